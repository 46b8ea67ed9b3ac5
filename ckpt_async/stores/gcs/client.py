"""Objects of one bucket of Google Cloud Storage.

An object's ETag here is its generation, a number that no other version of it ever has. Writes, deletes and copies are
made conditional on it (https://cloud.google.com/storage/docs/request-preconditions).
"""

# ruff: noqa: ARG002 - `copy_part` takes what the protocol says, and refuses

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, ObjectNotFoundError, StoreError
from ckpt_async.stores.checks import check_prefix
from ckpt_async.stores.gcs import answers
from ckpt_async.stores.gcs.errors import GcsLocation
from ckpt_async.stores.gcs.multipart import Multiparts
from ckpt_async.stores.gcs.probe import OTHER_GENERATION, GcsProbe
from ckpt_async.stores.gcs.sending import Sender
from ckpt_async.stores.gcs.session import GcsSession, quoted
from ckpt_async.stores.http.bucket import BucketStore, Page, Way
from ckpt_async.stores.http.failures import reachable_hint
from ckpt_async.stores.http.messages import MalformedResponseError, Response
from ckpt_async.stores.interface import (
    Body,
    Capabilities,
    Condition,
    MultipartInfo,
    ObjectInfo,
    SmallPut,
    StoredPart,
)
from ckpt_async.stores.options import StoreOptions

_MAX_OBJECT_BYTES = 5 << 40  # https://cloud.google.com/storage/quotas; a rewrite takes any object
_NO_PARTS = "no multipart uploads: an interrupted shard is sent again from its beginning"


class GcsStore(BucketStore[GcsSession]):
    """Objects below `prefix` of one bucket."""

    get_operation, list_operation = "get", "list"

    def __init__(
        self, bucket: str, prefix: str, options: StoreOptions, *, endpoint_url: str, url: str
    ) -> None:
        location = GcsLocation(bucket, f"{prefix}/" if prefix else "", endpoint_url)
        super().__init__(GcsSession(location, options), url)
        self._sender, self._multiparts = Sender(self._session), Multiparts(self._session)
        self._is_probed = False

    @property
    def capabilities(self) -> Capabilities:
        finds = self._session.is_tls and self._multiparts.answers_checksums
        return replace(super().capabilities, finds_checksums=finds)

    def _unproven(self) -> Capabilities:
        return Capabilities(
            conditional_put=False,
            multipart=True,
            checksum_algorithm=answers.ALGORITHM,
            max_copy_bytes=_MAX_OBJECT_BYTES,
            copies_parts=False,
        )

    async def _find_out(self, request_timeout_s: float) -> Capabilities:
        hint = reachable_hint(self._session.endpoint)
        probe = GcsProbe(self, request_timeout_s, hint, other_etag=OTHER_GENERATION)
        is_conditional, has_multipart = await probe.find_out()
        self._is_probed = True
        remarks = () if has_multipart else (_NO_PARTS,)  # an emulator
        return replace(
            self._unproven(), conditional_put=is_conditional, multipart=has_multipart, remarks=remarks
        )

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
        url = self._session.media_url(self._session.name(key, "get"))
        answer = await self._session.request("get", key, "GET", url, max_size_bytes=max_size_bytes)
        if answer.status >= 300:
            raise await self._read_refused(key, answer)
        with self._translating("get", key):
            info = answers.info_of_media(key, answer, len(answer.error))
        self._check_data(key, answer.error, info)
        return answer.error, info

    async def _way(self) -> Way:
        def url_of(key: str) -> str:
            return self._session.media_url(self._session.name(key, "get"))

        with self._translating("get", ""):
            return Way(self._session.endpoint, url_of, await self._session.credentials.headers())

    def _info_of_part(self, key: str, answer: Response, size_bytes: int) -> ObjectInfo:
        return answers.info_of_media(key, answer, size_bytes)

    async def _read_refused(self, key: str, answer: Response) -> StoreError:
        """As specified. Google reports a missing object in plain text, as any middlebox might, so a 404 is confirmed by
        asking for its metadata.
        """
        if answer.status == 404:
            try:
                await self.head(key)
            except ObjectNotFoundError as error:
                return error
        return self._session.refused(answer, "get", key)

    async def head(self, key: str) -> ObjectInfo:
        name = self._session.name(key, "head")
        answer = await self._session.call("head", key, "GET", self._session.json_url(name))
        with self._translating("head", key):
            return answers.info(key, name, answers.document(answer, "storage#object"))

    async def _pages(self, prefix: str, start_after: str) -> AsyncIterator[Page]:
        asked = {"prefix": self._root + prefix, "maxResults": "1000"}
        asked["fields"] = "kind,nextPageToken,items(name,size,generation,crc32c,updated)"
        if start_after:
            asked["startOffset"] = self._root + start_after  # inclusive
        token, is_last = "", False
        while not is_last:
            query = {**asked, "pageToken": token} if token else asked
            answer = await self._session.call("list", prefix, "GET", self._session.json_url(None, **query))
            with self._translating("list", prefix):
                page, token = answers.page(answer, asked["prefix"], token)
            yield page
            is_last = page.is_last

    async def _delete_one(self, key: str) -> None:
        """Google's batch requests are no faster, and may lack the answer for some key."""
        url = self._session.json_url(self._session.name(key, "delete"))
        await self._session.call("delete", key, "DELETE", url)

    async def delete_if(self, key: str, etag: str) -> None:
        """As specified. Emulators ignore the condition, so the generation is always compared first."""
        name, there = self._session.name(key, "delete"), ""
        try:
            there = (await self.head(key)).etag
            if there == etag:
                url = self._session.json_url(name, ifGenerationMatch=etag)
                await self._session.call("delete", key, "DELETE", url)
        except ObjectNotFoundError:
            there = ""
        if there != etag:
            raise self._location.unmet("it is gone or has changed", operation="delete", key=key)

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
            with self._translating("copy", source):
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

    async def _complete(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """As specified, although the request takes no checksum of the whole. Before it, the checksums of the parts,
        which the store has compared, are combined; after it, the store's own checksum is compared.
        """
        self._multiparts.check_whole(key, parts, checksum, size_bytes)
        await self._multiparts.complete(key, upload_id, parts)
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
