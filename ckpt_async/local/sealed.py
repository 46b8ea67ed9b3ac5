"""What runs without a remote have sealed in a folder, so that a later launch can prune it. There is a small file for
each checkpoint, `sealed/<run>/rank-<r>/<g>-<step>.json`; it names the checkpoint's files, each with its identity.
`run` tells apart the runs that save to one folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Sealed, Shard
from ckpt_async.local.durable import write_durably
from ckpt_async.local.folder import Folder
from ckpt_async.local.kept import manifests


def put(folder: Folder, run: str, rank: int, sealed: Sealed, shards: Sequence[Shard]) -> None:
    """Note a checkpoint; durable on return."""
    path = folder.private / keys.sealed_manifest(run, sealed.checkpoint, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, records.encode_manifest(sealed.checkpoint, sealed.name, shards, sealed))


def drop(folder: Folder, run: str, rank: int, checkpoint: CheckpointId) -> None:
    """Forget it. Its files are not touched."""
    folder.unlink(keys.sealed_manifest(run, checkpoint, rank))


def read(folder: Folder, run: str, rank: int) -> list[tuple[Sealed, list[Shard]]]:
    """What was noted, oldest first."""
    return [
        (sealed, [each.shard for each in enqueued])
        for _, enqueued, sealed in manifests(folder.private / keys.sealed_rank(run, rank))
        if sealed is not None
    ]
