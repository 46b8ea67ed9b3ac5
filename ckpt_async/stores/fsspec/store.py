"""Any file system of fsspec as a store: SFTP, WebDAV, SMB, Hugging Face, OCI, DBFS, HDFS and others.

Weaker than S3, as the store logs when it is opened for writing: writes cannot be conditional, so rank 0 alone decides
(`conditional_put` is False); no checksum is kept or compared, so each object is read back before it counts; there are
no parts, so an interrupted shard is sent again from the beginning. If the file system can rename, every write goes to a
temporary name and is renamed into place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ckpt_async.core.model import Checksum
from ckpt_async.errors import (
    FailureReason,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.stores.bodies import WriterCancelledError, send_in_thread
from ckpt_async.stores.checks import check_prefix
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.fsspec.failures import missing_option, options_hint, translating
from ckpt_async.stores.fsspec.files import ALGORITHM, Files, Manners, is_posix, probe
from ckpt_async.stores.fsspec.lanes import FileSystem, Lanes, Pipe, PipeWriter
from ckpt_async.stores.interface import (
    REQUEST_TIMEOUT_S,
    Body,
    Capabilities,
    Condition,
    Create,
    Enough,
    Listing,
    Match,
    ObjectInfo,
    Sink,
    SmallGet,
    SmallPut,
)
from ckpt_async.stores.one_by_one import get_one_by_one, put_one_by_one
from ckpt_async.stores.opening import in_time
from ckpt_async.stores.quiet import say_once
from ckpt_async.stores.tree import OWN
from ckpt_async.stores.whole import WholeObjects, check_folder_key, check_limit, check_range, check_same
from ckpt_async.threads import in_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Each lane has its own connection, and sshd drops new ones when 10 have not logged in yet (MaxStartups).
_MOST_LANES = 8
_LEFT_OVER_AGE_S = 24 * 3600.0


class FsspecStore(WholeObjects):
    """Objects as files below what `url` names. A cancelled call returns at once, even if the file system hangs."""

    no_parts = "a file system has no multipart uploads"

    def __init__(self, url: str, scheme: str, *, max_connections: int) -> None:
        super().__init__(url, _capabilities(Manners()))
        self._scheme = scheme
        self._most_lanes = min(max_connections, _MOST_LANES)
        self._lanes: Lanes | None = None
        self._root = ""
        self._manners = Manners()
        self._made: set[str] = set()
        self._has_own = False
        self._clock_ahead_s = 0.0  # how far the server's clock is ahead of ours

    async def open(self, *, is_read_only: bool = False, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Connect. For writing, also make the folder if it is missing, and find out how the file system behaves by
        means of two small files, which are deleted again.
        """
        self._lanes = Lanes(self._connect, self._most_lanes)
        try:
            with translating("open", self._url):
                lanes = self._lanes
                opening = self._open_to_read if is_read_only else lambda: self._open_to_write(lanes)
                await in_time(opening, request_timeout_s)
        except BaseException:
            await self.close()
            raise

    async def _open_to_write(self, lanes: Lanes) -> None:
        self._manners, modified_at = await lanes.call(lambda fs: probe(fs, self._root))
        self._has_own = self._manners.has_folders
        if modified_at is not None:
            self._clock_ahead_s = modified_at - time.time()
        self._capabilities = _capabilities(self._manners)
        logger.warning("store_promises_less url=%s %s", self._url, "; ".join(self._capabilities.remarks))
        if self._has_own:
            before = time.time() + self._clock_ahead_s - _LEFT_OVER_AGE_S
            await self._do("open", "", lambda files: files.left_over(before))

    async def _open_to_read(self) -> None:
        assert self._lanes is not None
        self._manners = await self._lanes.call(lambda fs: Manners(is_posix=is_posix(fs)))
        is_there, self._has_own = await self._do(
            "open", "", lambda files: (files.is_root_there(), files.is_folder(OWN))
        )
        if not is_there:
            raise StoreError(
                "no such folder", reason=FailureReason.NOT_FOUND, operation="open", key=self._url
            )

    def _connect(self) -> FileSystem:
        """Connect, in the thread of a lane. Options and credentials come from fsspec's own configuration."""
        import fsspec

        say_once("paramiko")
        kind = fsspec.get_filesystem_class(self._scheme)
        options = kind._get_kwargs_from_urls(self._url)  # noqa: SLF001 - what fsspec's own url_to_fs calls
        if port := options.get("port"):
            options["port"] = int(port)
        try:
            file_system = kind(skip_instance_cache=True, **options)
        except (FileNotFoundError, TypeError) as error:
            # The key file does not exist, or an option is missing: this must never be taken for "there is no run".
            option = missing_option(error)
            raise StoreError(
                f"the option {option} is missing" if option else f"{type(error).__name__}: {error}",
                reason=FailureReason.AUTH,
                operation="open",
                key=self._url,
                hint=options_hint(self._url, option),
            ) from error
        self._root = str(kind._strip_protocol(self._url)).rstrip("/")  # noqa: SLF001
        return file_system

    async def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        """As specified, but not atomic with a condition: that is only checked just before the write."""
        check_folder_key(key, "put")
        with translating("put", key):
            await self._check_condition(key, condition)
            info = await self._send(key, body, checksum)
        if info.last_modified is not None:
            self._clock_ahead_s = info.last_modified - time.time()
        return info

    async def _check_condition(self, key: str, condition: Condition) -> None:
        match condition:
            case None:
                return
            case Create():
                with contextlib.suppress(ObjectNotFoundError):
                    await self._found(key, "put")
                    raise PreconditionFailedError(operation="put", key=key)
            case Match(etag):
                await self._check_is(key, etag, "put")

    async def _check_is(self, key: str, etag: str, operation: str) -> None:
        try:
            there = await self._found(key, operation)
        except ObjectNotFoundError:
            raise PreconditionFailedError("there is no object", operation=operation, key=key) from None
        check_same(key, there.etag, etag, operation)

    async def _send(self, key: str, body: Body, checksum: Checksum) -> ObjectInfo:
        pipe, size_bytes = Pipe(), body.size_bytes
        writing = asyncio.ensure_future(
            self._do("put", key, lambda files: files.write(key, pipe, size_bytes, checksum))
        )
        writing.add_done_callback(lambda _: pipe.break_off())
        try:
            # Nobody takes the bytes any more, and `writing` tells why.
            with contextlib.suppress(WriterCancelledError):
                await send_in_thread(body, PipeWriter(pipe))
            pipe.end()
            found = await writing
        except BaseException as error:
            pipe.break_off()
            if isinstance(error, asyncio.CancelledError):
                writing.cancel()  # the file system may hang
            # A partial object must be gone before the next attempt.
            await asyncio.gather(writing, return_exceptions=True)
            raise
        return found.info(key, checksum)

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        await put_one_by_one(self, puts, stored)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        check_folder_key(key, "get")

        def read(files: Files) -> tuple[bytes, ObjectInfo]:
            found = files.found(key)
            check_limit(key, found.size_bytes, max_size_bytes)
            data = bytearray()
            files.read(key, 0, found.size_bytes, data.extend)
            return bytes(data), found.info(key, checksum_of(bytes(data), ALGORITHM))

        return await self._do("get", key, read)

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        check_folder_key(key, "get_range")
        guarded = _Guarded(sink)

        def read(files: Files) -> ObjectInfo:
            found = files.found(key)
            check_range(key, found.size_bytes, offset, size_bytes)
            files.read(key, offset, size_bytes, guarded.take)
            return found.info(key)

        try:
            return await self._do("get_range", key, read)
        except StoreError:
            if guarded.error is not None:
                raise guarded.error from None
            raise
        finally:
            await in_thread(guarded.close)

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        await get_one_by_one(self, gets, got)

    async def head(self, key: str) -> ObjectInfo:
        """As specified, with a checksum: computing it reads the whole file."""
        check_folder_key(key, "head")

        def read(files: Files) -> ObjectInfo:
            found = files.found(key)
            return found.info(key, files.checksum(key, found.size_bytes))

        return await self._do("head", key, read)

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:  # noqa: ARG002 - all at once
        check_prefix(prefix, "list")
        folder = prefix.rpartition("/")[0]

        def walk(files: Files) -> list[ObjectInfo]:
            self._check_there(files, "list", prefix)
            found = [each.info(key) for key, each in files.walk(f"{folder}/" if folder else "", prefix)]
            self._check_there(files, "list", prefix)
            return [each for each in found if each.key > start_after]

        listed = await self._do("list", prefix, walk)
        now = time.time() + self._clock_ahead_s
        return Listing(tuple(sorted(listed, key=lambda info: info.key)), now)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_folder_key(key, "delete")
        for key in keys:
            await self._do("delete", key, lambda files, key=key: files.delete(key))  # type: ignore[misc]

    async def delete_if(self, key: str, etag: str) -> None:
        """As specified, but the ETag is compared just before the deletion."""
        check_folder_key(key, "delete")
        await self._check_is(key, etag, "delete")
        await self.delete([key])

    async def copy(self, source: str, etag: str, key: str) -> None:
        """Have the server copy the object, if it can. The ETag is compared just before."""
        check_folder_key(source, "copy")
        check_folder_key(key, "copy")
        if not self._manners.copies:
            raise StoreError(
                f"{self._scheme}:// cannot copy within the store",
                reason=FailureReason.OTHER,
                operation="copy",
                key=source,
            )
        check_same(source, (await self._found(source, "copy")).etag, etag, "copy")
        await self._do("copy", source, lambda files: files.copy(source, key))

    # --- one call in a lane --------------------------------------------------------------------------------

    async def _do(self, operation: str, key: str, work: Callable[[Files], T]) -> T:
        assert self._lanes is not None, "open() first"

        def in_lane(file_system: FileSystem) -> T:
            files = Files(file_system, self._root, self._manners, self._made)
            try:
                return work(files)
            except FileNotFoundError:
                self._check_there(files, operation, key)
                raise

        with translating(operation, key or self._url):
            return await self._lanes.call(in_lane)

    async def _found(self, key: str, operation: str) -> ObjectInfo:
        return await self._do(operation, key, lambda files: files.found(key).info(key))

    def _check_there(self, files: Files, operation: str, key: str) -> None:
        """Raise StoreError if the folder is gone: missing is not empty, as a server may have lost its mount. Our own
        subfolder shows that it is still the same folder.
        """
        if self._has_own and not files.is_folder(OWN):
            raise StoreError(
                f"{self._url} is no longer the same folder",
                reason=FailureReason.TRANSIENT,
                operation=operation,
                key=key,
                hint="was it unmounted, moved or emptied?",
            )


class _Guarded:
    """A sink for a thread that may outlive the call: after `close` it takes nothing more."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._lock, self._is_closed = sink, threading.Lock(), False
        self.error: Exception | None = None  # raised by the sink

    def take(self, piece: memoryview) -> None:
        with self._lock:
            if self._is_closed:
                raise WriterCancelledError
            try:
                self._sink(piece)
            except Exception as error:
                self.error = error
                raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True


def _capabilities(manners: Manners) -> Capabilities:
    return Capabilities(
        conditional_put=False,
        multipart=False,
        checksum_algorithm=ALGORITHM,
        copies=manners.copies,
        reads_back=True,
        remarks=tuple(_remarks(manners)),
    )


def _remarks(manners: Manners) -> Iterable[str]:
    yield "no checksums are stored: each object is read back before it counts, which doubles the traffic"
    yield "no multipart uploads: an interrupted shard is sent again from its beginning"
    if not manners.renames:
        yield "objects are not renamed into place: while one is being written, readers may see a partial object"
    elif not manners.replaces:
        yield (
            "a rename does not replace files: while a record is being replaced, it may be missing for a"
            " moment"
        )
    elif not manners.is_posix:
        yield "renames may not be atomic: atomicity is not documented"
    if not manners.copies:
        yield "no copies within the store: publish_copies is refused"
    if not manners.has_times:
        yield "files have no times: readers' leases never expire"
