"""Composer's own tests of its saver, loader and uploader, with our `CheckpointSaver` in place of theirs.

    python tests/compat/composer/conformance.py COMPOSER_SOURCE [pytest's options]

Run it in an environment with requirements.txt and conformance.txt. COMPOSER_SOURCE is the source of v0.32.1, because
the wheel has no tests. COMPOSER_REMOTE=1 also gives each saver a `remote`.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("tests/callbacks/test_checkpoint_saver.py", "tests/trainer/test_checkpoint.py")
TESTS = (
    *("TestCheckpointSaving", "TestCheckpointLoading", "TestCheckpointResumption"),
    *("test_rotate_checkpoints", "test_checkpoint_filenames", "test_stateful_checkpoint_saver"),
)


def main(source: str, *options: str) -> int:
    # The same as Composer's own.
    markers = "--strict-markers -m 'not gpu and not doctest and not daily and not remote'"
    pytest = [sys.executable, "-m", "pytest", "-p", "swap", "-o", f"addopts={markers}", "--timeout=300"]
    env = os.environ | {
        "PYTHONPATH": f"{HERE.parents[2]}{os.pathsep}{HERE}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.call([*pytest, *FILES, "-k", " or ".join(TESTS), *options], cwd=source, env=env)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
