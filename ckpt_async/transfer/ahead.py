"""Sending the parts of a shard that is still being written, so that most of it has arrived when it is finished.

Nothing sent here is trusted: once the shard is enqueued, the ordinary upload resumes this multipart upload, compares
every part with the file as it is then, and sends again whatever differs. A crash in between leaves an unfinished
multipart upload, which the sweeper removes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from ckpt_async.core.model import FileIdentity
from ckpt_async.core.units import MIB
from ckpt_async.errors import CkptAsyncError
from ckpt_async.stores.interface import Store, StoredPart
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.progress import Progress
from ckpt_async.transfer.source import Source
from ckpt_async.transfer.upload import PlannedPart, Resume, send_part

logger = logging.getLogger(__name__)

# The size of the shard is not known yet. With 10,000 parts of this size, up to 320 GB can be sent; and if the writer
# goes back and changes something, little has to be sent again.
PART_BYTES = 32 * MIB
POLL_S = 0.05


class _GrowingSource(Source):
    """A shard that may change at any time. Its size is the present one."""

    def check(self) -> None:
        """Do nothing: the upload that resumes this one compares every part."""


async def send_ahead(
    store: PatientStore, path: Path, key: str, *, smallest_part_bytes: int, is_growing: Callable[[], bool]
) -> Resume | None:
    """Send the parts of `path` as they are finished, until `is_growing` returns False and the parts have arrived.

    Returns the multipart upload with the parts that are there; None if the file stayed smaller than two parts, so that
    none was begun. If the store or the file fails, this is logged, and nothing more is sent: the ordinary upload sends
    the rest.
    """
    try:
        while not path.exists() and is_growing():  # noqa: ASYNC110  the writer sets no event
            await asyncio.sleep(POLL_S)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        logger.info("not_sent_ahead path=%s error=%s", path, error)
        await _wait_while(is_growing)
        return None
    facts = os.fstat(descriptor)
    identity = FileIdentity(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    source = _GrowingSource(descriptor, identity, str(path))
    upload = _Upload(store, source, key, max(PART_BYTES, smallest_part_bytes))
    try:
        await upload.send_while(is_growing)
    except (CkptAsyncError, OSError) as error:
        logger.info("not_sent_ahead path=%s error=%s", path, error)
    except BaseException:
        for task in upload.sending:
            task.cancel()
        raise
    finally:
        outcomes = await asyncio.gather(*upload.sending, return_exceptions=True)
        source.close()
    if failures := [each for each in outcomes if isinstance(each, BaseException)]:
        logger.info("not_sent_ahead path=%s error=%s", path, failures[0])
    await _wait_while(is_growing)
    parts = tuple(each for each in outcomes if isinstance(each, StoredPart))
    return Resume(upload.id, upload.part_bytes, parts) if upload.id else None


async def _wait_while(is_growing: Callable[[], bool]) -> None:
    """Wait for the end of a file of which nothing more is sent; otherwise the engine would begin again at once."""
    while is_growing():  # noqa: ASYNC110  the writer sets no event
        await asyncio.sleep(POLL_S)


class _Upload:
    """A multipart upload of a growing file. It is created together with its first part."""

    def __init__(self, store: PatientStore, source: _GrowingSource, key: str, part_bytes: int) -> None:
        self.id = ""
        self.part_bytes = part_bytes
        self.sending: list[asyncio.Task[StoredPart]] = []
        self._store, self._source, self._key = store, source, key
        self._room = asyncio.Semaphore(store.concurrency)

    async def send_while(self, is_growing: Callable[[], bool]) -> None:
        """Begin sending one part after the other, as the file grows."""
        offset, most = 0, self._store.capabilities.max_parts * 9 // 10
        while is_growing() and not any(each.done() and each.exception() for each in self.sending):
            # The last part of the file may still be written to; the file may also have been truncated.
            is_finished = os.fstat(self._source.descriptor).st_size >= offset + 2 * self.part_bytes
            if not is_finished or len(self.sending) >= most:
                await asyncio.sleep(POLL_S)
                continue
            if not self.id:
                self.id = await self._store.create_multipart(self._key)
            await self._room.acquire()
            part = PlannedPart(len(self.sending) + 1, offset, self.part_bytes)
            self.sending.append(asyncio.ensure_future(self._send(part)))
            offset += self.part_bytes

    async def _send(self, part: PlannedPart) -> StoredPart:
        async def attempt(once: Store, progress: Progress) -> StoredPart:
            return await send_part(once, self._source, self._key, self.id, part, progress)

        try:
            return await self._store.bulk("upload_part", part.size_bytes, attempt)
        finally:
            self._room.release()
