"""Whether the store has a checkpoint already: from a watcher whose memory is lost, or of another machine."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckpt_async.core import naming
from ckpt_async.core.model import CheckpointId, Decision
from ckpt_async.restore.partial import checksum_of_file
from ckpt_async.watch import plan
from ckpt_async.watch.entries import Entries, Entry
from ckpt_async.watch.remote import Remote


def there(remote: Remote, entries: Entries, entry: Entry, generation: int) -> Decision | None:
    """If it is in the store: from a watcher whose memory is lost; or it is a copy, made by hand, of one that is known
    by another path, which a trainer that goes back would have written to the same. Blocking calls.
    """
    known = entries.all.values()
    if not entry.is_doubtful and not plan.needs_new_generation(entry, known, generation):
        return None
    not_of = {CheckpointId(each.generation, each.step) for each in known if each.path == entry.path}
    return _same_in_store(remote, entry, entries.staged(entry), not_of)


def _same_in_store(
    remote: Remote, entry: Entry, staged: Path, not_of: Collection[CheckpointId]
) -> Decision | None:
    """The commit of the same name whose files have the sizes and the checksums of these, or None."""
    sizes = {shard: entry.files[path].size_bytes for path, shard in entry.shards.items()}
    for decision in remote.committed_as(naming.checkpoint_name(entry.name, entry.step)):
        if decision.checkpoint in not_of:
            continue
        files = remote.files(decision)
        if sizes != {each.name: each.size_bytes for each in files.values()}:
            continue
        sums = ((shard, each.checksum) for shard, each in files.items())
        if all(
            wanted and checksum_of_file(staged / shard, wanted.algorithm) == wanted for shard, wanted in sums
        ):
            return decision
    return None
