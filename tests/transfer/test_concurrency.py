"""How many requests go at once: down when the store asks, up while that makes it faster."""

from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.transfer.concurrency import REST_S, Concurrency, finished, throttled

MIB = 1 << 20


def play(state: Concurrency, link: float, per_request: float, duration_s: float, start_s: float = 0.0):
    """Run requests of 1 MiB, `state.limit` at once, over a link of so many bytes/s, each of them at most `per_request`
    bytes/s. Returns the state, and the limits it had.
    """
    now_s, limits = start_s, [state.limit]
    while now_s < start_s + duration_s:
        rate = min(per_request, link / state.limit)
        began_s, now_s = now_s, now_s + MIB / rate
        for _ in range(state.limit):
            state = finished(state, size_bytes=MIB, is_waited_for=True, began_s=began_s, now_s=now_s)
        limits.append(state.limit)
    return state, limits


def test_concurrency_converges_to_what_the_link_carries() -> None:
    state, limits = play(Concurrency(limit=4, most=64), link=20 * MIB, per_request=MIB, duration_s=300)
    assert 18 <= state.limit <= 26
    assert max(limits) <= 32


def test_concurrency_does_not_grow_without_a_gain() -> None:
    _, limits = play(Concurrency(limit=8, most=64), link=8 * MIB, per_request=8 * MIB, duration_s=20)
    assert max(limits) == 10  # one step, taken back
    assert limits[-1] == 8


def test_concurrency_does_not_grow_while_nothing_waits() -> None:
    state = Concurrency(limit=8, most=64)
    for tick in range(100):
        state = finished(state, size_bytes=MIB, is_waited_for=False, began_s=tick, now_s=tick + 1.0)
    assert state.limit == 8


def test_concurrency_never_exceeds_its_maximum() -> None:
    _, limits = play(Concurrency(limit=4, most=6), link=1e12, per_request=MIB, duration_s=100)
    assert max(limits) == 6


def test_slow_down_halves_once_for_all_requests_in_flight() -> None:
    state = Concurrency(limit=16, most=16)
    for _ in range(16):
        state = throttled(state, began_s=1.0, now_s=2.0)
    assert state.limit == 8
    assert throttled(state, began_s=2.5, now_s=3.0).limit == 4


def test_concurrency_recovers_after_a_slow_down() -> None:
    state = throttled(Concurrency(limit=16, most=32), began_s=0.0, now_s=1.0)
    state, _ = play(state, link=1e12, per_request=MIB, duration_s=4 * REST_S, start_s=1.0)
    assert state.limit == 32


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 100), st.integers(0, 1 << 40), st.booleans())),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_the_limit_stays_in_its_bounds(events, start: int, most: int) -> None:
    state, now_s = Concurrency(limit=start, most=max(start, most)), 0.0
    for is_throttled, took_s, size_bytes, is_waited_for in events:
        began_s, now_s = now_s, now_s + took_s
        if is_throttled:
            state = throttled(state, began_s=began_s, now_s=now_s)
        else:
            state = finished(
                state, size_bytes=size_bytes, is_waited_for=is_waited_for, began_s=began_s, now_s=now_s
            )
        assert 1 <= state.limit <= state.most
