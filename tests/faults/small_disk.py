"""Runs a script on a small file system of its own."""

import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.faults.processes import ROOT


def disk_image(tmp_path: Path, make: str) -> Path:
    """Return an image of a disk on which this command has made a file system."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(300 << 20)  # the least that XFS takes
    name, *options = make.split()
    made = shutil.which(name) and not subprocess.run([name, *options, str(image)]).returncode
    if os.geteuid() or not made or subprocess.run(["losetup", "--find"], capture_output=True).returncode:
        pytest.skip(f"needs root, {name} and loop devices")
    return image


def on_small_disk(
    tmp_path: Path, script: str, size: str = "1m", image: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in a mount namespace of its own, where `disk` is an empty file system of this size, or the one in
    this image.
    """
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    unshare = shutil.which("unshare")
    mount, flags = f"mount -t tmpfs -o size={size} none", "-Urm"
    if image is not None:  # only the real root may mount it
        mount, flags = f"mount -o loop {shlex.quote(str(image))}", "-m"
    command = f'{mount} "$0" && shift 0 && exec "$@"'
    if unshare is None or subprocess.run([unshare, flags, "true"], capture_output=True).returncode:
        pytest.skip("no user and mount namespaces here")
    preamble = """
        import fcntl, os, sys, threading, time, zlib
        from pathlib import Path
        from ckpt_async import *
        from ckpt_async.core import failures
        from ckpt_async.errors import NoSpaceError, JournalError
        from tests.faults.trainer import write_shards
        tmp = Path(sys.argv[1])
        disk, remote = tmp / "disk", f"file://{tmp}/remote"
        failures.RETRY_ACTION_S = 0.1
        def fill(folder):
            with open(folder / "ballast", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
            for journal in folder.rglob("journal-*.log"):  # what is left of its last page would take more records
                with open(journal, "ab", buffering=0) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    left = -os.fstat(file.fileno()).st_size % 4096
                    if left > 20:
                        rest = b'z [0.0,"' + bytes(left - 20).replace(b"\\0", b"x") + b'"]'
                        try:
                            file.write(b"%08x %b\\n" % (zlib.crc32(rest), rest))
                        except OSError:
                            pass  # blocks are smaller, or always new ones
    """
    text = textwrap.dedent(preamble) + textwrap.dedent(script)
    return subprocess.run(
        [unshare, flags, "sh", "-c", command, str(disk), sys.executable, "-c", text, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
