"""Builds `shim.c`, or skips the test and says why it cannot be used here."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shim.c")


def build(folder: Path) -> Path:
    """Compile the library into the folder and return its path; skip the test if there is no C compiler, or no Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or platform.system() != "Linux":
        pytest.skip("needs Linux and a C compiler (cc or gcc)")
    library = folder / "shim.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Werror",
        "-o",
        str(library),
        str(SOURCE),
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library
