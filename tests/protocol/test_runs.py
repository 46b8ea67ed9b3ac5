"""Finding the runs below a prefix with few requests."""

import asyncio
from typing import Any

from ckpt_async.core import keys
from ckpt_async.core.settings import Settings
from ckpt_async.protocol.runs import run_of, runs_below
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import PAGE_KEYS
from tests.stores.misbehaving import Meddled


def test_a_run_is_known_by_its_records() -> None:
    assert run_of("a/b/.ckpt-async/generations/000001.json") == "a/b"
    assert run_of("a/kinds/w/.ckpt-async/members/000001/00000.json") == "a"
    assert run_of(".ckpt-async/decisions/000001-000000000001.json") == ""
    assert run_of("kinds/w/.ckpt-async/members/x") == ""
    for other in ("a/.ckpt-async/journal-00000.log", "a/ckpt/step-1.g1/x", "generations/1"):
        assert run_of(other) is None


def test_each_costs_one_list_however_many_objects_it_has() -> None:
    many = [f"ckpt/step-{number}.g1/a" for number in range(3 * PAGE_KEYS)]
    # In key order '-' and '.' come before '/', and digits and letters after it.
    runs = ("a", "a-b", "a0", "team/b")
    store = Meddled()

    async def look() -> list[str]:
        for name in [f"{run}/{key}" for run in runs for key in (keys.generation_key(1), *many)]:
            await store.put(name, BytesBody(b"x"), checksum_of(b"x", "crc64nvme"))
        for name in (f"a/kinds/ema/{keys.generation_key(1)}", f"c/kinds/ema/{keys.generation_key(1)}", "z"):
            await store.put(name, BytesBody(b"x"), checksum_of(b"x", "crc64nvme"))
        whole: Any = store
        await whole.open()
        return await runs_below(PatientStore(whole, Settings()))

    assert asyncio.run(look()) == sorted([*runs, "c"])
    assert sum(count for (operation, _), count in store.asked.items() if operation == "list") <= 6
