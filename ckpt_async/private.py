"""Folders and files that must be ours, in places where others may be able to write: there, a name proves nothing.

The private part of a folder is checked when it is opened, and is then safe by its rights. Files in it are opened
without following links, and only those may lock who may write. Blocking, a few system calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pwd
import re
import stat
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from ckpt_async.errors import JournalError

logger = logging.getLogger(__name__)

# Below it are hard links to the files of one checkpoint.
_SHARDS = re.compile(r"/spool/rank-[0-9]+/[^/]+/")
# How long a lock is waited for before that is logged.
SAY_AFTER_S = 0.5


# --- folders -----------------------------------------------------------------------------------------------


def check(place: Path) -> None:
    """Refuse a private folder that others may have filled: what it says is not obeyed. A missing one passes.

    Raises JournalError if it is not a folder, belongs to neither this user nor root, or may be written to by anybody
    outside its group.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _opened(place):
        pass


def make(place: Path) -> os.stat_result:
    """Make a private folder, for this user alone, or check the one that is there. Return its status.

    Links in it are refused. If it is this user's but its group may write to it (Kubernetes gives fsGroup that right
    whenever it mounts a volume), what others have put there is refused, and from then on only this user may use it.

    Raises JournalError; OSError if it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        place.mkdir(0o700)
    with _opened(place) as (path, facts):
        if not (facts.st_mode & stat.S_IWGRP and facts.st_uid == os.geteuid()):
            _refuse_planted(place, None)
            return facts
        os.chmod(path, 0o700)
        try:
            _refuse_planted(place, (facts.st_uid, 0))
        except BaseException:
            os.chmod(path, stat.S_IMODE(facts.st_mode))  # so that it is refused until somebody has looked
            raise
        return facts


def make_below(folder: Path) -> None:
    """Make a folder within a private one, and those above it that are missing. Its group may not write to it, whatever
    the umask. Raises OSError.
    """
    try:
        folder.mkdir(0o755)
    except FileExistsError:
        if folder.is_symlink() or not folder.is_dir():
            raise
    except FileNotFoundError:
        make_below(folder.parent)
        make_below(folder)


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a path to the folder itself, whatever its name leads to by now, and its status, which is checked."""
    descriptor = os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
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
        yield f"/proc/self/fd/{descriptor}", facts
    finally:
        os.close(descriptor)


def _refuse_planted(place: Path, owners: Container[int] | None) -> None:
    """Refuse links, and if `owners` are given, what is not theirs; links to the trainer's files may be anybody's."""
    for above, folders, files in os.walk(place):
        is_of_shards = _SHARDS.search(f"{above}/") is not None
        for name in (*folders, *files):
            try:
                facts = os.lstat(f"{above}/{name}")
            except FileNotFoundError:
                continue  # other ranks are at work
            # `*.tmp` is only ever replaced.
            is_link = stat.S_ISLNK(facts.st_mode) and not name.endswith(".tmp")
            is_theirs = owners is not None and not is_of_shards and facts.st_uid not in owners
            if is_link or is_theirs:
                raise JournalError(
                    f"'{above}/{name}' was put there by user {_name_of(facts.st_uid)}, not by ckpt_async",
                    hint="look at it, then remove it",
                )


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"  # as `sudo -u` takes it


# --- files and locks ---------------------------------------------------------------------------------------


def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
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
        with contextlib.suppress(
            OSError
        ):  # of a group that this user is not in, or on a file system without modes
            if may_write:
                os.fchown(descriptor, -1, above.st_gid)
            os.fchmod(descriptor, mode)
    return descriptor


def lock(
    descriptor: int,
    path: Path,
    *,
    timeout_s: float,
    poll_s: float,
    how: int = fcntl.LOCK_EX,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Take the flock of a file, and call `meanwhile` before each pause. Return False if somebody else still has it when
    the time is up.
    """
    waiting = Waiting(path, timeout_s, poll_s)
    while not try_lock(descriptor, how):
        meanwhile()
        if waiting.is_over():
            return False
        waiting.pause(descriptor)
    return True


def try_lock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Waiting:
    """A wait for a lock, of which the log tells once: anybody who may open the file can hold it, for as long as they
    like.
    """

    def __init__(self, path: Path, timeout_s: float, poll_s: float) -> None:
        self._path, self._timeout_s, self._poll_s = path, timeout_s, poll_s
        self._began, self._is_told = time.monotonic(), False

    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        return self._waited_s() >= self._timeout_s

    def pause(self, descriptor: int) -> None:
        if self._waited_s() >= SAY_AFTER_S and not self._is_told:
            self._is_told = True
            pid = holder(os.fstat(descriptor)) or "unknown"
            logger.warning("lock_waits path=%s holder_pid=%s", self._path, pid)
        time.sleep(self._poll_s)


def holder(facts: os.stat_result) -> str:
    """Return the process id of a holder of a file's flock; "" if there is none, or none that this process can see."""
    place = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            if line.split()[1:6:4] == ["FLOCK", place]:
                return line.split()[4]
    return ""
