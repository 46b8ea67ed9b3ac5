"""How many requests should carry shard bytes at once: as many as fill the link. Pure; time is an argument.

The number doubles while that pays in full, as in TCP's slow start, or becomes four times as large if each connection is
slow. Then it is set to what the measured rate needs at the speed that a connection has when the link is not full. Now
and then a step more is tried, because links change. On 503 SlowDown the number is halved, as in every S3 SDK's adaptive
mode, and if answers are so late that their requests were given up. Steps are then judged over as long as answers take:
until then, bytes that a proxy has accepted but not forwarded pass for the rate of the link. A process begins with what
the previous one has learned, if a first look at the rate confirms it.

The link belongs to the node: if several processes use it, the rate of all of them counts. Judged by its own rate, each
process would grow for ever, because on a full link more connections get a larger share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

# How long new connections take to reach their rate, and for how long the rate is then measured: this many seconds, or
# this many round trips of TCP if that is longer (connecting, TLS, TCP's own slow start).
SETTLE_S, SETTLE_ROUND_TRIPS = 0.2, 10
WINDOW_S, WINDOW_ROUND_TRIPS = 0.2, 3
# The first measurement is short: all connections have just begun, and too few of them should not cost much time.
FIRST_WINDOW_S = 0.05
# If a single connection gets less than this, the link needs many connections.
SLOW_BYTES_PER_S = 32 << 20
# If it gets less than this, it mostly waits for answers to small requests.
FAR_BYTES_PER_S = 2 << 20
# How much of our own time a small request takes, so that others can be made while it waits for its answer; and how many
# bytes of small requests may be on the link at once before its rate is known.
SMALL_S, SMALL_INFLIGHT_BYTES = 0.0004, 8 << 20
# A store that answers faster than this is near, and its small requests wait for a core rather than for the network.
FAR_S = 0.01
# If connections have less than this fraction of the rate they had before the last step, the link is nearly full.
STEADY = 0.9
# A process that keeps at least this many cores busy is limited by them, or by the GIL, rather than by the link.
BUSY_CORES = 0.7
# A step has paid in full if the rate grew by at least this fraction of what the number of connections grew by.
FULL = 0.6
# The gain that a step must bring to be kept in part; less is noise.
GAIN = 1.08
# More than this many times as many connections as most processes on the link have, or as many times fewer, is not fair.
FAIR = 1.25
# With at least the fraction SAME of the rate that an earlier process saw, a connection is on the same link; with more
# than WIDER times that rate, it is on a wider one.
SAME, WIDER = 0.7, 1.25
# How much longer than usual a request may take before its connection counts as slow.
SLOW_AFTER_S = 1.0
# If more than this fraction of all requests is slow, and more than these few, they are not slow by chance.
MOST_SLOW, FEW = 0.25, 3
# This many times the connections that the rate needs, so that the link stays full between the requests of each.
SLACK = 1.1
# How long to wait for the next step after one that did not pay, or after a SlowDown; it doubles each time in a row, up
# to the second value.
REST_S, LONGEST_REST_S = 2.0, 60.0


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The present limit, and what it was learned from. The limit is never below 1 or above `most`."""

    limit: int
    most: int
    # How long buffers beyond the link may fill, faster than the link itself is, before the first measurement.
    fills_s: float = 0.0
    # This many load all cores. Tried next if the first measurement shows that the cores are the limit.
    few: int = 0
    is_searching: bool = True  # the limit is being doubled
    settles_until_s: float = 0.0
    window: tuple[float, int] | None = None  # when the measurement began, and the bytes moved by then
    # Before the last step: the limit, the requests of all processes on the link, and the rate in bytes/s.
    before: tuple[int, int, float] | None = None
    connection_bytes_per_s: float = 0.0  # as last seen; 0: not known yet
    tries_at_s: float = 0.0
    rest_s: float = REST_S
    reduced_at_s: float = float("-inf")
    # How long answers take after the last byte, once requests were given up because of that; 0: that has not happened.
    answers_s: float = 0.0
    refused: tuple[int, float] | None = (
        None  # a limit that was too much, and until when it is not tried again
    )
    # What to check about the limit taken over from an earlier process: the limit to return to if the link has changed,
    # and the rate that a connection had then.
    unconfirmed: tuple[int, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the next checkpoint would begin with this limit.

        An occasional trial step does not count, nor does a limit of an earlier process that is not confirmed yet. A
        search that ran out of requests continues at its limit.
        """
        is_kept = self.is_searching or self.before is None
        return is_kept and self.unconfirmed is None and self.connection_bytes_per_s > 0


def remembered(state: Concurrency, limit: int, connection_bytes_per_s: float) -> Concurrency:
    """Return the state to begin with, given what an earlier process has found."""
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
    """Return the state after an observation: `moved_bytes` have moved by now over the whole link.

    `is_full`: as many requests are under way as allowed, and more are waiting; otherwise the limit is not what bounds
    the rate, and nothing is learned. `busy_cores`: how many cores this process has kept busy. `others`: the number of
    requests under way in each other process on the link.
    """
    settle_s = max(SETTLE_S, SETTLE_ROUND_TRIPS * round_trip_s, state.answers_s)
    if not is_full:
        return replace(state, window=None, settles_until_s=now_s + settle_s)
    if state.window is None:
        return state if now_s < state.settles_until_s else replace(state, window=(now_s, moved_bytes))
    began_s, moved_before = state.window
    was_more = state.before is not None and state.limit < state.before[0]
    is_first = (state.before is None or was_more) and (state.is_searching or state.unconfirmed is not None)
    if moved_bytes < moved_before or (is_first and moved_bytes == moved_before):
        # Either a store that shared the limit has closed, or no answer has come yet.
        return replace(state, window=(now_s, moved_bytes))
    if state.fills_s:
        pause_s = state.fills_s if state.unconfirmed is None else settle_s
        return replace(state, window=None, settles_until_s=now_s + pause_s, fills_s=0.0)
    window_s = FIRST_WINDOW_S if is_first and state.is_searching else WINDOW_S
    if now_s - began_s < max(window_s, WINDOW_ROUND_TRIPS * round_trip_s, state.answers_s):
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
    if others:  # with many processes, one of them changes the sum by less than its normal variation
        paid = max(paid, GAIN)
    # If other processes have given way in the meantime, nothing is learned, and the link may be full.
    if in_all > in_all_before and rate / rate_before >= paid:
        if state.refused is None or state.limit >= state.refused[0]:
            state = replace(state, rest_s=REST_S, refused=None)
        return _step_up(state, in_all, rate, now_s, settle_s)
    return _step_back(state, in_all, rate, now_s, settle_s)


def _step_back(state: Concurrency, in_all: int, rate: float, now_s: float, settle_s: float) -> Concurrency:
    """Return the state after a step that did not pay in full."""
    assert state.before is not None
    limit, in_all_before, rate_before = state.before
    gain = rate / rate_before
    # This process's share of the connections that the rate needs, if each has the speed that it had before.
    share = math.ceil(in_all_before * gain * SLACK * state.limit / in_all)
    needed = limit if gain < GAIN else min(state.limit, max(1, share))
    each = min(rate_before / in_all_before, rate / (in_all - state.limit + needed))
    state = replace(state, limit=needed, connection_bytes_per_s=each, window=None)
    return _resting(replace(state, settles_until_s=now_s + settle_s), now_s)


def _resting(state: Concurrency, now_s: float) -> Concurrency:
    """Return the state in which the number stays as it is for a while."""
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
    """Return the state after the first measurement has checked what an earlier process found.

    If a connection is slower now, the link, or its load by others, has changed, and the search begins anew.
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
    """A request that is under way."""

    size_bytes: int
    arrived_bytes: int
    took_s: float
    late_bytes_per_s: float  # over at least the later half: early bytes disappear into buffers on the way
    waited_s: float = 0.0  # for the answer, since all bytes have arrived


def usual_rate(
    requests: Sequence[Request], ended_bytes_per_s: Iterable[float], known_bytes_per_s: float = 0.0
) -> float:
    """Return the usual rate of a connection at present; 0 if unknown.

    That is the median of the requests that ended last and of those under way long enough. If they are too few, or
    faster, it is the rate found by the search, `known_bytes_per_s` (0: none). Since then, others may have come to the
    link.
    """
    late = [each.late_bytes_per_s for each in requests if each.took_s >= SLOW_AFTER_S / 2]
    rates = [*ended_bytes_per_s, *late]
    if len(rates) <= FEW:
        return known_bytes_per_s
    return min(statistics.median(rates), known_bytes_per_s or math.inf)


def stragglers(
    requests: Sequence[Request], connection_bytes_per_s: float, ended_bytes_per_s: Collection[float]
) -> list[int]:
    """Return the indices of requests that would end sooner if they began again on other connections.

    At their present rate they take far longer than usual, or all their bytes have arrived long ago, compared with the
    requests that ended last. If they are many, the cause is the link or the store, and the result is empty.
    """
    if not connection_bytes_per_s:
        return []
    answered_bytes_per_s = statistics.median(ended_bytes_per_s) if ended_bytes_per_s else 0.0
    found = [
        number
        for number, each in enumerate(requests)
        if _is_straggler(each, connection_bytes_per_s, answered_bytes_per_s)
    ]
    return found if len(found) <= max(FEW, len(requests) * MOST_SLOW) else []


def _is_straggler(request: Request, connection_bytes_per_s: float, answered_bytes_per_s: float) -> bool:
    left_bytes = request.size_bytes - request.arrived_bytes
    if left_bytes <= 0:  # how fast bytes arrive does not say when a store answers that has not read them yet
        connection_bytes_per_s = min(connection_bytes_per_s, answered_bytes_per_s)
    usual_s = request.size_bytes / connection_bytes_per_s if connection_bytes_per_s else math.inf
    too_long_s = SLOW_AFTER_S + 2 * usual_s
    if left_bytes <= 0:
        return request.waited_s >= too_long_s
    is_seen = request.took_s >= max(SLOW_AFTER_S, usual_s / 2)
    return is_seen and left_bytes / max(request.late_bytes_per_s, 1.0) > too_long_s


def _fair(limit: int, others: Sequence[int]) -> int:
    """Return a limit one step closer to what most processes have; 0 if it is close already.

    Not closer to the mean: one process that tries more would raise that, and then all others.
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
        more = max(1, state.limit // 4, in_all // 8)  # a step of one process must be visible in the sum
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
    """Return the state, given that a small request of `small_bytes` waits `small_s` for its answer.

    Small requests do not fill the link, so no search is needed: the limit becomes as many as can be made while one
    waits, unless other processes are on the link.
    """
    limit = min(state.most, math.ceil(small_s / SMALL_S), int(SMALL_INFLIGHT_BYTES / max(small_bytes, 1.0)))
    is_new = state.is_searching and state.before is None and state.unconfirmed is None
    if small_s < FAR_S or limit <= state.limit or not is_new or any(others):
        return state
    return replace(state, limit=limit, few=0, window=None)


def throttled(state: Concurrency, *, began_s: float, now_s: float, answers_s: float = 0.0) -> Concurrency:
    """Return the state after a request that began at `began_s` was told to slow down, or was late.

    `answers_s`: for how long it waited in vain for its answer after its last byte had arrived. Requests that were under
    way when the limit was last halved do not halve it again.
    """
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
        answers_s=max(answers_s, state.answers_s),
    )


def answered(state: Concurrency, waited_s: float) -> Concurrency:
    """Return the state after a request was answered `waited_s` after its last byte had arrived.

    The time by which steps are judged shrinks gradually: of two requests, the smaller is answered sooner.
    """
    if not (state.answers_s and waited_s):
        return state
    return replace(state, answers_s=max(waited_s, state.answers_s / 2))
