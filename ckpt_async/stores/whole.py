"""Stores of whole objects, which have no multipart uploads and refuse every request about one."""

# ruff: noqa: ARG002 - the methods take what the protocol says, and refuse
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.checks import check_prefix
from ckpt_async.stores.interface import Body, MultipartInfo, ObjectInfo, StoredPart


class WholeObjects:
    """Base class of stores whose `capabilities.multipart` is False."""

    no_parts: ClassVar[str]  # the reason given in errors
    no_parts_reason: ClassVar[FailureReason] = FailureReason.OTHER

    async def copy_part(
        self, source: str, etag: str, key: str, upload_id: str, number: int, offset: int, size_bytes: int
    ) -> StoredPart:
        self._refuse_part("copy_part", key)

    async def create_multipart(self, key: str) -> str:
        self._refuse_part("create_multipart", key)

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Checksum | None
    ) -> StoredPart:
        self._refuse_part("put_part", key)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        self._refuse_part("list_parts", key)

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        self._refuse_part("complete_multipart", key)

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        self._refuse_part("abort_multipart", key)

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        """Return an empty list: there are no multipart uploads here."""
        check_prefix(prefix, "list_multiparts")
        return []

    def _refuse_part(self, operation: str, key: str) -> NoReturn:
        raise StoreError(self.no_parts, reason=self.no_parts_reason, operation=operation, key=key)
