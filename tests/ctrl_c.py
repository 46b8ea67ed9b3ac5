"""Ctrl-C at every point where CPython delivers signals, one after the other."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def interrupted(call: Callable[[], object], at: int) -> BaseException | None:
    """Call it, and raise KeyboardInterrupt at the `at`-th point where a signal may arrive: a Python function begins, or
    a call of a C function has ended. Returns what it raised; None once there is no such point.
    """
    num_points = 0

    def on_event(_: FrameType, event: str, __: object) -> None:
        nonlocal num_points
        num_points += event in ("call", "c_return")
        if num_points == at:
            raise KeyboardInterrupt

    gc.disable()  # finalizers of what earlier tests have left would get the interrupt, in which it is ignored
    try:
        sys.setprofile(on_event)
        call()
    except KeyboardInterrupt as error:
        return error
    except RuntimeError as error:
        # `Condition.wait` had just let go of its lock.
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return error
    finally:
        sys.setprofile(None)
        gc.enable()
    return KeyboardInterrupt("ignored, as in a finalizer") if num_points >= at else None
