"""The type of a folder's file system, and what it keeps between the machines that use it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ckpt_async.errors import JournalError

# Two processes must never write for one rank, and an flock may keep out only those of the same machine. Nobody can list
# all file systems that several machines may share, so this lists those that belong to one machine; '' stands for
# systems without mountinfo (not Linux).
LOCAL_FILESYSTEMS = frozenset(
    "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs nilfs2 tmpfs ramfs overlay".split()
) | {""}
# Of those that machines share, the ones where a lock and a link hold for all of them. Of any other, FUSE's above all,
# one machine cannot find out what another sees.
_EXCLUSIVE_FOR_ALL = frozenset("nfs nfs4 lustre gpfs ceph fuse.ceph fuse.ceph-fuse fuse.glusterfs".split())
_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
# The upper folder of an overlay may itself be on an overlay.
_MAX_OVERLAYS = 8


def check_local(path: Path, filesystem: str) -> None:
    """Raise JournalError unless the file system is known to be local."""
    if filesystem not in LOCAL_FILESYSTEMS:
        raise JournalError(
            f"folder {str(path)!r} is on a file system ({filesystem}) that is not known to be local: if another"
            " machine uses it too, nothing may keep both from writing one journal",
            hint="use a folder on a local disk of each node; if this is a local disk, set"
            " allow_unknown_filesystem=True",
        )


def excludes_all_writers(filesystem: str) -> bool:
    """Return whether a lock and a link exclude every writer, on whatever machine it is."""
    return filesystem in LOCAL_FILESYSTEMS | _EXCLUSIVE_FOR_ALL


def keeps_inodes(filesystem: str) -> bool:
    """Return whether a file has the same inode number after each mount. Most FUSE file systems number files as they are
    looked up.
    """
    return "fuse" not in filesystem


def is_local(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is on a file system of this machine, as far as the mounts tell."""
    return filesystem_of(Path(path)) in LOCAL_FILESYSTEMS


def filesystem_of(path: Path) -> str:
    """Return the type of the file system that writes to `path` end up on, from Linux's mountinfo; '' if there is
    none. A symbolic link is followed.
    """
    try:
        lines = _MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return ""
    return parse_mountinfo(os.path.realpath(path), lines, os.path.isdir)


def parse_mountinfo(path: str, lines: list[str], is_folder: Callable[[str], bool] = lambda _: False) -> str:
    """Return the type of the mount with the longest mount point above `path`; of equal ones, the last mounted.

    For an overlay, the file system that it writes to counts: 'overlay' if that is local, or for example 'overlay on
    nfs', as far as its upper folder is visible from here.
    """
    kind, options = _mount(path, lines)
    for _ in range(_MAX_OVERLAYS):
        upper = _unescaped(options.get("upperdir", ""))
        if kind != "overlay" or not upper.startswith("/") or not is_folder(upper):
            return kind
        below, more = _mount(upper, lines)
        if below != "overlay":
            return "overlay" if below in LOCAL_FILESYSTEMS else f"overlay on {below}"
        if more == options:
            return kind  # the path belongs to another mount namespace
        options = more
    return kind


def _mount(path: str, lines: list[str]) -> tuple[str, dict[str, str]]:
    """Return the type and options of a path's mount. Format: proc(5), /proc/pid/mountinfo: field 5 is the mount
    point with octal escapes; after '-' come the type, the source and the options.
    """
    best, kind, options = -1, "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _unescaped(fields[4]).rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= best:
            best = len(point)
            kind, _, rest = after.partition(" ")
            options = rest.rpartition(" ")[2]
    pairs = (each.partition("=") for each in options.split(","))
    return kind, {name: value for name, _, value in pairs}


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
