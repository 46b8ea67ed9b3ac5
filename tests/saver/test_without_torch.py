"""What needs torch says so where there is none."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import ckpt_async.saver",
        "import ckpt_async.torch; ckpt_async.torch.load",
        "from ckpt_async.torch import dump",
    ],
)
def test_the_extra_is_named(code: str) -> None:
    without = "import sys; sys.modules['torch'] = None; " + code
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "needs torch: " in done.stderr
    assert "[torch]'" in done.stderr
