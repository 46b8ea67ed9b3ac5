"""Objects of one bucket of Google Cloud Storage.

An object's ETag here is its generation, a number that no other version of it ever has. Writes, deletes and copies are
made conditional on it (https://cloud.google.com/storage/docs/request-preconditions).
"""

# ruff: noqa: ARG002 - `copy_part` takes what the protocol says, and refuses

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, ObjectNotFoundError, StoreError
from ckpt_async.stores.checks import check_prefix
from ckpt_async.stores.gcs import answers
from ckpt_async.stores.gcs.errors import GcsLocation, translating
from ckpt_async.stores.gcs.multipart import Multiparts
from ckpt_async.stores.gcs.probe import Probe
from ckpt_async.stores.gcs.reading import Reader
from ckpt_async.stores.gcs.sending import Sender
from ckpt_async.stores.gcs.session import GcsSession, quoted
from ckpt_async.stores.http.messages import MalformedResponseError
from ckpt_async.stores.interface import (
    REQUEST_TIMEOUT_S,
    Body,
    Capabilities,
    Condition,
    Enough,
    Listing,
    Moved,
    MultipartInfo,
    ObjectInfo,
    Sink,
    SmallGet,
    SmallPut,
    StoredPart,
)
from ckpt_async.stores.options import StoreOptions

_MAX_OBJECT_BYTES = 5 << 40  # https://cloud.google.com/storage/quotas; a rewrite takes any object
_DELETES_AT_ONCE = 16
_CAPABILITIES = Capabilities(
    conditional_put=True,
    multipart=True,
    checksum_algorithm=answers.ALGORITHM,
    max_copy_bytes=_MAX_OBJECT_BYTES,
    copies_parts=False,
)


class GcsStore:
    """Objects below `prefix` of one bucket. Belongs to the event loop that opened it."""

    def __init__(
        self, bucket: str, prefix: str, options: StoreOptions, *, endpoint_url: str, url: str
    ) -> None:
        self._root = f"{prefix}/" if prefix else ""
        self._location = GcsLocation(bucket, self._root, endpoint_url)
        self._url = url
        self._session = GcsSession(self._location, options)
        self._sender, self._reader = Sender(self._session), Reader(self._session, self.head)
        self._multiparts = Multiparts(self._session)
        self._capabilities: Capabilities | None = None
        self.has_conditional_delete = True
        self._is_probed = False

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "open() first"
        finds = self._session.is_tls and self._multiparts.answers_checksums
        return replace(self._capabilities, finds_checksums=finds)

    def moved(self) -> Moved | None:
        return self._session.pools.traffic.read()

    async def open(self, *, is_read_only: bool = False, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Find credentials, then find out what the store enforces (see `Probe`)."""
        try:
            await self._session.open(is_read_only=is_read_only)
            # Not probed yet: declare nothing that a writer would rely on.
            self._capabilities = replace(_CAPABILITIES, conditional_put=False)
            if not is_read_only:
                found = await Probe(self, self._session, request_timeout_s).find_out()
                self._is_probed = True
                self.has_conditional_delete = found.has_conditional_delete
                self._capabilities = replace(
                    _CAPABILITIES,
                    conditional_put=found.has_conditional_put,
                    multipart=found.has_multipart,
                    remarks=tuple(found.remarks()),
                )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    # --- objects -------------------------------------------------------------------------------------------

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        """As specified. If the answer reports other bytes than were sent (Google refuses those, but an emulator may not
        compare them), the object is deleted again, provided that it is still the same one.
        """
        info = await self._sender.put(key, body, checksum, condition)
        await self._check_stored(info, body.size_bytes, checksum, "put")
        return info

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        spoilt = await self._sender.put_many(puts, stored)
        if spoilt is not None:
            put, info = spoilt
            await self._check_stored(info, len(put.data), put.checksum, "put")

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        """As specified. The bytes have been compared with the checksum that the store keeps."""
        return await self._reader.get(key, max_size_bytes=max_size_bytes)

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        if size_bytes == 0:
            return await self.head(key)  # HTTP cannot express an empty range
        return await self._reader.get_range(key, offset, size_bytes, sink)

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        await self._reader.get_many(gets, got)

    async def head(self, key: str) -> ObjectInfo:
        name = self._session.name(key, "head")
        answer = await self._session.call("head", key, "GET", self._session.json_url(name))
        with translating("head", key, self._location):
            return answers.info(key, name, answers.document(answer, "storage#object"))

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        check_prefix(prefix, "list")
        root = self._root + prefix
        asked = {"prefix": root, "maxResults": "1000"}
        asked["fields"] = "kind,nextPageToken,items(name,size,generation,crc32c,updated)"
        if start_after:
            asked["startOffset"] = self._root + start_after  # inclusive
        found: dict[str, ObjectInfo] = {}
        server_time, token = 0.0, ""
        while True:
            page = {"pageToken": token} if token else {}
            answer = await self._session.call(
                "list", prefix, "GET", self._session.json_url(None, **asked, **page)
            )
            with translating("list", prefix, self._location):
                # Take the time of the first page: measured against a later one, ages would come out too large.
                server_time = server_time or answers.server_time(answer)
                items, following = answers.page(answer, root)
                if following and following == token:
                    raise MalformedResponseError("the listing does not advance")
                for name, item in items:
                    key = name.removeprefix(self._root)
                    if key in found:
                        raise MalformedResponseError(f"the listing has {key!r} twice")
                    if key > start_after:
                        found[key] = answers.info(key, name, item)
            token = following
            if not token or (enough is not None and enough(tuple(found.values()))):
                # Google orders names by their UTF-8, as we do.
                return Listing(tuple(found[key] for key in sorted(found)), server_time, not token)

    async def delete(self, keys: Sequence[str]) -> None:
        """Send one request per key. Google's batch requests are no faster, and may lack the answer for some key."""
        names = [self._session.name(key, "delete") for key in keys]
        at_once = asyncio.Semaphore(_DELETES_AT_ONCE)

        async def delete(key: str, name: str) -> None:
            async with at_once:
                with contextlib.suppress(ObjectNotFoundError):
                    await self._session.call("delete", key, "DELETE", self._session.json_url(name))

        outcomes = await asyncio.gather(*map(delete, keys, names), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def delete_if(self, key: str, etag: str) -> None:
        name = self._session.name(key, "delete")
        if not answers.is_generation(etag):
            raise self._location.unmet("the ETag is not a generation", operation="delete", key=key)
        url = self._session.json_url(name, ifGenerationMatch=etag)
        try:
            if not self.has_conditional_delete and (await self.head(key)).etag != etag:
                raise self._location.unmet("the object has changed", operation="delete", key=key)
            await self._session.call("delete", key, "DELETE", url)
        except ObjectNotFoundError as error:
            raise self._location.unmet("the object is missing", operation="delete", key=key) from error

    async def copy(self, source: str, etag: str, key: str) -> None:
        """Copy in one request, unless the storage class or location differs: then in as many as the store asks for
        (https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite).
        """
        name, to = self._session.name(source, "copy"), self._session.name(key, "copy")
        if not answers.is_generation(etag):
            raise self._location.unmet("the ETag is not a generation", operation="copy", key=source)
        what = f"/rewriteTo/b/{self._location.bucket}/o/{quoted(to)}"
        asked = {"ifSourceGenerationMatch": etag} | dict(self._sender.copied_query)
        while True:
            url = self._session.json_url(name, what, **asked)
            answer = await self._session.call("copy", source, "POST", url)
            with translating("copy", source, self._location):
                rewritten = answers.document(answer, "storage#rewriteResponse")
                if rewritten.get("done") is True:
                    return
                token = rewritten.get("rewriteToken")
                if not isinstance(token, str) or not token:
                    raise MalformedResponseError(
                        "the copy is not complete, and there is no token to continue it"
                    )
            asked["rewriteToken"] = token

    # --- large objects ---------------------------------------------------------------------------------------

    async def copy_part(
        self, source: str, etag: str, key: str, upload_id: str, number: int, offset: int, size_bytes: int
    ) -> StoredPart:
        """Refuse: Google's XML API has no such request. `copy` takes objects of any size."""
        raise self._location.error(
            "parts cannot be copied", reason=FailureReason.OTHER, operation="copy_part", key=key
        )

    async def create_multipart(self, key: str) -> str:
        return await self._multiparts.create(key)

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum | None
    ) -> StoredPart:
        return await self._multiparts.put(key, upload_id, number, body, checksum)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        return await self._multiparts.parts(key, upload_id)

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """As specified, although the request takes no checksum of the whole. Before it, the checksums of the parts,
        which the store has compared, are combined; after it, the store's own checksum is compared. Google forgets an
        upload that it has completed; then the object itself must show whether it is what this call would have made.
        """
        self._multiparts.check_whole(key, parts, checksum, size_bytes)
        try:
            await self._multiparts.complete(key, upload_id, parts)
        except ObjectNotFoundError:
            with contextlib.suppress(ObjectNotFoundError):
                info = await self.head(key)
                if info.size_bytes == size_bytes and info.checksum == checksum:
                    return info
            raise
        info = await self.head(key)
        await self._check_stored(info, size_bytes, checksum, "complete_multipart")
        return info

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            await self._multiparts.abort(key, upload_id)

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        check_prefix(prefix, "list_multiparts")
        if not self.capabilities.multipart:
            return []
        return await self._multiparts.uploads(prefix, may_have_none=not self._is_probed)

    async def _check_stored(
        self, info: ObjectInfo, size_bytes: int, checksum: Checksum, operation: str
    ) -> None:
        if info.size_bytes == size_bytes and info.checksum in (None, checksum):
            return
        with contextlib.suppress(StoreError):
            await self.delete_if(info.key, info.etag)
        raise self._location.spoilt(
            f"the store has {info.size_bytes} bytes with {info.checksum}, but {size_bytes} with {checksum}"
            " were sent",
            operation=operation,
            key=info.key,
        )
