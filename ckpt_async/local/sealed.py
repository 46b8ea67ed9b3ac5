"""What runs without a remote have sealed in a folder, so that a later launch can load and prune it. There is a small
file for each checkpoint, `sealed/<run>/rank-<r>/<g>-<step>.json`; it names the checkpoint's files, each with its
identity, and the launch. `run` tells apart the runs that save to one folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, FileIdentity, Sealed, Shard
from ckpt_async.local.durable import fsync_path, write_durably
from ckpt_async.local.folder import Folder, identity_of
from ckpt_async.local.kept import manifests


@dataclass(frozen=True, slots=True)
class Note:
    """What one rank has sealed. `launch` is the same on all ranks of a launch, and of no other one."""

    sealed: Sealed
    shards: tuple[Shard, ...]
    launch: str

    @property
    def id(self) -> CheckpointId:
        return self.sealed.checkpoint

    @property
    def name(self) -> str:
        return self.sealed.name

    @property
    def mark(self) -> str:
        """Is the same on all ranks that took part in this save, and on no others."""
        return f"{self.launch}-{self.id.step}"


def put(folder: Folder, run: str, rank: int, note: Note) -> None:
    """Note a checkpoint; durable on return."""
    path = folder.private / keys.sealed_manifest(run, note.id, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = records.encode_manifest(note.id, note.name, note.shards, note.sealed, launch=note.launch)
    write_durably(path, data)


def drop(folder: Folder, run: str, rank: int, checkpoint: CheckpointId) -> None:
    """Forget it. Its files are not touched."""
    folder.unlink(keys.sealed_manifest(run, checkpoint, rank))


def read(private: Path, run: str, rank: int) -> list[Note]:
    """What was noted in a folder's private part, oldest first."""
    return [
        Note(found.sealed, tuple(each.shard for each in found.enqueued), found.launch)
        for _, found in manifests(private / keys.sealed_rank(run, rank))
        if found.sealed is not None
    ]


def begin(folder: Folder, run: str, rank: int) -> None:
    """Leave a sign that a rank of the run may save here from now on. See `has_begun`."""
    (folder.private / keys.sealed_rank(run, rank)).mkdir(parents=True, exist_ok=True)


def has_begun(private: Path, run: str, rank: int) -> bool:
    return (private / keys.sealed_rank(run, rank)).is_dir()


def take_part(folder: Folder, run: str, rank: int, launch: str) -> None:
    """Leave a sign that a rank is to save in this launch, until `has_sealed`."""
    (folder.private / keys.sealed_not_yet(run, rank, launch)).touch()


def has_sealed(folder: Folder, run: str, rank: int, launch: str) -> None:
    """Remove the sign; durable on return."""
    sign = folder.private / keys.sealed_not_yet(run, rank, launch)
    if sign.exists():
        sign.unlink()
        fsync_path(sign.parent)


def not_yet(private: Path, run: str, rank: int) -> frozenset[str]:
    """Return the launches of which the sign is there: in these, the rank was to save and has sealed nothing."""
    found = private.glob(keys.sealed_not_yet(run, rank, "*"))
    return frozenset(each.name.partition("-")[2] for each in found)


def begin_file(folder: Folder, run: str, rank: int, source: str) -> None:
    """Note, before a file is written, that it is this run's, until `end_file`: a kill may come before `put`."""
    (folder.private / keys.sealed_writing(run, rank)).write_text(source)


def end_file(folder: Folder, run: str, rank: int) -> None:
    folder.unlink(keys.sealed_writing(run, rank))


def unfinished_file(private: Path, run: str, rank: int) -> str | None:
    """Return the file that a rank was writing, whole or not, when it was killed."""
    try:
        return (private / keys.sealed_writing(run, rank)).read_text() or None
    except OSError:
        return None


def begin_with_remote(private: Path, run: str, rank: int) -> None:
    """Leave a sign that the journal has what this rank of the run saves here from now on."""
    sign = private / keys.sealed_with_remote(run, rank)
    sign.parent.mkdir(parents=True, exist_ok=True)
    sign.touch()


def has_begun_with_remote(private: Path, run: str, rank: int) -> bool:
    return (private / keys.sealed_with_remote(run, rank)).exists()


def ranks(private: Path, run: str) -> list[int]:
    """Return the ranks of the run that have begun to save here."""
    found = private.glob(f"{keys.sealed_run(run)}/rank-*")
    return sorted(int(each.name.removeprefix("rank-")) for each in found)


def identity_now(folder: Path, shard: Shard) -> FileIdentity | None:
    """Return what a file is now, or None unless it is as long and as old as noted. It may be on another disk by now."""
    try:
        found = identity_of(os.lstat(folder / shard.source))
    except OSError:
        return None
    return found if found.is_as_long_and_old_as(shard.identity) else None
