"""How requests are authorized: by a shared access signature (SAS), or by a token of Microsoft Entra ID.

An account key is never sent, nor does it sign single requests: it signs a SAS for this container, valid for an hour.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.azure.account import KEY_NAMES, SAS_NAMES, Account, connection_string, first_of
from ckpt_async.stores.quiet import say_once

VERSION = "2023-11-03"
_SCOPE = "https://storage.azure.com/.default"
_SIGNED_S, _RENEW_S = 3600.0, 1800.0
# A token that is about to expire may do so in transit.
_MARGIN_S = 120.0
# By default, azure-identity waits 300 s for an answer from the token provider.
_ANSWER_S = 30
_KEYS = "set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING"
_NO_CREDENTIALS = (
    f"{_KEYS}; for a managed identity, workload identity or `az login`, run pip install '.[azure]' in the"
    " clone of ckpt_async"
)
_NO_IDENTITY = f"{_KEYS}, or give this machine an identity: `az login`, AZURE_CLIENT_*, a managed identity"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """What authorizes a request. It must never appear in a message."""

    query: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def source_headers(self) -> dict[str, str]:
        """Return the headers for the source of a copy, whose URL carries `query`."""
        return {f"x-ms-copy-source-{name.lower()}": value for name, value in self.headers.items()}


class Access:
    """Finds the credentials when they are first needed, and again after `forget`."""

    def __init__(self, account: Account, container: str, env: Mapping[str, str]) -> None:
        self._account, self._container, self._env = account, container, env
        self._grant: Grant | None = None
        self._renew_at = 0.0  # by time.time()
        self._identity: Any = None
        self._asking: asyncio.Future[tuple[Grant, float]] | None = None
        self._lock = asyncio.Lock()

    async def grant(self) -> Grant:
        """Return a valid grant. Raises StoreError if there are no credentials."""
        async with self._lock:
            if self._grant is None or time.time() >= self._renew_at:
                self._grant, self._renew_at = await self._find()
            return self._grant

    def forget(self) -> None:
        """Look for credentials again: they were refused, but the environment or the identity may have others by now."""
        self._renew_at = 0.0

    async def _find(self) -> tuple[Grant, float]:
        given = connection_string(self._env)
        if sas := given.get("SharedAccessSignature") or first_of(self._env, SAS_NAMES):
            return Grant(sas.strip().lstrip("?")), float("inf")
        if key := given.get("AccountKey") or first_of(self._env, KEY_NAMES):
            now = time.time()
            return Grant(signed(self._account.name, self._container, key, now + _SIGNED_S)), now + _RENEW_S
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask_identity))
            # Mark its exception as retrieved.
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        # A caller that gives up leaves the thread to the next one. Otherwise, threads that wait for an answer would
        # soon use up the pool.
        return await asyncio.shield(self._asking)

    def _ask_identity(self) -> tuple[Grant, float]:
        try:
            from azure.identity import DefaultAzureCredential
        except ImportError:
            raise _refused("there are no credentials", _NO_CREDENTIALS) from None
        say_once("azure")
        try:
            self._identity = self._identity or DefaultAzureCredential(
                connection_timeout=_ANSWER_S, read_timeout=_ANSWER_S
            )
            token = self._identity.get_token(_SCOPE)
        except Exception as error:
            # The message lists all that was tried, on many lines.
            logger.debug("azure_identity_failed error=%s", error)
            what = str(error).partition("\n")[0]
            raise _refused(
                f"no identity provided a token: {type(error).__name__}: {what}", _NO_IDENTITY
            ) from error
        headers = {"Authorization": f"Bearer {token.token}"}
        return Grant(headers=headers), max(time.time(), token.expires_on - _MARGIN_S)


def signed(account: str, container: str, key: str, expires_at: float) -> str:
    """Return a service SAS for all that we do to one container's blobs (form of version 2020-12-06). Pure."""
    permissions, expiry = "rcwdl", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))
    # In this order: permissions, start, expiry, resource, identifier, IP, protocol, version, kind of resource,
    # snapshot, encryption scope, and five response headers.
    text = "\n".join(
        [permissions, "", expiry, f"/blob/{account}/{container}", "", "", "", VERSION, "c", *[""] * 7]
    )
    try:
        secret = b64decode(key, validate=True)
    except ValueError:
        raise _refused("the account's key is not base64", "copy it from the Azure portal") from None
    signature = b64encode(hmac.digest(secret, text.encode(), "sha256")).decode()
    return urlencode({"sv": VERSION, "sr": "c", "sp": permissions, "se": expiry, "sig": signature})


def _refused(message: str, hint: str) -> StoreError:
    return StoreError(message, reason=FailureReason.AUTH, operation="open", hint=hint)
