"""Whether the store has a checkpoint already: from a watcher whose memory is lost, or of another machine, or because
somebody has renamed or copied what is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt_async.core import naming
from ckpt_async.core.model import CheckpointId, Checksum, Decision, Outcome
from ckpt_async.restore.partial import checksum_of_file
from ckpt_async.watch import plan
from ckpt_async.watch.entries import Entries, Entry, State
from ckpt_async.watch.remote import Remote


def there(remote: Remote, entries: Entries, entry: Entry, generation: int) -> Decision | None:
    """The commit that has it, byte for byte, if it is in the store: from a watcher whose memory is lost; or it is one
    that is known by another path, renamed or copied by hand. Blocking calls.
    """
    known = entries.all.values()
    if not entry.is_doubtful and not plan.is_perhaps_copy(entry, known, generation):
        return None
    not_of = {CheckpointId(each.generation, each.step) for each in known if each.path == entry.path}
    compared = _Compared(entry, entries.staged(entry))
    for decision in _candidates(remote, entry, known):
        if decision.checkpoint not in not_of and compared.are_in(remote, decision):
            return decision
    return None


def _candidates(remote: Remote, entry: Entry, known: Iterable[Entry]) -> Iterator[Decision]:
    yield from remote.committed_as(naming.checkpoint_name(entry.name, entry.step))
    akin = plan.akin(entry, known)
    ids = dict.fromkeys(
        CheckpointId(each.generation, each.step) for each in akin if each.state is State.COMMITTED
    )
    decisions = remote.decisions(ids).values()
    yield from (each for each in decisions if each.outcome is not Outcome.ABORT)


class _Compared:
    """What is staged of a checkpoint; no file is read more than once."""

    def __init__(self, entry: Entry, staged: Path) -> None:
        self._staged, self._is_file = staged, entry.path in entry.files
        self._sizes = {shard: entry.files[path].size_bytes for path, shard in entry.shards.items()}
        self._sums: dict[tuple[str, str], Checksum | None] = {}

    def are_in(self, remote: Remote, decision: Decision) -> bool:
        """Whether the files of a commit have the names, the sizes and the checksums of these; of a single file, its
        name is the checkpoint's.
        """
        files = remote.files(decision)
        if self._is_file and len(files) == 1:
            files = dict(zip(self._sizes, files.values(), strict=True))
        if self._sizes != {name: each.size_bytes for name, each in files.items()}:
            return False
        # Small ones first: those that differ tell it soonest.
        wanted = sorted(files.items(), key=lambda each: (each[1].size_bytes, each[0]))
        return all(
            each.checksum and self._sum(name, each.checksum.algorithm) == each.checksum
            for name, each in wanted
        )

    def _sum(self, shard: str, algorithm: str) -> Checksum | None:
        key = shard, algorithm
        if key not in self._sums:
            self._sums[key] = checksum_of_file(self._staged / shard, algorithm)
        return self._sums[key]
