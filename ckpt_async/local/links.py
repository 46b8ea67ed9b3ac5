"""Hard links of the trainer's files into the spool."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable

from ckpt_async.core import errnos
from ckpt_async.core.model import FileIdentity
from ckpt_async.errors import InvalidShardError


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
