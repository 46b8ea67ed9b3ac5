"""Copies within the store, and what a failed one leaves there."""

from dataclasses import replace

import pytest

from ckpt_async.core.model import Checksum
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, IntegrityError, StoreError
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import Capabilities, ObjectInfo
from ckpt_async.transfer import copying
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import MemoryBucket, MemoryStore
from tests.stores.misbehaving import Meddled, trouble
from tests.virtual_time import run

DATA = b"0123456789"


class CopiesNoParts(Meddled):
    async def before(self, operation: str, key: str) -> None:
        if operation == "copy_part":
            raise trouble(FailureReason.OTHER)


def capabilities(max_copy_bytes: int) -> Capabilities:
    return Capabilities(True, True, "crc64nvme", max_copy_bytes=max_copy_bytes)


async def copied(raw: Meddled, checksum: Checksum | None = None) -> None:
    store = PatientStore(raw, Settings(upload_timeout_s=1.0), is_patient=False)
    await store.put("source", DATA)
    await copying.copy(store, "source", "exact/a", len(DATA), checksum or checksum_of(DATA, "crc64nvme"))


def test_a_source_with_other_content_replaces_nothing() -> None:
    raw = Meddled()
    with pytest.raises(IntegrityError, match="expected 10 with"):
        run(copied(raw, checksum_of(b"something else", "crc64nvme")))
    assert raw.keys() == ["source"]


def test_what_a_store_does_not_copy_at_once_is_copied_in_parts() -> None:
    raw = Meddled(capabilities=capabilities(max_copy_bytes=4))
    run(copied(raw))
    assert raw.bucket.objects["exact/a"].data == DATA
    assert ("copy", "source") not in raw.asked


def test_a_copy_in_parts_that_fails_leaves_none_of_them() -> None:
    raw = CopiesNoParts(capabilities=capabilities(max_copy_bytes=4))
    with pytest.raises(StoreError):
        run(copied(raw))
    assert (raw.keys(), raw.bucket.uploads) == (["source"], {})


@pytest.mark.fault("F151")
def test_a_copy_is_found_where_no_checksum_is_reported() -> None:
    """Otherwise it would be taken for somebody else's when its checkpoint is pruned, and stay."""

    class KeepsNoChecksum(MemoryStore):
        async def head(self, key: str) -> ObjectInfo:
            return replace(await super().head(key), checksum=None)

    async def main() -> list[bool]:
        store = PatientStore(KeepsNoChecksum(MemoryBucket()), Settings())
        await store.open()
        await store.put("exact/a", DATA)
        others = DATA, DATA[::-1], DATA[1:]
        found = [
            await copying.find(store, "exact/a", len(other), checksum_of(other, "crc64nvme"))
            for other in others
        ]
        return [each is not None for each in found]

    assert run(main()) == [True, False, False]


def test_only_the_parts_of_exactly_this_key_are_dropped() -> None:
    """A file whose name begins alike may be under way."""

    async def main() -> list[str]:
        store = PatientStore(Meddled(), Settings())
        for key in ("exact/a", "exact/a.pt"):
            await store.create_multipart(key)
        await copying.drop_parts(store, "exact/a")
        return [each.key for each in await store.list_multiparts("")]

    assert run(main()) == ["exact/a.pt"]
