"""The checkpoint folder: everything that touches it goes through here. Blocking calls, safe from any thread.

Nothing outside the folder is ever opened, linked or removed: paths are walked component by component with
`O_NOFOLLOW`, so a symlink on the way is refused rather than followed (invariant I10, fault F27).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ckpt_async import private
from ckpt_async.core import arguments, errnos, keys
from ckpt_async.core.errnos import Meaning
from ckpt_async.core.model import FileIdentity
from ckpt_async.core.naming import check_relative
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    InvalidNameError,
    InvalidShardError,
    JournalError,
    NoSpaceError,
    SettingsError,
    SourceError,
)
from ckpt_async.filesystems import LOCAL_FILESYSTEMS, check_local, filesystem_of, keeps_inodes
from ckpt_async.local.host_mark import HostMark
from ckpt_async.local.reserve import PIECE_BYTES, Reserve

logger = logging.getLogger(__name__)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must not hang the trainer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WHY_UNLINKED = (
    "only files of this user, or that it may write to (fs.protected_hardlinks), can be linked, if the folder's file"
    " system has hard links, and not from another one. Mend that, or keep such files until they are uploaded"
)
# How long the clock that stamps files may stand still, and where times are whole seconds (FAT: two).
_TICK_S, _COARSE_TICK_S = 0.02, 2.02
# How often links are made anew because the engine has removed the spool's folder in between.
_LINK_TRIES = 10
# Temporary files live for milliseconds; older ones were left behind by a kill.
LEFT_OVER_AGE_S = 3600.0
# A removal takes well under a millisecond. A lock that is held for longer than this was left to a forked
# child by a process that was killed, and is ignored.
REMOVAL_S = 5.0
_REMOVAL_POLL_S = 0.001


def place_of(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder that a user has named; `~` is the home folder."""
    return Path(os.path.realpath(os.path.expanduser(folder)))


class Folder:
    """The trainer's checkpoint folder, with our private part, `.ckpt-async/`, in it.

    Opening creates what is missing and checks what everything else relies on: that the folder is writable, is on a
    local file system that no other machine uses, and that hard links work there (else `can_link` is False). Where
    `keeps_inodes` is True, no mount changes a file's inode number. Each kind of checkpoints has its own private
    part, `private`; what keeps processes and machines apart is common to all kinds.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, kind: str = "", allows_unknown_filesystem: bool = False
    ) -> None:
        if not arguments.path(path, "folder"):
            raise SettingsError(
                "the folder is '', which would mean the working directory", hint="use '.' if you want that"
            )
        self.path = place_of(path)
        self.kind = kind
        self.common = self.path / keys.PRIVATE
        self.private = self.common / keys.kind_place(kind)
        private.check(self.common)
        filesystem = self._filesystem = filesystem_of(self.path)
        self.keeps_inodes = keeps_inodes(filesystem)
        self._host_mark = HostMark(self.common, boot_id())
        self._trusted = filesystem if allows_unknown_filesystem else self._host_mark.trusted
        if filesystem != self._trusted:
            check_local(self.path, filesystem)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._common_facts = private.make(self.common)
            (self.private / "spool").mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise JournalError(f"folder {str(self.path)!r}: {error.filename!r} is not a folder") from error
        except OSError as error:
            raise unusable(self.path, error) from error
        self._is_told = False  # that files cannot be linked
        self.reserve = Reserve(self.common)
        self.reserve.take()
        self.can_link = self._probe_in_space()
        self._host_mark.take(self.path, self._trusted)
        self._remove_left_overs()

    def tend(self) -> None:
        """Called once a second by the running engine: renew the mark that tells other machines about it, and take
        the reserved space again if there is room.
        """
        self.check_same()
        self._host_mark.renew(self._trusted)
        self.reserve.take()

    def check_same(self) -> None:
        """Raise JournalError if our private part is not where it was (not mounted, say), or something else is there:
        whoever may write to the folder can put it there.
        """
        try:
            is_same = os.path.samestat(os.lstat(self.common), self._common_facts)
        except FileNotFoundError:
            raise not_there(self.common) from None
        if not is_same:
            raise JournalError(
                f"{str(self.common)!r} was replaced (or mounted as another device) while this process was using it",
                hint="nothing in it was touched: find out by whom, and restart this process",
            )

    def has(self, source: str, spool: str | None) -> bool:
        """Return whether a file that was handed over is there: the link `spool`, or else the user's own file.

        A file that is missing is lost only if our private part is where it was: else JournalError is raised, because
        its file system is not mounted.
        """
        path = f"{self.private.relative_to(self.path)}/{spool}" if spool else source
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._parent(path) as (parent, name):
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            return True
        self.check_same()
        return False

    def settles_in_s(self, identity: FileIdentity, now: float) -> float:
        """Return for how long an enqueued file may change without another time: what is read earlier may be mixed."""
        left_s = identity.mtime_ns / 1e9 + self._tick_s - now
        return max(0.0, min(left_s, self._tick_s))  # the user may have set any time

    def _probe_in_space(self) -> bool:
        """Probe with as much as the records of a commit may need, which is released first if it is not free. Without
        any reserve, less has to do.
        """
        while True:
            try:
                return self._probe(PIECE_BYTES)
            except NoSpaceError:
                if not self.reserve.release(every_s=0.0):
                    return self._probe(1)

    def _probe(self, size_bytes: int) -> bool:
        """Write, link and remove one small file, so that problems are reported clearly now and not during the first
        save. Find out how coarse times are.
        """
        probe = self.private / f"probe-{os.getpid()}-{os.urandom(4).hex()}"
        linked = probe.with_suffix(".link")
        try:
            probe.write_bytes(bytes(size_bytes))
            self._tick_s = _TICK_S if probe.stat().st_mtime_ns % 10**9 else _COARSE_TICK_S
            try:
                os.link(probe, linked)
            except OSError as error:
                if errnos.is_full(error):
                    raise
                return False
            return True
        except OSError as error:
            raise unusable(self.path, error) from error
        finally:
            for path in (probe, linked):
                with contextlib.suppress(OSError):  # read-only: the error already raised is the one to report
                    path.unlink(missing_ok=True)

    def _remove_left_overs(self) -> None:
        """Remove temporary files of killed processes, best effort. Only old ones, because other processes may be
        using theirs.
        """
        oldest = time.time() - LEFT_OVER_AGE_S
        for path in (
            *self.private.glob("probe-*"),
            *self.private.glob("removing-*"),
            *self.private.glob("*.tmp"),
        ):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < oldest:
                    path.unlink()

    # --- paths ---------------------------------------------------------------------------------------------

    def relative(self, path: str | os.PathLike[str]) -> str:
        """Return the path of a user's file within the folder, '/'-joined and checked; a symlink in its last
        component is not followed. Relative paths are relative to the working directory, as everywhere in Python.
        """
        text = arguments.path(path, "path", InvalidShardError)
        if "\0" in text:
            raise InvalidNameError(f"path {text!r} has a NUL character")
        if not text.startswith(os.sep) or "//" in text or "/." in text or text.endswith(os.sep):
            text = os.path.abspath(text)
        relative = self._within(text)
        if relative == "." or relative.split(os.sep)[0] == "..":
            raise InvalidShardError(
                f"{text!r} is not a file or sub-folder of the folder {str(self.path)!r}",
                hint="write checkpoints below the folder that the uploader was opened with",
            )
        return check_relative(relative.replace(os.sep, "/"), "path")

    def _within(self, path: str) -> str:
        """Return an absolute path relative to the folder. The usual case, without symlinks, comes first, because
        the trainer waits for it.
        """
        here = str(self.path)
        if path.startswith(f"{here}{os.sep}"):
            above = path[: path.rindex(os.sep)]
            while len(above) > len(here) and not os.path.islink(above):
                above = above[: above.rindex(os.sep)]
            if len(above) == len(here):
                return path[len(here) + 1 :]
        parent, name = os.path.split(path)
        return os.path.relpath(os.path.join(os.path.realpath(parent), name), self.path)

    def _open_folder(self, relative: str) -> int:
        """Return a descriptor of a folder within this one ('' is itself), reached without following any symlink."""
        descriptor = os.open(self.path, _DIRECTORY)
        for name in relative.split("/") if relative else ():
            try:
                below = os.open(name, _DIRECTORY, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = below
        return descriptor

    @contextlib.contextmanager
    def _parent(self, relative: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder that holds `relative`, and its name there."""
        folder, _, name = relative.rpartition("/")
        descriptor = self._open_folder(folder)
        try:
            yield descriptor, name
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """Exclude other kinds of checkpoints while files are let go; otherwise each kind might leave a shared file
        to the other.
        """
        there = self.common / keys.KINDS
        with self._locked(there) if there.is_dir() else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _locked(self, place: Path) -> Iterator[None]:
        """Hold the lock of those who remove files, across all processes. Not for the trainer's thread, in which Ctrl-C
        may leave a generator suspended.
        """
        descriptor = _open_lock(place)
        try:
            private.lock(descriptor, place, timeout_s=REMOVAL_S, poll_s=_REMOVAL_POLL_S)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for the copy in a child forked in the meantime
            os.close(descriptor)

    def _wait_for_removals(self) -> None:
        """Wait until nobody is removing files: those that `remove_source` moved away by mistake are back then."""
        descriptor = _open_lock(self.common)
        try:
            private.lock(
                descriptor, self.common, timeout_s=REMOVAL_S, poll_s=_REMOVAL_POLL_S, how=fcntl.LOCK_SH
            )
        finally:  # not in a function of its own, which Ctrl-C could keep from beginning
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def walk(self, *relative: str) -> list[str]:
        """Return, for each path, the path itself if it is a regular file, else every regular file below it, sorted;
        no file twice.

        Raises InvalidShardError for anything that is neither a file nor a folder: a symlink could lead anywhere,
        and a FIFO would hang the upload.
        """
        self._wait_for_removals()
        return list(dict.fromkeys(found for each in relative for found in self._files(each)))

    def _files(self, relative: str) -> list[str]:
        here = relative
        try:
            mode = os.lstat(f"{self.path}/{relative}").st_mode  # `link` refuses symlinks on the way
            if stat.S_ISREG(mode):
                return [relative]
            if not stat.S_ISDIR(mode):
                raise InvalidShardError(f"{relative!r} is {kind_of(mode)}, not a regular file or folder")
            found: list[str] = []
            waiting = [(relative, True)]
            while waiting:
                here, is_folder = waiting.pop()
                if is_folder:
                    waiting += reversed(self._entries(here))
                else:
                    found.append(here)
            return found
        except FileNotFoundError:
            raise InvalidShardError(f"{str(self.path / here)!r} does not exist") from None
        except OSError as error:
            raise self._source_error(self.path / here, error) from error

    def _entries(self, folder: str) -> list[tuple[str, bool]]:
        """Return the entries of a folder, sorted: the path, and whether it is a folder."""
        found = []
        descriptor = self._open_folder(folder)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    path = check_relative(f"{folder}/{entry.name}", "path")
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if not is_folder and not entry.is_file(follow_symlinks=False):
                        mode = entry.stat(follow_symlinks=False).st_mode
                        raise InvalidShardError(f"{path!r} is {kind_of(mode)}, not a regular file or folder")
                    found.append((path, is_folder))
        finally:
            os.close(descriptor)
        found.sort()
        return found

    # --- the spool -----------------------------------------------------------------------------------------

    def link(
        self, files: Sequence[tuple[str, str]], spool: str, num_tries: int = _LINK_TRIES
    ) -> list[tuple[FileIdentity, bool]]:
        """Hard-link regular files, given as (source, name), as `name` into the folder `spool` below `.ckpt-async/`:
        all of them or none. The links are not yet durable.

        Returns, for each, what the file is now and whether it was linked. Where the file system cannot link
        (another mount inside the folder, no hard links) it is not, and then only the user's own file holds the
        bytes.
        """
        self.check_same()
        done: list[tuple[FileIdentity, bool]] = []
        try:
            link_into(
                f"{self.private}/{spool}", files, done, open_folder=self._open_folder, can_link=self.can_link
            )
            unlinked = [
                source for (source, _), (_, is_linked) in zip(files, done, strict=True) if not is_linked
            ]
            if unlinked and not self._is_told:
                self._is_told = True
                logger.warning(
                    "not_linked path=%s: %s. Not said again", self.path / unlinked[0], _WHY_UNLINKED
                )
            return done
        except BaseException as error:
            self.undo_links(spool, [name for _, name in files[: len(done)]])
            if not isinstance(error, OSError):
                raise
            source, _ = files[len(done)]
            if isinstance(error, FileNotFoundError) and self.private.is_dir():
                if num_tries > 1 and os.path.lexists(self.path / source):
                    return self.link(files, spool, num_tries - 1)
                raise InvalidShardError(f"{str(self.path / source)!r} does not exist") from None
            if errnos.is_full(error):
                raise no_space(self.path, common=self.common) from error
            raise self._source_error(self.path / source, error) from error

    def _source_error(self, path: Path, error: OSError) -> CkptAsyncError:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            return InvalidShardError(
                f"{str(path)!r} is a symlink or goes through one; symlinks are not followed"
            )
        meaning, hint = errnos.meaning_of(error, is_local=self._filesystem in LOCAL_FILESYSTEMS)
        if meaning in (Meaning.AWAY, Meaning.DAMAGED):  # of the machine rather than of one file
            return JournalError(f"{str(path)!r} cannot be linked: {error.strerror}", hint=hint)
        return InvalidShardError(f"{str(path)!r} cannot be read: {error.strerror}")

    def is_same(self, source: str, identity: FileIdentity) -> bool:
        """Return whether the user's file is still the one that was enqueued."""
        try:
            with self._parent(source) as (parent, name):
                return identity_of(os.stat(name, dir_fd=parent, follow_symlinks=False)) == identity
        except OSError:
            return False

    def undo_links(self, spool: str, names: Iterable[str]) -> None:
        """Remove the links that `link` has made, as far as possible. Nothing refers to the rest, and the next launch
        removes them.
        """
        for name in names:
            with contextlib.suppress(OSError):
                self.unlink(f"{spool}/{name}")

    def unlink(self, spool: str) -> None:
        """Remove one spool file if it exists. The removal is not yet durable."""
        (self.private / spool).unlink(missing_ok=True)

    def remove_spool(self, spool: str) -> None:
        """Remove a spool folder with all its links; idempotent. The user's own files stay."""
        self.check_same()
        with contextlib.suppress(FileNotFoundError):
            for folder, _, names, descriptor in os.fwalk(self.private / spool, topdown=False):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=descriptor)
                os.rmdir(folder)

    def open_source(self, source: str, spool: str | None, identity: FileIdentity) -> int:
        """Open a shard for reading and return its descriptor, after checking that it is the file that was enqueued.

        Raises SourceError with SOURCE_MISSING or SOURCE_CHANGED; OSError for disk errors.
        """
        path = f"{self.private}/{spool}" if spool else f"{self.path}/{source}"
        try:
            if spool:
                descriptor = os.open(path, _FILE)
            else:
                with self._parent(source) as (parent, name):
                    descriptor = os.open(name, _FILE, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            raise SourceError(
                f"shard {path!r} is gone: it was deleted before it was uploaded",
                reason=FailureReason.SOURCE_MISSING,
            ) from None
        try:
            # Nothing replaces a link in the spool, and not every file system keeps its inode number.
            check_unchanged(descriptor, identity, path, is_same_inode=not spool)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def remove_source(self, source: str, identity: FileIdentity, *, keeps_folders: bool = False) -> bool:
        """Delete the user's file that was enqueued, and folders that became empty (unless `keeps_folders`). Returns
        False if it is no longer the same file (the trainer wrote a new one to that path), which then stays.
        """
        try:
            with self._locked(self.common), self._parent(source) as (parent, name):
                there = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if identity_of(there) != identity or not self._take_away(parent, name, identity):
                    return False
        except (FileNotFoundError, NotADirectoryError):
            self.check_same()
            return True
        above = source.rpartition("/")[0]
        while above and not keeps_folders:
            try:
                with self._parent(above) as (parent, name):
                    os.rmdir(name, dir_fd=parent)
            except OSError:
                break  # not empty: it still has files of other ranks or of the user
            above = above.rpartition("/")[0]
        return True

    def _take_away(self, parent: int, name: str, identity: FileIdentity) -> bool:
        """Delete a file if it is still this one. A restarted trainer may write the same path between our check and
        an unlink, which would delete the new file. So the file is moved first, checked again, and put back if it is
        a different one.
        """
        away = f"{self.private}/removing-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            os.rename(name, away, src_dir_fd=parent)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            os.unlink(name, dir_fd=parent)  # on a separate mount nothing better is possible
            return True
        if identity_of(os.lstat(away)) == identity:
            os.unlink(away)
            return True
        try:
            os.link(away, name, dst_dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            pass  # the trainer has written an even newer one
        except OSError:
            os.rename(away, name, dst_dir_fd=parent)  # no hard links on this file system
            return False
        os.unlink(away)
        return False

    # --- facts ---------------------------------------------------------------------------------------------

    def space(self) -> tuple[int, int]:
        """Return the free and total bytes of the folder's file system, as an unprivileged user sees them."""
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize

    def num_ranks(self) -> int:
        """Return how many ranks fill this folder: those that have anything in the spool, at least one."""
        try:
            return max(1, len(spooled_ranks(self.private)))
        except OSError:  # such as a folder that was removed while it was listed
            return 1


def check_unchanged(
    descriptor: int, identity: FileIdentity, path: str, *, is_same_inode: bool = False
) -> None:
    """Raise SourceError unless the open file has the size with which it was enqueued and, to the nanosecond, the mtime;
    and, if `is_same_inode`, is that very file.
    """
    found = identity_of(os.fstat(descriptor))
    if not (found == identity if is_same_inode else found.is_as_long_and_old_as(identity)):
        raise SourceError(
            f"shard {path!r} was changed after it was enqueued (overwritten in place or truncated; or its time was set"
            " late, as some mounts of file servers do: then use a local folder)",
            reason=FailureReason.SOURCE_CHANGED,
        )


# --- the lock between those who remove files and those who list them ---------------------------------------


def _open_lock(place: Path) -> int:
    """Return a separate descriptor, because a lock does not separate threads that share one."""
    try:
        return os.open(place, _DIRECTORY)
    except OSError as error:
        raise unusable(place, error) from error


# --- facts of the machine ----------------------------------------------------------------------------------


def boot_id() -> str:
    """Return an id that changes with every boot of this machine (random(4)); '' if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def spooled_ranks(private: Path) -> set[int]:
    """Return the ranks that have anything in the spool."""
    numbers = {each: each.name.removeprefix("rank-") for each in (private / "spool").glob("rank-*")}
    return {int(number) for each, number in numbers.items() if number.isdecimal() and any(each.iterdir())}


# --- errors -------------------------------------------------------------------------------


def not_there(path: Path) -> JournalError:
    return JournalError(
        f"{str(path)!r} is not where this process has opened it: its file system is not mounted any more, or its folder"
        " was moved or removed",
        hint="mount it again, or move it back: then uploads go on. Nothing is given up or written until then",
    )


def no_space(path: Path, *, common: Path | None = None) -> NoSpaceError:
    """`common`: the private part of an open folder, in which a step may be incomplete."""
    hint = "free space, lower num_checkpoints_to_keep, or put the folder on a larger disk; then try again"
    if common is not None:
        hint += ", or release an incomplete step with `give_up`"
        if not Reserve(common).is_there:
            hint += ": that, too, needs some free space, because there is no reserve here"
    what = (
        "is full" if _has_inodes(path) else "is full: it has space, but no inode for another file (`df -i`)"
    )
    return NoSpaceError(f"the file system of {str(path)!r} {what}", hint=hint)


def _has_inodes(path: Path) -> bool:
    for existing in (path, *path.parents):
        with contextlib.suppress(OSError):
            facts = os.statvfs(existing)
            return facts.f_favail > 0 or facts.f_files == 0 or facts.f_bavail == 0  # btrfs counts no inodes
    return True


def unusable(path: Path, error: OSError) -> JournalError:
    if errnos.is_full(error):
        return no_space(path)
    hint = "it must exist or be creatable, and writable"
    if isinstance(error, PermissionError):
        hint = private.whose(Path(error.filename or path))
    return JournalError(f"folder {str(path)!r} cannot be used: {error.strerror}", hint=hint)


# --- links --------------------------------------------------------------------------------------------------


def link_into(
    folder: str,
    files: Iterable[tuple[str, str]],
    done: list[tuple[FileIdentity, bool]],
    *,
    open_folder: Callable[[str], int],
    can_link: bool,
) -> None:
    """Hard-link regular files, given as (source, name), as `name` into `folder`, as far as the file system can. For
    each file, append to `done` what it is now and whether it was linked. `open_folder` returns a descriptor of the
    folder that contains a source.
    """
    above_now: str | None = None
    parent = -1
    made: set[str] = set()
    try:
        for source, name in files:
            above, _, base = source.rpartition("/")
            if above != above_now:  # sources from one folder follow one another
                before, parent = parent, open_folder(above)
                above_now = above
                if before >= 0:
                    os.close(before)
            target = f"{folder}/{name}"
            is_linked = can_link
            if is_linked:
                _make_folder(target[: target.rindex("/")], made)
                is_linked = _link(base, parent, target)
            facts = os.lstat(target) if is_linked else os.stat(base, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISREG(facts.st_mode):
                if is_linked:
                    os.unlink(target)
                raise InvalidShardError(f"{source!r} is {kind_of(facts.st_mode)}, not a regular file")
            done.append((identity_of(facts), is_linked))
    finally:
        if parent >= 0:
            os.close(parent)


def _make_folder(folder: str, made: set[str]) -> None:
    if folder in made:
        return
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
    made.add(folder)


def _link(name: str, parent: int, target: str) -> bool:
    while True:
        try:
            os.link(name, target, src_dir_fd=parent, follow_symlinks=False)
            return True
        except FileExistsError:
            # Left by a crash between the link and the journal row, so nothing refers to it.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
        except OSError as error:
            if error.errno in errnos.NO_LINKS:
                return False
            raise


def identity_of(facts: os.stat_result) -> FileIdentity:
    return FileIdentity(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def kind_of(mode: int) -> str:
    for is_kind, name in (
        (stat.S_ISLNK, "a symlink"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return name
    return "a device"
