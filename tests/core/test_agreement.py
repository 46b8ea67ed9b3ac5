"""What receipts must agree on (R5), and what finding that out costs."""

from dataclasses import replace

import pytest

from ckpt_async.core.agreement import obstacle, verdict
from ckpt_async.core.model import CheckpointId, Checksum, Decision, Outcome, Receipt, StoredShard

ID = CheckpointId(1, 100)


class Counted(int):
    """A rank that counts how often ranks are compared."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) < int(other)


def receipt(rank: int, world_size: int, name: str = "step-100") -> Receipt:
    key = f"ckpt/{name}.g1/{rank}.pt"
    return Receipt(
        ID, name, rank, world_size, (StoredShard(f"{rank}.pt", key, 1, Checksum("crc32c", "AAAAAA==")),)
    )


def test_ranks_that_call_the_checkpoint_differently_are_named() -> None:
    receipts = [receipt(0, 3), receipt(2, 3, "best-100"), receipt(1, 3)]
    assert obstacle(ID, receipts) == "rank 2 calls it 'best-100', other ranks 'step-100'"


@pytest.mark.fault("F108")
def test_receipts_of_different_launches_are_not_committed_together() -> None:
    """Two launches that have opened the same generation of a remote that was wiped write under the same keys."""
    receipts = [replace(receipt(rank, 3), nonce=nonce) for rank, nonce in enumerate("aab")]
    assert obstacle(ID, receipts) == "the receipts of ranks 1, 2 are of different launches"
    assert obstacle(ID, [*receipts[:2], replace(receipts[2], nonce="a")]) is None


def test_the_cost_per_rank_does_not_grow_with_the_number_of_ranks() -> None:
    """The event loop waits for it: with 4,000 ranks, the name was looked for 4,000 times, for eight seconds."""
    world_size = 500
    receipts = [receipt(Counted(rank), world_size) for rank in range(world_size)]
    Counted.num_compared = 0
    assert obstacle(ID, receipts) is None
    assert 0 < Counted.num_compared < 10 * world_size


DRAFT = Decision(ID, Outcome.ABORT, "step-100", 2, "nonce", 0.0, "rank 0 on host")
CHECKSUMS = {rank: Checksum("crc32c", f"{rank}AAAAA==") for rank in range(2)}
BOTH = {rank: receipt(rank, 2) for rank in range(2)}


def test_all_receipts_decide_a_commit_bound_to_them() -> None:
    decision = verdict(DRAFT, BOTH, [], CHECKSUMS)
    assert decision is not None
    assert decision.outcome is Outcome.COMMIT
    assert (decision.receipts, decision.num_shards) == ((CHECKSUMS[0], CHECKSUMS[1]), 2)


def test_missing_receipt_decides_nothing() -> None:
    assert verdict(DRAFT, {1: BOTH[1]}, [], CHECKSUMS) is None


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_lost_object_decides_an_abort_by_store(ranks: tuple[int, ...]) -> None:
    """Also if a receipt is what was lost."""
    decision = verdict(DRAFT, {rank: BOTH[rank] for rank in ranks}, ["ckpt/step-100.g1/0.pt"], CHECKSUMS)
    assert decision is not None
    assert (decision.outcome, decision.is_lost_by_store) == (Outcome.ABORT, True)
    assert "ckpt/step-100.g1/0.pt" in decision.reason


def test_contradiction_is_not_blamed_on_the_store() -> None:
    """Its files need not be kept as what the store has lost."""
    other = BOTH | {1: replace(BOTH[1], name="best-100")}
    decision = verdict(DRAFT, other, ["ckpt/step-100.g1/0.pt"], CHECKSUMS)
    assert decision is not None
    assert (decision.outcome, decision.is_lost_by_store) == (Outcome.ABORT, False)
