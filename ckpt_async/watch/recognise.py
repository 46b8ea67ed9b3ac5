"""Recognises checkpoints that were committed before.

They were committed by a watcher that has lost its memory or ran on another machine, or somebody has renamed or copied
a known checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_async.core import naming
from ckpt_async.core.model import CheckpointId, Checksum, Decision, Outcome
from ckpt_async.restore.checkpoint import RemoteFile
from ckpt_async.restore.destination import checksum_of_file
from ckpt_async.watch import plan
from ckpt_async.watch.entries import Entries, Entry, State
from ckpt_async.watch.remote import Remote


@dataclass(frozen=True, slots=True)
class Same:
    """A committed checkpoint that is the same: byte for byte, or if it was pruned since, by names, sizes and times."""

    checkpoint: CheckpointId
    is_in_store: bool = True  # False: it was pruned

    def known_as(self, entry: Entry) -> Entry:
        return replace(entry, generation=self.checkpoint.generation, step=self.checkpoint.step)

    @property
    def why_outdated(self) -> str:
        return (
            f"it has the files of step {self.checkpoint.step}, which was committed and pruned, but would become the"
            " newest: adopt it with --kind, or into another remote"
        )


def find_same(remote: Remote, entries: Entries, entry: Entry) -> Same | None:
    """Return the committed checkpoint that is the same as the entry, if there is one.

    It was committed by a watcher that has lost its memory, or it is known by another path and was renamed or copied
    by hand. The calls block.
    """
    known = entries.all.values()
    akin = [each for each in plan.akin(entry, known) if each.state is State.COMMITTED]
    compared = _Compared(entry, entries.staged(entry))
    if entry.is_doubtful or plan.is_perhaps_copy(entry, known):
        for decision in _committed_like(remote, entry):
            if compared.are(remote.files(decision)):
                return Same(decision.checkpoint)
    return _known_as(remote, entry, akin, compared) if akin else None


def _committed_like(remote: Remote, entry: Entry) -> list[Decision]:
    """Return the commits of this name. If it tells no step, as that of a folder to which the newest checkpoint was
    pulled to resume from it, that one.
    """
    if entry.is_doubtful and plan.has_no_step(entry):
        newest = remote.newest_commit()
        return [newest] if newest is not None else []
    return remote.committed_as(naming.checkpoint_name(entry.name, entry.step))


def _known_as(remote: Remote, entry: Entry, akin: Collection[Entry], compared: _Compared) -> Same | None:
    decisions = remote.decisions([each.id for each in akin])
    for each in akin:
        decision = decisions.get(each.id)
        if decision is None or decision.outcome is not Outcome.COMMIT:
            if plan.has_times_of(entry, each):
                return Same(each.id, is_in_store=False)
        elif each.content == entry.content or compared.are(remote.files(decision)):
            return Same(each.id)
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
        if self._is_file and len(files) == 1:
            files = dict(zip(self._sizes, files.values(), strict=True))
        sums = {name: _said(each.checksum) for name, each in files.items()}
        if {name: each.size_bytes for name, each in files.items()} != self._sizes or not all(sums.values()):
            return False
        # Small files first, since they show a difference soonest.
        wanted = sorted(sums, key=lambda name: (self._sizes[name], name))
        return all(self._sum(each, sums[each]) for each in wanted)

    def _sum(self, shard: str, said: str) -> bool:
        algorithm = said.partition(":")[0]
        key = shard, algorithm
        if key not in self._sums:
            self._sums[key] = _said(checksum_of_file(self._staged / shard, algorithm))
        return self._sums[key] == said


def _said(checksum: Checksum | None) -> str:
    return f"{checksum.algorithm}:{checksum.value}" if checksum else ""
