"""How many requests should carry shard bytes at once: fewer when the store asks for it, more while that pays. Pure.

Halved on 503 SlowDown, as every S3 SDK's adaptive mode and TCP do; grown step by step while the last step made it
faster; taken back when it did not. Time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# A window is long enough to say something of the rate: this long, and as many requests as go at once.
WINDOW_S = 1.0
# What a step must gain to be kept: less is noise.
GAIN = 1.05
# After a step that did not pay, and after the store said that it is too much: how long until the next one is tried.
REST_S = 30.0


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The limit now, and what it was learnt from. `start` to begin with; never below 1 or above `most`."""

    limit: int
    most: int
    window_began_s: float = 0.0
    window_requests: int = 0
    window_bytes: int = 0
    was_full: bool = (
        True  # whether requests waited all through the window: else the limit was not what bound them
    )
    before: tuple[int, float] | None = None  # limit and rate in bytes/s before the last step up
    rests_until_s: float = 0.0
    reduced_at_s: float = float("-inf")


def finished(
    state: Concurrency, *, size_bytes: int, is_waited_for: bool, began_s: float, now_s: float
) -> Concurrency:
    """A request that began at `began_s` has carried `size_bytes`; `is_waited_for` says whether others wait to start."""
    state = replace(
        state,
        window_requests=state.window_requests + 1,
        window_bytes=state.window_bytes + size_bytes,
        was_full=state.was_full and is_waited_for,
        # An idle time before the window says nothing of the rate within it.
        window_began_s=began_s if state.window_requests == 0 else state.window_began_s,
    )
    window_s = now_s - state.window_began_s
    if window_s < WINDOW_S or state.window_requests < state.limit:
        return state
    rate, was_full = state.window_bytes / window_s, state.was_full
    state = replace(state, window_requests=0, window_bytes=0, was_full=True)
    if not was_full:
        return replace(state, before=None)
    if state.before is not None:
        limit, rate_before = state.before
        if rate < rate_before * GAIN:
            return replace(state, limit=limit, before=None, rests_until_s=now_s + REST_S)
    if state.limit == state.most or now_s < state.rests_until_s:
        return replace(state, before=None)
    return replace(
        state, limit=min(state.most, state.limit + max(1, state.limit // 4)), before=(state.limit, rate)
    )


def throttled(state: Concurrency, *, began_s: float, now_s: float) -> Concurrency:
    """A request that began at `began_s` was told to slow down. Those under way when it was halved count as one."""
    if began_s < state.reduced_at_s:
        return state
    return replace(
        state,
        limit=max(1, state.limit // 2),
        window_requests=0,
        window_bytes=0,
        was_full=True,
        before=None,
        rests_until_s=now_s + WINDOW_S,
        reduced_at_s=now_s,
    )
