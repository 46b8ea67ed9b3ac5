"""Amazon S3 and S3-compatible stores, over aiobotocore.

A body is never copied in Python: its slices go straight to the socket, bypassing the SDK's checksums and body signing.
Instead, the bytes are protected by our own full-object checksum, which the store compares with what arrived. It is
computed beforehand and sent as a header; or, over TLS and if the store was seen to honour trailers, it is computed
while the bytes are sent and follows them as a trailer.

This module must not retry: one call is one attempt. (Only requests without a body, that is GET, HEAD, copy, abort and
conditional delete, are repeated once by aiohttp if the connection breaks before an answer.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, ObjectNotFoundError, StoreError
from ckpt_async.stores.checks import check_prefix
from ckpt_async.stores.checksums import Digest
from ckpt_async.stores.http.bucket import BucketStore, Page, Way
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.interface import (
    Body,
    Capabilities,
    Condition,
    Create,
    Match,
    MultipartInfo,
    ObjectInfo,
    SmallGet,
    SmallPut,
    StoredPart,
)
from ckpt_async.stores.one_by_one import get_one_by_one, put_one_by_one
from ckpt_async.stores.options import StoreOptions
from ckpt_async.stores.s3 import answers
from ckpt_async.stores.s3.answers import Pages, SdkResponse
from ckpt_async.stores.s3.errors import S3Location, meaning_of
from ckpt_async.stores.s3.listing import is_directory_bucket, listed_prefix, server_start
from ckpt_async.stores.s3.probe import S3Probe
from ckpt_async.stores.s3.reading import Reader
from ckpt_async.stores.s3.sending import Put, Sender, checksum_parameters
from ckpt_async.stores.s3.session import S3Session
from ckpt_async.stores.s3.standing import NOTHING

# CopyObject takes these from its source, unless told to replace all of them.
_COPIED_ALONG = frozenset({"CacheControl", "ContentType", "Metadata", "Tagging"})
_DELETE_BATCH = 1000  # the limit of DeleteObjects (S3 API reference)


class S3Store(BucketStore[S3Session]):
    """Objects below `prefix` of one bucket.

    `put` answers with the size it sent: S3 stores a body whole, exactly Content-Length bytes, or not at all.
    """

    get_operation, list_operation = "get_object", "list_objects_v2"

    def __init__(
        self,
        bucket: str,
        prefix: str,
        options: StoreOptions,
        *,
        endpoint_url: str | None,
        url: str,
        standing: Mapping[str, str] = NOTHING,
    ) -> None:
        location = S3Location(bucket, f"{prefix}/" if prefix else "", endpoint_url)
        super().__init__(S3Session(location, options, standing), url)
        self._options, self.has_order = options, not is_directory_bucket(bucket)
        self._sender, self._reader = Sender(self._session), Reader(self._session)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, finds_checksums=self._sender.finds_checksums)

    def _unproven(self) -> Capabilities:
        """As specified. A reader's lease is written with the checksum that more stores know, including directory
        buckets and stores from before 2025.
        """
        return Capabilities(conditional_put=False, multipart=True, checksum_algorithm="crc32c")

    async def _find_out(self, request_timeout_s: float) -> Capabilities:
        return await S3Probe(self, self._session, self._sender, request_timeout_s).capabilities()

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        match condition:
            case Create():
                asked = {"IfNoneMatch": "*"}
            case Match(etag):
                asked = self._session.match(etag)
            case None:
                asked = {}
        put = Put("put_object", key, {**asked, **self._options.put_args})
        response = await self._sender.put(put, body, checksum)
        return ObjectInfo(key, body.size_bytes, response["ETag"], answers.checksum(response))

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        template = self._sender.templates.get("put_object")
        if template is None:
            await put_one_by_one(self, puts, stored)
        else:
            await self._sender.put_many(template, puts, stored)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        """As specified. If the store has kept a checksum, the bytes have been compared with it."""
        data, info = await self._reader.get(key, max_size_bytes=max_size_bytes)
        self._check_data(key, data, info)
        return data, info

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        if await self._reader.series_template() is None:
            await get_one_by_one(self, gets, got)
        else:
            await super().get_many(gets, got)

    async def _way(self) -> Way:
        found = await self._reader.series_template()
        assert found is not None, "see get_many"
        template, credentials = found

        def url_of(key: str) -> str:
            return template.url(self._session.name(key, "get_object"), credentials, time.time())

        return Way(template.origin, url_of, self._reader.headers)

    async def _way_to(self, key: str) -> tuple[str, Mapping[str, str]]:
        return await self._reader.signed(key), self._reader.headers

    def _info_of_part(self, key: str, answer: Response, size_bytes: int) -> ObjectInfo:
        return answers.info_of_part(key, answer, size_bytes)

    async def _read_refused(self, key: str, answer: Response) -> StoreError:
        return self._reader.refused(key, answer)

    async def head(self, key: str) -> ObjectInfo:
        response = await self._session.call("head_object", key, ChecksumMode="ENABLED")
        with self._translating("head_object", key):
            return answers.info(key, response)

    async def _pages(self, prefix: str, start_after: str) -> AsyncIterator[Page]:
        bucket = self._location.bucket
        asked = {"Prefix": listed_prefix(bucket, self._root + prefix)}
        if start := server_start(bucket, prefix, start_after):
            asked["StartAfter"] = self._root + start
        async for page in self._listed(answers.OBJECTS, **asked):
            with self._translating(self.list_operation, prefix):
                found = answers.page_of(page, asked["Prefix"])
            yield found

    async def delete(self, keys: Sequence[str]) -> None:
        names = [self._session.name(key, "delete_objects") for key in keys]
        for start in range(0, len(names), _DELETE_BATCH):
            batch = names[start : start + _DELETE_BATCH]
            # Not in quiet mode: an empty answer might also come from something that has deleted nothing.
            objects = [{"Key": name} for name in batch]
            response = await self._session.call(
                "delete_objects", None, keys[start], Delete={"Objects": objects}
            )
            with self._translating("delete_objects", keys[start]):
                error = answers.check_deleted(response, batch)
            if error is not None:
                code = error.get("Code", "")
                reason, hint = meaning_of(code, 0, "delete_objects", self._location)
                raise self._location.error(
                    f"{code}: {error.get('Message', '')}",
                    reason=reason,
                    operation="delete_objects",
                    key=error.get("Key", "").removeprefix(self._root),
                    hint=hint,
                )

    async def delete_if(self, key: str, etag: str) -> None:
        """As specified. Some stores ignore the condition (Ceph, LocalStack), so the ETag is always compared first."""
        there = ""
        with contextlib.suppress(ObjectNotFoundError):
            there = (await self.head(key)).etag
        if there != etag:
            raise self._location.unmet("it is gone or has changed", operation="delete_object", key=key)
        try:
            await self._session.call("delete_object", key, **self._session.match(etag))
        except StoreError as error:
            if error.reason is not FailureReason.OTHER:
                raise
            await self.delete([key])  # the store does not know the condition

    async def copy(self, source: str, etag: str, key: str) -> None:
        """Copy the object with its metadata and tags; storage class and encryption are specified anew."""
        put_args = {
            name: value for name, value in self._options.put_args.items() if name not in _COPIED_ALONG
        }
        await self._session.call(
            "copy_object",
            key,
            ChecksumAlgorithm=self.capabilities.checksum_algorithm.upper(),
            **self._copied(source, etag),
            **put_args,
        )

    async def copy_part(
        self, source: str, etag: str, key: str, upload_id: str, number: int, offset: int, size_bytes: int
    ) -> StoredPart:
        response = await self._session.call(
            "upload_part_copy",
            key,
            UploadId=upload_id,
            PartNumber=number,
            CopySourceRange=f"bytes={offset}-{offset + size_bytes - 1}",
            **self._copied(source, etag),
        )
        with self._translating("upload_part_copy", key):
            return answers.copied_part(number, size_bytes, response)

    def _copied(self, source: str, etag: str) -> dict[str, Any]:
        name = self._session.name(source, "copy_object")
        return {
            "CopySource": {"Bucket": self._location.bucket, "Key": name},
            "CopySourceIfMatch": etag,
        }

    async def create_multipart(self, key: str) -> str:
        response = await self._session.call(
            "create_multipart_upload",
            key,
            ChecksumAlgorithm=self.capabilities.checksum_algorithm.upper(),
            ChecksumType="FULL_OBJECT",
            **self._options.put_args,
        )
        upload_id: str = response["UploadId"]
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum | None
    ) -> StoredPart:
        put = Put(
            "upload_part",
            key,
            {"UploadId": upload_id, "PartNumber": number},
            {"partNumber": str(number), "uploadId": upload_id},
        )
        if checksum is None:
            digest = Digest(self.capabilities.checksum_algorithm)
            response = await self._sender.put_found(put, body, digest)
            checksum = digest.checksum()
        else:
            response = await self._sender.put(put, body, checksum)
        return StoredPart(number, body.size_bytes, response["ETag"], checksum)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        listed: list[SdkResponse] = []
        async for page in self._listed(answers.PARTS, key, UploadId=upload_id):
            listed.extend(page.get("Parts", ()))
        with self._translating(answers.PARTS.operation, key):
            return answers.parts(listed)

    async def _complete(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        response = await self._session.call(
            "complete_multipart_upload",
            key,
            UploadId=upload_id,
            MultipartUpload={"Parts": [_part_parameters(part) for part in parts]},
            ChecksumType="FULL_OBJECT",
            MpuObjectSize=size_bytes,
            **checksum_parameters(checksum),
        )
        return ObjectInfo(key, size_bytes, response["ETag"], answers.checksum(response))

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            await self._session.call("abort_multipart_upload", key, UploadId=upload_id)

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        check_prefix(prefix, "list_multipart_uploads")
        uploads: list[MultipartInfo] = []
        whole = self._root + prefix
        asked = {"Prefix": listed_prefix(self._location.bucket, whole)}
        async for page in self._listed(answers.UPLOADS, **asked):
            with self._translating(answers.UPLOADS.operation, prefix):
                found = answers.uploads(page, asked["Prefix"])
                uploads += [
                    replace(each, key=each.key.removeprefix(self._root))
                    for each in found
                    if each.key.startswith(whole)
                ]
        return uploads

    async def _listed(self, pages: Pages, key: str | None = None, **asked: Any) -> AsyncIterator[SdkResponse]:
        """Yield all pages of a listing, each of which has shown that it belongs to the request."""
        named = {"Bucket": self._location.bucket, **({} if key is None else {"Key": self._root + key})}
        following: dict[str, Any] | None = {}
        while following is not None:
            asked |= following
            about = key or asked["Prefix"].removeprefix(self._root)
            page = await self._session.call(pages.operation, key, about, **asked)
            with self._translating(pages.operation, about):
                following = answers.next_page(pages, {**asked, **named}, page)
            yield page


def _part_parameters(part: StoredPart) -> dict[str, Any]:
    checksum = checksum_parameters(part.checksum) if part.checksum is not None else {}
    return {"PartNumber": part.number, "ETag": part.etag, **checksum}
