"""How many requests run at once: enough to fill the link, found within seconds; fewer when the store asks for it."""

import random
import statistics
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.stores.interface import Capabilities
from ckpt_async.transfer.concurrency import (
    Concurrency,
    Request,
    answered,
    far_away,
    observed,
    remembered,
    stragglers,
    throttled,
    usual_rate,
)
from ckpt_async.transfer.upload import part_size

MIB = 1 << 20
TICK_S = 0.1


@dataclass
class Link:
    """A link that moves `each` bytes/s per connection, `together` at most; new connections need `ramp_s` for that."""

    each: float
    together: float = 1e15
    ramp_s: float = 0.05
    round_trip_s: float = 0.0
    now_s: float = 0.0
    moved: float = 0.0

    def play(
        self, state: Concurrency, duration_s: float, *, is_full: bool = True, busy_cores: float = 0.0
    ) -> tuple[Concurrency, list[int]]:
        """Return the final state and the limit at each tick."""
        limits, grown_at_s, slower = [], self.now_s, state.limit
        for _ in range(round(duration_s / TICK_S)):
            if limits and state.limit > limits[-1]:
                grown_at_s, slower = self.now_s, limits[-1]
            fast = state.limit if self.now_s - grown_at_s >= self.ramp_s else slower
            self.moved += TICK_S * min(self.together, self.each * fast)
            self.now_s += TICK_S
            state = observed(
                state,
                moved_bytes=round(self.moved),
                round_trip_s=self.round_trip_s,
                is_full=is_full,
                now_s=self.now_s,
                busy_cores=busy_cores,
            )
            limits.append(state.limit)
        return state, limits


@pytest.mark.parametrize(("each", "together"), [(5, 100), (20, 400), (60, 400), (5, 300), (90, 10_000)])
def test_a_link_is_full_from_the_third_second_on_and_not_by_too_many_connections(
    each: int, together: int
) -> None:
    needed = together / each
    _, limits = Link(each * MIB, together * MIB).play(Concurrency(limit=8, most=128), 60)
    assert min(limits[30:]) >= needed
    assert max(limits[30:]) <= max(8, 1.25 * 1.2 * needed)  # while it tries one step more
    assert sorted(limits[30:])[len(limits[30:]) // 2] <= max(8, 1.2 * needed)


def test_concurrency_does_not_grow_without_a_gain() -> None:
    """A busy core may be the bottleneck, for example with checksums or encryption."""
    _, limits = Link(1e9, 8 * MIB).play(Concurrency(limit=8, most=64), 300)
    assert limits[-1] == 8
    assert sum(limit > 8 for limit in limits) * TICK_S <= 10  # tries become rarer and rarer


def test_what_a_link_far_away_needs_is_found_though_its_connections_are_slow_to_start() -> None:
    link = Link(5 * MIB, 200 * MIB, ramp_s=0.8, round_trip_s=0.1)
    _, limits = link.play(Concurrency(limit=8, most=128), 30)
    assert 40 <= limits[-1] <= 48


def test_slow_connections_are_made_more_at_once() -> None:
    """The step is fourfold where connections are slow and eightfold where they mostly wait for answers. Where they are
    fast it is twofold, because such a link needs few.
    """
    _, waiting = Link(MIB).play(Concurrency(limit=8, most=128), 3)
    _, slow = Link(20 * MIB).play(Concurrency(limit=8, most=128), 3)
    _, fast = Link(60 * MIB).play(Concurrency(limit=8, most=128), 3)
    assert sorted(set(waiting)) == [8, 64, 128]
    assert sorted(set(slow)) == [8, 32, 128]
    assert sorted(set(fast)) == [8, 16, 32, 64, 128]


def test_a_link_that_begins_to_fill_is_not_tried_with_four_times_as_many() -> None:
    """Otherwise a step that has almost fully paid off would be followed by one that is far too large."""
    _, limits = Link(20 * MIB, 500 * MIB).play(Concurrency(limit=8, most=128), 4)
    assert max(limits) == 64
    assert limits[-1] == 32


def test_a_first_look_that_sees_the_cores_at_their_limit_goes_back_to_as_few_as_load_them() -> None:
    """It stays there if that moves as much, and searches otherwise, because the link may simply have been fast."""
    _, loopback = Link(400 * MIB, 1200 * MIB).play(Concurrency(limit=8, most=64, few=3), 3, busy_cores=1.1)
    assert loopback[3] == 3
    assert max(loopback[3:]) <= 4  # one more is tried now and then
    _, beside_training = Link(100 * MIB).play(Concurrency(limit=8, most=64, few=3), 6, busy_cores=1.1)
    assert 3 in beside_training
    assert beside_training[-1] == 64
    _, idle = Link(100 * MIB).play(Concurrency(limit=8, most=64, few=3), 6, busy_cores=0.5)
    assert min(idle) == 8
    _, many_cores = Link(400 * MIB, 1200 * MIB).play(Concurrency(limit=8, most=64, few=17), 3, busy_cores=1.1)
    assert min(many_cores) == 8


def test_many_that_wait_for_answers_far_away_are_not_too_many_for_the_cores() -> None:
    state = far_away(Concurrency(limit=8, most=128, few=3), small_s=0.05, small_bytes=4096)
    _, limits = Link(MIB).play(state, 3, busy_cores=1.1)
    assert min(limits) == state.limit == 125


def test_what_fills_buffers_at_first_does_not_pass_for_the_rate_of_the_link() -> None:
    link = Link(5 * MIB)
    state = Concurrency(limit=8, most=128, fills_s=0.15)
    link.moved = 8 * MIB
    state, limits = link.play(state, 0.2)
    assert set(limits) == {8}
    _, limits = link.play(state, 2)
    assert sorted(set(limits)) == [8, 32, 128]


def test_nothing_is_learnt_before_the_first_answer() -> None:
    state, limits = Link(0.0).play(Concurrency(limit=8, most=64), 3)
    assert set(limits) == {8}
    assert state.before is None


@pytest.mark.parametrize("began_within_s", [0.0, 2.0, 20.0])
@pytest.mark.parametrize(("each", "together"), [(20, 400), (5, 400), (60, 100), (5, 2000)])
def test_eight_engines_on_a_link_share_it_and_none_grows_at_the_others_expense(
    each: int, together: int, began_within_s: float
) -> None:
    """Judging only by their own rates, each would grow to 128: on a full link, more connections take a larger share."""
    chance = random.Random(1)
    states = [Concurrency(limit=8, most=128) for _ in range(8)]
    begin_s = [chance.random() * began_within_s for _ in states]
    now_s = moved = 0.0
    sums: list[int] = []
    while now_s < 60:
        now_s += TICK_S
        there = [number for number in range(8) if begin_s[number] <= now_s]
        limits = {number: states[number].limit for number in there}
        moved += TICK_S * MIB * min(together, each * sum(limits.values())) * chance.gauss(1, 0.03)
        for number in there:
            states[number] = observed(
                states[number],
                moved_bytes=round(moved),
                round_trip_s=0.01,
                is_full=True,
                now_s=now_s,
                others=[limit for other, limit in limits.items() if other != number],
            )
        sums.append(sum(state.limit for state in states))
    settled = sums[len(sums) // 2 :]
    assert min(settled) * each >= min(0.9 * together, 8 * each * 8)
    needed = max(64, together / each)
    assert statistics.median(settled) <= 1.5 * needed
    assert max(settled) <= 2.5 * needed, "where all try more at the same moment"
    limits = sorted(state.limit for state in states)
    assert limits[-1] <= 2.5 * limits[0]


def test_a_link_that_changes_is_found_again() -> None:
    link = Link(10 * MIB, 100 * MIB)
    state, _ = link.play(Concurrency(limit=8, most=128), 60)
    link.together = 400 * MIB
    _, limits = link.play(state, 90)
    assert limits[-1] >= 40


def _found(link: Link) -> Concurrency:
    """Return the state with which the next process starts, given what this one has learned about the link."""
    before, _ = link.play(Concurrency(limit=8, most=128), 20)
    assert before.is_known
    return remembered(Concurrency(limit=8, most=128), before.limit, before.connection_bytes_per_s)


@pytest.mark.parametrize(("each", "together"), [(5, 100), (5, 400), (60, 400), (20, 10_000)])
def test_the_next_process_fills_the_link_from_the_beginning(each: int, together: int) -> None:
    link = Link(each * MIB, together * MIB)
    begun, needed = _found(link), min(together / each, 128)
    state, limits = link.play(begun, 2)  # after this it tries one step more, as always
    assert [min(limits), max(limits)] == [begun.limit] * 2
    assert needed <= begun.limit <= max(8, 1.2 * needed)
    assert state.is_known


def test_the_next_process_goes_on_where_the_requests_of_a_search_ran_out() -> None:
    """A single shard with few parts does not fill the concurrency being tried."""
    link = Link(5 * MIB)
    state, _ = link.play(Concurrency(limit=8, most=128), 0.5)
    state, _ = link.play(state, 1, is_full=False)
    assert (state.limit, state.is_known) == (32, True)
    begun = remembered(Concurrency(limit=8, most=128), state.limit, state.connection_bytes_per_s)
    assert not begun.is_known  # otherwise an old file would be renewed forever
    assert min(link.play(begun, 2)[1]) == 32


def test_a_link_that_has_become_narrower_between_two_processes_is_found_from_the_beginning() -> None:
    link = Link(5 * MIB, 400 * MIB)
    begun = _found(link)
    link.together = 50 * MIB
    _, limits = link.play(begun, 20)
    assert limits[10] <= 32
    assert limits[-1] <= 12


def test_a_link_that_has_become_wider_between_two_processes_is_found_at_once() -> None:
    """The same happens when fewer processes share the link."""
    begun = _found(Link(5 * MIB, 20 * MIB))
    _, limits = Link(5 * MIB, 400 * MIB).play(begun, 4)
    assert begun.limit == 8
    assert limits[-1] >= 80


def test_what_is_remembered_is_within_the_limits_of_this_process_and_gives_way_to_slow_down() -> None:
    begun = remembered(Concurrency(limit=8, most=16), 100, 5e6)
    assert begun.limit == 16
    halved = throttled(begun, began_s=1.0, now_s=1.0)
    assert Link(MIB).play(halved, 0.5)[0].limit == 8
    halved = throttled(remembered(Concurrency(limit=8, most=128), 64, 5e6), began_s=0.0, now_s=0.0)
    assert set(Link(MIB).play(halved, 1.5)[1]) == {32}, "no search begins while the store asks for less"


def test_concurrency_does_not_grow_while_nothing_waits() -> None:
    _, limits = Link(MIB).play(Concurrency(limit=8, most=64), 60, is_full=False)
    assert set(limits) == {8}


def test_a_pause_between_checkpoints_says_nothing_of_the_link() -> None:
    link = Link(MIB, 32 * MIB)
    state, _ = link.play(Concurrency(limit=8, most=64), 30)
    paused, limits = link.play(state, 60, is_full=False)
    assert set(limits) == {state.limit}
    link.moved, link.now_s = link.moved + 1, link.now_s + 600
    _, limits = link.play(paused, 5)
    assert min(limits) >= 32


def test_a_store_that_closes_does_not_pass_for_a_slower_link() -> None:
    """Ranks share a limit; when one of them ends, the bytes it moved are no longer counted."""
    link = Link(5 * MIB, 300 * MIB)
    state, _ = link.play(Concurrency(limit=8, most=128), 3)
    link.moved = 0.0
    _, limits = link.play(state, 3)
    assert min(limits) >= state.limit
    assert limits[-1] >= 60


def test_concurrency_never_exceeds_its_maximum() -> None:
    _, limits = Link(MIB).play(Concurrency(limit=4, most=6), 30)
    assert max(limits) == 6


def test_slow_down_halves_once_for_all_requests_in_flight() -> None:
    state = Concurrency(limit=16, most=16)
    for _ in range(16):
        state = throttled(state, began_s=1.0, now_s=2.0)
    assert state.limit == 8
    assert throttled(state, began_s=2.5, now_s=3.0).limit == 4


def test_concurrency_recovers_after_a_slow_down() -> None:
    link = Link(MIB)
    state, _ = link.play(Concurrency(limit=16, most=32), 10)
    state = throttled(state, began_s=link.now_s, now_s=link.now_s)
    assert state.limit == 16
    state, _ = link.play(state, 30)
    assert state.limit == 32


@pytest.mark.fault("F86a")
def test_after_late_answers_a_step_is_judged_only_once_its_requests_can_have_been_answered() -> None:
    """Within half a second, bytes that a proxy had accepted passed for a faster link, and the limit was soon as high as
    before.
    """
    link = Link(MIB)
    state = throttled(Concurrency(limit=16, most=32), began_s=0.0, now_s=40.0, answers_s=38.0)
    link.now_s = 40.0
    state, limits = link.play(state, 37)
    assert set(limits) == {8}
    state, limits = link.play(state, 80)
    assert 8 < max(limits) <= 12


def test_once_answers_are_quick_again_so_are_the_steps() -> None:
    link = Link(MIB)
    state = throttled(Concurrency(limit=16, most=32), began_s=0.0, now_s=0.0, answers_s=38.0)
    state = answered(state, 30.0)
    assert state.answers_s == 30.0
    state = answered(state, 0.1)
    assert state.answers_s == 15.0, "the request may have been a small one"
    for _ in range(10):
        state = answered(state, 0.1)
    assert link.play(state, 30)[0].limit == 32
    untold = Concurrency(limit=16, most=32)
    assert answered(untold, 5.0) == untold


def test_a_store_that_goes_on_refusing_is_tried_ever_more_seldom() -> None:
    """Otherwise a tenth of all requests would be throttled again and again."""
    link, refused_at, state = Link(MIB), [], Concurrency(limit=8, most=128)
    for _ in range(3000):
        state, _ = link.play(state, TICK_S)
        if state.limit > 8:
            state = throttled(state, began_s=link.now_s, now_s=link.now_s)
            refused_at.append(link.now_s)
    assert len(refused_at) < 20
    assert sum(at > 150 for at in refused_at) < 8


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 100), st.integers(0, 1 << 40), st.booleans())),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_the_limit_stays_in_its_bounds(events, start: int, most: int) -> None:
    state, now_s, moved = Concurrency(limit=start, most=max(start, most)), 0.0, 0
    for is_throttled, took_s, size_bytes, is_full in events:
        began_s, now_s, moved = now_s, now_s + took_s, moved + size_bytes
        if is_throttled:
            state = throttled(state, began_s=began_s, now_s=now_s)
        else:
            state = observed(state, moved_bytes=moved, round_trip_s=0.01, is_full=is_full, now_s=now_s)
        assert 1 <= state.limit <= state.most


def _request(rate_mib_s: float, took_s: float, size_mib: int = 32) -> Request:
    return Request(size_mib * MIB, int(rate_mib_s * took_s * MIB), took_s, rate_mib_s * MIB)


def test_a_connection_far_slower_than_usual_is_told_from_the_others() -> None:
    others = [_request(10, 2) for _ in range(8)]
    assert stragglers([*others, _request(1, 2)], 10 * MIB, []) == [8]
    assert stragglers([_request(1, 2)] * 3, 10 * MIB, []) == [0, 1, 2]  # the last requests of a shard
    assert stragglers([*others, _request(6, 2)], 10 * MIB, []) == []
    assert stragglers([*others, _request(1, 1.5)], 10 * MIB, []) == []  # it has only just started
    assert stragglers([*others, _request(0.0, 30)], 10 * MIB, []) == [8]
    assert stragglers([_request(1, 2)], 0.0, []) == []  # the usual rate is unknown


def test_a_slow_connection_is_seen_though_buffers_have_swallowed_much_at_once() -> None:
    others = [_request(20, 0.7, 16) for _ in range(8)]
    swallowed = Request(16 * MIB, 7 * MIB, 1.0, 2 * MIB)
    assert stragglers([*others, swallowed], 20 * MIB, []) == [8]


def test_a_request_that_buffers_have_swallowed_is_slow_if_its_answer_does_not_come() -> None:
    others = [_request(20, 0.5) for _ in range(8)]
    swallowed = [Request(16 * MIB, 16 * MIB, 4.0, 0.0, waited_s) for waited_s in (2.0, 3.0)]
    assert [stragglers([*others, each], 20 * MIB, [20 * MIB]) for each in swallowed] == [[], [8]]


@pytest.mark.fault("F86a")
@pytest.mark.parametrize("ended", [[], [MIB // 4] * 3])
def test_a_request_waits_for_its_answer_as_long_as_others_did(ended: list[float]) -> None:
    """A proxy had accepted all bytes at once. By the rate of that, each of the last three requests was slow after a
    second, and was sent twice more.
    """
    assert stragglers([Request(8 * MIB, 8 * MIB, 9.0, 0.0, 9.0)] * 3, 500 * MIB, ended) == []


def test_a_request_that_would_not_end_sooner_goes_on() -> None:
    nearly_there = [Request(4 * MIB, 3 * MIB, 2.0, MIB), Request(8 * MIB, 7 * MIB, 9.0, MIB)]
    assert stragglers(nearly_there, 5 * MIB, []) == []


def test_a_link_or_a_store_that_has_become_slow_makes_no_stragglers() -> None:
    assert stragglers([_request(0.5, 30) for _ in range(8)], 5 * MIB, []) == []
    assert stragglers([Request(16 * MIB, 16 * MIB, 9.0, 0.0, 9.0)] * 8, 20 * MIB, [20 * MIB]) == []


def test_where_nobody_has_seen_the_link_most_requests_say_what_is_usual() -> None:
    """The usual rate comes from finished requests and those running long enough: filling buffers says nothing about the
    rate.
    """
    swallowed = Request(16 * MIB, 4 * MIB, 0.1, 40 * MIB)
    assert usual_rate([*[_request(6, 1)] * 7, _request(2, 1), *[swallowed] * 20], []) == 6 * MIB
    assert usual_rate([_request(2, 3)], [6 * MIB] * 7) == 6 * MIB  # the last request
    assert usual_rate([_request(2, 3)], [6 * MIB] * 2) == 0.0  # too few to judge
    assert usual_rate([_request(2, 3)], [6 * MIB] * 2, 5 * MIB) == 5 * MIB


def test_what_is_usual_is_less_once_others_use_the_link_too() -> None:
    """When all parts are under way, the search sees nothing any more; it may have seen the link when it was empty."""
    assert usual_rate([_request(1, 3)] * 16, [], 5 * MIB) == 1 * MIB
    assert usual_rate([_request(9, 3)] * 16, [], 5 * MIB) == 5 * MIB
    assert usual_rate([_request(1, 3)] * 3, [5 * MIB] * 16, 5 * MIB) == 5 * MIB  # only the slow ones are left


def _part_mib(size_mib: int, link: Concurrency | None) -> int:
    capabilities = Capabilities(conditional_put=True, multipart=True, checksum_algorithm="crc64nvme")
    size_bytes = part_size(size_mib * MIB, 16 * MIB, capabilities, link)
    assert size_bytes % MIB == 0
    return size_bytes // MIB


@pytest.mark.parametrize(
    ("size_mib", "concurrency", "part_mib"),
    [(1024, 8, 32), (1024, 64, 16), (8192, 8, 64), (8192, 128, 32), (100, 128, 16), (1 << 20, 128, 117)],
)
def test_a_shard_is_cut_so_that_all_connections_can_share_it(
    size_mib: int, concurrency: int, part_mib: int
) -> None:
    link = Concurrency(limit=concurrency, most=128, is_searching=False)
    assert _part_mib(size_mib, link) == part_mib


def test_a_shard_can_fill_64_connections_before_anybody_has_seen_the_link() -> None:
    assert [_part_mib(1024, link) for link in (Concurrency(limit=8, most=128), None)] == [16, 32]


def test_a_part_takes_no_longer_than_a_few_seconds() -> None:
    """A part is sized by what a connection was seen to move, but the setting and the store's limits take precedence."""
    slow, fast = Link(5 * MIB, 50 * MIB), Link(60 * MIB, 300 * MIB)
    found = [link.play(Concurrency(limit=8, most=128), 20)[0] for link in (slow, fast)]
    assert 20 <= _part_mib(8192, found[0]) <= 25
    assert _part_mib(8192, found[1]) == 64
    assert _part_mib(1 << 20, found[0]) == 117
