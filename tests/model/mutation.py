"""Deliberate bugs: one function of the package, with a piece of its source replaced for a while."""

import __future__

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def changed(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """Make every caller of `function` run its source with `new` in place of `old`, which must occur exactly once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times"
    made: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(old, new), f"<mutant of {function.__qualname__}>", "exec", flags, True)
    exec(code, function.__globals__, made)
    before: Any = function.__code__
    function.__code__ = made[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before
