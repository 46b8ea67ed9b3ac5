"""Closing what is open when the interpreter exits."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async.trainer import at_exit


@pytest.mark.parametrize("has_threads", [True, False])
def test_what_cannot_be_uploaded_at_exit_for_lack_of_threads_delays_it_for_seconds_only(
    has_threads: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.12.0 and 3.12.1 start none then. It was tried for a minute, and nobody learnt why it failed."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    limits: list[float] = []

    def close(timeout_s: float) -> None:
        limits.append(timeout_s)

    uploader: Any = SimpleNamespace(
        folder="folder",
        pid=os.getpid(),
        before_exit=limits.append,
        settings=SimpleNamespace(upload_timeout_s=1000.0),
        close=close,
    )
    monkeypatch.setattr(at_exit, "_open", [uploader])
    monkeypatch.setattr(at_exit, "_is_closing", False)
    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", refused)
    at_exit._close_all()
    writing_s, uploading_s = limits
    assert 55 < writing_s <= 60
    assert uploading_s <= (60 if has_threads else 5)
    assert uploading_s > (55 if has_threads else 0)
    assert ("no_threads_at_exit" in caplog.text) is not has_threads
