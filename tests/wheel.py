"""`./dev wheel`: build the wheel and the sdist into dist/, and use the wheel as somebody who never saw the clone.

An empty environment gets the wheel and what it depends on, and nothing else; no torch, no file of the clone.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"

# As in the README, and restored by another process.
SAVE = """
from pathlib import Path
from ckpt_async import Uploader
with Uploader("shards", "REMOTE") as uploader:
    shard = Path("shards/step-100/rank-0.pt")
    shard.parent.mkdir(parents=True)
    shard.write_text("state")
    uploader.enqueue(shard, step=100)
    uploader.seal(step=100)
"""
LOAD = """
from ckpt_async import restore
found = restore.find("REMOTE")
report = restore.fetch(found, "back")
assert [path.read_text() for path in report.paths.values()] == ["state"]
"""


def main() -> int:
    uv = (sys.executable, "-m", "uv")
    for old in DIST.glob("ckpt_async-*"):
        old.unlink()
    run(*uv, "build", "-q", "--out-dir", DIST, cwd=ROOT)
    (wheel,) = DIST.glob("*.whl")
    (sdist,) = DIST.glob("*.tar.gz")
    version = re.search(
        r'^__version__ = "(.*)"$', (ROOT / "ckpt_async/__init__.py").read_text(), re.MULTILINE
    )
    assert version is not None
    assert wheel.name == f"ckpt_async-{version[1]}-py3-none-any.whl"
    packed = zipfile.ZipFile(wheel).namelist()
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ckpt_async").rglob("*.py")}
    assert there == {name for name in packed if name.endswith(".py")}, (
        "the wheel lacks modules, or has others"
    )
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run(*uv, "venv", "-q", place / "venv", "--python", sys.executable)
        python = place / "venv/bin/python"
        run(*uv, "pip", "install", "-q", "--python", python, wheel)
        run(*uv, "pip", "check", "-q", "--python", python)
        remote = f"file://{place}/store"
        for code in (SAVE, LOAD):
            run(python, "-W", "error", "-c", code.replace("REMOTE", remote), cwd=place)
        command = place / "venv/bin/ckpt-async"
        assert run(command, "--version", cwd=place).split()[-1] == version[1]
        assert "step-100" in run(command, "ls", remote, cwd=place)
        run(command, "verify", remote, cwd=place)
    print(f"{wheel.relative_to(ROOT)} and {sdist.relative_to(ROOT)} work in an empty environment")
    return 0


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {
        name: text for name, text in os.environ.items() if not re.match("RANK|WORLD|LOCAL|PYTHONPATH", name)
    }
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
