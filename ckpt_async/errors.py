"""Every error of the package. One base; below it, classes by what the caller does next.

A failure that heals never becomes one of these at the trainer: the engine retries by `FailureReason`.
"""

from __future__ import annotations

import enum
from typing import Self


class FailureReason(enum.Enum):
    """Why one attempt failed. The values are metric labels: a closed set, never free text."""

    THROTTLED = "throttled"  # 503 SlowDown, 429: slow down and go on
    TRANSIENT = "transient"  # 5xx, reset connection: try again
    TIMEOUT = "timeout"  # deadline passed or no byte moved for too long
    AUTH = "auth"  # 401, 403, expired token: never "missing"; credentials may be rotated in
    NOT_FOUND = "not_found"  # 404: bucket or object
    PRECONDITION = "precondition"  # 412, 409: a fact to decide on, not a failure
    CHECKSUM = "checksum"  # what the store has is not what we sent
    SOURCE_CHANGED = "source_changed"  # a local shard was overwritten or truncated after enqueue
    SOURCE_MISSING = "source_missing"  # a local shard is gone
    DISK = "disk"  # ENOSPC, EIO, read-only file system
    OTHER = "other"  # a request the store will never accept

    @property
    def is_retryable(self) -> bool:
        """Whether another attempt of the same request may succeed.

        AUTH counts: tokens are rotated beneath us, and giving up would lose what waiting keeps.
        """
        return self in (
            FailureReason.THROTTLED,
            FailureReason.TRANSIENT,
            FailureReason.TIMEOUT,
            FailureReason.AUTH,
            FailureReason.CHECKSUM,
            FailureReason.DISK,
        )


class CkptAsyncError(Exception):
    """Base of all errors of this package. `hint` says what to do; it is part of the message."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.hint = hint

    @property
    def without_hint(self) -> str:
        """The message alone, for those who show the hint by itself."""
        return str(self).removesuffix(f" ({self.hint})")

    def __reduce__(self) -> tuple[object, ...]:
        # Ranks tell each other what failed. Not by `__init__`, which would want all that is in the message again.
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(
    kind: type[CkptAsyncError], args: tuple[object, ...], state: dict[str, object]
) -> CkptAsyncError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


# --- wrong input: fix the call ---------------------------------------------------------------------------


class SettingsError(CkptAsyncError, ValueError):
    """A setting has an invalid value. Names the setting and its allowed range."""


class InvalidNameError(CkptAsyncError, ValueError):
    """A path, checkpoint name or key that would be unsafe or ambiguous. Nothing was done with it."""


class InvalidShardError(CkptAsyncError, ValueError):
    """A path handed to `enqueue` is not a regular file inside the folder. Nothing was enqueued."""


class SealedError(CkptAsyncError):
    """The checkpoint was sealed (or given up) by this rank: it takes no more shards (rule R11)."""


class BacklogError(CkptAsyncError):
    """Uploads have fallen behind or the disk has run low, and the policy says to raise (or waiting took longer than
    `block_timeout_s`). Nothing was enqueued; call again later, or save less often.
    """


class UploaderClosedError(CkptAsyncError):
    """The uploader is closed, or this process is a fork of the one that opened it."""


class RunnerError(CkptAsyncError):
    """The engine's process cannot be started or reached (`runner="process"`; the message has the end of its output), or
    there are too few descriptors, threads or too little memory left.
    """


# --- local durability: the folder needs attention ---------------------------------------------------------


class JournalError(CkptAsyncError):
    """The journal cannot be used as it is. The message says what is wrong and what to do."""


class JournalDamagedError(JournalError):
    """What is in the journal cannot be read. Whoever may write it next moves it aside and rebuilds it from the spool's
    manifests (rule R10).
    """


class NoJournalError(JournalError):
    """There is no journal in the folder: no uploader was ever opened there. Looking never makes one."""


class FolderInUseError(JournalError):
    """Another live process owns this rank's journal in this folder."""


class NoSpaceError(JournalError, OSError):
    """The folder's file system is full. Nothing was done, by `enqueue` nothing enqueued; call again when there is
    space.
    """


# --- the store ---------------------------------------------------------------------------------------------


class StoreError(CkptAsyncError):
    """A store request failed. `reason` decides what the engine does next; `key` and `operation` say where.

    Stores raise nothing else: every SDK and operating-system error is translated in `ckpt_async.stores`.
    """

    def __init__(
        self, message: str, *, reason: FailureReason, operation: str = "", key: str = "", hint: str = ""
    ) -> None:
        where = " ".join(part for part in (operation, repr(key) if key else "") if part)
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.reason = reason
        self.operation = operation
        self.key = key


class ObjectNotFoundError(StoreError):
    """No object at this key."""

    def __init__(
        self, message: str = "no such object", *, operation: str = "", key: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, reason=FailureReason.NOT_FOUND, operation=operation, key=key, hint=hint)


class PreconditionFailedError(StoreError):
    """A conditional write was refused, or *seems* to have been: after a lost reply our own success reads
    like this too (rule R13), so read back and compare before deciding that someone else won.
    """

    def __init__(self, message: str = "precondition failed", *, operation: str = "", key: str = "") -> None:
        super().__init__(message, reason=FailureReason.PRECONDITION, operation=operation, key=key)


class ObjectTooLargeError(StoreError):
    """The object has more bytes than whoever asked for it would read. Nothing of it was read."""

    def __init__(self, message: str, *, operation: str = "", key: str = "") -> None:
        super().__init__(message, reason=FailureReason.OTHER, operation=operation, key=key)


class IntegrityError(StoreError):
    """The store holds other bytes than were sent."""

    def __init__(self, message: str, *, operation: str = "", key: str = "") -> None:
        super().__init__(message, reason=FailureReason.CHECKSUM, operation=operation, key=key)


class SourceError(CkptAsyncError):
    """A local shard no longer holds the bytes that were enqueued: it is never committed."""

    def __init__(self, message: str, *, reason: FailureReason) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidRecordError(CkptAsyncError):
    """An object of the protocol (receipt, decision, latest, …) is not one this version can have written. `key` says
    which, where that is known; `detail` is the message without it.
    """

    def __init__(self, message: str, *, hint: str = "", key: str = "") -> None:
        super().__init__(f"{key}: {message}" if key else message, hint=hint)
        self.key, self._message = key, message

    @property
    def detail(self) -> str:
        return f"{self._message} ({self.hint})" if self.hint else self._message

    def at(self, key: str) -> Self:
        """The same, of the object at `key`."""
        return type(self)(self._message, hint=self.hint, key=key)


class UnknownVersionError(InvalidRecordError):
    """It is of another format version: whoever wrote it can read it, so it is not damaged. Upgrade this program."""


# --- what another program wrote, and what ranks say of it -------------------------------------------------


class UnsafePickleError(CkptAsyncError):
    """A pickle names or does something that a checkpoint does not need. Nothing of it was run."""


class FormatError(CkptAsyncError):
    """A file cannot be loaded: not what its name says, truncated, too large. Or a state cannot be written as its file's
    name says; or what either needs is missing.
    """


class StateMismatchError(CkptAsyncError):
    """What was loaded does not fit the model. The model was not changed; the message names what differs."""


class RanksDisagreeError(CkptAsyncError):
    """Ranks do not have the same value; the message says which have which. Raised on all of them."""


class RankFailedError(CkptAsyncError):
    """What one rank did for all of them failed. Raised on all of them, with its cause."""


class CheckpointRefusedError(CkptAsyncError, ValueError):
    """The validation function rejected a file of a checkpoint. Nothing of that file was used."""


# --- outcomes ----------------------------------------------------------------------------------------------


class UploadFailedError(CkptAsyncError):
    """Shards could not be uploaded within `upload_timeout_s`. They stay in the spool, and the next start,
    `ckpt-async drain` or the sweeper tries again. Also: a start committed nothing because ranks of it never came; the
    adapter of a framework could not get its newest checkpoint committed by the end of training.
    """


class SaveFailedError(CkptAsyncError):
    """A checkpoint was not written, or not handed over: this rank's part does not exist, so it is never committed.
    `CheckpointSaver` raises it at its next `step`; its cause says what happened. The next save is not affected.
    """


class CheckpointConflictError(CkptAsyncError, FileExistsError):
    """A folder holds checkpoints of another run that this one would replace, and `overwrite` is off."""


class CheckpointAbortedError(CkptAsyncError):
    """The checkpoint was given up and will never be committed; the message says who gave it up and why."""


class CommitTimeoutError(CkptAsyncError, TimeoutError):
    """`wait` ran out of time. The checkpoint may still be committed later."""


class FencedError(CkptAsyncError):
    """A newer generation of this run has started: this trainer is superseded and takes no new checkpoint
    (rule R11). What it had sealed is still finished. Stop this process.
    """


class DamagedCheckpointError(CkptAsyncError):
    """A committed checkpoint cannot be read as it was decided: a shard is missing, truncated or changed. It was
    marked, so that `restore.find` skips it from now on; ask again for the next older one.
    """


class UnreliableReadError(CkptAsyncError):
    """The data that arrives is not what was committed, and differs each time: the network, a proxy or this machine's
    memory corrupts it. Nothing was marked: the checkpoint may be intact. Try again, or on another node.
    """


class NoUsableCheckpointError(CkptAsyncError):
    """There are committed checkpoints and none of them can be used; the message says why, for each. Starting from
    scratch would discard them: run `ckpt-async verify` first.
    """


class UnknownKindError(CkptAsyncError):
    """The run has no checkpoints of this kind, but others; the message says which. A misspelt name would otherwise look
    like a fresh start.
    """


class ResumeError(CkptAsyncError):
    """Ranks that resume together could not; raised on all of them, with what happened on which."""


class DestinationError(CkptAsyncError):
    """A file could not be written to its destination: a different one is there, or it cannot be written."""


class CheckpointGoneError(CkptAsyncError):
    """The checkpoint was pruned, or this reader's lease on it was lost, before it was read. Find another one."""


class CapabilityError(CkptAsyncError):
    """The store cannot do what the chosen settings need."""
