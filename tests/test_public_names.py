"""What `import ckpt_async` offers."""

import subprocess
import sys

import ckpt_async


def test_every_public_name_is_listed_and_loads() -> None:
    assert set(ckpt_async.__all__) <= set(dir(ckpt_async))
    for name in ckpt_async.__all__:
        assert getattr(ckpt_async, name).__name__ == name


def test_torch_is_imported_only_for_names_that_need_it() -> None:
    code = """
import sys, ckpt_async
dir(ckpt_async), ckpt_async.Uploader, ckpt_async.Sweeper
before = "torch" in sys.modules
from ckpt_async import CheckpointSaver
print(before, "torch" in sys.modules, CheckpointSaver.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True", "CheckpointSaver"]), done.stderr
