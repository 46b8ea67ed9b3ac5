"""Azure Blob Storage, as block blobs.

The service compares what arrives, blob by blob and block by block, with a CRC64 of the same bytes that are sent. It
compares nothing over the whole of a blob that is made of blocks. That such a blob is the file follows from the blocks'
checksums, which `complete_multipart` combines, and from the order in which it commits them. Our checksum of the whole
is kept as metadata, which is part of every answer about the blob.

This module must not retry: one call is one attempt. (Only requests without a body, that is GET, HEAD and DELETE, are
repeated once by aiohttp if the connection breaks before an answer.)
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_async.core.model import Checksum
from ckpt_async.core.units import MIB
from ckpt_async.errors import ObjectNotFoundError, PreconditionFailedError, StoreError
from ckpt_async.stores.azure import answers, blocks
from ckpt_async.stores.azure.access import Access
from ckpt_async.stores.azure.account import Account
from ckpt_async.stores.azure.blocks import ALGORITHM, Block
from ckpt_async.stores.azure.errors import AzureLocation
from ckpt_async.stores.azure.probe import AzureProbe
from ckpt_async.stores.azure.sending import BLOB, Sender
from ckpt_async.stores.azure.session import NOTHING, AzureSession
from ckpt_async.stores.checks import check_prefix
from ckpt_async.stores.checksums import checksum_of, combine
from ckpt_async.stores.http.bucket import BucketStore, Page, Way, at_once
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.interface import (
    Body,
    BytesBody,
    Capabilities,
    Condition,
    Create,
    Match,
    MultipartInfo,
    ObjectInfo,
    SmallPut,
    StoredPart,
)
from ckpt_async.stores.options import StoreOptions

# "Scalability and performance targets for Blob storage". "Copy Blob From URL" does not copy larger blobs.
_MAX_BLOCKS, _MAX_COPY_BYTES = 50_000, 256 * MIB
_AT_ONCE = 16  # small requests of one call that run concurrently
_MARK = BytesBody(b".")  # a block has at least one byte


class AzureStore(BucketStore[AzureSession]):
    """Blobs below `prefix` of one container.

    `put` answers with the size it sent: a blob is stored whole, exactly Content-Length bytes, or not at all.
    """

    get_operation, list_operation = "get_blob", "list_blobs"

    def __init__(
        self,
        account: Account,
        container: str,
        prefix: str,
        options: StoreOptions,
        *,
        url: str,
        env: Mapping[str, str],
    ) -> None:
        root = f"{prefix}/" if prefix else ""
        location = AzureLocation(container, root, account.endpoint_url, account)
        super().__init__(AzureSession(location, Access(account, container, env), options), url)
        self._sender = Sender(self._session)

    def _unproven(self) -> Capabilities:
        return Capabilities(
            conditional_put=False,
            multipart=True,
            checksum_algorithm=ALGORITHM,
            min_part_size_bytes=1,
            max_parts=_MAX_BLOCKS - 1,  # one block is our mark
            max_copy_bytes=_MAX_COPY_BYTES,
        )

    async def _find_out(self, request_timeout_s: float) -> Capabilities:
        probe = AzureProbe(self, self._session, self._sender, request_timeout_s)
        return replace(self._unproven(), conditional_put=await probe.is_conditional())

    # --- objects -------------------------------------------------------------------------------------------

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        headers = {**BLOB, **answers.metadata(checksum), **_condition_headers(condition)}
        answer, told = await self._sender.put(
            "put_blob", key, body, checksum, headers=headers, is_conditional=condition is not None
        )
        with self._translating("put_blob", key):
            return ObjectInfo(key, body.size_bytes, answers.etag(answer), told)

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        await self._sender.put_many(puts, stored)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        """As specified. If the blob has our checksum, the bytes have been compared with it."""
        answer = await self._session.call("GET", "get_blob", key, max_size_bytes=max_size_bytes)
        with self._translating("get_blob", key):
            info = answers.info(key, answer)
        self._check_data(key, answer.error, info)
        return answer.error, info

    async def _way(self) -> Way:
        grant = await self._session.access.grant()
        url_of = functools.partial(self._session.url, operation="get_blob", grant=grant)
        return Way(self._location.account.endpoint_url, url_of, self._session.headers(grant))

    def _check_origin(self, answer: Response) -> None:
        answers.check_origin(answer)

    def _info_of_part(self, key: str, answer: Response, size_bytes: int) -> ObjectInfo:
        return answers.info_of_part(key, answer, size_bytes)

    async def _read_refused(self, key: str, answer: Response) -> StoreError:
        return self._session.refused(answer, "get_blob", key)

    async def head(self, key: str) -> ObjectInfo:
        answer = await self._session.call("HEAD", "head_blob", key)
        with self._translating("head_blob", key):
            return answers.info(key, answer)

    async def _pages(self, prefix: str, start_after: str = "", **asked: str) -> AsyncIterator[Page]:  # noqa: ARG002
        """As specified. Azure cannot start a listing in the middle, so the keys before `start_after` are listed too."""
        asked |= {"restype": "container", "comp": "list", "prefix": self._root + prefix}
        marker, is_last = "", False
        while not is_last:
            query = {**asked, "marker": marker} if marker else asked
            answer = await self._session.call("GET", "list_blobs", None, query, about=prefix)
            with self._translating("list_blobs", prefix):
                page, marker = answers.page(answer, asked["prefix"], marker)
            yield page
            is_last = page.is_last

    async def _delete_one(self, key: str) -> None:
        await self._session.call("DELETE", "delete_blob", key)

    async def delete_if(self, key: str, etag: str) -> None:
        await self._session.call("DELETE", "delete_blob", key, headers={"If-Match": etag})

    async def copy(self, source: str, etag: str, key: str) -> None:
        """Copy with Copy Blob From URL, which is done when it answers. Metadata is copied too."""
        headers = {**await self._source(source, etag), "x-ms-requires-sync": "true"}
        await self._session.put("copy_blob", key, NOTHING, headers, BytesBody(b""), is_conditional=True)

    async def _source(self, source: str, etag: str) -> dict[str, str]:
        url = self._session.url(source, "copy_blob", grant := await self._session.access.grant())
        return {"x-ms-copy-source": url, "x-ms-source-if-match": etag, **grant.source_headers()}

    # --- uploads in parts ----------------------------------------------------------------------------------

    async def create_multipart(self, key: str) -> str:
        """Begin an upload by sending a first block, which is never committed: Azure knows only blocks, and this one
        makes the upload exist.
        """
        upload_id = blocks.new_upload_id(time.time() + self._session.clock_ahead_s)
        await self._put_block(key, upload_id, blocks.MARK, _MARK, checksum_of(_MARK.data, ALGORITHM))
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum | None
    ) -> StoredPart:
        """As specified, except that a part of an aborted upload is accepted too; completing that upload will fail."""
        assert checksum is not None, "this store computes no checksums"
        await self._put_block(key, upload_id, number, body, checksum)
        return StoredPart(number, body.size_bytes, blocks.block_id(upload_id, number, checksum), checksum)

    async def _put_block(self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum) -> None:
        query = {"comp": "block", "blockid": blocks.block_id(upload_id, number, checksum)}
        await self._sender.put("put_block", key, body, checksum, query=query)

    async def copy_part(
        self, source: str, etag: str, key: str, upload_id: str, number: int, offset: int, size_bytes: int
    ) -> StoredPart:
        """Copy with Put Block From URL, whose answer has the CRC64 of what was copied."""
        id_ = blocks.block_id(upload_id, number, None)
        headers = {
            **await self._source(source, etag),
            "x-ms-source-range": f"bytes={offset}-{offset + size_bytes - 1}",
        }
        query = {"comp": "block", "blockid": id_}
        answer = await self._session.put(
            "copy_block", key, query, headers, BytesBody(b""), is_conditional=True
        )
        with self._translating("copy_block", key):
            return StoredPart(number, size_bytes, id_, answers.told_crc64(answer))

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        """As specified. Azure discards blocks that are not committed within a week, all those of a blob at once."""
        ours, _ = await self._blocks(key)
        if (parts := blocks.parts_of(ours, upload_id)) is None:
            raise self._location.not_found("there is no such upload", operation="get_block_list", key=key)
        return parts

    async def _blocks(self, key: str) -> tuple[Sequence[Block], bool]:
        """Return our uncommitted blocks, and whether there are others. ObjectNotFoundError if there is nothing."""
        query = {"comp": "blocklist", "blocklisttype": "uncommitted"}
        answer = await self._session.call("GET", "get_block_list", key, query)
        with self._translating("get_block_list", key):
            return answers.uncommitted_blocks(answer)

    async def _complete(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        """As specified: the checksums of the blocks, each compared by the service, must combine to that of the whole.
        Once blocks are committed, be it by this upload or another one of this key, they are gone.
        """
        self._check_whole(key, upload_id, parts, checksum, size_bytes)
        answer = await self._commit(key, [part.etag for part in parts], answers.metadata(checksum))
        with self._translating("put_block_list", key):
            return ObjectInfo(key, size_bytes, answers.etag(answer))

    async def _commit(self, key: str, ids: Sequence[str], headers: Mapping[str, str]) -> Response:
        body = BytesBody(answers.block_list(ids))
        checksum, query = checksum_of(body.data, ALGORITHM), {"comp": "blocklist"}
        is_conditional = "If-None-Match" in headers
        answer, _ = await self._sender.put(
            "put_block_list", key, body, checksum, query=query, headers=headers, is_conditional=is_conditional
        )
        return answer

    def _check_whole(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> None:
        told = [(part.checksum, part.size_bytes) for part in parts if part.checksum is not None]
        named = [blocks.block_of(part.etag, part.size_bytes) for part in parts]
        if [(each.upload_id, each.number) for each in named if each] != [
            (upload_id, part.number) for part in parts
        ]:
            problem = "a part belongs to another upload or position"
        elif len(told) < len(parts) or any(each.algorithm != checksum.algorithm for each, _ in told):
            problem = f"some parts have no {checksum.algorithm} checksum"
        elif (total := sum(size for _, size in told)) != size_bytes:
            problem = f"the parts have {total} bytes, not {size_bytes}"
        elif (whole := combine(told, checksum.algorithm)) != checksum:
            problem = f"the parts have {whole}, not {checksum}"
        else:
            return
        raise self._location.spoilt(problem, operation="put_block_list", key=key)

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop the blocks of an upload, if possible. Azure can do that only by committing the blob, so if the key has
        no blob, an empty one is made, which drops them, and deleted. If there is a blob, or another upload of the same
        key, the blocks are left to expire within a week.
        """
        with contextlib.suppress(ObjectNotFoundError, PreconditionFailedError):
            ours, has_others = await self._blocks(key)
            if has_others or {block.upload_id for block in ours} != {upload_id}:
                return
            answer = await self._commit(key, [], _condition_headers(Create()))
            await self.delete_if(key, answers.etag(answer))

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        """List uploads of keys without a blob: Azure does not list blocks beside a blob, which expire in a week."""
        check_prefix(prefix, "list_blobs")
        found: list[MultipartInfo] = []

        async def look(name: str) -> None:
            key = name.removeprefix(self._root)
            ours, _ = await self._blocks(key)
            ids = {block.upload_id for block in ours if block.number == blocks.MARK}
            found.extend(MultipartInfo(key, each, blocks.began_at(each)) for each in sorted(ids))

        names: list[str] = []
        async for page in self._pages(prefix, include="uncommittedblobs"):
            names += [each.key for each in page.objects if not each.size_bytes]
        await at_once(look, names)
        return sorted(found, key=lambda each: (each.key, each.upload_id))


def _condition_headers(condition: Condition) -> dict[str, str]:
    match condition:
        case None:
            return {}
        case Create():
            return {"If-None-Match": "*"}
        case Match(etag):
            return {"If-Match": etag}
