"""What Composer's pointer file names as its target, and which rank writes it."""

import pytest

from ckpt_async.core import pointers
from ckpt_async.core.model import FileIdentity, Shard


def shard(name: str, publish_as: str = "") -> Shard:
    return Shard(name, name, FileIdentity(1, 1, 1, 1), is_linked=True, publish_as=publish_as)


A, B = shard("a.pt"), shard("b.pt")
DATA = "ckpt/step-7.g2"


@pytest.mark.parametrize(
    ("rank", "shards", "num_shards", "has_own", "target"),
    [
        (0, [A], 1, True, f"{DATA}/a.pt"),
        (3, [A], 1, True, f"{DATA}/a.pt"),
        (0, [], 1, True, DATA),  # the one file is another rank's: rank 0 does not know which
        (0, [A, B], 2, True, DATA),
        (3, [A, B], 2, True, DATA),  # the other ranks have nothing
        (0, [A], 2, True, DATA),
        (1, [B], 2, True, None),
        (0, [shard("a.pt", "x/a")], 1, False, "x/a"),
        (0, [shard("a.pt", "x/a-rank0")], 2, True, "x/a-rank0"),
        (1, [shard("a.pt", "x/a-rank1")], 2, True, "x/a-rank1"),
        (1, [shard("a.pt", "x/a-rank1")], 2, False, None),
        (0, [shard("a.pt", "x/a-rank0")], 2, False, "x"),
        (0, [shard("a", "x/y/a"), shard("b", "x/z/b")], 3, True, "x"),
        (0, [shard("a", "a"), shard("b", "b")], 2, True, ""),
        (0, [shard("a", "x/a"), B], 2, True, DATA),  # only some of it is published
    ],
)
def test_target(rank: int, shards: list[Shard], num_shards: int, has_own: bool, target: str | None) -> None:
    found = pointers.target(rank, shards, name="step-7", generation=2, num_shards=num_shards, has_own=has_own)
    assert found == target
    assert target is None or pointers.may_write(rank, shards)
