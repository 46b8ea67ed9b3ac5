"""The folder tree beneath a DirectoryStore: names, temporary files, the lock, and the folder's own clock. Blocking."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from ckpt_async import filesystems, private
from ckpt_async.core import errnos
from ckpt_async.core.keys import DATA, PRIVATE, RESERVE
from ckpt_async.errors import FailureReason, ObjectNotFoundError, StoreError

# Where temporary files and the lock are, below a name that no key may start with. Left-overs are harmless.
OWN = f"{PRIVATE}/tmp"  # noqa: S108 - a key, not a path
_LOCK = "lock"
# A few records; with 64 KiB free, XFS makes no new file.
_RESERVE_BYTES = 1 << 20
_TEMPORARY = re.compile(r"[0-9a-f]{32}(\.link|\.open)?")

# How often to retry when a parent folder vanishes before it is used, because a `delete` found it empty.
_PARENT_ATTEMPTS = 10
# Holders keep the lock for a rename and an fsync; if it takes longer than this, one of them hangs.
_LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.002
# Far longer than any upload goes without a write.
_LEFT_OVER_AGE_S = 24 * 3600.0
# Far longer than anybody keeps a store open without listing anything.
_LEFT_SIGN_AGE_S = 30 * 24 * 3600.0
# Far longer than it takes from making a folder to putting the first file into it.
_EMPTY_AGE_S = 60.0
# On GlusterFS, a folder or a lock that another node is just making neither can be made nor is there, for a moment.
_BEING_MADE = {errno.EEXIST, errno.ENOENT, errno.ESTALE}
_OPEN_ATTEMPTS, _OPEN_PAUSE_S = 10, 0.1


class Tree:
    """Files below `root`, named by keys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._own = root / OWN
        # What must be there while this is open: for a writer a file of its own, which nobody makes anew where the file
        # system is not mounted; for a reader, our own subfolder, if it has found one.
        self._sign: Path | None = None
        self._may_write = False
        # The files that are being written, with the sizes that they will have.
        self._filling: dict[Path, int] = {}
        self._filling_lock = threading.Lock()
        self.ignores_case = False  # known once it is open for writing

    def open_to_read(self) -> None:
        try:
            is_folder = stat.S_ISDIR(os.stat(self.root).st_mode)
        except FileNotFoundError:
            check_no_dangling_link(self.root)
            raise StoreError(
                "no such folder", reason=FailureReason.NOT_FOUND, operation="open", key=str(self.root)
            ) from None
        if not is_folder:
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder", str(self.root))
        self._sign = self._own if self._own.is_dir() else None

    def open_to_write(self) -> bool:
        """Make the folder if it is missing and try one write and one lock in it; return whether hard links work."""
        self.close()
        for attempts_left in reversed(range(_OPEN_ATTEMPTS)):
            try:
                make_folders(self.path(OWN))
                self._sign = self._own
                can_link = self._probe()
                break
            except (OSError, StoreError) as error:  # StoreError: it has been there
                if not attempts_left or (isinstance(error, OSError) and error.errno not in _BEING_MADE):
                    raise
                time.sleep(_OPEN_PAUSE_S)
        self.reserve()
        self._may_write = True
        return can_link

    def close(self) -> None:
        """Remove the sign of a writer, best effort: others remove it when it is old."""
        if self._may_write and self._sign is not None:
            with contextlib.suppress(OSError):
                self._sign.unlink(missing_ok=True)
        self._sign, self._may_write = None, False

    def path(self, key: str) -> Path:
        """Return the file of a key. Symbolic links among its folders could lead out of the root: refused (I10)."""
        path = self.root / key
        parent = path.parent
        while parent != self.root:
            if parent.is_symlink():
                raise OSError(errno.ELOOP, "a folder in the path is a symbolic link", str(parent))
            parent = parent.parent
        return path

    def has(self, path: Path) -> bool:
        """Return whether there is anything but a folder. Raises OSError if that cannot be told."""
        try:
            return not stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def open(self, key: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path(key), flags)
        except (FileNotFoundError, NotADirectoryError) as error:
            self.check_there("get", key)
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "not a regular file", key)
        return descriptor

    def _probe(self) -> bool:
        with contextlib.ExitStack() as held:
            temporary, file = self.create_temporary(held)
            self._remove_left_overs(os.fstat(file.fileno()).st_mtime)
            linked = temporary.with_name(f"{temporary.name}.link")
            held.callback(unlink_if_there, linked)
            os.write(file.fileno(), b"probe")
            os.fsync(file.fileno())
            with self.locked():
                pass
            other = self.root / OWN.upper()
            self.ignores_case = other.exists() and other.samefile(self._own)
            can_link = _try_link(temporary, linked)
            sign = temporary.with_suffix(".open")
            os.replace(temporary, sign)
            sync_folder(self._own)
        self._sign = sign
        return can_link

    def reserve(self) -> None:
        """Take some space, which whoever prunes deletes on a full disk: both `pruning` and `latest` are written before
        anything goes. Best effort, and only while there is twice as much: else what was freed would be taken again.
        """
        reserve = self.path(RESERVE)
        if os.path.lexists(reserve):
            return
        with contextlib.suppress(OSError, StoreError), contextlib.ExitStack() as held:
            temporary, file = self.create_temporary(held)
            for _ in range(2):
                file.write(os.urandom(_RESERVE_BYTES))
            file.truncate(_RESERVE_BYTES)
            os.fsync(file.fileno())
            os.replace(temporary, reserve)

    def take_space(self, temporary: Path, size_bytes: int, held: contextlib.ExitStack) -> None:
        """Raise OSError if a file that will have this size would take the last of the space, until `held` closes: that
        is for the records, by which something can be pruned while others wait to upload.
        """
        with self._filling_lock:
            status = os.statvfs(self.root)
            promised_bytes = sum(map(_missing_bytes, self._filling, self._filling.values()))
            kept_bytes = min(2 * _RESERVE_BYTES, status.f_blocks * status.f_frsize // 8)
            left_bytes = status.f_bavail * status.f_frsize - promised_bytes - size_bytes
            if status.f_blocks and left_bytes < kept_bytes:  # some network file systems tell no sizes
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))
            self._filling[temporary] = size_bytes
        held.callback(self._fill_ended, temporary)

    def _fill_ended(self, temporary: Path) -> None:
        with self._filling_lock:
            del self._filling[temporary]

    def _remove_left_overs(self, now: float) -> None:
        """Delete temporary files of writers that died, best effort. Others may write to a shared remote: no link is
        followed, and only what has a name of ours is deleted.
        """
        own = os.open(self.path(OWN), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in filter(_TEMPORARY.fullmatch, os.listdir(own)):
                with contextlib.suppress(OSError):
                    age_s = now - os.stat(name, dir_fd=own, follow_symlinks=False).st_mtime
                    if age_s > (_LEFT_SIGN_AGE_S if name.endswith(".open") else _LEFT_OVER_AGE_S):
                        os.unlink(name, dir_fd=own)
        finally:
            os.close(own)

    def create_temporary(self, held: contextlib.ExitStack, mode: int = 0o666) -> tuple[Path, FileIO]:
        """Create and open a file under a temporary name. `held` closes it and removes the name: it owns both even if
        nobody wants the result any more. Its group and others get no right that is not in `mode`.
        """
        path = self.path(f"{OWN}/{secrets.token_hex(16)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with self._in_place("put"):
            descriptor = os.open(path, flags, 0o600 | mode & 0o066)
        held.callback(unlink_if_there, path)
        file = held.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
        self.check_there("put")  # now: only in the place where it was made can it be published
        return path, file

    def link_temporary(self, key: str, held: contextlib.ExitStack) -> Path | None:
        """Link a file under a temporary name, which `held` removes, and return that, or None if the file system cannot
        link it.
        """
        path = self.path(f"{OWN}/{secrets.token_hex(16)}")
        held.callback(unlink_if_there, path)
        with self._in_place("copy"):
            return path if _try_link(self.path(key), path) else None

    def check_spelling(self, key: str) -> None:
        """Where case is ignored, raise StoreError if the file of this key is that of another key. Needs the lock: names
        that differ only in case often come at the same moment.
        """
        folder = self.root
        for name in key.split("/") if self.ignores_case else ():
            if os.path.lexists(folder / name) and name not in os.listdir(folder):
                raise StoreError(
                    f"this file system ignores case, and has {name!r} in another spelling",
                    reason=FailureReason.OTHER,
                    operation="put",
                    key=key,
                    hint="rename one of the two, or use a folder that tells upper from lower case",
                )
            folder /= name

    def into_parent(self, target: Path, place: Callable[[], None]) -> None:
        for _ in range(_PARENT_ATTEMPTS):
            try:
                return place()
            except FileNotFoundError:
                self.check_there("put")
                # A delete removed the folder just made: try again.
                with contextlib.suppress(FileNotFoundError):
                    make_folders(target.parent)
        return place()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the compare-and-swaps and deletes of every other process and thread.

        The lock file is never removed, because everybody who waits for the lock must wait on the same inode. The wait
        is bounded, because the holder may be a stopped process.
        """
        path, descriptor = self._open_lock("lock")
        try:
            if not private.lock(descriptor, path, timeout_s=_LOCK_TIMEOUT_S, poll_s=_LOCK_POLL_S):
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", str(path))
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self, operation: str) -> tuple[Path, int]:
        path = self.path(f"{OWN}/{_LOCK}")
        with self._in_place(operation):
            return path, private.open_lock(path)

    def check_there(self, operation: str, key: str = "") -> None:
        """Raise StoreError if the folder is gone: missing is not empty. A mount point whose file system is not mounted
        lacks our sign, even if somebody else has opened a store there meanwhile: what was committed there, nobody would
        find.
        """
        if not self.root.is_dir() or (self._sign is not None and not self._sign.exists()):
            raise StoreError(
                f"{self.root} is no longer the same folder",
                reason=FailureReason.TRANSIENT,
                operation=operation,
                key=key,
                hint="was it unmounted, moved or emptied?",
            )

    @contextlib.contextmanager
    def translating(self, operation: str, key: str) -> Iterator[None]:
        """Turn every OSError into a StoreError with the right reason."""
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectNotFoundError(operation=operation, key=key) from error
        except OSError as error:
            meaning, hint = errnos.meaning_of(error, is_local=filesystems.is_local(self.root))
            raise StoreError(
                str(error), reason=meaning.reason, operation=operation, key=key, hint=hint
            ) from error

    @contextlib.contextmanager
    def _in_place(self, operation: str) -> Iterator[None]:
        """Run code that needs our own subfolder. Readers may find none, if a run was copied without it."""
        if self._sign is None:
            self.check_there(operation)
            make_folders(self._own)
            self._sign = self._own
        try:
            yield
        except FileNotFoundError:
            self.check_there(operation)
            raise

    def now(self) -> float:
        """Return the time by the clock that sets file times, which is the server's on a network file system."""
        if not self._may_write:
            return time.time()
        with self._in_place("list"):
            os.utime(self._sign or self._own)  # which keeps it from being taken for a left-over
            return os.stat(self._sign or self._own).st_mtime

    def files(self, folder: str, now: float, start_after: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield every regular file below `folder` ("" or ending in '/') past `start_after`, in key order, without
        following links. Each folder is read when its turn comes; folders before `start_after` are not read at all.
        """
        path = self.path(folder) if folder else self.root
        try:
            entries = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return  # deleted since its parent was read
        if not entries and self._may_write and folder.startswith((DATA, f"{PRIVATE}/")):
            _remove_left_behind(path, now)
        # The keys in a folder continue with '/', so "a-b" sorts before everything in "a".
        below = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        for entry in sorted(entries, key=lambda each: f"{each.name}/" if below[each.name] else each.name):
            key = folder + entry.name
            if below[entry.name]:
                is_own = f"/{key}".endswith(f"/{OWN}")  # of a kind, too
                if not is_own and (f"{key}/" > start_after or start_after.startswith(f"{key}/")):
                    yield from self.files(f"{key}/", now, start_after)
            elif key > start_after and entry.is_file(follow_symlinks=False):
                yield key, entry


def check_no_dangling_link(path: Path) -> None:
    """Raise OSError if a link on the path is dangling: a disk is not mounted, so nothing may be started here."""
    while not os.path.lexists(path):
        path = path.parent
    if not path.exists():
        raise OSError(errno.ENOLINK, "a symbolic link in the path is dangling", str(path))


def _remove_left_behind(folder: Path, now: float) -> None:
    """Remove an empty folder, unless it was just made: whoever deleted its last file may have died before this."""
    with contextlib.suppress(OSError):
        if folder.stat().st_mtime < now - _EMPTY_AGE_S:
            folder.rmdir()


def _try_link(path: Path, link: Path) -> bool:
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno not in errnos.NO_LINKS_PROBED:
            raise
        return False
    return True


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents, each durable in its own parent."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # a delete has removed it since, and with it what was to be made durable
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlink_if_there(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _missing_bytes(temporary: Path, size_bytes: int) -> int:
    """Return what is still to be written to a file, if it has not got its name yet."""
    try:
        return size_bytes - temporary.stat().st_size
    except FileNotFoundError:
        return 0
