"""What somebody who can write to the bucket may put there: it gets nowhere but into the files of a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import CkptAsyncError, DestinationError, InvalidNameError, NoUsableCheckpointError
from ckpt_async.restore.destination import PARTIAL_FOLDER, RANGE_BYTES
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.heard import Heard, heard
from tests.restore import plays
from tests.restore.runs import ALGORITHM, Run, content, left_in

MIB = 1 << 20
# No name that a user needs begins like these. Some file systems do not tell capitals from small letters.
PRIVATE_NAMES = (
    ".ckpt-async/journal-00000.log",
    ".CKPT-Async/journal-00000.log",
    f"{PARTIAL_FOLDER}/fetch-0",
    "optim/.ckpt-async/journal-00000.log",
    "optim/.ckpt-async./x",
    ".ckpt-async",
)


def forged(run: Run, files: Mapping[str, bytes], name: str = "step-10") -> CheckpointId:
    """Commit a checkpoint, and rewrite it as whoever can write to the bucket may: any name, any files."""
    id_ = run.commit(10, {0: {"model.pt": content(10, "model.pt")}})
    shards = []
    for shard, data in files.items():
        key = f"ckpt/{name}.g1/{shard}"
        run.put(key, data)
        checksum = checksum_of(data, ALGORITHM)
        shards.append({ALGORITHM: checksum.value, "key": key, "name": shard, "size_bytes": len(data)})
    receipt = json.loads(run.get(keys.receipt_key(id_, 0))) | {"name": name, "shards": shards}
    _rewrite(run, id_, receipt, name=name, num_shards=len(shards), size_bytes=sum(map(len, files.values())))
    return id_


def _rewrite(run: Run, id_: CheckpointId, receipt: dict[str, Any], **changed: object) -> None:
    data = json.dumps(receipt).encode()
    run.put(keys.receipt_key(id_, 0), data)
    decision = json.loads(run.get(keys.decision_key(id_))) | changed
    decision["receipts"] = [{ALGORITHM: checksum_of(data, ALGORITHM).value}]
    run.put(keys.decision_key(id_), json.dumps(decision).encode())


@pytest.mark.fault("F25")
@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_bucket_writes_nothing_into_a_private_folder(run_: Run, tmp_path: Path, name: str) -> None:
    """A journal planted there would tell `drain` and `sweep` where to send credentials, and what to delete."""
    forged(run_, {"model.pt": b"weights", name: b"planted"})
    with pytest.raises(NoUsableCheckpointError, match=r"begins with \.ckpt-async"):
        restore.fetch_latest(run_.url, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.fault("F25")
@pytest.mark.parametrize("name", [".ckpt-async", ".Ckpt-Async-10", "step-1", "step-", "-10", "--delete=10"])
def test_a_checkpoint_from_a_bucket_is_named_as_we_name(run_: Run, tmp_path: Path, name: str) -> None:
    """The README's `fetch(…, f"shards/{checkpoint.name}")`, and commands that are given the name, rely on it."""
    forged(run_, {"journal-00000.log": b"planted"}, name)
    with pytest.raises(NoUsableCheckpointError, match="name"):
        restore.fetch_latest(run_.url, lambda checkpoint: tmp_path / "shards" / checkpoint.name)
    assert not (tmp_path / "shards").exists()


@pytest.mark.fault("F25")
@pytest.mark.parametrize("planted", ["step-20/.ckpt-async/journal-00000.log", ".ckpt-async-20/.metadata"])
def test_another_tools_checkpoint_has_no_private_names(run_: Run, tmp_path: Path, planted: str) -> None:
    from tests.dcp_metadata import metadata_of

    folder = planted.partition("/")[0]
    for path, data in {
        planted: b"planted",
        f"{folder}/.metadata": metadata_of({"0.distcp": 5}),
        f"{folder}/0.distcp": b"12345",
    }.items():
        run_.put(path, data)
    with pytest.raises(NoUsableCheckpointError, match=r"begins with \.ckpt-async"):
        restore.fetch_latest(run_.url, lambda checkpoint: tmp_path / checkpoint.name)


def test_a_private_name_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """What could never be fetched again must not be accepted."""
    folder = tmp_path / "folder"
    (folder / "step-1" / PARTIAL_FOLDER).mkdir(parents=True)
    (folder / "step-1" / PARTIAL_FOLDER / "fetch-0").write_bytes(b"left over")
    (folder / "model.pt").write_bytes(b"weights")
    remote = f"file://{tmp_path}/remote"
    with Uploader(folder, remote, rank=0, world_size=1, publish_copies=True) as uploader:
        with pytest.raises(InvalidNameError, match=r"begins with \.ckpt-async"):
            uploader.enqueue(folder / "step-1", 1)
        for name in (".CKPT-ASYNC-1", "-1"):
            with pytest.raises(InvalidNameError, match="begins with"):
                uploader.enqueue(folder / "model.pt", 1, name=name)
        with pytest.raises(InvalidNameError, match=r"begins with \.ckpt-async"):
            uploader.enqueue(folder / "model.pt", 1, publish_as="latest/.ckpt-async/model.pt")


# --- what a fetch may delete ---------------------------------------------------------------------------------


def test_a_bucket_cannot_make_a_fetch_delete_the_users_files(run_: Run, tmp_path: Path) -> None:
    """A shard that is a record of an unfinished fetch would list the user's files by guessed inodes."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    facts = os.stat(there / "mine.txt")
    record = f'"another"\n{json.dumps(["mine.txt", "x", facts.st_dev, facts.st_ino])}\n'.encode()
    forged(run_, {f"{PARTIAL_FOLDER}/fetch-0": record})
    for _ in range(2):
        with contextlib.suppress(CkptAsyncError):
            restore.fetch_latest(run_.url, there)
    assert left_in(there) == ["mine.txt"]


@pytest.mark.fault("F102")
def test_another_users_record_deletes_nothing(run_: Run, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    there = tmp_path / "there"
    (there / PARTIAL_FOLDER).mkdir(parents=True)
    (there / "mine.txt").write_text("mine")
    facts = os.stat(there / "mine.txt")
    record = f'"another"\n{json.dumps(["mine.txt", "x", facts.st_dev, facts.st_ino])}\n'
    (there / PARTIAL_FOLDER / "fetch-0").write_text(record)
    os.chown(there / PARTIAL_FOLDER, 12345, 12345)
    run_.commit(10)
    with pytest.raises(DestinationError, match="belongs to another user"):
        restore.fetch_latest(run_.url, there)
    assert (there / "mine.txt").read_text() == "mine"


def test_only_the_user_may_write_what_a_fetch_may_delete(run_: Run, tmp_path: Path) -> None:
    run_.commit(10, {0: {f"{n}.pt": content(10, str(n)) for n in range(30)}})
    found = restore.find(run_.url)
    assert found is not None
    with plays.playing(plays.fetches_a_few_files, found, str(tmp_path / "there"), 10) as (process, _):
        process.join(plays.PATIENCE_S)
    assert (tmp_path / "there" / PARTIAL_FOLDER).stat().st_mode & 0o777 == 0o700


def test_a_fetch_follows_no_link_in_its_folder(run_: Run, tmp_path: Path) -> None:
    """What a `….ranges` points at must not be appended to."""
    there, mine = tmp_path / "there", tmp_path / "mine.txt"
    run_.commit(10, {0: {"model.pt": bytes(RANGE_BYTES + 1)}})
    mine.write_text("mine")
    (there / PARTIAL_FOLDER).mkdir(mode=0o700, parents=True)
    names: list[str] = []
    opened = os.open

    def plant(path: Any, flags: int, *others: Any, **named: Any) -> int:
        name = os.fsdecode(path) if isinstance(path, str | Path) else ""
        if PARTIAL_FOLDER in name and len(os.path.basename(name)) == 32 and not names:
            names.append(f"{name}.ranges")
            os.symlink(mine, names[0])
        return opened(path, flags, *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", plant)
        with pytest.raises(DestinationError):
            restore.fetch_latest(run_.url, there)
    assert names, "no link was planted"
    assert mine.read_text() == "mine"


# --- what small objects may cost -------------------------------------------------------------------------------

BOMBS: dict[str, Callable[[int], bytes]] = {
    "lists": lambda size: b"\x80\x04](" + b"]" * size + b"e.",
    "dicts": lambda size: b"\x80\x04](" + b"}" * size + b"e.",
    "marks": lambda size: b"\x80\x04" + b"(" * size + b".",
    "memo": lambda size: b"\x80\x04](" + b"N\x94" * (size // 2) + b"e.",
    "tuples": lambda size: b"\x80\x04](" + b"N\x85" * (size // 2) + b"e.",
}


@pytest.mark.fault("F28")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_metadata_takes_little_memory(run_: Run, bomb: str) -> None:
    data = BOMBS[bomb](2 * MIB)
    run_.put("step-20/.metadata", data)
    run_.put("step-20/0.distcp", b"12345")
    with peak_below(40 * len(data)), pytest.raises(NoUsableCheckpointError):
        restore.find(run_.url)


def test_a_mark_that_is_no_mark_is_refused(run_: Run) -> None:
    mark = b'{"item_handlers":{"default":"x"},"a":[' + b"[]," * MIB + b"[]]}"
    run_.put("20/_CHECKPOINT_METADATA", mark)
    run_.put("20/default/x", b"12345")
    with peak_below(10 * len(mark)), pytest.raises(NoUsableCheckpointError, match="too many"):
        restore.find(run_.url)


@pytest.mark.fault("F28")
def test_find_ends_with_the_first_missing_shards(run_: Run) -> None:
    """A receipt may list 300,000 shards, each of which would cost a request."""
    id_ = forged(run_, {"model.pt": b"weights"})
    receipt = json.loads(run_.get(keys.receipt_key(id_, 0)))
    (shard,) = receipt["shards"]
    told = [shard | {"name": f"{n}", "key": f"ckpt/step-10.g1/{n}"} for n in range(3000)]
    _rewrite(run_, id_, receipt | {"shards": told}, num_shards=3000)
    token = heard.set(own := Heard())
    try:
        with pytest.raises(NoUsableCheckpointError, match="is missing"):
            restore.find(run_.url)
    finally:
        heard.reset(token)
    print(f"answers={own.num_answers}")
    assert own.num_answers < 3000


@contextlib.contextmanager
def peak_below(limit_bytes: int) -> Any:
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"peak={peak_bytes / MIB:.1f} MiB limit={limit_bytes / MIB:.1f} MiB")
    assert peak_bytes < limit_bytes
