"""The order of uploads where saves come faster than the link carries them, played with real ranks' decisions.

A save every second, and an upload that takes as long as seven of them. Each rank has a link of its own, up to 10 %
faster or slower than the others, and learns of a decision by polls whose pauses double.
"""

import random
from dataclasses import dataclass, field

import pytest

from ckpt_async.core import order
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.order import Turn

SAVES_PER_UPLOAD = 7
BEAT_S = 0.125
# Until then, the fastest rank has named a target while others still sent what they had begun alone.
START_S = 4 * SAVES_PER_UPLOAD


def id_of(step: int) -> CheckpointId:
    return CheckpointId(1, step)


@dataclass
class Rank:
    speed: float
    turn: Turn = field(default_factory=Turn)
    left: dict[CheckpointId, float] = field(default_factory=dict)  # seconds of upload that are left
    polls: dict[CheckpointId, tuple[float, float]] = field(default_factory=dict)  # when, and the last pause
    decided: set[CheckpointId] = field(default_factory=set)
    is_dead: bool = False

    def owed(self) -> list[CheckpointId]:
        return sorted(self.left)


@dataclass
class Launch:
    """All ranks of a launch, and what is in the store."""

    ranks: list[Rank]
    is_newest_first: bool = True  # False: oldest first, as without targets
    target: CheckpointId | None = None
    num_targets: int = 0
    sent: set[tuple[int, CheckpointId]] = field(default_factory=set)
    committed: dict[CheckpointId, float] = field(default_factory=dict)
    oldest_newest_s: float = 0.0  # the largest age of the newest commit

    now: float = 0.0
    num_saved: int = 0

    def run(self, num_saves: int) -> None:
        while self.now < num_saves:
            now = self.now
            if now >= self.num_saved:
                self.num_saved += 1
                for rank in self.ranks:
                    rank.left[id_of(self.num_saved)] = SAVES_PER_UPLOAD
            for number, rank in enumerate(self.ranks):
                if not rank.is_dead:
                    self._poll(rank, now)
                    self._turn(rank, now)
                    self._send(number, rank, now)
            if self.committed and now > START_S:
                newest = max(self.committed)
                self.oldest_newest_s = max(self.oldest_newest_s, now - (newest.step - 1))
            self.now += BEAT_S

    def _poll(self, rank: Rank, now: float) -> None:
        for id_, (at, pause_s) in list(rank.polls.items()):
            if now >= at and id_ in self.committed:
                rank.decided.add(id_)
                del rank.polls[id_]
            elif now >= at:
                rank.polls[id_] = now + 2 * pause_s, 2 * pause_s

    def _turn(self, rank: Rank, now: float) -> None:
        def turned() -> bool:
            is_open = rank.turn.target is not None and rank.turn.target not in rank.decided
            is_alone = len(self.ranks) == 1
            rank.turn = order.turned(rank.turn, rank.owed(), now, is_open=is_open, is_alone=is_alone)
            is_waiting.append(order.is_waiting(rank.turn, now, is_open=is_open))
            return not is_alone and order.is_asking_due(rank.turn, rank.owed(), now, is_open=is_open)

        is_waiting: list[bool] = []
        if turned():
            is_known = self.target is None or self.target == rank.turn.target
            if not is_waiting[-1] and is_known and (self.target is None or self.target < rank.owed()[-1]):
                self.target = rank.owed()[-1]
                self.num_targets += 1
            rank.turn = order.with_target(rank.turn, self.target, now)
            turned()

    def _send(self, number: int, rank: Rank, now: float) -> None:
        is_open = rank.turn.target is not None and rank.turn.target not in rank.decided
        is_resting = self.is_newest_first and order.is_resting(rank.turn, now, is_open=is_open)
        work_s = 0.0 if is_resting else BEAT_S * rank.speed
        while work_s > 0 and rank.left:
            ordered = order.in_order(rank.turn, rank.owed()) if self.is_newest_first else rank.owed()
            id_ = ordered[0]
            sent_s = min(work_s, rank.left[id_])
            work_s -= sent_s
            rank.left[id_] -= sent_s
            if rank.left[id_] > 1e-9:
                continue
            del rank.left[id_]
            assert (number, id_) not in self.sent, "a part is sent twice"
            self.sent.add((number, id_))
            rank.polls[id_] = now, BEAT_S
            if all((each, id_) in self.sent for each in range(len(self.ranks))):
                assert id_ not in self.committed
                self.committed[id_] = now
                rank.decided.add(id_)


def launch_of(num_ranks: int, seed: int, *, is_newest_first: bool = True) -> Launch:
    rng = random.Random(seed)
    return Launch([Rank(1 + rng.uniform(-0.1, 0.1)) for _ in range(num_ranks)], is_newest_first)


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_ranks_commit_as_often_but_newer_checkpoints(num_ranks: int) -> None:
    """The ranks of a launch that choose by themselves, newest first, commit one of 400."""
    num_saves = 400 if num_ranks < 64 else 200
    before = launch_of(num_ranks, 1, is_newest_first=False)
    before.run(num_saves)
    now = launch_of(num_ranks, 1)
    now.run(num_saves)
    assert len(now.committed) >= 0.9 * len(before.committed)
    slowest_s = SAVES_PER_UPLOAD / min(rank.speed for rank in now.ranks)
    assert now.oldest_newest_s <= 2 * slowest_s + 1 + 8 * BEAT_S
    assert before.oldest_newest_s > num_saves / 2
    assert now.num_targets <= len(now.committed) + 1


def test_a_rank_five_times_slower_is_waited_for() -> None:
    """It is never sent away from what it has begun, although each target is overdue for the others."""
    launch = launch_of(8, 2)
    launch.ranks[3].speed = 0.2
    launch.run(400)
    assert len(launch.committed) >= 400 / (5 * SAVES_PER_UPLOAD) - 3


def test_a_dead_rank_keeps_nobody_from_the_newest() -> None:
    """Nothing can be committed without it. But the others do not stay with the target that it has not delivered."""
    launch = launch_of(4, 3)
    launch.run(30)
    launch.ranks[0].is_dead = True
    num_before = launch.num_targets
    launch.run(150)
    assert launch.num_targets > num_before + 2


def test_one_checkpoint_at_a_time_asks_for_no_target() -> None:
    launch = launch_of(4, 4)
    for rank in launch.ranks:
        rank.speed *= 2 * SAVES_PER_UPLOAD
    launch.run(100)
    assert (launch.num_targets, len(launch.committed)) == (0, 100)


def test_a_rank_turns_to_the_target_when_it_has_sealed_it() -> None:
    turn = order.with_target(Turn(), id_of(9), 0.0)
    turn = order.turned(turn, [id_of(7), id_of(8)], 1.0, is_open=True, is_alone=False)
    assert order.in_order(turn, [id_of(7), id_of(8)]) == [id_of(8), id_of(7)]
    assert not order.is_asking_due(turn, [id_of(7), id_of(8)], 1.0, is_open=True)
    owed = [id_of(7), id_of(8), id_of(9), id_of(10)]
    turn = order.turned(turn, owed, 2.0, is_open=True, is_alone=False)
    assert order.in_order(turn, owed) == [id_of(9), id_of(8), id_of(7), id_of(10)]


def test_what_an_earlier_launch_left_comes_last() -> None:
    left, own = [CheckpointId(1, step) for step in (900, 901)], [CheckpointId(2, step) for step in (10, 20)]
    turn = order.turned(Turn(), [*left, *own], 0.0, is_open=False, is_alone=False)
    assert order.in_order(turn, [*left, *own]) == [own[1], own[0], left[1], left[0]]


def test_a_waiting_rank_finishes_what_it_has_begun() -> None:
    """It has sent its part of the target, and nothing older is left; meanwhile it saves more."""
    turn = Turn(target=id_of(2), upload_s=7.0, free_at=10.0)
    begun = order.in_order(turn, [id_of(3), id_of(4)])[0]
    assert order.in_order(turn, [id_of(step) for step in range(3, 9)])[0] == begun


def test_what_an_earlier_launch_left_comes_after_what_is_newer_than_the_target() -> None:
    left, own = (
        [CheckpointId(1, 900), CheckpointId(1, 901)],
        [CheckpointId(2, step) for step in (10, 20, 30, 40)],
    )
    turn = Turn(target=own[1])
    assert order.in_order(turn, [*left, own[0], *own[2:]]) == [own[0], own[2], own[3], left[1], left[0]]


def test_little_time_turns_a_rank_to_the_newest() -> None:
    owed = [id_of(1), id_of(2), id_of(3)]
    turn = order.turned(Turn(target=id_of(1)), owed, 0.0, is_open=True, is_alone=False)
    assert order.in_order(turn, owed)[0] == id_of(1)
    assert order.in_order(order.to_newest(turn, owed, 1.0), owed)[0] == id_of(3)


def test_upload_shares_the_link_only_with_less_urgent_ones() -> None:
    assert order.may_share(1, [1, 2])
    assert not order.may_share(1, [0, 2])


def test_resting_or_asking_rank_begins_no_upload() -> None:
    assert order.may_begin(0, [0], is_resting=False, asks_for_s=None)
    assert not order.may_begin(0, [], is_resting=True, asks_for_s=None)
    assert not order.may_begin(0, [], is_resting=False, asks_for_s=order.ASKING_S / 2)
    assert order.may_begin(0, [], is_resting=False, asks_for_s=order.ASKING_S)


def test_small_checkpoints_share_a_place_and_large_ones_do_not() -> None:
    ids = [CheckpointId(1, step) for step in range(4)]
    found = order.places(zip(ids, [3, 3, 9, 1], strict=True), shared_bytes=5)
    assert [found[each] for each in ids] == [0, 0, 1, 2]
