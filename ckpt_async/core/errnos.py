"""What the error numbers of files mean: on the trainer's disk, and in a folder that is the remote. Pure."""

from __future__ import annotations

import enum
import errno
from errno import EMLINK, ENOSYS, EOPNOTSUPP, EPERM, EXDEV

from ckpt_async.errors import FailureReason


class Meaning(enum.Enum):
    AWAY = (
        "away"  # a file server, its client, or something that the machine is short of: it may be back later
    )
    FULL = "full"
    REFUSED = "refused"  # to this user
    EXISTS = "exists"
    GONE = "gone"
    DAMAGED = "damaged"  # the device
    WRONG = "wrong"  # this call or path, here and for ever


_SERVER = "is its file server reachable, and the file system mounted?"
_DEVICE = "the device reports errors: see dmesg"
_PERMISSION = "this user has no permission: check owner and mode"
_MEMORY = "too little memory, or too many threads"

# A number that is not here means AWAY, too: whoever tries again until the time is up loses nothing.
_MEANINGS: dict[int, tuple[Meaning, str]] = {
    errno.ENOTCONN: (Meaning.AWAY, _SERVER),
    errno.ESHUTDOWN: (Meaning.AWAY, _SERVER),
    errno.ECONNABORTED: (Meaning.AWAY, _SERVER),
    errno.ECONNREFUSED: (Meaning.AWAY, _SERVER),
    errno.ECONNRESET: (Meaning.AWAY, _SERVER),
    errno.EHOSTDOWN: (Meaning.AWAY, _SERVER),
    errno.EHOSTUNREACH: (Meaning.AWAY, _SERVER),
    errno.ENETDOWN: (Meaning.AWAY, _SERVER),
    errno.ENETUNREACH: (Meaning.AWAY, _SERVER),
    errno.ETIMEDOUT: (Meaning.AWAY, "is a writer suspended, or does the file system hang?"),
    errno.ENOLINK: (Meaning.AWAY, "is it mounted?"),
    # Replaced on the server while it was open here, which another look mends.
    errno.ESTALE: (Meaning.AWAY, "if this stays, the file system was exported anew: remount it"),
    errno.EMFILE: (Meaning.AWAY, "this process has too many files open: raise `ulimit -n`"),
    errno.ENFILE: (Meaning.AWAY, "the machine has too many files open"),
    errno.ENOMEM: (Meaning.AWAY, _MEMORY),
    errno.EAGAIN: (Meaning.AWAY, _MEMORY),
    errno.EROFS: (Meaning.AWAY, "the file system is read-only: see dmesg, then remount it"),
    errno.ENOSPC: (Meaning.FULL, "the file system is full"),
    errno.EDQUOT: (Meaning.FULL, "the disk quota is used up"),
    errno.EACCES: (Meaning.REFUSED, _PERMISSION),
    errno.EPERM: (Meaning.REFUSED, _PERMISSION),
    errno.EEXIST: (Meaning.EXISTS, ""),
    errno.ENOENT: (Meaning.GONE, ""),
    errno.EIO: (Meaning.DAMAGED, _DEVICE),
    errno.EUCLEAN: (Meaning.DAMAGED, _DEVICE),  # ext4, XFS: a structure is wrong
    errno.EBADMSG: (Meaning.DAMAGED, _DEVICE),  # ext4, XFS: a checksum is
    errno.ENXIO: (Meaning.DAMAGED, _DEVICE),
    errno.ENODEV: (Meaning.DAMAGED, _DEVICE),
    errno.ENOTDIR: (Meaning.WRONG, "a part of the path is a file, not a folder: check the path"),
    errno.EISDIR: (Meaning.WRONG, "it is a folder, not a file: check the path"),
    errno.ELOOP: (Meaning.WRONG, "symbolic links form a loop, or lead out of the folder: check the path"),
    errno.ENAMETOOLONG: (Meaning.WRONG, "the path is too long: check it"),
    errno.EFBIG: (Meaning.WRONG, "the file system has no files that large"),
    errno.EINVAL: (Meaning.WRONG, "the file system does not support this, or not such a name"),
    errno.EOPNOTSUPP: (Meaning.WRONG, "the file system does not support this"),
    errno.ENOSYS: (Meaning.WRONG, "the file system does not support this"),
}
_REASONS = {
    Meaning.AWAY: FailureReason.TRANSIENT,
    Meaning.FULL: FailureReason.DISK,
    Meaning.REFUSED: FailureReason.AUTH,
    Meaning.EXISTS: FailureReason.TRANSIENT,  # who cannot use what somebody else has just made, looks again
    Meaning.GONE: FailureReason.NOT_FOUND,
    Meaning.DAMAGED: FailureReason.DISK,
    Meaning.WRONG: FailureReason.OTHER,
}
_OWN_REASONS = {errno.ETIMEDOUT: FailureReason.TIMEOUT, errno.EROFS: FailureReason.DISK}

# What a call says that a file system does not have: hard links, or a faster way to do the same.
NO_LINKS = frozenset({EXDEV, EPERM, EMLINK, EOPNOTSUPP, ENOSYS})
UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EISDIR})


def meaning_of(error: OSError, *, is_local: bool = True) -> tuple[Meaning, str]:
    """Return what an error means, and a hint what to do about it ("": nothing that its text does not say).

    `is_local`: the file is on a device of this machine, not on a mount of a file server. That says EIO while it cannot
    be reached.
    """
    meaning, hint = _MEANINGS.get(error.errno or 0, (Meaning.AWAY, ""))
    if error.errno == errno.EIO and not is_local:
        return Meaning.AWAY, _SERVER
    return meaning, hint


def is_full(error: OSError) -> bool:
    return meaning_of(error)[0] is Meaning.FULL


def may_pass(error: OSError) -> bool:
    """Return whether the same may succeed later without anybody who mends the device or the path."""
    return meaning_of(error)[0] in (Meaning.AWAY, Meaning.FULL)


def reason_of(error: OSError, *, is_local: bool = True) -> tuple[FailureReason, str]:
    """Return why a request to a store of files failed, and the hint."""
    meaning, hint = meaning_of(error, is_local=is_local)
    return _OWN_REASONS.get(error.errno or 0, _REASONS[meaning]), hint
