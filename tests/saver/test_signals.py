"""What calls the saver from outside the training loop: signals, and a thread."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckpt_async.errors import JournalError, SettingsError
from ckpt_async.saver.save_requests import on_signals, watch


@pytest.fixture(autouse=True)
def _handler_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_may_come_as_soon_as_the_handler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.signal

    def installed(number: int, handler: Any) -> Any:
        before = install(number, handler)
        os.kill(os.getpid(), number)
        return before

    came: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: came.append("the earlier handler"))
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", installed)
        undo = on_signals([signal.SIGUSR1], lambda: came.append("ours"))
    assert came == ["ours", "the earlier handler"]
    undo()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert came == ["ours", "the earlier handler", "the earlier handler"]


def test_if_one_signal_cannot_be_handled_none_is() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SettingsError, match="save_signals"):
        on_signals([signal.SIGUSR1, signal.SIGKILL], lambda: None)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_watching_thread_outlives_what_it_calls(caplog: pytest.LogCaptureFixture) -> None:
    num_calls, called_often = 0, threading.Event()

    def action() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            called_often.set()
        if num_calls < 4:
            raise JournalError("the disk is full")

    stop = watch(action, 0.001)
    assert called_often.wait(60)
    stop()
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert said == ["saver_watch_failed error=JournalError('the disk is full')"]


def test_the_last_call_is_made_after_one_that_failed() -> None:
    failed, calls = threading.Event(), list[bool]()

    def action() -> None:
        calls.append(failed.is_set())
        if not failed.is_set():
            failed.set()
            raise JournalError("the disk is full")

    stop = watch(action, 0.001)
    assert failed.wait(60)
    stop()
    assert calls[-1]
