"""Parts that are sent while a shard is still being written."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.settings import Settings
from ckpt_async.core.units import MIB
from ckpt_async.errors import FailureReason
from ckpt_async.stores.interface import Capabilities
from ckpt_async.transfer import ahead
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.upload import Resume
from tests.stores.misbehaving import Meddled, trouble


class Store(Meddled):
    """A store that counts the parts of which it was asked to store any, and those it has stored."""

    num_asked = num_stored = 0

    async def before(self, operation: str, key: str) -> None:
        self.num_asked += operation == "put_part"

    async def after(self, operation: str, key: str) -> None:
        self.num_stored += operation == "put_part"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty shard."""
    monkeypatch.setattr(ahead, "PART_BYTES", MIB)
    monkeypatch.setattr(ahead, "POLL_S", 0.001)
    path = tmp_path / "shard"
    path.touch()
    return path


def send(
    raw: Store, path: Path, *steps: Callable[[], bool], smallest: int = MIB
) -> Coroutine[Any, Any, Resume | None]:
    """Send the shard, and meanwhile go through these steps, each of which returns whether it is over."""
    left = list(steps)

    def is_growing() -> bool:
        if left and left[0]():
            left.pop(0)
        return bool(left)

    store = PatientStore(raw, Settings(num_concurrent_uploads=4))
    return ahead.send_ahead(store, path, "ckpt/shard", smallest_part_bytes=smallest, is_growing=is_growing)


def grow(path: Path, num_parts: int) -> Callable[[], bool]:
    return lambda: os.truncate(path, num_parts * MIB) is None


def polls(num: int = 20) -> Callable[[], bool]:
    left = iter(range(num))
    return lambda: next(left, None) is None


def test_all_parts_but_the_last_are_sent_and_the_file_is_closed(path: Path) -> None:
    raw, before = Store(), os.listdir("/proc/self/fd")
    resume = asyncio.run(
        send(
            raw, path, grow(path, 3), lambda: raw.num_stored == 2, grow(path, 8), lambda: raw.num_stored == 7
        )
    )
    assert resume is not None
    assert [(each.number, each.size_bytes) for each in resume.parts] == [(n, MIB) for n in range(1, 8)]
    assert os.listdir("/proc/self/fd") == before


def test_a_part_is_not_smaller_than_the_ordinary_upload_makes_them(path: Path) -> None:
    raw = Store()
    resume = asyncio.run(send(raw, path, grow(path, 8), lambda: raw.num_stored == 1, smallest=3 * MIB))
    assert resume is not None
    assert (resume.part_size_bytes, [each.size_bytes for each in resume.parts]) == (3 * MIB, [3 * MIB])


def test_after_a_failure_nothing_more_is_sent(path: Path) -> None:
    class Refusing(Store):
        async def before(self, operation: str, key: str) -> None:
            await super().before(operation, key)
            if operation == "put_part":
                raise trouble(FailureReason.OTHER)

    raw = Refusing()
    steps = grow(path, 2), lambda: raw.num_asked > 0, polls(), grow(path, 8), polls()
    resume = asyncio.run(send(raw, path, *steps))
    assert resume is not None
    assert (resume.parts, raw.asked["put_part", "ckpt/shard"]) == ((), 1)


@pytest.mark.parametrize("operation", ["create_multipart", "put_part", "open"])
def test_after_a_failure_the_end_of_the_file_is_awaited(path: Path, operation: str) -> None:
    """The engine began again at once, for as long as the file was written."""

    class Refusing(Store):
        async def before(self, asked: str, key: str) -> None:
            if asked == operation:
                raise trouble(FailureReason.OTHER)

    if operation == "open":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    raw, is_over = Refusing(), polls(200)
    asyncio.run(send(raw, path, grow(path, 8), is_over))
    assert is_over()
    assert raw.asked["create_multipart", "ckpt/shard"] == (operation != "open")


def test_room_is_left_for_the_parts_of_the_rest(path: Path) -> None:
    raw = Store(capabilities=Capabilities(True, True, "crc64nvme", max_parts=10))
    resume = asyncio.run(send(raw, path, grow(path, 30), lambda: raw.num_stored >= 9, polls()))
    assert resume is not None
    assert len(resume.parts) == 9


def test_whoever_cancels_it_does_not_wait_for_its_parts(path: Path) -> None:
    class Silent(Store):
        async def before(self, operation: str, key: str) -> None:
            await super().before(operation, key)
            if operation == "put_part":
                asked.set()
                await asyncio.Event().wait()

    asked = asyncio.Event()

    async def main() -> None:
        task = asyncio.ensure_future(send(Silent(), path, grow(path, 2), lambda: False))
        await asked.wait()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done

    asyncio.run(main())
