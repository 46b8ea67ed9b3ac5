"""How many requests should carry shard bytes at once: as many as fill the link. Pure; time comes in as an argument.

Doubled while that pays in full, as TCP's slow start does, or four times as many where each is slow; then what the rate
that was found needs, at the rate that a connection has when the link is not full. Now and then a step more is tried:
links change. Halved on 503 SlowDown, as every S3 SDK's adaptive mode does. A process begins with what the one before it
has learnt, if a first look at the rate confirms it.

The link is the node's: where several processes use it, what counts is what all of them move. Judged by its own rate,
each would grow for ever, for on a full link more connections are a larger share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

# How long connections that were just added take to reach their rate, and how long that is looked at: this, or so many
# round trips of TCP (connecting, TLS, its own slow start).
SETTLE_S, SETTLE_ROUND_TRIPS = 0.2, 10
WINDOW_S, WINDOW_ROUND_TRIPS = 0.2, 3
# The first look is at connections that have all just begun: soon enough to lose little by too few of them.
FIRST_WINDOW_S = 0.05
# A link that gives one connection less than this takes many.
SLOW_BYTES_PER_S = 32 << 20
# One that gives less than this mostly waits for answers to small requests.
FAR_BYTES_PER_S = 2 << 20
# What a small request takes of us, so that others may be made while it waits for its answer; and how much of all of
# them may be on the link at once before its rate is known.
SMALL_S, SMALL_INFLIGHT_BYTES = 0.0004, 8 << 20
# A store that answers sooner is near: what a small request waits for is a core.
FAR_S = 0.01
# Connections that have less than this part of what they had before the last step are about to fill the link.
STEADY = 0.9
# A process that keeps as many cores at work as this is bound by them, or by Python's lock, rather than by the link.
BUSY_CORES = 0.7
# A step has paid in full if it brought this part of what as much more of everything would have.
FULL = 0.6
# What a step must gain to be kept in part: less is noise.
GAIN = 1.08
# So many times what most processes on a link have, or as much less, is not fair.
FAIR = 1.25
# A connection with this part of the rate that an earlier process has seen is on the same link; one with so many times
# as much is on a wider one.
SAME, WIDER = 0.7, 1.25
# What a request may take beyond what is usual, before its connection is a slow one.
SLOW_AFTER_S = 1.0
# More than this part of all, if these are not the last few, are not slow by chance.
MOST_SLOW, FEW = 0.25, 3
# More than the rate needs, so that the link stays full between the requests of one connection.
SLACK = 1.1
# After a step that did not pay, and after the store said that it is too much: how long until the next one is tried.
# Twice as long each time in a row, up to the second.
REST_S, LONGEST_REST_S = 2.0, 60.0


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The limit now, and what it was learnt from. `start` to begin with; never below 1 or above `most`."""

    limit: int
    most: int
    fills_s: float = (
        0.0  # how long buffers beyond the link may fill, faster than it is, before the first look
    )
    few: int = 0  # as many load all cores: tried next where the first look says that these bound the rate
    is_searching: bool = True  # doubles
    settles_until_s: float = 0.0
    window: tuple[float, int] | None = None  # when it began, and what had moved by then
    before: tuple[int, int, float] | None = (
        None  # limit, all on the link, and rate in bytes/s before the last step
    )
    connection_bytes_per_s: float = 0.0  # as last seen; 0: not known yet
    tries_at_s: float = 0.0
    rest_s: float = REST_S
    reduced_at_s: float = float("-inf")
    refused: tuple[int, float] | None = (
        None  # a limit that was too much, and until when it is not tried again
    )
    unconfirmed: tuple[int, float] | None = (
        None  # the limit if it is another link than an earlier process has seen, and a connection's rate on that
    )

    @property
    def is_known(self) -> bool:
        """Whether the next checkpoint would begin with this limit: not with a step that is only tried now and then, nor
        with what only others have said. A search that ran out of requests goes on there.
        """
        is_kept = self.is_searching or self.before is None
        return is_kept and self.unconfirmed is None and self.connection_bytes_per_s > 0


def remembered(state: Concurrency, limit: int, connection_bytes_per_s: float) -> Concurrency:
    """Begin with what an earlier process has found."""
    return replace(
        state,
        limit=min(limit, state.most),
        fills_s=SETTLE_S,
        is_searching=False,
        connection_bytes_per_s=connection_bytes_per_s,
        unconfirmed=(state.limit, connection_bytes_per_s),
    )


def observed(
    state: Concurrency,
    *,
    moved_bytes: int,
    round_trip_s: float,
    is_full: bool,
    now_s: float,
    busy_cores: float = 0.0,
    others: Sequence[int] = (),
) -> Concurrency:
    """So much has moved by now, over all of the link. `is_full`: as many requests are under way as may be, and more
    wait; else it is not the limit that bounds the rate, and nothing is learnt. `busy_cores`: how many this process has
    kept at work. `others`: the requests under way of each other process on the link.
    """
    settle_s = max(SETTLE_S, SETTLE_ROUND_TRIPS * round_trip_s)
    if not is_full:
        return replace(state, window=None, settles_until_s=now_s + settle_s)
    if state.window is None:
        return state if now_s < state.settles_until_s else replace(state, window=(now_s, moved_bytes))
    began_s, moved_before = state.window
    was_more = state.before is not None and state.limit < state.before[0]
    is_first = (state.before is None or was_more) and (state.is_searching or state.unconfirmed is not None)
    if moved_bytes < moved_before or (is_first and moved_bytes == moved_before):
        # A store that shared the limit has closed; no answer has come yet.
        return replace(state, window=(now_s, moved_bytes))
    if state.fills_s:
        pause_s = state.fills_s if state.unconfirmed is None else settle_s
        return replace(state, window=None, settles_until_s=now_s + pause_s, fills_s=0.0)
    window_s = FIRST_WINDOW_S if is_first and state.is_searching else WINDOW_S
    if now_s - began_s < max(window_s, WINDOW_ROUND_TRIPS * round_trip_s):
        return state
    state = replace(state, window=(now_s, moved_bytes))
    rate = (moved_bytes - moved_before) / (now_s - began_s)
    in_all = state.limit + sum(others)
    if state.unconfirmed is not None:
        return _confirmed(state, *state.unconfirmed, rate / in_all, now_s, settle_s)
    few, state = state.few, replace(state, few=0, connection_bytes_per_s=rate / in_all)
    if state.limit > few > 0 and busy_cores > BUSY_CORES:
        before = state.limit, in_all, rate
        return replace(state, limit=few, window=None, settles_until_s=now_s + settle_s, before=before)
    if state.before is not None and was_more and rate >= STEADY * state.before[2]:
        return _resting(state, now_s)
    if state.before is None and now_s < state.tries_at_s:
        return state
    if state.before is None and not state.is_searching and (fair := _fair(state.limit, others)):
        return replace(
            state, limit=fair, window=None, settles_until_s=now_s + settle_s, tries_at_s=now_s + REST_S
        )
    if state.before is None or state.before[2] <= 0 or was_more:
        return _step_up(state, in_all, rate, now_s, settle_s)
    _, in_all_before, rate_before = state.before
    paid = 1 + FULL * (in_all / in_all_before - 1)
    if others:  # of many processes one moves the sum by less than it varies by itself
        paid = max(paid, GAIN)
    # Where others have given way meanwhile nothing is learnt, and the link may be full.
    if in_all > in_all_before and rate / rate_before >= paid:
        if state.refused is None or state.limit >= state.refused[0]:
            state = replace(state, rest_s=REST_S, refused=None)
        return _step_up(state, in_all, rate, now_s, settle_s)
    return _step_back(state, in_all, rate, now_s, settle_s)


def _step_back(state: Concurrency, in_all: int, rate: float, now_s: float, settle_s: float) -> Concurrency:
    """The step before has not paid in full."""
    assert state.before is not None
    limit, in_all_before, rate_before = state.before
    gain = rate / rate_before
    # Its share of what the rate needs, if a connection has the rate that it had before.
    share = math.ceil(in_all_before * gain * SLACK * state.limit / in_all)
    needed = limit if gain < GAIN else min(state.limit, max(1, share))
    each = min(rate_before / in_all_before, rate / (in_all - state.limit + needed))
    state = replace(state, limit=needed, connection_bytes_per_s=each, window=None)
    return _resting(replace(state, settles_until_s=now_s + settle_s), now_s)


def _resting(state: Concurrency, now_s: float) -> Concurrency:
    """The number stays for a while."""
    return replace(
        state,
        is_searching=False,
        before=None,
        tries_at_s=now_s + state.rest_s,
        rest_s=min(LONGEST_REST_S, 2 * state.rest_s),
    )


def _confirmed(
    state: Concurrency,
    start: int,
    expected_bytes_per_s: float,
    each_bytes_per_s: float,
    now_s: float,
    settle_s: float,
) -> Concurrency:
    """What an earlier process has found, after the first look at it: where a connection has less now, the link, or who
    else is on it, is not what it was.
    """
    if each_bytes_per_s < SAME * expected_bytes_per_s:
        return replace(
            state,
            limit=start,
            connection_bytes_per_s=each_bytes_per_s,
            is_searching=True,
            window=None,
            settles_until_s=now_s + settle_s,
            unconfirmed=None,
        )
    is_wider = each_bytes_per_s > WIDER * expected_bytes_per_s
    return replace(
        state,
        connection_bytes_per_s=each_bytes_per_s,
        is_searching=is_wider,
        tries_at_s=now_s if is_wider else now_s + REST_S,
        unconfirmed=None,
    )


@dataclass(frozen=True, slots=True)
class Request:
    """One that is under way."""

    size_bytes: int
    moved_bytes: int
    took_s: float
    late_bytes_per_s: float  # over half of its time or more: at first, buffers on the way swallow it at once


def usual_rate(requests: Sequence[Request], ended_bytes_per_s: Iterable[float]) -> float:
    """What a connection brings, by what most requests say, where there are too few of them for the link to be searched
    for: those that have ended, and those under way long enough. 0 if they are too few for that, too.
    """
    late = [each.late_bytes_per_s for each in requests if each.took_s >= SLOW_AFTER_S / 2]
    rates = [*ended_bytes_per_s, *late]
    return statistics.median(rates) if len(rates) > FEW else 0.0


def stragglers(requests: Sequence[Request], connection_bytes_per_s: float) -> list[int]:
    """Which of them, by number, would end sooner if they began again on other connections: those that are a small
    fraction as fast as a connection was seen to be, or that take far longer than others do (what buffers on the way
    have swallowed counts as moved). None if they are many: then it is the link, or the store.
    """
    if not connection_bytes_per_s:
        return []
    found = [
        number
        for number, each in enumerate(requests)
        if _is_straggler(each, each.size_bytes / connection_bytes_per_s)
    ]
    return found if len(found) <= max(FEW, len(requests) * MOST_SLOW) else []


def _is_straggler(request: Request, usual_s: float) -> bool:
    too_long_s = SLOW_AFTER_S + 2 * usual_s
    left_s = (request.size_bytes - request.moved_bytes) / max(request.late_bytes_per_s, 1.0)
    is_seen = request.took_s >= max(SLOW_AFTER_S, usual_s / 2)
    return request.took_s >= too_long_s or (is_seen and left_s > too_long_s)


def _fair(limit: int, others: Sequence[int]) -> int:
    """A step towards what most have; 0 if it is near. (Not towards the mean, which one that tries more would raise, and
    then all others.)
    """
    usual = statistics.median([limit, *others])
    if limit > FAIR * usual:
        return max(math.ceil(usual), limit * 3 // 4)
    if limit * FAIR < usual:
        return min(math.floor(usual), limit + max(1, limit // 4))
    return 0


def _step_up(state: Concurrency, in_all: int, rate: float, now_s: float, settle_s: float) -> Concurrency:
    most = state.most
    if state.refused is not None and now_s < state.refused[1]:
        most = min(most, state.refused[0] - 1)
    if state.limit >= most:
        return replace(state, is_searching=False, before=None)
    if not state.is_searching:
        more = max(1, state.limit // 4, in_all // 8)  # what only one process tries has to be seen in the sum
    else:
        each = rate / in_all
        is_filling = state.before is not None and each < STEADY * state.before[2] / state.before[1]
        far_or_slow = 7 if each < FAR_BYTES_PER_S else 3 if each < SLOW_BYTES_PER_S else 1
        is_shared = in_all > state.limit  # there are many connections already
        more = state.limit * (1 if is_filling or is_shared else far_or_slow)
    return replace(
        state,
        limit=min(most, state.limit + more),
        window=None,
        settles_until_s=now_s + settle_s,
        before=(state.limit, in_all, rate),
    )


def far_away(
    state: Concurrency, *, small_s: float, small_bytes: float, others: Sequence[int] = ()
) -> Concurrency:
    """A small request of `small_bytes` waits for so long. What does not fill the link needs no search: as many as can
    be made meanwhile, if nobody else is on it.
    """
    limit = min(state.most, math.ceil(small_s / SMALL_S), int(SMALL_INFLIGHT_BYTES / max(small_bytes, 1.0)))
    is_new = state.is_searching and state.before is None and state.unconfirmed is None
    if small_s < FAR_S or limit <= state.limit or not is_new or any(others):
        return state
    return replace(state, limit=limit, few=0, window=None)


def throttled(state: Concurrency, *, began_s: float, now_s: float) -> Concurrency:
    """A request that began at `began_s` was told to slow down. Those under way when it was halved count as one."""
    if began_s < state.reduced_at_s:
        return state
    return replace(
        state,
        limit=max(1, state.limit // 2),
        is_searching=False,
        unconfirmed=None,
        window=None,
        before=None,
        tries_at_s=now_s + REST_S,
        rest_s=min(LONGEST_REST_S, 2 * state.rest_s),
        reduced_at_s=now_s,
        refused=(state.limit, now_s + state.rest_s),
    )
