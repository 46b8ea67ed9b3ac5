"""What receipts must agree on (R5), and what finding that out costs."""

from dataclasses import replace

import pytest

from ckpt_async.core.agreement import obstacle
from ckpt_async.core.model import CheckpointId, Checksum, Receipt, StoredShard

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
