"""Virtual environments for what cannot share the project's own: built once, and kept in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def environment(family: str, name: str, requirements: Path, pins: Sequence[Path] = ()) -> Path:
    """Return the interpreter of an environment with these requirements, after building it if they are new. `pins` are
    further files on which they depend.

    Raises CalledProcessError if something cannot be installed.
    """
    text = json.dumps([*(path.read_text() for path in (requirements, *pins)), sys.version_info[:2]])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt-async" / family
    folder = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    python, stamp = folder / "bin" / "python", folder / "ready"
    with exclusive(cache / f"{name}.lock"):
        if not stamp.exists():
            print(f"building {folder}, which may take minutes", file=sys.stderr, flush=True)
            base = getattr(sys, "_base_executable", sys.executable)
            subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
            uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python]
            subprocess.run([*uv, "-r", requirements], check=True)
            stamp.touch()
    return python


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
