"""Files that are not checkpoints are uploaded as they are, in the background, and reported loudly if they fail."""

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from ckpt_async import PlainUploader, StoreOptions
from ckpt_async.errors import InvalidNameError, InvalidShardError, StoreError, UploaderClosedError
from ckpt_async.trainer import plain
from tests.seaweed import SeaweedServer


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text("first")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def test_a_file_is_uploaded_as_it_was_when_it_was_put(log: Path, folder: Path) -> None:
    with PlainUploader(f"file://{folder}") as files:
        files.put(log, "logs/rank0.txt")
        log.write_text("changed since")
        assert files.flush(30) == []
        assert (folder / "logs/rank0.txt").read_text() == "first"
        assert files.failures == {}


def test_the_newest_of_many_under_one_key_is_what_is_there_at_the_end(log: Path, folder: Path) -> None:
    with PlainUploader(f"file://{folder}") as files:
        for number in range(50):
            log.write_text(str(number))
            files.put(log, "log.txt")
    assert (folder / "log.txt").read_text() == "49"


def test_on_s3_a_file_of_many_parts_too(s3_url: str, tmp_path: Path) -> None:
    from ckpt_async import torch as ckpt

    large = tmp_path / "trace.json"
    large.write_bytes(bytes(range(256)) * (11 << 12))
    with PlainUploader(s3_url, part_size_bytes=5 << 20) as files:
        files.put(large, "traces/trace.json")
    assert files.failures == {}
    back = ckpt.fetch_file(f"{s3_url}/traces/trace.json", tmp_path / "back.json")
    assert back.read_bytes() == large.read_bytes()


def test_what_cannot_be_uploaded_is_an_error_in_the_log_and_raises_nothing(
    tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SeaweedServer(tmp_path / "server") as server, pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment().items():
            environment.setenv(name, value)
        with PlainUploader(f"s3://{server.bucket}/run", upload_timeout_s=1.0) as files:
            server.kill()
            files.put(log, "log.txt")
            assert files.flush(60) == []
            assert list(files.failures) == ["log.txt"]
    assert "plain_file_not_uploaded key=log.txt" in caplog.text


def test_whatever_a_file_fails_with_is_told_and_the_next_under_its_key_is_sent(
    log: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    with PlainUploader(f"file://{folder}") as files:
        with monkeypatch.context() as patch:
            patch.setattr(plain, "upload", no_memory)
            files.put(log, "log.txt")
            assert files.flush(5) == []
        assert isinstance(files.failures["log.txt"], MemoryError)
        files.put(log, "log.txt")
        assert files.flush(30) == []
    assert files.failures == {}
    assert (folder / "log.txt").read_text() == "first"


def test_closing_says_which_files_are_lost(
    tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SeaweedServer(tmp_path / "server") as server, pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment().items():
            environment.setenv(name, value)
        files = PlainUploader(f"s3://{server.bucket}/run")
        server.kill()
        files.put(log, "log.txt")
        files.close(timeout_s=0.1)
    assert "plain_file_not_uploaded key=log.txt error=closed after" in caplog.text


def test_a_disk_without_room_for_the_copy_raises_nothing(
    tmp_path: Path, log: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither this nor a removed staging folder may stop training; the failure is reported for the file."""
    staging = tmp_path / "staging"
    staging.mkdir()
    with PlainUploader(f"file://{folder}", staging_folder=staging) as files:
        shutil.rmtree(staging)
        files.put(log, "a.txt")
        assert isinstance(files.failures["a.txt"], OSError)
    assert "plain_file_not_uploaded key=a.txt" in caplog.text


def test_without_overwrite_what_is_there_stays(
    log: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with PlainUploader(f"file://{folder}") as files, caplog.at_level(logging.ERROR):
        files.put(log, "log.txt", overwrite=False)
        files.flush(30)
        log.write_text("second")
        files.put(log, "log.txt", overwrite=False)
        files.flush(30)
        assert (folder / "log.txt").read_text() == "first"
        assert "overwrite is off" in str(files.failures["log.txt"])
        files.put(log, "log.txt")
        files.flush(30)
        assert files.failures == {}
    assert (folder / "log.txt").read_text() == "second"


def test_wrong_arguments_are_refused_at_once(tmp_path: Path, log: Path, folder: Path) -> None:
    with PlainUploader(f"file://{folder}") as files:
        for key in ("/log.txt", "a b", "../log.txt", "ckpt/log.txt", ".ckpt-async/log.txt"):
            with pytest.raises(InvalidNameError):
                files.put(log, key)
        with pytest.raises(InvalidShardError, match="is not a file"):
            files.put(tmp_path, "log.txt")
    with pytest.raises(UploaderClosedError):
        files.put(log, "log.txt")


def test_a_store_that_does_not_answer_is_told_before_training(s3_url: str) -> None:
    with pytest.raises(StoreError):
        PlainUploader(f"{s3_url.rpartition('/')[0].replace('ckpt', 'no-such-bucket')}/run")


def test_the_store_is_the_one_that_the_options_name(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "OPEN_TIMEOUT_S", 0.5)
    with pytest.raises(StoreError):
        PlainUploader(s3_url, store_options=StoreOptions(endpoint_url="http://127.0.0.1:9"))


def test_copies_are_removed(tmp_path: Path, log: Path, folder: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with PlainUploader(f"file://{folder}", staging_folder=staging) as files:
        files.put(log, "log.txt")
        files.flush(30)
        (copies,) = staging.iterdir()
        assert list(copies.iterdir()) == []
    assert list(staging.iterdir()) == []
    shutil.rmtree(folder)


def test_nothing_of_a_closed_uploader_is_left(log: Path, folder: Path) -> None:
    def upload() -> tuple[int, int]:
        with PlainUploader(f"file://{folder}") as files:
            files.put(log, "log.txt")
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    left = upload()
    assert upload() == left
    assert upload() == left
