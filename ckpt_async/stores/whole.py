"""Stores of whole objects: they have no multipart uploads, and refuse every request about one."""

# ruff: noqa: ARG002 - the methods take what the protocol says, and refuse
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ckpt_async.core.keys import RESERVE
from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, ObjectTooLargeError, PreconditionFailedError, StoreError
from ckpt_async.stores.checks import check_key, check_prefix
from ckpt_async.stores.interface import (
    Body,
    Capabilities,
    Moved,
    MultipartInfo,
    ObjectInfo,
    StoredPart,
)
from ckpt_async.stores.tree import OWN


class WholeObjects:
    """Base class of stores whose `capabilities.multipart` is False."""

    no_parts: ClassVar[str]  # the reason given in errors
    no_parts_reason: ClassVar[FailureReason] = FailureReason.OTHER

    def __init__(self, url: str, capabilities: Capabilities) -> None:
        self._url, self._capabilities = url, capabilities

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def moved(self) -> Moved | None:
        return None

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


# --- folders, here or on a server -----------------------------------------------------------------------------


def check_folder_key(key: str, operation: str) -> None:
    """Raise StoreError for a key that could lead out of the root, or names what the store keeps for itself."""
    check_key(key, operation)
    if f"{key}/".startswith(f"{OWN}/") and (key, operation) != (RESERVE, "delete"):
        raise StoreError(
            "the store keeps its own files under this key",
            reason=FailureReason.OTHER,
            operation=operation,
            key=key,
        )


def check_limit(key: str, size_bytes: int, max_size_bytes: int) -> None:
    if size_bytes > max_size_bytes:
        raise ObjectTooLargeError(
            f"has {size_bytes} bytes, more than {max_size_bytes}", operation="get", key=key
        )


def check_range(key: str, total_bytes: int, offset: int, size_bytes: int) -> None:
    if offset + size_bytes > total_bytes:
        raise StoreError(
            f"bytes {offset}+{size_bytes} are beyond the object's {total_bytes}",
            reason=FailureReason.OTHER,
            operation="get_range",
            key=key,
        )


def check_same(key: str, etag: str, wanted_etag: str, operation: str) -> None:
    if etag != wanted_etag:
        raise PreconditionFailedError(operation=operation, key=key)
