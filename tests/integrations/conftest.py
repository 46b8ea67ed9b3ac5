"""Fixtures shared by the tests of all frameworks."""

from pathlib import Path

import pytest


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"
