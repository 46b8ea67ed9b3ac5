"""Measures how fast a file goes to the store and comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable

import aiofiles

from ckpt_async.core.settings import Settings
from ckpt_async.core.units import in_units
from ckpt_async.doctor.diagnosis import Speed
from ckpt_async.errors import CkptAsyncError
from ckpt_async.local.folder import Folder
from ckpt_async.stores import parse_url
from ckpt_async.stores.interface import Store
from ckpt_async.transfer import upload
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.source import Source
from ckpt_async.transfer.together import all_or_none

SPEED_BYTES, SPEED_RANGES = 64 << 20, 8
SPEED_TIMEOUT_S = 120.0


async def measure(
    store: Store,
    settings: Settings,
    workplace: Folder,
    key: str,
    *,
    opened: Callable[[upload.Resume], None],
    uploaded: Callable[[], None],
) -> Speed:
    """Upload a file as an uploader does, and read it in ranges.

    `opened` and `uploaded` are called when a multipart upload begins and ends.
    """
    quick = dataclasses.replace(
        settings, upload_timeout_s=SPEED_TIMEOUT_S, retry_max_s=settings.retry_initial_s
    )

    try:
        source = await _large_source(workplace)
        try:
            began = time.perf_counter()
            await upload.upload(
                PatientStore(store, quick, is_patient=False),
                source,
                key,
                smallest_part_bytes=settings.part_size_bytes,
                resume=None,
                opened=opened,
                sent=lambda _: None,
            )
            upload_s = time.perf_counter() - began
            uploaded()
        finally:
            source.close()
        began = time.perf_counter()
        ranges = upload.plan_parts(SPEED_BYTES, SPEED_BYTES // SPEED_RANGES)
        async with asyncio.timeout(SPEED_TIMEOUT_S):
            await all_or_none(
                store.get_range(key, each.offset, each.size_bytes, lambda _: None) for each in ranges
            )
        return Speed(SPEED_BYTES, upload_s, time.perf_counter() - began)
    except (CkptAsyncError, OSError) as error:
        return Speed(SPEED_BYTES, error=str(error) or f"no result within {SPEED_TIMEOUT_S:.0f} s")


def no_room(url: str, workplace: Folder, min_free_bytes: int) -> str:
    """Return why the file must not be written, or "": a trainer on this node may need the space."""
    free_bytes, _ = workplace.space()
    needed_bytes = SPEED_BYTES
    if parse_url(url).scheme == "file":
        needed_bytes *= 2  # the remote may be on the same disk
    if free_bytes - needed_bytes >= min_free_bytes:
        return ""
    what = f"{in_units(free_bytes)} are free, but it takes {in_units(needed_bytes)}"
    return f"{what} in addition to min_free_bytes={min_free_bytes}" if min_free_bytes else what


async def _large_source(folder: Folder) -> Source:
    """Return a shard to send, whose bytes cannot be compressed on the way."""
    path = folder.path / "speed.bin"
    async with aiofiles.open(path, "wb") as file:
        for _ in range(SPEED_RANGES):
            await file.write(os.urandom(SPEED_BYTES // SPEED_RANGES))
    ((identity, _),) = folder.link([(path.name, path.name)], "spool/doctor")
    return Source(folder.open_source(path.name, None, identity), identity, str(path))
