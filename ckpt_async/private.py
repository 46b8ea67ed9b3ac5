"""Folders and locks that must be ours, in places where others may be able to write: there, a name proves nothing.

The private part of a folder is checked when it is opened, and is then safe by its rights. Blocking, a few system calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pwd
import stat
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_async.errors import JournalError

logger = logging.getLogger(__name__)

# How long a lock is waited for before that is logged.
SAY_AFTER_S = 0.5


# --- folders -----------------------------------------------------------------------------------------------


def check(place: Path) -> os.stat_result | None:
    """Refuse a private folder that others may have filled: what it says is not obeyed. Return its status, or None if it
    is missing.

    Raises JournalError if it is not a folder, belongs to neither this user nor root, or may be written to by everybody.
    """
    try:
        facts = os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISDIR(facts.st_mode):
        raise JournalError(f"{str(place)!r} is not a folder")
    if facts.st_uid not in (os.geteuid(), 0):
        owner = _name_of(facts.st_uid)
        raise JournalError(
            f"{str(place)!r} belongs to user {owner}: another user's processes do not obey it",
            hint=f"do it as that user, e.g. `sudo -u {owner} ckpt-async drain {place.parent}`",
        )
    if facts.st_mode & stat.S_IWOTH:
        raise JournalError(
            f"everybody may write to {str(place)!r}, so anybody may have put there what it says",
            hint=f"look at what is in it, then `chmod go-w {place}`",
        )
    return facts


def make(place: Path) -> os.stat_result:
    """Make a private folder, for this user alone, or check the one that is there. Return its status.

    Links in it are refused. A group that may write to it loses that right if it is this user's: Kubernetes gives it to
    fsGroup whenever it mounts a volume. Raises JournalError; OSError if it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        place.mkdir(0o700)
    check(place)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if facts.st_mode & stat.S_IWGRP and facts.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    for above, folders, files in os.walk(place):
        for path in (f"{above}/{name}" for name in (*folders, *files)):
            if os.path.islink(path) and not path.endswith(".tmp"):  # that is only ever replaced
                raise JournalError(f"{path!r} is a link, which ckpt_async has not made", hint="remove it")
    return facts


def whose(path: Path) -> str:
    """Return a hint on a path that this user may not use: whose it is, or the nearest folder above that can be seen."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            facts = os.lstat(each)
            return (
                f"{str(each)!r} belongs to user {_name_of(facts.st_uid)}, with mode {stat.S_IMODE(facts.st_mode):o}:"
                " do it as that user, or `chown` it"
            )
    return ""


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"  # as `sudo -u` takes it


# --- files and locks ---------------------------------------------------------------------------------------


def open_file(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor; links are not followed. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_lock(path: Path) -> int:
    """Open a lock file, made if it is missing, and return its descriptor. Raises OSError.

    An flock needs no more than the right to read. So the file may be read only by those who may write to its folder.
    """
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT, 0o600)
    facts, above = os.fstat(descriptor), os.stat(path.parent)
    may_write = above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    mode = 0o600 | may_write | may_write << 1
    if facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) != mode:
        # Fails for a group that this user is not in, and on a file system without modes.
        with contextlib.suppress(OSError):
            if may_write:
                os.fchown(descriptor, -1, above.st_gid)
            os.fchmod(descriptor, mode)
    return descriptor


def lock(
    descriptor: int,
    path: Path,
    *,
    timeout_s: float = 0.0,
    poll_s: float = 0.0,
    how: int = fcntl.LOCK_EX,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Take the flock of a file. Return False if others still have it when the time is up, or when `is_over`, which is
    called before each pause.

    Anybody who may open the file can hold it for as long as they like. So a wait for it is logged, with the holder.
    """
    began, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited_s = time.monotonic() - began
        if is_over() or waited_s >= timeout_s:
            return False
        if waited_s >= SAY_AFTER_S and not is_told:
            is_told = True
            pid = holder(os.fstat(descriptor)) or "unknown"
            logger.warning("lock_waits path=%s holder_pid=%s", path, pid)
        time.sleep(poll_s)


def holder(facts: os.stat_result) -> str:
    """Return the process id of a holder of a file's flock; "" if there is none, or none that this process can see."""
    place = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            if line.split()[1:6:4] == ["FLOCK", place]:
                return line.split()[4]
    return ""
