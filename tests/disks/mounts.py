"""File systems, each mounted as one or two nodes see it. As root, in a mount namespace of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.openssh import OpensshServer, find_sshd

# Large enough for xfs, which takes no less.
SIZE_BYTES = 400 << 20
AWAY_S = 4.0


class CannotMountError(Exception):
    """This file system cannot be mounted here; the text says why."""


@dataclass(frozen=True)
class Mounted:
    """One file system, empty. `nodes` are its mount points: two of them, if two nodes share it. `again` kills the first
    node's client, and mounts it again after a while.
    """

    name: str
    nodes: tuple[Path, ...]
    again: Callable[[], None] | None = None

    @property
    def two(self) -> tuple[Path, Path]:
        """The folder as two writers see it, which may be two processes of one machine."""
        return self.nodes[0], self.nodes[-1]


def command(*args: str | Path, package: str) -> None:
    """Run a command. Raises CannotMountError with the end of what it says, or with the package that has it."""
    if shutil.which(str(args[0])) is None:
        raise CannotMountError(f"no {args[0]}: apt-get install --no-install-recommends {package}")
    done = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        raise CannotMountError(f"{args[0]}: {said[0].strip()}")


@contextlib.contextmanager
def mounted_at(place: Path, *mount: str | Path, package: str = "mount") -> Iterator[Path]:
    """Mount something, and unmount it whatever happens below."""
    place.mkdir(parents=True)
    command(*mount, place, package=package)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True)


@contextlib.contextmanager
def on_loop(
    name: str, make: tuple[str, ...], package: str, mount: tuple[str, ...], folder: Path
) -> Iterator[Mounted]:
    """A disk in a file: `make` gets the file's name, `mount` that and the place."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    command(*make, image, package=package)
    with mounted_at(folder / "disk", *mount, image, package=package) as place:
        if "casefold" in make:
            command("chattr", "+F", place, package="e2fsprogs")  # while the folder is empty
        yield Mounted(name, (place,))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """The disk of a file server, which can be full."""
    with MOUNTS["ext4"](folder) as mounted:
        yield mounted.nodes[0]


@contextlib.contextmanager
def in_memory(folder: Path) -> Iterator[Mounted]:
    with mounted_at(folder / "disk", "mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "none") as place:
        yield Mounted("tmpfs", (place,))


@contextlib.contextmanager
def gluster(folder: Path) -> Iterator[Mounted]:
    """One brick and two clients. Port 24007 is Gluster's own, so only one at a time."""
    for each in ("log", "run", "work"):
        (folder / each).mkdir()
    options = {
        "working-directory": folder / "work",
        "run-directory": folder / "run",
        "glusterd-sockfile": folder / "run/socket",
        "transport-type": "socket",
        "transport.socket.bind-address": "127.0.0.1",
        "transport.socket.listen-port": 24007,
        "base-port": 49952,
        "max-port": 49999,
        "ping-timeout": 0,
    }
    lines = "".join(f"    option {name} {value}\n" for name, value in options.items())
    (folder / "glusterd.vol").write_text(f"volume management\n    type mgmt/glusterd\n{lines}end-volume\n")
    log, package = folder / "log", "glusterfs-server glusterfs-client"
    with contextlib.ExitStack() as held:
        alone = held.enter_context(Path(tempfile.gettempdir(), "ckpt-tests-gluster.lock").open("w"))
        fcntl.flock(alone, fcntl.LOCK_EX)
        brick = held.enter_context(small_disk(folder)) / "brick"
        brick.mkdir()
        held.callback(_kill_all, folder / "run")
        daemon = ("glusterd", "-f", folder / "glusterd.vol", "-p", folder / "run/glusterd.pid")
        command(*daemon, "-l", log / "glusterd.log", package=package)
        until = time.monotonic() + 20
        while not (folder / "run/socket").exists():
            if time.monotonic() > until:
                raise CannotMountError("glusterd does not answer")
            time.sleep(0.1)
        ask = ("gluster", f"--glusterd-sock={folder}/run/socket", "--mode=script", "volume")
        command(*ask, "create", "v", f"{os.uname().nodename}:{brick}", "force", package=package)
        command(*ask, "start", "v", package=package)
        nodes = []
        client = ("glusterfs", "--volfile-server=127.0.0.1", "--volfile-id=v", "-l", log / "client")
        for node in ("one", "two"):
            pid = ("-p", folder / "run" / f"{node}.pid")
            nodes.append(held.enter_context(mounted_at(folder / node, *client, *pid, package=package)))
            await_mount(nodes[-1])

        def again() -> None:
            pid = folder / "run/one.pid"
            os.kill(int(pid.read_text()), signal.SIGKILL)
            time.sleep(AWAY_S)
            subprocess.run(["umount", "-l", nodes[0]], capture_output=True)
            command(*client, "-p", pid, nodes[0], package=package)
            await_mount(nodes[0])

        yield Mounted("gluster", tuple(nodes), again)


def _kill_all(run: Path) -> None:
    for file in run.rglob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)


@contextlib.contextmanager
def sshfs(folder: Path) -> Iterator[Mounted]:
    sshd = find_sshd()
    if sshd is None:
        raise CannotMountError("no sshd: apt-get install --no-install-recommends openssh-server")
    with contextlib.ExitStack() as held:
        server = held.enter_context(OpensshServer(sshd, held.enter_context(small_disk(folder)) / "server"))
        host, _, served = server.url.removeprefix("sftp://").partition("/")
        name, _, port = host.partition(":")
        key = server.environment()["FSSPEC_SFTP_KEY_FILENAME"]
        options = f"IdentityFile={key},StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null"
        mount = ("sshfs", "-p", port, "-o", options, f"{name}:/{served}")
        nodes = [
            held.enter_context(mounted_at(folder / node, *mount, package="sshfs")) for node in ("one", "two")
        ]
        yield Mounted("sshfs", tuple(nodes))


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Mounted]:
    """A folder through `rclone mount`, which has no links. Mounted once, because what one node writes reaches another
    only after seconds, and is seen there only after minutes.
    """
    with small_disk(folder) as served:
        cache = f"--cache-dir={folder / 'cache'}"
        mount = ("rclone", "mount", "--daemon", "--vfs-cache-mode=writes", cache, served)
        with mounted_at(folder / "one", *mount, package="rclone fuse3") as place:
            await_mount(place)
            yield Mounted("rclone", (place,))


def await_mount(place: Path) -> None:
    """Wait for a client that mounts in the background."""
    until = time.monotonic() + 20
    while not os.path.ismount(place):
        if time.monotonic() > until:
            raise CannotMountError(f"nothing is mounted at {place.name} after 20 s")
        time.sleep(0.05)


_LOOP = ("mount", "-o", "loop")
_EXT = ("-q", "-F")
MOUNTS: Mapping[str, Callable[[Path], AbstractContextManager[Mounted]]] = {
    "ext4": partial(on_loop, "ext4", ("mkfs.ext4", *_EXT), "e2fsprogs", _LOOP),
    # Times have whole seconds.
    "ext3": partial(on_loop, "ext3", ("mkfs.ext3", *_EXT, "-I", "128"), "e2fsprogs", _LOOP),
    "xfs": partial(on_loop, "xfs", ("mkfs.xfs", "-q", "-f"), "xfsprogs", _LOOP),
    "btrfs": partial(on_loop, "btrfs", ("mkfs.btrfs", "-q", "-f"), "btrfs-progs", _LOOP),
    "tmpfs": in_memory,
    "casefold": partial(
        on_loop, "casefold", ("mkfs.ext4", *_EXT, "-O", "casefold", "-E", "encoding=utf8"), "e2fsprogs", _LOOP
    ),
    "ntfs": partial(on_loop, "ntfs", ("mkntfs", "-q", "-F"), "ntfs-3g", ("lowntfs-3g", "-o", "ignore_case")),
    "gluster": gluster,
    "sshfs": sshfs,
    "rclone": rclone,
}
