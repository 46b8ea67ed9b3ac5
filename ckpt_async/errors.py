"""All errors of the package: one base class, and subclasses that differ in what the caller should do next.

The trainer never sees a failure that heals: the engine retries it, depending on its `FailureReason`.
"""

from __future__ import annotations

import enum
import errno
import pickle
from typing import Self


class FailureReason(enum.Enum):
    """Why one attempt failed. The values are metric labels, so they are a closed set and never free text."""

    THROTTLED = "throttled"  # 503 SlowDown, 429: slow down and continue
    TRANSIENT = "transient"  # 5xx, reset connection: try again
    TIMEOUT = "timeout"  # the deadline passed, or no byte moved for too long
    AUTH = "auth"  # 401, 403, expired token: never means "missing"; new credentials may arrive
    NOT_FOUND = "not_found"  # 404: bucket or object
    PRECONDITION = "precondition"  # 412, 409: a fact to decide on, not a failure
    CHECKSUM = "checksum"  # the store holds different bytes than we sent
    SOURCE_CHANGED = "source_changed"  # a local shard was overwritten or truncated after enqueue
    SOURCE_MISSING = "source_missing"  # a local shard is gone
    STORE_LOST_OBJECTS = "store_lost_objects"  # the store does not have any more what it had confirmed
    DISK = "disk"  # ENOSPC, EIO, read-only file system
    OTHER = "other"  # a request the store will never accept

    @property
    def is_retryable(self) -> bool:
        """Return whether another attempt of the same request may succeed.

        AUTH is retryable: tokens are rotated underneath us, and waiting saves the work that giving up would lose.
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
    """Base class of all errors of this package. `hint` tells the user what to do; it is part of the message."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.hint = hint

    @property
    def without_hint(self) -> str:
        """The message without the hint, for callers that show the hint separately."""
        return str(self).removesuffix(f" ({self.hint})")

    def __reduce__(self) -> tuple[object, ...]:
        # Ranks send errors to each other. Unpickling must bypass `__init__`, which would need every argument
        # that is already part of the message.
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
    """A setting has an invalid value. The message names the setting and its allowed range."""


class InvalidNameError(CkptAsyncError, ValueError):
    """A path, checkpoint name or key is unsafe or ambiguous. Nothing was done with it."""


class InvalidShardError(CkptAsyncError, ValueError):
    """A path handed to `enqueue` is not a regular file inside the folder. Nothing was enqueued."""


class SealedError(CkptAsyncError):
    """This rank has already sealed (or given up) the checkpoint, so it accepts no more shards (rule R11)."""


class BacklogError(CkptAsyncError):
    """Uploads have fallen behind or disk space is low, and the policy is to raise (or blocking took longer than
    `block_timeout_s`). Nothing was enqueued; call again later, or save less often.
    """


class UploaderClosedError(CkptAsyncError):
    """The uploader is closed, or this process is a fork of the one that opened it."""


class RunnerError(CkptAsyncError):
    """The engine's process cannot be started or reached (`runner="process"`; the message contains the end of its
    output), or the system has too few descriptors or threads or too little memory left.
    """


# --- local durability: the folder needs attention ---------------------------------------------------------


class JournalError(CkptAsyncError):
    """The journal cannot be used as it is. The message says what is wrong and what to do."""


class JournalDamagedError(JournalError):
    """The journal's content cannot be read. The next process that may write it moves it aside and rebuilds it from
    the spool's manifests (rule R10).
    """


class NoJournalError(JournalError):
    """The folder has no journal: no uploader was ever opened there. Read-only access never creates one."""


class FolderInUseError(JournalError):
    """Another live process owns this rank's journal in this folder."""


class NoSpaceError(JournalError, OSError):
    """The folder's file system is full. Nothing was done (`enqueue` enqueued nothing); call again once space has
    been freed. What earlier calls have enqueued of an incomplete step is released by `Uploader.give_up`, on the
    full disk if it has had 64 MiB free before.
    """

    errno = errno.ENOSPC


# --- the store ---------------------------------------------------------------------------------------------


class StoreError(CkptAsyncError):
    """A store request failed. `reason` decides what the engine does next; `key` and `operation` say where it
    failed.

    Stores raise no other errors: `ckpt_async.stores` translates every SDK and operating-system error.
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
    """There is no object at this key."""

    def __init__(
        self, message: str = "no such object", *, operation: str = "", key: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, reason=FailureReason.NOT_FOUND, operation=operation, key=key, hint=hint)


class ObjectArchivedError(StoreError):
    """The object is in an archive class, and cannot be read until somebody has restored it."""

    def __init__(self, message: str, *, operation: str = "", key: str = "", hint: str = "") -> None:
        super().__init__(message, reason=FailureReason.OTHER, operation=operation, key=key, hint=hint)


class PreconditionFailedError(StoreError):
    """A conditional write was refused, or *appears* to have been. After a lost reply our own success looks the same
    (rule R13), so read the object back and compare before concluding that someone else won.
    """

    def __init__(self, message: str = "precondition failed", *, operation: str = "", key: str = "") -> None:
        super().__init__(message, reason=FailureReason.PRECONDITION, operation=operation, key=key)


class ObjectTooLargeError(StoreError):
    """The object is larger than the caller is willing to read. None of it was read."""

    def __init__(self, message: str, *, operation: str = "", key: str = "") -> None:
        super().__init__(message, reason=FailureReason.OTHER, operation=operation, key=key)


class IntegrityError(StoreError):
    """The store holds different bytes than were sent."""

    def __init__(self, message: str, *, operation: str = "", key: str = "") -> None:
        super().__init__(message, reason=FailureReason.CHECKSUM, operation=operation, key=key)


class LocalReadError(StoreError):
    """This node's disk does not return a local shard. Its upload is tried again, as after a failure of the store."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, reason=FailureReason.DISK, hint=hint)


class SourceError(CkptAsyncError):
    """A local shard no longer holds the bytes that were enqueued, so it is never committed."""

    def __init__(self, message: str, *, reason: FailureReason) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidRecordError(CkptAsyncError):
    """A protocol object (receipt, decision, latest, …) cannot have been written by this version. `key` identifies
    it, where that is known; `detail` is the message without the key.
    """

    def __init__(self, message: str, *, hint: str = "", key: str = "") -> None:
        super().__init__(f"{key}: {message}" if key else message, hint=hint)
        self.key, self._message = key, message

    @property
    def detail(self) -> str:
        return f"{self._message} ({self.hint})" if self.hint else self._message

    def at(self, key: str) -> Self:
        """Return this error with `key` set to the object's key."""
        return type(self)(self._message, hint=self.hint, key=key)


class UnknownVersionError(InvalidRecordError):
    """The object has another format version. The version that wrote it can read it, so it is not damaged: upgrade
    this program.
    """


# --- files of other programs, and agreement between ranks ---------------------------------------------------


class UnsafePickleError(CkptAsyncError, pickle.UnpicklingError, ValueError):
    """A pickle refers to something, or does something, that a checkpoint does not need. None of it was executed."""


class FormatError(CkptAsyncError, ValueError):
    """A file cannot be loaded because it is not what its name says, is truncated or is too large; or a state cannot
    be saved in the format that its file name implies; or a module that either needs is missing.
    """


class StateMismatchError(CkptAsyncError, RuntimeError):
    """The loaded state does not fit the model. The model was not changed; the message names the differences."""


class RanksDisagreeError(CkptAsyncError, RuntimeError):
    """The ranks do not agree on a value; the message says which ranks have which value. Raised on every rank."""


class RankFailedError(CkptAsyncError, RuntimeError):
    """An operation that one rank performed for all ranks failed. Raised on every rank, with the original error as
    its cause.
    """


class CheckpointRefusedError(CkptAsyncError, ValueError):
    """The caller's validation function rejected a file of a checkpoint. Nothing of that file was used."""


# --- outcomes ----------------------------------------------------------------------------------------------


class UploadFailedError(CkptAsyncError, RuntimeError):
    """Shards could not be uploaded within `upload_timeout_s`. They stay in the spool, and the next launch,
    `ckpt-async drain` or the sweeper tries again.

    Also raised when a launch committed nothing because some of its ranks never appeared, and when a framework
    adapter could not get its newest checkpoint committed by the end of training.
    """


class SaveFailedError(CkptAsyncError, RuntimeError):
    """A checkpoint was not written or not handed over. This rank's part does not exist, so the checkpoint is never
    committed. `CheckpointSaver` raises this error at its next `step`, with the original error as its cause. The
    next save is not affected.
    """


class CheckpointConflictError(CkptAsyncError, FileExistsError):
    """The folder holds checkpoints of another run that this checkpoint would replace, and `overwrite` is off."""


class CheckpointAbortedError(CkptAsyncError):
    """The checkpoint was given up and will never be committed; the message says who gave it up and why."""


class CommitTimeoutError(CkptAsyncError, TimeoutError):
    """`wait` ran out of time. The checkpoint may still be committed later."""


class FencedError(CkptAsyncError):
    """A newer generation of this run has started: this trainer is superseded and accepts no new checkpoint (rule
    R11). Checkpoints that it had sealed are still finished. Stop this process.
    """


class DamagedCheckpointError(CkptAsyncError):
    """A committed checkpoint differs from its decision: a shard is missing, truncated or changed. The checkpoint
    has been marked, so `restore.find` skips it from now on; call it again to get the next older one.
    """


class UnreliableReadError(CkptAsyncError):
    """The data that arrives is not what was committed, and it differs each time: the network, a proxy or this
    machine's memory corrupts it. Nothing was marked, because the checkpoint may be intact. Try again, or on another
    node.
    """


class NoUsableCheckpointError(CkptAsyncError):
    """There are committed checkpoints, but none of them is usable; the message gives the reason for each. Starting
    from scratch would discard them, so run `ckpt-async verify` first.
    """


class UnknownKindError(CkptAsyncError):
    """The run has no checkpoints of this kind, but has other kinds, which the message lists. Without this error a
    misspelt name would look like a fresh start.
    """


class DestinationError(CkptAsyncError):
    """A file could not be written to its destination: a different file is in the way, or writing failed."""


class InTheWayError(DestinationError, FileExistsError):
    """Something else is in the way at the destination. It was left alone."""


class CheckpointGoneError(CkptAsyncError):
    """The checkpoint was pruned, or this reader lost its lease on it, before it had been read. Find another one."""


class CapabilityError(CkptAsyncError):
    """The store lacks a capability that the chosen settings need."""
