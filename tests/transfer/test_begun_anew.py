"""A multipart upload that cannot be finished is dropped, and the shard is sent again."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, IntegrityError, StoreError
from ckpt_async.local.folder import Folder
from ckpt_async.stores.interface import BytesBody, ObjectInfo, StoredPart
from ckpt_async.transfer import upload
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.source import Source
from tests.stores.bodies import crc
from tests.stores.memory import MemoryBucket, MemoryStore

PART_BYTES = 5 << 20
DATA = random.Random(14).randbytes(2 * PART_BYTES)


class LikeCeph(MemoryStore):
    """A store that completes an upload only with all parts that it has."""

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], *rest: Any
    ) -> ObjectInfo:
        if len(parts) < len(await self.list_parts(key, upload_id)):
            raise IntegrityError("400 InvalidPart", operation="complete_multipart", key=key)
        return await super().complete_multipart(key, upload_id, parts, *rest)


class ListsNoParts(MemoryStore):
    """A store that does not list parts, or not for these credentials."""

    reason = FailureReason.OTHER

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        raise StoreError("refused", reason=self.reason, operation="list_parts", key=key)


def resumed(folder: Path, store: MemoryStore, num_parts: int) -> MemoryBucket:
    """Upload a shard of two parts of which an earlier process had sent this many, perhaps of a longer file."""

    async def main() -> None:
        await store.open()
        upload_id = await store.create_multipart("a")
        for number in range(1, num_parts + 1):
            part = DATA[:PART_BYTES]
            await store.put_part("a", upload_id, number, BytesBody(part), crc(part))
        (folder / "a.bin").write_bytes(DATA)
        place = Folder(str(folder))
        [(identity, _)] = place.link([("a.bin", "a.bin")], "spool/a")
        source = Source(place.open_source("a.bin", None, identity), identity, "a.bin")
        try:
            await upload.upload(
                PatientStore(store, Settings(retry_initial_s=0.01, retry_max_s=0.01)),
                source,
                "a",
                smallest_part_bytes=PART_BYTES,
                resume=upload.Resume(upload_id, PART_BYTES),
                opened=lambda resume: None,
                sent=lambda size_bytes: None,
            )
        finally:
            source.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    return store._bucket


@pytest.mark.fault("F152")
def test_a_shard_cut_short_is_sent_again(tmp_path: Path) -> None:
    bucket = resumed(tmp_path, LikeCeph(MemoryBucket()), num_parts=3)
    assert bucket.objects["a"].data == DATA
    assert [each for each in bucket.uploads.values() if not each.is_completed] == []


@pytest.mark.fault("F152")
@pytest.mark.parametrize("reason", [FailureReason.OTHER, FailureReason.AUTH])
def test_a_shard_whose_parts_are_not_listed_is_sent_again(tmp_path: Path, reason: FailureReason) -> None:
    """Waiting for the right to list them would last until the upload is given up."""
    store = ListsNoParts(MemoryBucket())
    store.reason = reason
    bucket = resumed(tmp_path, store, num_parts=1)
    assert bucket.objects["a"].data == DATA
    assert [each for each in bucket.uploads.values() if not each.is_completed] == []
