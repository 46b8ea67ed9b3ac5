"""Several requests at once, of which one fails."""

import asyncio

import pytest

from ckpt_async.transfer.together import all_or_none
from tests.virtual_time import run


def test_a_failure_is_raised_once_the_others_have_ended() -> None:
    """Whoever hears of it closes what they use."""
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(1)
            ended.append("slow")

    async def fail() -> None:
        await asyncio.sleep(1)
        raise ZeroDivisionError

    async def main() -> float:
        with pytest.raises(ZeroDivisionError):
            await all_or_none([slow(), fail()])
        return asyncio.get_running_loop().time()

    assert run(main()) == 2
    assert ended == ["slow"]
