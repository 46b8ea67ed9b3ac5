"""`--log-format json`: every line of stderr is a JSON object."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.cli import main
from tests.sweep.trainers import Trainers


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_what_drain_does_is_told_as_objects(
    tmp_path: Path, trainers: Trainers, capsys: pytest.CaptureFixture[str]
) -> None:
    trainers.die(tmp_path / "folder", f"file://{tmp_path}/run", 1, 2)
    capsys.readouterr()
    assert main(["drain", str(tmp_path / "folder"), "--log-format", "json", "-v"]) == 0
    told = {each["fields"]["step"] for each in said(capsys) if each.get("event") == "checkpoint_committed"}
    assert told == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error"),
    [
        (["drain", "/nowhere"], 3, "NoJournalError"),
        (["drain"], 2, "UsageError"),
        (["nonsense"], 2, "UsageError"),
    ],
)
def test_errors_are_objects_too(
    arguments: list[str], exit_code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in (["--log-format", "json"], ["--log-format=json"]):
        assert main([*arguments, *form]) == exit_code
        [line] = said(capsys)
        assert line["event"] == "command_failed"
        assert line["fields"] == {"error": error, "exit_code": exit_code}
        assert line["level"] == "error"
    main(arguments)
    assert capsys.readouterr().err.startswith("ckpt-async: ")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--log-format", "json", "status", "x"], "status --log-format json x"),
        (["--log-format=json", "-v", "drain", "x"], "drain --log-format=json -v x"),
        (
            ["--log-format", "json", "run", "s3://b/r", "--", "ls", "-l"],
            "run --log-format json s3://b/r -- ls -l",
        ),
    ],
)
def test_an_option_before_the_command_is_told_where_it_belongs(
    typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    [line] = said(capsys)
    told = f"ckpt-async: {typed[0].partition('=')[0]} must come after the command (did you mean `ckpt-async {meant}`?)"
    assert line["message"] == told


def test_a_traceback_that_was_asked_for_is_a_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ASYNC_DEBUG", "1")
    assert main(["ls", "file:///nowhere/at/all", "--log-format", "json"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].startswith("Traceback (most recent call last)")
    assert main(["ls", "file:///nowhere/at/all"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("ckpt-async: ")


@pytest.mark.filterwarnings("default")
def test_a_warning_of_python_is_an_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_async.cli.output.version", lambda _: warnings.warn("old", stacklevel=1) or 0)
    assert main(["version", "--log-format", "json"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["logger"] == "py.warnings"
    assert "UserWarning: old" in told["message"]
