"""What a rank that has done its part knows of the others, and how often it looks for them and for the decision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ckpt_async.core.local_state import LocalCheckpoint

# How many ranks commit at once, those with the newest receipts first. If every rank that sees all receipts committed,
# N ranks would read N x N receipts.
NUM_COMMITTERS = 8
# With more ranks than this, half as many commit at once: eight would use most of the 5,500 reads that S3 answers per
# second.
MANY_RANKS = 2000
# How long each group of committers has, by the store's clock: a commit takes a round trip for every 16 ranks.
COMMIT_S, COMMIT_S_PER_RANK = 1.0, 0.01
# While checkpoints wait, all ranks of a launch together poll for decisions, and list receipts again, at most this often
# per second: S3 answers 5,500 reads a second. The first listing of each checkpoint's receipts is not counted.
POLLS_PER_S, LISTINGS_PER_S = 500, 50


@dataclass(frozen=True, slots=True)
class Receipts:
    """What a listing of a checkpoint's receipts showed."""

    ranks: tuple[int, ...] = ()  # oldest receipt first
    newest_age_s: float = 0.0
    is_whole: bool = True  # False: the listing stopped where a rank was missing


@dataclass(frozen=True, slots=True)
class Watch:
    """A checkpoint that waits for the other ranks, or for one of them to commit it."""

    receipts: Receipts = field(default_factory=Receipts)  # as last listed
    list_at: float = 0.0  # when they were listed or, if all were there, when it is this rank's turn to commit
    since: float = 0.0
    log_at: float = float("inf")  # when to log that the checkpoint has been waiting long


@dataclass(frozen=True, slots=True)
class Polls:
    """When this engine has looked, and may look again, for the decisions of all checkpoints that wait for one."""

    num: int = 0  # since something began to wait
    next_at: float = 0.0
    last_at: float = float("-inf")
    last_listing_at: float = float("-inf")  # of the receipts of any checkpoint, but the first one of each

    @property
    def has_polled(self) -> bool:
        return self.last_at > float("-inf")

    def began(self, now: float, *, first_s: float) -> Polls:
        """Return when to poll, now that another checkpoint has begun to wait: soon."""
        soon = now + first_s
        return replace(self, num=1, next_at=min(self.next_at, soon) if self.next_at > now else soon)

    def polled(self, now: float, *, first_s: float, longest_s: float) -> Polls:
        """Return when to poll again, after a poll."""
        next_at = next_poll(self.num, now, first_s=first_s, longest_s=longest_s)
        return replace(self, num=self.num + 1, last_at=now, next_at=next_at)


def is_complete(checkpoint: LocalCheckpoint, receipts: Receipts) -> bool:
    """Return whether there are receipts of all ranks of *this generation's* world size (R5)."""
    num_ranks = 0 if checkpoint.sealed is None else checkpoint.sealed.world_size
    return 0 < num_ranks <= len(receipts.ranks) and {*receipts.ranks} >= {*range(num_ranks)}


def lacks_own(receipts: Receipts, rank: int) -> bool:
    """Return whether a listing that goes as far lacks this rank's receipt."""
    return rank not in receipts.ranks and (receipts.is_whole or rank < max(receipts.ranks, default=-1))


def has_gap(ranks: Collection[int]) -> bool:
    """Return whether a rank below the highest of `ranks` is missing.

    If so, no further page need be listed to know that not all are there.
    """
    return len(ranks) <= max(ranks, default=-1)


def missing_ranks(receipts: Receipts, world_size: int) -> list[int]:
    """Return the ranks whose receipts were missing, as far as the listing went."""
    return missing_among(receipts.ranks, world_size, is_whole=receipts.is_whole)


def missing_among(ranks: Collection[int], world_size: int, *, is_whole: bool) -> list[int]:
    """Return the ranks that are missing among `ranks`, which a listing showed, as far as the listing went."""
    end = world_size if is_whole else max(ranks, default=0)
    return sorted({*range(end)} - {*ranks})


def turn_s(receipts: Receipts, rank: int) -> float:
    """Return the age of the newest receipt at which it is this rank's turn to commit, once all receipts are there.

    The ranks with the newest receipts commit at once. The same number before them follow when the first group has had
    its time, then twice as many, and so on.
    """
    place = next(
        (place for place, each in enumerate(reversed(receipts.ranks)) if each == rank), len(receipts.ranks)
    )
    num_ranks = len(receipts.ranks)
    num_committers = NUM_COMMITTERS if num_ranks <= MANY_RANKS else NUM_COMMITTERS // 2
    return (place // num_committers).bit_length() * (COMMIT_S + COMMIT_S_PER_RANK * num_ranks)


def listed_until(checkpoint: LocalCheckpoint, receipts: Receipts, rank: int, now: float) -> float:
    """Return until when a listing just made is good: if all receipts are there, until it is this rank's turn."""
    if not is_complete(checkpoint, receipts):
        return now
    return now + max(0.0, turn_s(receipts, rank) - receipts.newest_age_s)


def next_poll(num_polls: int, now: float, *, first_s: float, longest_s: float) -> float:
    """Return when to look again.

    The pause doubles each time, so that a rank that never comes costs only a few requests an hour.
    """
    return float(now + min(longest_s, first_s * 2.0 ** min(num_polls, 32)))
