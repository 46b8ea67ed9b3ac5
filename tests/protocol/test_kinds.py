"""Finding the kinds of checkpoints below a run with few requests."""

import asyncio
from typing import Any

import pytest

from ckpt_async.core import keys
from ckpt_async.core.settings import Settings
from ckpt_async.errors import UnknownKindError
from ckpt_async.protocol.runs import check_known, kinds_below
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import PAGE_KEYS
from tests.stores.misbehaving import Meddled


def run(store: Meddled, work: Any) -> Any:
    async def main() -> Any:
        whole: Any = store
        await whole.open()
        return await work(PatientStore(whole, Settings()))

    return asyncio.run(main())


def holding(*names: str) -> Meddled:
    store = Meddled()

    async def put() -> None:
        for name in names:
            await store.put(name, BytesBody(b"x"), checksum_of(b"x", "crc64nvme"))

    asyncio.run(put())
    return store


def test_each_costs_one_list_however_many_objects_it_has() -> None:
    many = [f"ckpt/step-{number}.g1/a" for number in range(5 * PAGE_KEYS)]
    begun = keys.generation_key(1)
    # In key order '-' and '.' come before '/', and digits and letters after it.
    kinds = ("a", "a-b", "a0", "weights")
    store = holding(
        *(f"kinds/{kind}/{key}" for kind in kinds for key in (begun, *many)),
        *(f"kinds/Others/{key}" for key in many),
        *(f"kinds/theirs/{key}" for key in many),
        "kinds/a-file",
        *many,
    )
    assert run(store, kinds_below) == sorted(kinds)
    assert sum(count for (operation, _), count in store.asked.items() if operation == "list") <= 7


@pytest.mark.parametrize(
    ("there", "asked", "is_error"),
    [
        ((), "weights", False),
        ((), "", False),
        (("kinds/ema/GENERATION",), "weights", False),  # started, but nothing was decided
        (("kinds/ema/GENERATION", "kinds/ema/DECISION"), "weights", True),
        (("kinds/ema/GENERATION", "kinds/ema/DECISION"), "", True),
        (("kinds/ema/GENERATION", "kinds/ema/DECISION", "GENERATION"), "", False),
        (("GENERATION", "DECISION"), "weights", True),
        (("GENERATION", "DECISION", "kinds/weights/GENERATION"), "weights", False),
        (
            ("GENERATION", "DECISION", "kinds/Weights/GENERATION", "kinds/weights-2/GENERATION"),
            "weights",
            True,
        ),
    ],
)
def test_a_kind_that_nobody_began_is_unknown_once_others_are_decided(
    there: tuple[str, ...], asked: str, is_error: bool
) -> None:
    real = {"GENERATION": keys.generation_key(1), "DECISION": keys.decision_key(keys.CheckpointId(1, 1))}
    store = holding(
        *(each.replace(word, key) for each in there for word, key in real.items() if word in each)
    )

    async def work(patient: PatientStore) -> None:
        await check_known(patient, asked)

    if is_error:
        with pytest.raises(UnknownKindError, match=r"\(it has "):
            run(store, work)
    else:
        run(store, work)
