"""Asynchronous upload and lifecycle manager for training checkpoints.

    from ckpt_async import CheckpointSaver, Uploader  # CheckpointSaver needs torch

    with Uploader("checkpoints", "s3://bucket/prefix/run-a", num_checkpoints_to_keep=3) as uploader:
        shard = f"checkpoints/step-100/rank-{uploader.rank}.pt"
        ...  # write it
        uploader.enqueue(shard, step=100)
        uploader.seal(step=100)

These guarantees hold at any time, even after SIGKILL or power loss:

- Write order: shards → receipts → decision `commit` → latest → local symlink. A checkpoint is visible only
  when every shard of every rank is in the store and verified.
- Delete order: latest is ahead → decision `pruning` → reader leases drain → shards → receipts → `pruned`.
- Read order: latest (a hint) or the list of decisions (the truth) → lease → decision → shards.

`docs/design.md` gives the reasons. Names are loaded on first use, so importing the package costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` costs more than all the rest here
if TYPE_CHECKING:
    from ckpt_async.core.json_log import JsonFormatter
    from ckpt_async.core.settings import Settings
    from ckpt_async.errors import (
        BacklogError,
        CapabilityError,
        CheckpointAbortedError,
        CheckpointConflictError,
        CheckpointGoneError,
        CheckpointRefusedError,
        CkptAsyncError,
        CommitTimeoutError,
        DamagedCheckpointError,
        DestinationError,
        FailureReason,
        FencedError,
        FolderInUseError,
        FormatError,
        IntegrityError,
        InvalidNameError,
        InvalidRecordError,
        InvalidShardError,
        JournalDamagedError,
        JournalError,
        NoJournalError,
        NoSpaceError,
        NoUsableCheckpointError,
        ObjectNotFoundError,
        ObjectTooLargeError,
        PreconditionFailedError,
        RankFailedError,
        RanksDisagreeError,
        RunnerError,
        SaveFailedError,
        SealedError,
        SettingsError,
        SourceError,
        StateMismatchError,
        StoreError,
        UnknownKindError,
        UnknownVersionError,
        UnreliableReadError,
        UnsafePickleError,
        UploaderClosedError,
        UploadFailedError,
    )
    from ckpt_async.events import Event
    from ckpt_async.saver import CheckpointSaver, Timestamp
    from ckpt_async.stores import StoreOptions
    from ckpt_async.sweep.sweeper import Sweeper
    from ckpt_async.trainer.plain import PlainUploader
    from ckpt_async.trainer.uploader import Uploader

__version__ = "0.1.0"

__all__ = [
    "BacklogError",
    "CapabilityError",
    "CheckpointAbortedError",
    "CheckpointConflictError",
    "CheckpointGoneError",
    "CheckpointRefusedError",
    "CheckpointSaver",
    "CkptAsyncError",
    "CommitTimeoutError",
    "DamagedCheckpointError",
    "DestinationError",
    "Event",
    "FailureReason",
    "FencedError",
    "FolderInUseError",
    "FormatError",
    "IntegrityError",
    "InvalidNameError",
    "InvalidRecordError",
    "InvalidShardError",
    "JournalDamagedError",
    "JournalError",
    "JsonFormatter",
    "NoJournalError",
    "NoSpaceError",
    "NoUsableCheckpointError",
    "ObjectNotFoundError",
    "ObjectTooLargeError",
    "PlainUploader",
    "PreconditionFailedError",
    "RankFailedError",
    "RanksDisagreeError",
    "RunnerError",
    "SaveFailedError",
    "SealedError",
    "Settings",
    "SettingsError",
    "SourceError",
    "StateMismatchError",
    "StoreError",
    "StoreOptions",
    "Sweeper",
    "Timestamp",
    "UnknownKindError",
    "UnknownVersionError",
    "UnreliableReadError",
    "UnsafePickleError",
    "UploadFailedError",
    "Uploader",
    "UploaderClosedError",
]

_HOMES = {
    "CheckpointSaver": "saver",
    "Event": "events",
    "JsonFormatter": "core.json_log",
    "PlainUploader": "trainer.plain",
    "Uploader": "trainer.uploader",
    "Settings": "core.settings",
    "StoreOptions": "stores",
    "Sweeper": "sweep.sweeper",
    "Timestamp": "saver",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ckpt_async' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ckpt_async.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
