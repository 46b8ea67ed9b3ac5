"""Fixtures that run commands as a script would."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_async import cli


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run a command with --json and return its exit code and its object."""

    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        code = cli.main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call
