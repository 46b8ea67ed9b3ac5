"""Keys: each one parses back to what it was made from, and no foreign key is mistaken for one of ours."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.core import keys, naming
from ckpt_async.core.model import CheckpointId

generations = st.integers(1, keys.MAX_GENERATION)
steps = st.integers(0, keys.MAX_STEP)
ranks = st.integers(0, keys.MAX_RANK)
ids = st.builds(CheckpointId, generations, steps)
PARSERS: list[Callable[[str], Any]] = [
    keys.parse_checkpoint_tag,
    keys.parse_data_key,
    keys.parse_lease_key,
    keys.parse_beat_key,
    keys.parse_member_key,
    keys.parse_generation_key,
    keys.parse_receipt_key,
    keys.parse_decision_key,
]


@given(ids, ranks)
def test_keys_round_trip(id_: CheckpointId, rank: int) -> None:
    """An object whose key cannot be parsed back is never found and never deleted."""
    assert id_ == keys.parse_checkpoint_tag(keys.checkpoint_tag(id_))
    assert id_ == keys.parse_decision_key(keys.decision_key(id_))
    assert (id_, rank) == keys.parse_receipt_key(keys.receipt_key(id_, rank))
    assert id_ == keys.parse_lease_key(keys.lease_key(id_, "reader"))
    assert id_.generation == keys.parse_generation_key(keys.generation_key(id_.generation))
    assert (id_.generation, rank) == keys.parse_member_key(keys.member_key(id_.generation, rank))
    assert id_.generation == keys.parse_beat_key(keys.beat_key(id_.generation))


@given(ids, ids)
def test_decision_keys_sort_in_checkpoint_order(one: CheckpointId, two: CheckpointId) -> None:
    """Readers take the last decision in a listing as the newest (R3)."""
    assert (one < two) == (keys.decision_key(one) < keys.decision_key(two))
    assert (one == two) == (keys.receipts_prefix(one) == keys.receipts_prefix(two))


names = st.from_regex(r"[a-z0-9.=][a-z0-9.=-]{0,9}", fullmatch=True).filter(
    lambda name: name not in {".", ".."}
)


@pytest.mark.fault("F26")
@given(names, st.integers(0, 200), st.integers(1, 20), names, st.integers(0, 200), st.integers(1, 20))
def test_no_checkpoint_key_is_a_prefix_of_another(
    name: str, step: int, generation: int, other: str, other_step: int, other_generation: int
) -> None:
    """Fault F26: `step-1` is a prefix of `step-10`; deleting one must not delete both."""
    one = keys.data_prefix(naming.checkpoint_name(name, step), generation)
    two = keys.data_prefix(naming.checkpoint_name(other, other_step), other_generation)
    assert (one == two) == (one.startswith(two) or two.startswith(one))


@given(st.integers(1, 999), st.integers(0, 999), st.integers(1, 999), st.integers(0, 999))
def test_listing_one_checkpoints_receipts_excludes_all_others(
    g: int, s: int, other_g: int, other_s: int
) -> None:
    """A listing by prefix must never show another checkpoint's receipts (R5)."""
    one, two = CheckpointId(g, s), CheckpointId(other_g, other_s)
    assert (one == two) == keys.receipt_key(one, 0).startswith(keys.receipts_prefix(two))


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@pytest.mark.parametrize(
    "key",
    [
        "", "x", "/", "ckpt/", "ckpt/x", "ckpt/x.g1", "ckpt/step.g1/x", "ckpt/step-1.gx/x", "ckpt//x",
        ".ckpt-async/decisions/1-2.json", ".ckpt-async/decisions/000001-000000000002.json.bak",
        ".ckpt-async/decisions/000001-000000000002.json\n", "x/.ckpt-async/decisions/000001-000000000002.json",
        ".ckpt-async/decisions/\u0660\u0660\u0660\u0660\u0660\u0661-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0662.json",
        ".ckpt-async/generations/\u0660\u0660\u0660\u0660\u0660\u0661.json",
        ".ckpt-async/receipts/000001-000000000002/1.json", ".ckpt-async/receipts/000001-000000000002/00001.json/x",
        ".ckpt-async/leases/000001-000000000002/a/b.json", ".ckpt-async/members/000001/x.json",
        "rank-00001.lock.bak",
        "rank-1.lock",
        "rank-\u0660\u0660\u0660\u0660\u0661.lock",
        "000001-00000000000\u0662",
    ],
    ids=ascii,
)  # fmt: skip
def test_foreign_keys_are_not_parsed_as_ours(parse: Callable[[str], Any], key: str) -> None:
    """Only keys that we recognise may be deleted; everything else belongs to someone else."""
    assert parse(key) is None


@given(ids, ranks)
def test_spool_folders_of_checkpoints_do_not_nest(id_: CheckpointId, rank: int) -> None:
    """Links are removed a whole folder at a time, so a nested folder would go with its parent."""
    folder = keys.spool_checkpoint(id_, rank)
    assert keys.spool_manifest(id_, rank) == f"{folder}.json"
    assert folder.startswith(f"{keys.spool_rank(rank)}/")
