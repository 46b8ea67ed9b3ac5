"""Parameters that go with every request for which S3 accepts them: requester pays, and a customer-provided key (SSE-C).

They come from the environment, as credentials do, never from a URL, and are not stored anywhere.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpt_async.errors import SettingsError
from ckpt_async.stores.s3.listing import is_directory_bucket

PAYER = "CKPT_ASYNC_S3_REQUEST_PAYER"
KEY = "CKPT_ASYNC_S3_SSE_C_KEY"
KEY_FILE = "CKPT_ASYNC_S3_SSE_C_KEY_FILE"

_KEY_BYTES = 32  # AES-256, the only algorithm that S3 supports
_KEY_HINT = (
    f"{KEY} is base64 of 32 bytes, {KEY_FILE} a file with them, raw or in base64: openssl rand -base64 32"
)
# The header names, for reads that bypass the SDK.
_HEADERS = {
    "RequestPayer": "x-amz-request-payer",
    "SSECustomerAlgorithm": "x-amz-server-side-encryption-customer-algorithm",
    "SSECustomerKey": "x-amz-server-side-encryption-customer-key",
    "SSECustomerKeyMD5": "x-amz-server-side-encryption-customer-key-md5",
}
NOTHING: Mapping[str, str] = MappingProxyType({})


def find_standing(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the parameters, by the SDK's names. Raises SettingsError, which never contains a key."""
    found: dict[str, str] = {}
    if payer := env.get(PAYER):
        if payer != "requester":
            raise SettingsError(f"{PAYER} is {payer!r}", hint="the only valid value is requester")
        found["RequestPayer"] = payer
    if (key := _find_key(env)) is not None:
        told = {
            "SSECustomerAlgorithm": "AES256",
            "SSECustomerKey": b64encode(key).decode(),
            "SSECustomerKeyMD5": b64encode(hashlib.md5(key, usedforsecurity=False).digest()).decode(),
        }
        # The source of a copy was written with the same key.
        found |= told | {f"CopySource{name}": value for name, value in told.items()}
    return found


def check_standing(
    standing: Mapping[str, str], bucket: str, put_args: Mapping[str, object], endpoint_url: str | None
) -> None:
    """Raise SettingsError for what S3 refuses: directory buckets, plain http, or another encryption beside this."""
    if standing and is_directory_bucket(bucket):
        raise SettingsError(
            f"{bucket} is a directory bucket: S3 supports neither requester pays nor customers' keys (SSE-C)"
            " there",
            hint=f"unset {PAYER}, {KEY} and {KEY_FILE}",
        )
    if "SSECustomerKey" not in standing:
        return
    if endpoint_url is not None and not endpoint_url.startswith("https:"):
        raise SettingsError(f"a customer's key (SSE-C) is sent only over https, not to {endpoint_url}")
    if others := sorted(name for name in put_args if name.startswith(("SSE", "ServerSide", "BucketKey"))):
        raise SettingsError(
            f"put_args has {', '.join(others)}, but {KEY} or {KEY_FILE} is set",
            hint="an object can have only one encryption: leave one of them out",
        )


def headers_to_read(standing: Mapping[str, str]) -> dict[str, str]:
    return {header: standing[name] for name, header in _HEADERS.items() if name in standing}


class AddStanding:
    """Handler of the SDK's event before it builds a request: adds the parameters that the operation accepts."""

    def __init__(self, standing: Mapping[str, str]) -> None:
        self._standing = standing

    def __call__(self, params: dict[str, Any], model: Any, **_: object) -> dict[str, Any]:
        taken = model.input_shape.members if model.input_shape is not None else {}
        return {**{name: value for name, value in self._standing.items() if name in taken}, **params}


def _find_key(env: Mapping[str, str]) -> bytes | None:
    text, path = env.get(KEY), env.get(KEY_FILE)
    if text and path:
        raise SettingsError(f"both {KEY} and {KEY_FILE} are set", hint="leave one of them out")
    if path:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise SettingsError(f"{KEY_FILE}: {path} cannot be read: {error.strerror}") from error
        return data if len(data) == _KEY_BYTES else _decoded(data, f"{KEY_FILE}: {path}")
    return _decoded(text.encode(), KEY) if text else None


def _decoded(data: bytes, name: str) -> bytes:
    try:
        key = b64decode(data.strip(), validate=True)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise SettingsError(f"{name} does not hold a key of 32 bytes", hint=_KEY_HINT)
    return key
