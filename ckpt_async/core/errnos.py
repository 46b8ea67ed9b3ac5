"""What the error numbers of files mean: on the trainer's disk, and in a folder that is the remote. Pure."""

from __future__ import annotations

import enum
import errno

from ckpt_async.errors import FailureReason


class Meaning(enum.Enum):
    """What has happened, and the reason for the failure of a request to a store."""

    AWAY = (
        "away",
        FailureReason.TRANSIENT,
    )  # a file server, or what the machine is short of: it may be back later
    FULL = "full", FailureReason.DISK
    REFUSED = "refused", FailureReason.AUTH  # to this user
    EXISTS = "exists", FailureReason.TRANSIENT  # who cannot use what somebody else has just made, looks again
    GONE = "gone", FailureReason.NOT_FOUND
    DAMAGED = "damaged", FailureReason.DISK  # the device
    WRONG = "wrong", FailureReason.OTHER  # this call or path, here and for ever

    @property
    def reason(self) -> FailureReason:
        return self.value[1]


_DEVICE = "the device reports errors: see dmesg"
_PERMISSION = "this user has no permission: check owner and mode"
_MEMORY = "too little memory, or too many threads"
_UNSUPPORTED = "the file system does not support this, or not such a name"
# All that is not below: ENOTCONN, EHOSTDOWN, ECONNRESET, … Whoever tries again until the time is up loses nothing.
_OTHER = (Meaning.AWAY, "is it mounted, and its file server reachable?")

_MEANINGS: dict[int, tuple[Meaning, str]] = {
    errno.ETIMEDOUT: (Meaning.AWAY, "is a writer suspended, or does the file system hang?"),
    # Replaced on the server while it was open here, which another look mends.
    errno.ESTALE: (Meaning.AWAY, "if this stays, the file system was exported anew: remount it"),
    errno.EMFILE: (Meaning.AWAY, "this process has too many files open: raise `ulimit -n`"),
    errno.ENFILE: (Meaning.AWAY, "the machine has too many files open"),
    errno.ENOMEM: (Meaning.AWAY, _MEMORY),
    errno.EAGAIN: (Meaning.AWAY, _MEMORY),
    errno.ENOSPC: (Meaning.FULL, "the file system is full"),
    errno.EDQUOT: (Meaning.FULL, "the disk quota is used up"),
    errno.EACCES: (Meaning.REFUSED, _PERMISSION),
    errno.EPERM: (Meaning.REFUSED, _PERMISSION),
    errno.EEXIST: (Meaning.EXISTS, ""),
    errno.ENOENT: (Meaning.GONE, ""),
    errno.EIO: (Meaning.DAMAGED, _DEVICE),
    errno.EUCLEAN: (Meaning.DAMAGED, _DEVICE),  # ext4, XFS: a structure is wrong
    errno.EBADMSG: (Meaning.DAMAGED, _DEVICE),  # ext4, XFS: a checksum is
    errno.EROFS: (Meaning.DAMAGED, "the file system is read-only: see dmesg, then remount it"),
    errno.ENOTDIR: (Meaning.WRONG, "a part of the path is a file, not a folder: check the path"),
    errno.EISDIR: (Meaning.WRONG, "it is a folder, not a file: check the path"),
    errno.ENOLINK: (Meaning.WRONG, "a symbolic link leads to nothing: is it mounted?"),
    errno.ELOOP: (Meaning.WRONG, "symbolic links form a loop, or lead out of the folder: check the path"),
    errno.ENAMETOOLONG: (Meaning.WRONG, "the path is too long: check it"),
    errno.EFBIG: (Meaning.WRONG, "the file system has no files that large"),
    errno.EINVAL: (Meaning.WRONG, _UNSUPPORTED),
    errno.EOPNOTSUPP: (Meaning.WRONG, _UNSUPPORTED),
    errno.ENOSYS: (Meaning.WRONG, _UNSUPPORTED),
}

# What a call says that a file system does not have: hard links, or a faster way to do the same.
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
# The same of a link that is tried in a place where files can be written: what `rclone mount` and its like answer.
NO_LINKS_PROBED = NO_LINKS | {errno.EIO, errno.EINVAL, errno.EACCES}
UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EISDIR})


def meaning_of(error: OSError, *, is_local: bool = True) -> tuple[Meaning, str]:
    """Return what an error means, and a hint what to do about it.

    `is_local`: the file is on a device of this machine. The mount of a file server that is away may say EIO, too.
    """
    is_of_server = error.errno == errno.EIO and not is_local
    return _OTHER if is_of_server else _MEANINGS.get(error.errno or 0, _OTHER)


def is_full(error: BaseException) -> bool:
    """Return whether the failed operation may succeed once there is space, on the disk or in the user's quota."""
    return isinstance(error, OSError) and meaning_of(error)[0] is Meaning.FULL
