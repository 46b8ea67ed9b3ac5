"""Wrong arguments are named in one sentence, before anything is done."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from ckpt_async import Uploader
from ckpt_async.core import arguments
from ckpt_async.core.settings import Settings
from ckpt_async.errors import InvalidShardError, SettingsError
from ckpt_async.saver import CheckpointSaver


@pytest.mark.parametrize(("wrong", "meant"), [("save_intervall", "save_interval"), ("file_name", "filename")])
def test_a_misspelled_argument_of_the_saver_is_corrected(tmp_path: Path, wrong: str, meant: str) -> None:
    """It was called an unknown setting of the uploader, followed by fifty names that did not include it."""
    with pytest.raises(SettingsError, match=rf"unknown argument '{wrong}'.*did you mean {meant}"):
        CheckpointSaver(tmp_path / "run", None, **{wrong: "2ba"})
    assert list(tmp_path.iterdir()) == []


def test_what_is_for_the_uploader_is_no_misspelling_of_the_savers_arguments() -> None:
    known = inspect.signature(CheckpointSaver).parameters
    others = [each.name for each in dataclasses.fields(Settings)] + list(
        inspect.signature(Uploader).parameters
    )
    arguments.check_spelling(others, known)


@pytest.mark.parametrize("wrong", [None, 3, ["a"], b"a"])
def test_what_is_not_a_path_is_named(tmp_path: Path, wrong: object) -> None:
    """It was a TypeError that did not say which argument."""
    with pytest.raises(SettingsError, match=r"^folder="):
        Uploader(wrong, f"file://{tmp_path}/remote", rank=0, world_size=1)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"^folder="):
        CheckpointSaver(wrong, None)  # type: ignore[arg-type]
    with (
        Uploader(tmp_path / "run", f"file://{tmp_path}/remote", rank=0, world_size=1) as uploader,
        pytest.raises(InvalidShardError, match=r"^path="),
    ):
        uploader.enqueue(wrong, step=1)  # type: ignore[arg-type]
