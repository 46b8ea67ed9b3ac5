"""What the plays of all frameworks need."""

from pathlib import Path

import pytest


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"
