"""Objects in a store that keeps no checksums are read back, and must hold exactly the bytes that were sent."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.settings import Settings
from ckpt_async.errors import StoreError
from ckpt_async.local.folder import Folder
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer import upload
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.source import Source
from tests.stores.memory import MemoryBucket, MemoryStore

DATA = b"weights" * 1000


class KeepsNoChecksum(MemoryStore):
    """A store without checksums that changes what it stores by `spoilt`."""

    spoilt: Any = staticmethod(lambda data: data)

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(bucket)
        self.bucket = bucket

    async def put(self, key: str, *args: Any, **kwargs: Any) -> ObjectInfo:
        info = await super().put(key, *args, **kwargs)
        there = self.bucket.objects[key]
        self.bucket.objects[key] = dataclasses.replace(there, data=self.spoilt(there.data))
        return dataclasses.replace(info, checksum=None)

    async def head(self, key: str) -> ObjectInfo:
        return dataclasses.replace(await super().head(key), checksum=None)


async def _upload(folder: Folder, store: KeepsNoChecksum) -> None:
    await store.open()
    [(identity, _)] = folder.link([("a.bin", "a.bin")], f"spool/{os.urandom(4).hex()}")
    source = Source(folder.open_source("a.bin", None, identity), identity, "a.bin")
    try:
        await upload.upload(
            PatientStore(store, Settings()),
            source,
            "ckpt/a.bin",
            smallest_part_bytes=1 << 23,
            resume=None,
            opened=lambda resume: None,
            sent=lambda size_bytes: None,
        )
    finally:
        source.close()


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (lambda data: data, None),
        (lambda data: data + b"more", "has 7004 bytes"),  # its first bytes are the right ones
        (lambda data: data[:-1], "beyond the object's 6999"),
        (lambda data: data[:-1] + b"\0", "has 7000 bytes"),
    ],
    ids=["whole", "longer", "shorter", "other"],
)
def test_objects_are_read_back_from_a_store_without_checksums(
    run: Any, tmp_path: Path, spoil: Any, refusal: str | None
) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    store = KeepsNoChecksum(MemoryBucket())
    store.spoilt = spoil
    if refusal is None:
        run(_upload(Folder(tmp_path), store))
        return
    with pytest.raises(StoreError, match=refusal):
        run(_upload(Folder(tmp_path), store))


class AnswersForNothing(KeepsNoChecksum):
    """A store that at first reports an object as stored without storing it, as a proxy in front of it might."""

    num_puts = 0

    async def put(self, key: str, *args: Any, **kwargs: Any) -> ObjectInfo:
        info = await super().put(key, *args, **kwargs)
        self.num_puts += 1
        if self.num_puts == 1:
            del self.bucket.objects[key]
        return info


@pytest.mark.fault("F93")
def test_what_was_stored_only_by_its_answer_is_sent_again(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    bucket = MemoryBucket()
    store = AnswersForNothing(bucket)
    run(_upload(Folder(tmp_path), store))
    assert store.num_puts == 2
    assert bucket.objects["ckpt/a.bin"].data == DATA
