"""The folder that files are fetched to: which are there already, which are unfinished, and which are published."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

from ckpt_async.core.naming import check_relative
from ckpt_async.errors import DestinationError, NoSpaceError
from ckpt_async.local.durable import FsyncError, fsync_path
from ckpt_async.local.folder import place_of
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile
from ckpt_async.restore.partial import PartialFile, checksum_of_file, discard_unlocked
from ckpt_async.restore.sources import has_size
from ckpt_async.restore.unfinished import Unfinished
from ckpt_async.stores import folder_of

# Below the destination, so on the same file system: finished files are renamed into place.
PARTIAL_FOLDER = ".ckpt-async-partial"


class Destination:
    """The folder for the files of one checkpoint. Blocking calls; raises DestinationError for problems in the
    folder.
    """

    def __init__(
        self, path: str | os.PathLike[str], checkpoint: Checkpoint, *, is_verified: bool, may_overwrite: bool
    ) -> None:
        self.path = place_of(path)
        self._checkpoint = checkpoint
        self._is_verified, self._may_overwrite = is_verified, may_overwrite
        self._partials = self.path / PARTIAL_FOLDER
        self._new: list[Path] = []
        # What is fetched gets one time, whatever the order in which it arrives: a marker that is older than the files
        # for which it stands tells `watch` that they are being rewritten.
        self._began_ns = time.time_ns()
        of = (
            f"{checkpoint.remote} generation {checkpoint.generation} step {checkpoint.step} {checkpoint.name}"
        )
        self._unfinished = Unfinished(self._partials, of)
        self._made: set[str] = set()  # below the destination
        self._targets: dict[str, Path] = {}
        self._partial_paths: dict[str, Path] = {}
        self._is_over = False

    def make(self) -> None:
        if folder_of(self._checkpoint.remote) == self.path:
            raise DestinationError(
                f"the destination {str(self.path)!r} is the remote itself; name another folder"
            )
        self._new = [each for each in (self.path, *self.path.parents) if not each.exists()]
        try:
            self._partials.mkdir(0o700, parents=True, exist_ok=True)
            self._check_ours()
            self._unfinished.take_over()
        except OSError as error:
            raise DestinationError(f"cannot write to {str(self.path)!r}: {error.strerror}") from error

    def _check_ours(self) -> None:
        """Raise DestinationError if the folder of partial files is not our own: its records say what may be deleted."""
        facts = self._partials.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            raise DestinationError(f"{str(self._partials)!r} is a symbolic link")
        with tempfile.TemporaryFile(dir=self.path) as mine:  # a server may map users to others
            if facts.st_uid != os.fstat(mine.fileno()).st_uid:
                raise DestinationError(
                    f"{str(self._partials)!r} belongs to another user, number {facts.st_uid}",
                    hint="use another destination, or remove that folder if no fetch of that user is running",
                )

    def target(self, file: RemoteFile) -> Path:
        if (target := self._targets.get(file.name)) is None:
            target = self._targets[file.name] = self.path / check_relative(file.name, "file")
        return target

    def partial_path(self, file: RemoteFile) -> Path:
        """Return the path of the partial file. It depends on the content, so that leftovers of another checkpoint's
        fetch are never mixed in.
        """
        if (path := self._partial_paths.get(file.name)) is None:
            told = f"{self._checkpoint.remote}\n{file.key}\n{file.size_bytes}\n{file.checksum}\n{file.name}"
            path = self._partials / hashlib.sha256(told.encode()).hexdigest()[:32]
            self._partial_paths[file.name] = path
        return path

    def give_up(self) -> None:
        """Let `is_there` and `begin` end soon, with CancelledError: they may be reading a large file. Any thread."""
        self._is_over = True

    def is_taken(self, file: RemoteFile) -> bool:
        """Return whether anything has the file's name."""
        return os.path.lexists(self.target(file))

    def is_there(self, file: RemoteFile) -> bool:
        """Return whether the file itself is there. Raises DestinationError if another file is, unless it may be
        overwritten.
        """
        target = self.target(file)
        try:
            if not os.path.lexists(target):
                return False
            if has_size(target, file.size_bytes) and self._is_right(target, file):
                return True
            if self._may_overwrite and not target.is_dir():
                return False
        except OSError as error:
            raise DestinationError(f"cannot read {str(target)!r}: {error.strerror}") from error
        raise DestinationError(
            f"{str(target)!r} exists and is not the file of {self._checkpoint.name}; it was left alone",
            hint="use another destination, or pass overwrite=True (--overwrite)",
        )

    def _is_right(self, path: Path, file: RemoteFile) -> bool:
        if file.checksum is None or not self._is_verified:
            return True
        return checksum_of_file(path, file.checksum.algorithm, lambda: self._is_over) == file.checksum

    def check_space(self, files: list[RemoteFile]) -> None:
        """Raise NoSpaceError if the files do not fit."""
        begun: set[str] = set()
        with contextlib.suppress(FileNotFoundError):  # the process that finished last has removed it
            begun.update(os.listdir(self._partials))
        needed_bytes = sum(file.size_bytes for file in files)
        for file in files if begun else ():
            path = self.partial_path(file)
            if path.name in begun:
                with contextlib.suppress(OSError):
                    needed_bytes -= min(file.size_bytes, os.stat(path).st_blocks * 512)
        facts = os.statvfs(self.path)
        free_bytes = facts.f_bavail * facts.f_frsize
        if needed_bytes > free_bytes:
            raise NoSpaceError(
                f"{str(self.path)!r} has {free_bytes} bytes free, but {needed_bytes} are needed",
                hint="free space, or fetch only some ranks or files",
            )

    def make_parent(self, file: RemoteFile) -> None:
        folder, _, _ = file.name.rpartition("/")
        if folder in self._made:
            return
        target = self.target(file)
        if Path(os.path.realpath(target.parent)) != target.parent:
            raise DestinationError(
                f"a symbolic link on the path to {str(target)!r} leads out of the destination"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        self._made.add(folder)

    def begin(self, partial: PartialFile, file: RemoteFile) -> bool:
        """Return whether the file is to be fetched: another process may just have finished it."""
        if self.is_there(file):
            return False
        self._unfinished.add(file.name, self.partial_path(file), partial.facts)
        return True

    def publish(self, partial: PartialFile, file: RemoteFile) -> None:
        partial.publish(self.target(file), modified_ns=self._began_ns)

    def sync(self, files: list[RemoteFile]) -> None:
        """Make the names durable, including those of new folders, and of files that another process has published
        but may not have synced yet.
        """
        folders = {self.path, *(each.parent for each in self._new)}
        for file in files:
            folder = self.target(file).parent
            while folder not in folders:
                folders.add(folder)
                folder = folder.parent
        try:
            for folder in folders:
                fsync_path(folder)
        except FsyncError as error:
            self.take_back(files)  # else the next call would find the files there and trust a second fsync
            raise DestinationError(f"{error.filename}: {error.strerror}") from error

    def take_back(self, files: list[RemoteFile]) -> None:
        """Remove the published and partial files, and those of unfinished fetches before: a checkpoint that cannot be
        fetched must leave nothing that could be taken for part of another one.
        """
        for file in files:
            discard_unlocked(self.partial_path(file))
        self._unfinished.remove_all()

    def finish(self) -> None:
        """Everything is there and durable."""
        self._unfinished.finish()

    def close(self) -> None:
        self._unfinished.close()
        with contextlib.suppress(OSError):
            self._partials.rmdir()  # fails if it is not empty: of a fetch that is running, or unfinished
