"""One call loads from anywhere: files, objects, pointers, folders and runs; on one rank for all of them."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import Uploader, restore, threads
from ckpt_async.errors import DestinationError, FormatError, NoUsableCheckpointError, SettingsError
from ckpt_async.torch import dump, fetch_file, fetch_together, load, load_remote
from ckpt_async.torch.places import reported
from tests.torch_side.states import dumped, is_same

STATE: dict[str, Any] = {"w": torch.arange(6.0), "step": 3}


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty place."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


def put(url: str, content: bytes) -> str:
    """Store an object as another tool would; return its URL."""
    from ckpt_async.core.settings import Settings
    from ckpt_async.transfer.patient import connect

    base, _, name = url.rpartition("/")

    async def work() -> None:
        store = connect(base, None, Settings())
        await store.open()
        await store.put(name, content)
        await store.close()

    threads.run(work())
    return url


def test_objects_load_by_their_url_or_their_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    put(f"{url}/run/ep1-rank3.pt", dumped(STATE))
    assert is_same(load(f"{url}/run/ep1-rank3.pt"), STATE)
    assert is_same(load("run/ep1-rank{rank}.pt", remote=url), STATE)
    with pytest.raises(FileNotFoundError, match="neither an object nor a run"):
        load(f"{url}/run/ep2.pt")


def test_a_rank_without_a_file_falls_back(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    put(f"{url}/a-rank0.pt", dumped({"of": 0}))
    dump({"of": 0}, tmp_path / "a-rank0.pt")
    for place in (url, str(tmp_path)):
        assert load(f"{place}/a-rank{{rank}}.pt", fallback=0) == {"of": 0}
        with pytest.raises(FileNotFoundError):
            load(f"{place}/a-rank{{rank}}.pt")
        with pytest.raises(FileNotFoundError):
            load(f"{place}/a-rank{{rank}}.pt", fallback=1)
    dump({"of": 3}, tmp_path / "a-rank3.pt")
    assert load(tmp_path / "a-rank{rank}.pt", fallback=0) == {"of": 3}


def test_pointers_are_followed(url: str, tmp_path: Path) -> None:
    """A pointer is relative to its own place or, in a bucket, may be the object's full name, as Composer writes it."""
    put(f"{url}/run/ep1-rank0.pt", dumped(STATE))
    pointer = f"{url}/run/latest.symlink"
    put(pointer, b"ep1-rank0.pt\n")
    assert is_same(load(pointer), STATE)
    put(f"{url}/again.pt.symlink", b"run/latest.symlink")
    assert is_same(load(f"{url}/again.pt.symlink"), STATE)
    if url.startswith("s3"):
        prefix = url.split("/", 3)[3]
        put(f"{url}/elsewhere/latest.symlink", f"/{prefix}/run/ep1-rank0.pt".encode())
        assert is_same(load(f"{url}/elsewhere/latest.symlink"), STATE)
    (tmp_path / "here").mkdir()
    dump(STATE, tmp_path / "here/a.pt")
    (tmp_path / "latest.symlink").write_text("here/a.pt")
    assert is_same(load(tmp_path / "latest.symlink"), STATE)


@pytest.mark.parametrize(
    "text", ["../a.pt", "x/../../a.pt", "", "a\\b", "a\0b", "x//y", "./a.pt", "s3://b/x"]
)
def test_pointers_that_lead_out_or_in_circles_are_refused(url: str, tmp_path: Path, text: str) -> None:
    put(f"{url}/a.symlink", text.encode())
    (tmp_path / "a.symlink").write_text(text)
    for place in (url, str(tmp_path)):
        with pytest.raises(FormatError, match="not a path below the pointer's folder"):
            load(f"{place}/a.symlink")
    put(f"{url}/b.symlink", b"c.symlink")
    put(f"{url}/c.symlink", b"b.symlink")
    (tmp_path / "b.symlink").write_text("b.symlink")
    for place in (url, str(tmp_path)):
        with pytest.raises(FormatError, match="forms a loop"):
            load(f"{place}/b.symlink")
    put(f"{url}/d.symlink", b"nothing.pt")
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt"):
        load(f"{url}/d.symlink")


def test_runs_and_their_checkpoints_load(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ckpt"
    with Uploader(folder, url, composer_symlink="latest-rank0.pt.symlink") as uploader:
        for step in (1, 2):
            path = folder / f"step-{step}"
            path.mkdir()
            for rank in (0, 1):
                dump({"step": step, "of": rank}, path / f"rank{rank}.pt")
            uploader.enqueue(path, step=step)
            uploader.seal(step=step)
            uploader.wait(step=step, timeout_s=60)
    shutil.rmtree(folder)
    assert load(url) == {"step": 2, "of": 0}
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load(url) == {"step": 2, "of": 1}
    assert load(f"{url}/latest-rank0.pt.symlink") == {"step": 2, "of": 1}
    assert load(f"{url}/ckpt/step-1.g1") == {"step": 1, "of": 1}
    assert load(f"{url}/ckpt/step-1.g1/rank0.pt") == {"step": 1, "of": 0}
    with pytest.raises(FileNotFoundError, match="not part of a committed checkpoint"):
        load(f"{url}/ckpt/step-1.g1/rank7.pt")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(FormatError, match=r"2 files that could be loaded: rank0\.pt, rank1\.pt"):
        load(url)


@pytest.mark.parametrize("suffix", ["", ".pt", ".tar.gz"])
def test_of_a_set_of_one_file_per_rank_each_rank_loads_its_own(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    suffix: str,
) -> None:
    caplog.set_level("INFO")
    names = [f"ep1-ba42-rank{rank}{suffix}" for rank in range(3)]
    for rank in range(3):
        dump({"of": rank}, tmp_path / "one", overwrite=True, format=suffix or ".pt")
        put(f"{url}/run/{names[rank]}", (tmp_path / "one").read_bytes())
    checkpoint = restore.find(f"{url}/run", world_size=3)
    assert checkpoint is not None
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert load_remote(checkpoint, f"ep1-ba42-rank{{rank}}{suffix}") == {"of": rank}
        assert caplog.messages[-1] == f"checkpoint_loaded path={url}/run/ep1-ba42 file={names[rank]}"
        assert load(f"{url}/run", world_size=3) == {"of": rank}
        assert caplog.messages[-1] == f"checkpoint_loaded path={url}/run file={names[rank]}"
        assert load(f"{url}/run/ep1-ba42-rank{{rank}}{suffix}") == {"of": rank}
        found = fetch_together(f"{url}/run", tmp_path / "there", ranks=[rank], world_size=3)
        assert found is not None
        assert list(found[1].paths) == [names[rank]]
        for unknown in (None, 2, 4):
            with pytest.raises(NoUsableCheckpointError, match=r"step 42 \(ep1-ba42"):
                load(f"{url}/run", world_size=unknown)


def test_folders_load_their_only_file_and_sharded_ones_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    dump(STATE, tmp_path / "step-1/m.pt")
    (tmp_path / "step-1/config.yaml").write_text("a: 1")
    assert is_same(load(tmp_path / "step-1"), STATE)
    (tmp_path / "step-1/.metadata").write_bytes(b"")
    with pytest.raises(FormatError, match=r"is a sharded checkpoint.*load_latest"):
        load(tmp_path / "step-1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="0 files that could be loaded: nothing"):
        load(tmp_path / "empty")


def test_progress_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = dumped({"w": torch.zeros(1 << 20)})
    put(f"{url}/a.pt", data)
    told: list[tuple[int, int]] = []
    load(f"{url}/a.pt", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (len(data), len(data))
    load(f"{url}/a.pt")  # stderr is not a terminal here
    load(f"{url}/a.pt", progress=False)
    assert capsys.readouterr().err == ""
    load(f"{url}/a.pt", progress=True)
    assert "a.pt" in capsys.readouterr().err


def test_progress_is_lines_where_nothing_can_be_redrawn() -> None:
    stream = io.StringIO()
    with reported(True, "a.pt", stream) as tell:
        assert tell is not None
        tell(1 << 20, 4 << 20)
        tell(4 << 20, 4 << 20)
    assert stream.getvalue().startswith("a.pt: 100% of 4.0 MiB")
    assert stream.getvalue().count("\n") == 1
    with reported(None, "a.pt", stream) as tell:
        assert tell is None


def test_names_in_a_store_are_checked(url: str) -> None:
    with pytest.raises(SettingsError, match="segment"):
        load(f"{url}/../a.pt")


def test_one_rank_reads_for_all(tmp_path: Path) -> None:
    """One process group plays all scenarios."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch_side.broadcast_ranks", "3", str(tmp_path)],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(3)]
    for name in ("same", "tensors", "shared", "without what is ignored"):
        assert [each[name] for each in found] == [True] * 3, name
    assert [each["reads"] for each in found] == [2, 0, 0]
    assert all("rank 0 failed: FileNotFoundError" in each["error"] for each in found)
    assert all("UnsafePickleError" in each["refused"] for each in found)
    # The state takes 64 MiB. A second copy of it, or one in a message, would take as much again.
    assert all(each["peak"] < 64 + 40 for each in found[1:]), [each["peak"] for each in found]


def test_a_file_is_fetched_to_the_very_path(url: str, tmp_path: Path) -> None:
    put(f"{url}/logs/rank0.txt", b"a log")
    put(f"{url}/latest.symlink", b"logs/rank0.txt")
    target = tmp_path / "new" / "log.txt"
    assert fetch_file(f"{url}/logs/rank0.txt", target) == target
    assert target.read_bytes() == b"a log"
    with pytest.raises(DestinationError, match="already exists"):
        fetch_file(f"{url}/latest.symlink", target)
    target.write_bytes(b"old")
    fetch_file(f"{url}/latest.symlink", target, overwrite=True)
    assert target.read_bytes() == b"a log"
    with pytest.raises(FileNotFoundError):
        fetch_file(f"{url}/nothing.txt", tmp_path / "nothing.txt")
    assert sorted(each.name for each in target.parent.iterdir()) == ["log.txt"]


def test_of_a_run_the_newest_checkpoints_file_is_fetched(url: str, tmp_path: Path) -> None:
    with Uploader(tmp_path / "folder", f"{url}/run") as uploader:
        for step in (1, 2):
            shard = tmp_path / "folder" / f"ep{step}-rank0.pt"
            shard.write_bytes(b"step %d" % step)
            uploader.enqueue(shard, step)
            uploader.seal(step)
            uploader.wait(step, 60)
    assert fetch_file(f"{url}/run", tmp_path / "newest.pt").read_bytes() == b"step 2"


def test_of_many_files_this_ranks_is_fetched(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with Uploader(folder, f"{url}/run") as uploader:
        for rank in range(2):
            (folder / f"rng-rank{rank}.pt").write_bytes(b"rank %d" % rank)
            uploader.enqueue(folder / f"rng-rank{rank}.pt", 1)
        uploader.seal(1)
        uploader.wait(1, 60)
    for rank in range(2):
        fetched = fetch_file(f"{url}/run", tmp_path / f"{rank}.pt", rank=rank)
        assert fetched.read_bytes() == b"rank %d" % rank
