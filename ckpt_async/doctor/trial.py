"""Tries out in a store what uploaders, readers and sweepers do, one thing after another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Awaitable, Callable

import aiofiles

from ckpt_async.core import keys
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import in_units
from ckpt_async.doctor.diagnosis import Remote, Speed, Tried
from ckpt_async.errors import CkptAsyncError, FailureReason, IntegrityError, StoreError
from ckpt_async.local.folder import Folder
from ckpt_async.protocol.verify import find_unreadable
from ckpt_async.stores import makes_folder, parse_url
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Store
from ckpt_async.transfer import upload
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.source import Source
from ckpt_async.transfer.together import all_or_none

# The time limit of a small request: the store answers, or it does not.
ANSWER_S = 15.0
# The time limit for all records of a long run, which has a decision for each checkpoint.
RECORDS_S = 60.0
NUM_SAMPLES = 5
SPEED_BYTES, SPEED_RANGES = 64 << 20, 8
SPEED_TIMEOUT_S = 120.0
_SWEEPERS = "a sweeper needs this permission, a trainer does not"
_SENT_AGAIN = "a shard whose upload is killed is sent again from its beginning: allow ListParts"


def in_one_line(error: CkptAsyncError) -> str:
    """Return the error without its hint, which is printed separately."""
    return " ".join(error.without_hint.split())


class Trial:
    """Does in a store what uploaders, readers and sweepers do, one thing after another."""

    def __init__(
        self, store: Store, settings: Settings, workplace: Folder | None, min_free_bytes: int
    ) -> None:
        self._store, self._settings, self._workplace = store, settings, workplace
        self._min_free_bytes = min_free_bytes
        self._name = f"{keys.PROBES}doctor-{secrets.token_hex(8)}"
        self._tried: list[Tried] = []
        self._written: list[str] = []
        self._uploads: dict[str, str] = {}  # unfinished multipart uploads: id by key
        self._facts = Remote(store.url, ())
        self.speed: Speed | None = None

    @property
    def found(self) -> Remote:
        return dataclasses.replace(self._facts, tried=tuple(self._tried))

    async def run(self) -> None:
        try:
            if await self._reach():
                try:
                    if await self._try("write", "objects can be written", self._write):
                        await self._try_the_rest()
                finally:
                    await self._clean_up()
        finally:
            await self._store.close()

    def _note(self, **facts: object) -> None:
        self._facts = dataclasses.replace(self._facts, **facts)  # type: ignore[arg-type]

    async def _try(
        self,
        check: str,
        what: str,
        act: Callable[[], Awaitable[None]],
        *,
        otherwise: str = "",
        timeout_s: float = ANSWER_S,
    ) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await act()
        except TimeoutError:
            self._tried.append(Tried(check, what, f"no answer within {timeout_s:.0f} s", "", otherwise))
            return False
        except StoreError as error:
            self._tried.append(Tried(check, what, in_one_line(error), error.hint, otherwise))
            return False
        self._tried.append(Tried(check, what))
        return True

    async def _reach(self) -> bool:
        """Return whether trying anything else makes sense. Credentials that may not list may still do for the rest."""
        if makes_folder(self._store.url):
            return True
        refusal: list[StoreError] = []

        async def listed() -> None:
            try:
                await self._store.open(is_read_only=True)
                began = time.time()
                listing = await self._store.list(self._name)
                # The store's time has whole seconds, rounded down.
                self._note(clock_ahead_s=listing.server_time + 0.5 - (began + time.time()) / 2)
            except StoreError as error:
                refusal.append(error)
                raise

        is_listed = await self._try("list", f"{self._store.url} answers and can be listed", listed)
        return is_listed or any(error.reason is FailureReason.AUTH for error in refusal)

    async def _write(self) -> None:
        """Open the store as an uploader does, which probes its capabilities, and send it a wrong checksum."""
        store, right, wrong = self._store, f"{self._name}-a", f"{self._name}-b"
        await store.close()
        await store.open()
        self._note(capabilities=store.capabilities)
        checksum = checksum_of(b"a", store.capabilities.checksum_algorithm)
        self._written += right, wrong
        await store.put(right, BytesBody(b"a"), checksum)
        try:
            await store.put(wrong, BytesBody(b"b"), checksum)
        except IntegrityError:
            self._note(is_checksum_compared=True)
        else:
            self._note(is_checksum_compared=False)

    async def _try_the_rest(self) -> None:
        if await self._try("read", "objects can be read", self._read):
            what, timeout_s = "the run's records can be read", RECORDS_S
            await self._try("records", what, self._read_records, otherwise=_SWEEPERS, timeout_s=timeout_s)
        if self._store.capabilities.multipart:
            await self._try("multipart", "multipart uploads can be completed", self._complete_multipart)
            what = "the parts of a multipart upload can be listed"
            await self._try("list parts", what, self._list_parts, otherwise=_SENT_AGAIN)
            what = "multipart uploads can be aborted"
            await self._try("abort", what, self._abort_multipart, otherwise=_SWEEPERS)
            what = "multipart uploads can be listed"
            await self._try("list multiparts", what, self._list_multiparts, otherwise=_SWEEPERS)
        if self._settings.publish_copies:
            await self._try("copy", "objects can be copied within the store", self._copy)
        if self._workplace is not None:
            self.speed = await self._measure_speed(self._workplace)
        await self._try("delete", "objects can be deleted again", self._delete, otherwise=_SWEEPERS)

    async def _read(self) -> None:
        took_s = []
        for _ in range(NUM_SAMPLES):
            began = time.perf_counter()
            data, _ = await self._store.get(self._written[0], max_size_bytes=16)
            took_s.append(time.perf_counter() - began)
            if data != b"a":
                raise IntegrityError(
                    "the store returned different bytes", operation="get", key=self._written[0]
                )
        self._note(round_trip_s=min(took_s))

    async def _copy(self) -> None:
        source, key = self._written[0], f"{self._name}-e"
        self._written.append(key)
        await self._store.copy(source, (await self._store.head(source)).etag, key)
        if (await self._store.get(key, max_size_bytes=16))[0] != b"a":
            raise IntegrityError("the copy has different bytes", operation="copy", key=key)

    async def _read_records(self) -> None:
        """Read the records of a run that is already there. One that cannot be read blocks whatever it describes."""
        found = await find_unreadable(PatientStore(self._store, self._settings, is_patient=False))
        self._note(unreadable=tuple(f"{each.key}: {each.message}" for each in found))

    async def _complete_multipart(self) -> None:
        await self._complete(await self._begin_multipart("c"))

    async def _list_parts(self) -> None:
        key = await self._begin_multipart("d")
        await self._store.list_parts(key, self._uploads[key])

    async def _abort_multipart(self) -> None:
        key = await self._begin_multipart("d")
        try:
            await self._abort(key)
        except StoreError:
            await self._complete(key)  # so that it can be deleted
            raise

    async def _begin_multipart(self, which: str) -> str:
        key = f"{self._name}-{which}"
        if key not in self._uploads:
            self._uploads[key] = await self._store.create_multipart(key)
            self._written.append(key)
        return key

    async def _complete(self, key: str) -> None:
        store, data = self._store, b"part"
        checksum = checksum_of(data, store.capabilities.checksum_algorithm)
        part = await store.put_part(key, self._uploads[key], 1, BytesBody(data), checksum)
        await store.complete_multipart(key, self._uploads[key], [part], checksum, len(data))
        del self._uploads[key]

    async def _abort(self, key: str) -> None:
        await self._store.abort_multipart(key, self._uploads[key])
        del self._uploads[key]

    async def _list_multiparts(self) -> None:
        await self._store.list_multiparts(self._name)

    async def _delete(self) -> None:
        await self._store.delete(self._written)

    async def _clean_up(self) -> None:
        """Remove what is left after Ctrl-C or after a check that failed half-way."""
        left: tuple[str, ...] = ()
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                left = tuple(each.key for each in (await self._store.list(self._name)).objects)
                await self._store.delete(left)
                left = ()
        for key in tuple(self._uploads):
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self._abort(key)
        self._note(left_behind=(*left, *self._uploads))

    async def _measure_speed(self, workplace: Folder) -> Speed:
        """Upload a file as an uploader does, and read it in ranges."""
        key = f"{self._name}-f"
        if what := no_room(self._store.url, workplace, self._min_free_bytes):
            return Speed(SPEED_BYTES, left_out=what)
        self._written.append(key)
        settings = self._settings
        quick = dataclasses.replace(
            settings, upload_timeout_s=SPEED_TIMEOUT_S, retry_max_s=settings.retry_initial_s
        )

        def opened(multipart: upload.Resume) -> None:
            self._uploads[key] = multipart.upload_id

        try:
            source = await _large_source(workplace)
            try:
                began = time.perf_counter()
                await upload.upload(
                    PatientStore(self._store, quick, is_patient=False),
                    source,
                    key,
                    smallest_part_bytes=settings.part_size_bytes,
                    resume=None,
                    opened=opened,
                    sent=lambda _: None,
                )
                upload_s = time.perf_counter() - began
                self._uploads.pop(key, None)
            finally:
                source.close()
            began = time.perf_counter()
            ranges = upload.plan_parts(SPEED_BYTES, SPEED_BYTES // SPEED_RANGES)
            async with asyncio.timeout(SPEED_TIMEOUT_S):
                await all_or_none(
                    self._store.get_range(key, each.offset, each.size_bytes, lambda _: None)
                    for each in ranges
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
