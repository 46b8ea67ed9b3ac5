"""`Uploader.open`: a shard that is uploaded while it is written. Real SeaweedFS, with a proxy that watches the wire."""

import fcntl
import gc
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import InvalidNameError, InvalidShardError, SealedError
from ckpt_async.transfer import ahead
from tests.faults.proxy import Fault, FaultProxy

MIB = 1 << 20
PART = 5 * MIB
QUICK: dict[str, Any] = {"rank": 0, "world_size": 1, "part_size_bytes": PART, "latest_filename": ""}
DATA = random.Random(7).randbytes(6 * PART + 123)


@pytest.fixture
def proxy(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy between the uploader and the server that counts what arrives."""
    monkeypatch.setattr(ahead, "PART_BYTES", PART)
    with FaultProxy(os.environ["AWS_ENDPOINT_URL_S3"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def num_parts(proxy: FaultProxy) -> int:
    return sum(part is not None for _, part in proxy.sent(r"big\.bin"))


def content(remote: str, name: str, tmp_path: Path) -> bytes:
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    return restore.fetch(checkpoint, tmp_path / "fetched").paths[name].read_bytes()


def test_parts_are_sent_before_the_shard_is_finished_and_none_twice(
    proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """The time until the shard is durable must depend on what is left, not on the whole shard."""
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        with uploader.open(1, "deep/big.bin") as file:
            file.write(DATA)
            file.flush()
            proxy.wait_for(lambda: num_parts(proxy) == 5)  # the last complete one may still be written to
            assert restore.find(f"{s3_url}/run") is None
        uploader.seal(1)
        uploader.wait(1, timeout_s=60)
        sent = proxy.sent(r"big\.bin")
        assert {part: count for (_, part), count in sent.items()} == dict.fromkeys(range(1, 8), 1)
        assert len([each for each in proxy.exchanges if re.fullmatch(r"uploads=?", each.query)]) == 1
    assert content(f"{s3_url}/run", "deep/big.bin", tmp_path) == DATA


def test_seeking_back_only_resends_the_part(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    """zip archives, and so torch.save, may patch what they wrote before."""
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        with uploader.open(1, "big.bin") as file:
            file.write(DATA)
            file.flush()
            proxy.wait_for(lambda: num_parts(proxy) == 5)
            file.seek(PART + 10)
            file.write(b"changed")
        uploader.seal(1)
        uploader.wait(1, timeout_s=60)
        assert proxy.sent(r"big\.bin")[next(key for key in proxy.sent(r"big\.bin") if key[1] == 2)] == 2
    assert content(f"{s3_url}/run", "big.bin", tmp_path) == DATA[: PART + 10] + b"changed" + DATA[PART + 17 :]


def test_an_exception_leaves_no_file(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    """Half a shard is not a shard. The checkpoint may continue without it, or with another shard of that name."""
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:

        def fail() -> None:
            with uploader.open(1, "big.bin") as file:
                file.write(DATA)
                file.flush()
                proxy.wait_for(lambda: num_parts(proxy) >= 2)
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            fail()
        assert not (tmp_path / "folder" / "step-1" / "big.bin").exists()
        proxy.wait_for(
            lambda: any(each.method == "DELETE" and "uploadId" in each.query for each in proxy.exchanges)
        )
        with uploader.open(1, "big.bin") as file:
            file.write(b"small")
        uploader.seal(1)
        uploader.wait(1, timeout_s=60)
    assert content(f"{s3_url}/run", "big.bin", tmp_path) == b"small"


def test_an_upload_error_only_stops_sending_ahead(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    """Uploading ahead is only a head start, so its errors are not failures of the checkpoint."""
    refused = proxy.add(Fault("too_large", "PUT", r"big\.bin", is_part=True, times=1))
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        with uploader.open(1, "big.bin") as file:
            file.write(DATA)
            file.flush()
            proxy.wait_for(lambda: refused.num_hits == 1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=60)
        uploader.raise_failures()
    assert content(f"{s3_url}/run", "big.bin", tmp_path) == DATA


@pytest.fixture
def uploader(tmp_path: Path) -> Iterator[Uploader]:
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/remote", **QUICK) as uploader:
        yield uploader


def test_a_store_without_multipart_gets_the_shard_afterwards(uploader: Uploader, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"weight": torch.arange(100_000)}
    with uploader.open(1, "model.pt", name="ep1-ba1") as file:
        torch.save(state, file)
    uploader.seal(1)
    uploader.wait(1, timeout_s=30)
    checkpoint = restore.find(uploader.remote)
    assert checkpoint is not None
    assert checkpoint.name == "ep1-ba1"
    path = restore.fetch(checkpoint, tmp_path / "fetched").paths["model.pt"]
    assert torch.equal(torch.load(path, weights_only=True)["weight"], state["weight"])


def test_sealing_while_a_shard_is_written_is_rejected(uploader: Uploader) -> None:
    file = uploader.open(1, "a.bin")
    with pytest.raises(SealedError, match=r"still being written: a\.bin"):
        uploader.seal(1)
    file.close()
    file.close()
    uploader.seal(1)
    with pytest.raises(SealedError):
        uploader.open(1, "b.bin")
    uploader.wait(1, timeout_s=30)


def test_a_file_that_is_never_closed_is_not_enqueued(uploader: Uploader) -> None:
    """Python closes unreferenced files, and half a shard must not become a shard that way."""
    file = uploader.open(1, "a.bin")
    file.write(b"half")
    del file
    gc.collect()
    with uploader.open(1, "b.bin") as file:
        file.write(b"whole")
    uploader.seal(1)
    uploader.wait(1, timeout_s=30)
    checkpoint = restore.find(uploader.remote)
    assert checkpoint is not None
    assert list(checkpoint.files) == ["b.bin"]


@pytest.mark.parametrize("where", ["link", "flock"])
def test_a_file_may_be_dropped_while_the_uploader_or_its_journal_is_locked(
    where: str, uploader: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector runs at any moment, and what it calls must wait for no lock of the thread it runs in."""
    place: Any = uploader._folder if where == "link" else fcntl
    call = getattr(place, where)

    def collect_and_call(*values: Any) -> Any:
        if threading.current_thread() is working:
            gc.collect()
        return call(*values)

    def work() -> None:
        if where == "link":
            uploader.enqueue(whole, 1)
        else:
            uploader._engine.journal.append([])

    whole = uploader.folder / "b.bin"
    whole.write_bytes(b"whole")
    working = threading.Thread(target=work, daemon=True)
    gc.disable()
    try:
        dropped: list[Any] = [uploader.open(1, "a.bin")]
        path = dropped[0].path
        dropped.append(dropped)
        del dropped
        monkeypatch.setattr(place, where, collect_and_call)
        working.start()
        working.join(20)
        assert not working.is_alive()
    finally:
        gc.enable()
    uploader.enqueue(whole, 1)
    assert not path.exists()
    uploader.seal(1)
    assert not uploader._engine.view().fresh_local().checkpoints[CheckpointId(1, 1)].growing
    uploader.wait(1, timeout_s=30)
    checkpoint = restore.find(uploader.remote)
    assert checkpoint is not None
    assert list(checkpoint.files) == ["b.bin"]


def test_a_forked_child_leaves_its_parents_file_alone(uploader: Uploader) -> None:
    """A dataloader worker gets a copy of everything, and drops it when it exits."""
    with uploader.open(1, "a.bin") as file:
        file.write(b"whole")
        child = os.fork()
        if child == 0:
            file.close()
            file.abandon()
            os._exit(0)
        os.waitpid(child, 0)
        assert file.path.exists()
    assert file.path.read_bytes() == b"whole"


def test_a_start_that_comes_to_a_step_again_replaces_the_file_of_an_earlier_one(tmp_path: Path) -> None:
    """Whether the earlier launch was killed while or after it wrote the file, what it enqueued is committed with its
    own bytes.
    """
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/remote"
    dies = f"""
import os
from ckpt_async import Uploader
uploader = Uploader({str(folder)!r}, {remote!r}, rank=0, world_size=2, launch_id="first")
with uploader.open(1, "enqueued.bin") as file:
    file.write(b"first")
uploader.seal(1)
file = uploader.open(2, "half.bin")
file.write(b"ha")
file.flush()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", dies], check=False).returncode == -9
    assert (folder / "step-2/half.bin").read_bytes() == b"ha"
    with Uploader(folder, remote, rank=0, world_size=1) as uploader:
        for step, name in ((1, "enqueued.bin"), (2, "half.bin")):
            with uploader.open(step, name) as file:
                file.write(b"second")
            with pytest.raises(InvalidShardError, match="already enqueued or opened"):
                uploader.open(step, name)
            uploader.seal(step)
            uploader.wait(step, timeout_s=60)
            assert content(remote, name, tmp_path / str(step)) == b"second"
    sent = Path(f"{tmp_path}/remote/ckpt/step-1.g1/enqueued.bin")
    assert sent.read_bytes() == b"first"


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a\0b", "", "a//b"])
def test_unsafe_names_are_refused(uploader: Uploader, name: str) -> None:
    with pytest.raises(InvalidNameError):
        uploader.open(1, name)


def test_open_overwrites_nothing_and_follows_no_symlink(uploader: Uploader, tmp_path: Path) -> None:
    (uploader.folder / "step-1").mkdir()
    (uploader.folder / "step-1" / "a.bin").write_bytes(b"mine")
    with pytest.raises(InvalidShardError, match="already exists"):
        uploader.open(1, "a.bin")
    (tmp_path / "outside").mkdir()
    (uploader.folder / "step-1" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidShardError, match="symbolic link"):
        uploader.open(1, "link/b.bin")
    assert not list((tmp_path / "outside").iterdir())
    with uploader.open(1, "c.bin"), pytest.raises(InvalidShardError, match="already enqueued or opened"):
        uploader.open(1, "c.bin")
