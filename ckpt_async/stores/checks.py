"""Checks that every store makes on keys before a request, and on sizes in the answer."""

from __future__ import annotations

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.backend import UNPRINTABLE
from ckpt_async.stores.interface import SmallGet


def check_key(key: str, operation: str) -> str:
    """Return `key` if it can only name an object below the root (invariant I10), else raise StoreError."""
    if any(segment in ("", ".", "..") for segment in key.split("/")) or "\\" in key:
        raise StoreError(
            "the key has an empty, '.' or '..' segment or a backslash",
            reason=FailureReason.OTHER,
            operation=operation,
            key=key,
        )
    if UNPRINTABLE.search(key):
        raise StoreError(
            "the key has a control character or a lone surrogate",
            reason=FailureReason.OTHER,
            operation=operation,
            key=key,
        )
    return key


def check_prefix(prefix: str, operation: str) -> str:
    """Like `check_key` for the start of a key: it may be empty and may end in '/'."""
    if prefix:
        check_key(prefix.removesuffix("/"), operation)
    return prefix


def check_size(size_bytes: int, get: SmallGet) -> None:
    """Raise StoreError unless an object has the size that was asked for."""
    if size_bytes != get.size_bytes:
        raise StoreError(
            f"has {size_bytes} bytes, not {get.size_bytes}",
            reason=FailureReason.OTHER,
            operation="get",
            key=get.key,
        )
