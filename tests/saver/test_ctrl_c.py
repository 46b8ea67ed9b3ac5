"""Ctrl-C within `CheckpointSaver.step` and `close`, at every point where CPython delivers signals: the step is saved
all the same, by its thread or by the next call, and nothing is waited for that never comes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async.errors import SaveFailedError
from ckpt_async.saver import CheckpointSaver
from tests.ctrl_c import interrupted

PATIENCE_S = 5.0

# A generator, or a descriptor, that was just made is closed by the garbage collector, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _gradients_are_on_again() -> Iterator[None]:
    """Ctrl-C within torch's own `no_grad` leaves them off."""
    yield
    torch.set_grad_enabled(True)


def state(batch: int) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(batch)), "batch": batch}


class Training:
    """Ctrl-C arrives while the state of batch 4 is taken, once."""

    def __init__(self) -> None:
        self.is_interrupted = False

    def state(self, batch: int) -> dict[str, Any]:
        if batch == 4 and not self.is_interrupted:
            self.is_interrupted = True
            os.kill(os.getpid(), signal.SIGINT)
        return state(batch)

    def run(self, saver: CheckpointSaver) -> None:
        for batch in range(1, 100):
            saver.step(partial(self.state, batch), batch)


def newest(folder: Path, remote: str | None) -> int:
    with CheckpointSaver(folder, remote, save_interval=None) as saver:
        return int(saver.load_latest()["batch"])


@pytest.mark.parametrize("has_remote", [True, False])
def test_close_saves_the_step_whose_save_was_interrupted(tmp_path: Path, has_remote: bool) -> None:
    """It took that step for saved: the newest checkpoint was the one before, without an error."""
    remote = f"file://{tmp_path}/remote" if has_remote else None
    saver = CheckpointSaver(tmp_path / "local", remote, save_interval="2ba")
    with pytest.raises(KeyboardInterrupt):
        Training().run(saver)
    saver.close()
    assert newest(tmp_path / "local", remote) == 4


def test_save_on_exception_saves_the_step_whose_save_was_interrupted(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/remote"
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointSaver(tmp_path / "local", remote, save_interval="2ba", save_on_exception=True) as saver,
    ):
        Training().run(saver)
    assert newest(tmp_path / "local", remote) == 4


def test_a_save_that_was_asked_for_and_interrupted_comes_at_the_next_step(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path / "local", None, save_interval=None) as saver:
        training = Training()
        saver.save_now()
        with pytest.raises(KeyboardInterrupt):
            saver.step(partial(training.state, 4), 4)
        assert saver.step(partial(training.state, 5), 5)


def test_an_interrupted_step_is_saved_by_its_thread_or_by_the_same_call_again(tmp_path: Path) -> None:
    """The next `step` waited for ever for a thread that did not exist, or the step was never saved."""
    options: dict[str, Any] = {"save_interval": "1ba", "num_checkpoints_to_keep": 1, "overwrite": True}
    saver = CheckpointSaver(tmp_path / "local", None, **options)
    for batch in range(1, 2_000):
        step = partial(saver.step, partial(state, batch), batch)
        error = interrupted(step, batch)
        if error is not None:
            assert type(error) is KeyboardInterrupt
            assert saver._saving.wait(PATIENCE_S), error  # while its traceback is alive
            saver.step(partial(state, batch), batch)
        assert saver._saving.wait(PATIENCE_S)
        assert saver.saved_checkpoints[-1].step == batch
        if error is None:
            break
    saver.close()
    assert batch > 100
    assert [each.step for each in saver._saving.saved] == [*range(1, batch + 1)]


def test_an_interrupted_close_is_finished_by_the_next(tmp_path: Path) -> None:
    """It was taken for closed: the last step was not saved, the uploader stayed open, hooks were not called."""
    for number in range(1, 2_000):
        saver = CheckpointSaver(tmp_path / f"{number}", None, save_interval="100ba", on_saved=str)
        saver.step(state(1), 1)
        error = interrupted(saver.close, number)
        saver.close()
        assert [each.step for each in saver.saved_checkpoints] == [1], error
        assert saver._is_closed
        assert not saver._hooks._waiting
        if error is None:
            break
    assert number > 100


def test_an_interrupted_sharded_save_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may still be writing it, so it cannot be begun again; but that it is not saved must be told."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    saver = CheckpointSaver(tmp_path / "local", None, save_interval="1ba", sharded=True)
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_async.torch.async_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.step(state(1), 1)
    with pytest.raises(SaveFailedError, match="ep0-ba1 was not saved: KeyboardInterrupt"):
        saver.close()
