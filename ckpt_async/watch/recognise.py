"""Recognises checkpoints that were committed before.

They were committed by a watcher that has lost its memory or ran on another machine, or somebody has renamed or copied
a known checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckpt_async.core import naming
from ckpt_async.core.model import CheckpointId, Checksum, Decision, Outcome
from ckpt_async.errors import StoreError
from ckpt_async.restore.checkpoint import RemoteFile
from ckpt_async.restore.destination import checksum_of_file
from ckpt_async.watch import plan
from ckpt_async.watch.disk import sample
from ckpt_async.watch.entries import Entries, Entry, State
from ckpt_async.watch.meanwhile import OutOfTimeError
from ckpt_async.watch.remote import Remote

T = TypeVar("T")

# Blocks of this many of a checkpoint's largest files are sampled: enough to tell two saves of one trainer
# apart.
NUM_SAMPLED = 8


@dataclass(frozen=True, slots=True)
class Same:
    """A committed checkpoint that is byte for byte the same. `sums` are the checksums of its files."""

    checkpoint: CheckpointId
    sums: Mapping[str, str]
    is_in_store: bool = True  # False: it was pruned

    def known_as(self, entry: Entry) -> Entry:
        id_ = self.checkpoint
        return replace(entry, generation=id_.generation, step=id_.step, sums=self.sums)

    @property
    def why_outdated(self) -> str:
        return (
            f"it has the bytes of step {self.checkpoint.step}, which was committed and pruned, but would become the"
            " newest: adopt it with --kind, or into another remote"
        )


def samples_of(entries: Entries, entry: Entry) -> dict[str, int]:
    """Return samples of the staged files; none if one of them cannot be read."""
    files = zip(entry.content.items(), entry.shards.values(), strict=True)
    largest = sorted(files, key=lambda each: (-each[0][1].size_bytes, each[0][0]))[:NUM_SAMPLED]
    found: dict[str, int] = {}
    for (name, _), shard in largest:
        crc = sample(entries.staged(entry) / shard)
        if crc is None:
            return {}
        found[name] = crc
    return found


def sums_of(files: Mapping[str, RemoteFile]) -> dict[str, str]:
    """Return the checksums of files by name; none if one of them is unknown."""
    sums = {name: each.checksum for name, each in files.items()}
    return {name: _said(each) for name, each in sums.items() if each} if all(sums.values()) else {}


def with_sums(
    remote: Remote, outcomes: list[tuple[Entry, str]], *, num_nodes: int
) -> list[tuple[Entry, str]]:
    """Add checksums to the entries that were not given up. `outcomes` has the reasons why others were.

    With several nodes, none are added, since each node has only a part of the checkpoint.
    If the checksums cannot be had now, the store is asked again when they matter, and has them unless the checkpoint
    was pruned.
    """
    if num_nodes > 1:
        return outcomes
    ids = {
        entry.number: CheckpointId(entry.generation, entry.step) for entry, reason in outcomes if not reason
    }
    files: Mapping[CheckpointId, Mapping[str, RemoteFile]] = {}
    with contextlib.suppress(StoreError, OutOfTimeError):
        files = remote.committed_files(ids.values()) if ids else {}
    sums = {number: sums_of(files.get(id_, {})) for number, id_ in ids.items()}
    return [(replace(entry, sums=sums.get(entry.number, {})), reason) for entry, reason in outcomes]


def there(remote: Remote, entries: Entries, entry: Entry, generation: int) -> Same | None:
    """Return the committed checkpoint that is byte for byte the same as the entry, if there is one.

    It was committed by a watcher that has lost its memory, or it is known by another path and was renamed or copied
    by hand. The calls block.
    """
    known = entries.all.values()
    akin = [each for each in plan.akin(entry, known, generation) if each.state is State.COMMITTED]
    compared = _Compared(entry, entries.staged(entry))
    if entry.is_doubtful or plan.is_perhaps_copy(entry, known, generation):
        for decision in _committed_like(remote, entry):
            files = remote.files(decision)
            if compared.are(files):
                return Same(decision.checkpoint, sums_of(files))
    return _known_as(remote, entry, akin, compared) if akin else None


def _committed_like(remote: Remote, entry: Entry) -> list[Decision]:
    """Return the commits that may be the same, by name; or by size, if the name tells no step, as that of a folder to
    which a checkpoint was pulled to resume from it.
    """
    if entry.is_doubtful and plan.has_no_step(entry):
        return remote.committed_of_size(len(entry.files), entry.size_bytes)
    return remote.committed_as(naming.checkpoint_name(entry.name, entry.step))


def _known_as(remote: Remote, entry: Entry, akin: Collection[Entry], compared: _Compared) -> Same | None:
    decisions = remote.decisions([CheckpointId(each.generation, each.step) for each in akin])
    for each in akin:
        id_ = CheckpointId(each.generation, each.step)
        decision = decisions.get(id_)
        is_there = decision is not None and decision.outcome is Outcome.COMMIT
        sums = each.sums or (sums_of(remote.files(decision)) if is_there and decision is not None else {})
        if each.content == entry.content or compared.have(sums):
            return Same(id_, sums, is_there)
    return None


class _Compared:
    """The staged files of a checkpoint, compared with others; no file is read more than once."""

    def __init__(self, entry: Entry, staged: Path) -> None:
        self._staged, self._is_file = staged, entry.path in entry.files
        self._sizes = {shard: entry.files[path].size_bytes for path, shard in entry.shards.items()}
        self._sums: dict[tuple[str, str], str] = {}

    def are(self, files: Mapping[str, RemoteFile]) -> bool:
        """Return whether the files of a commit have the same names, sizes and checksums as these.

        The name of a single file is that of the checkpoint, so it is ignored.
        """
        sizes = {name: each.size_bytes for name, each in self._named(files).items()}
        return sizes == self._sizes and self.have(sums_of(files))

    def have(self, sums: Mapping[str, str]) -> bool:
        """Return whether the files have these checksums, given that their sizes are equal."""
        sums = self._named(sums)
        # Small files first, since they show a difference soonest.
        wanted = sorted(sums, key=lambda name: (self._sizes.get(name, 0), name))
        return sums.keys() == self._sizes.keys() and all(self._sum(each, sums[each]) for each in wanted)

    def _named(self, files: Mapping[str, T]) -> Mapping[str, T]:
        is_one = self._is_file and len(files) == 1
        return dict(zip(self._sizes, files.values(), strict=True)) if is_one else files

    def _sum(self, shard: str, said: str) -> bool:
        algorithm = said.partition(":")[0]
        key = shard, algorithm
        if key not in self._sums:
            self._sums[key] = _said(checksum_of_file(self._staged / shard, algorithm))
        return self._sums[key] == said


def _said(checksum: Checksum | None) -> str:
    return f"{checksum.algorithm}:{checksum.value}" if checksum else ""
