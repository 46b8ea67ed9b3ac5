"""Who makes the requests: tokens from Google's default chain, renewed in time and after a refusal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import google.auth
import google.auth.exceptions
from google.auth.transport.requests import Request

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_TOKEN_S = 30.0  # for one request to the token provider
# A token younger than this was not refused because of its age.
_YOUNG_S = 60.0

NO_CREDENTIALS = (
    "no usable credentials: `gcloud auth application-default login`, GOOGLE_APPLICATION_CREDENTIALS, or a service"
    " account for this machine or pod"
)


class Credentials(Protocol):
    """The credentials of one store. They belong to its event loop."""

    async def headers(self) -> Mapping[str, str]:
        """Return the headers that authorize a request. Raises google.auth's errors."""
        ...

    def were_refused(self) -> bool:
        """Take note of a 401. Return whether the next `headers` will be different ones."""
        ...


class Anonymous:
    """No credentials: for emulators, and for public buckets if this machine has none."""

    async def headers(self) -> Mapping[str, str]:
        return {}

    def were_refused(self) -> bool:
        return False


class GoogleCredentials:
    """What `google.auth.default` finds: a file named by GOOGLE_APPLICATION_CREDENTIALS (service account, workload
    identity federation), what `gcloud auth application-default login` has stored, or else the metadata server (Compute
    Engine, GKE's workload identity). GOOGLE_CLOUD_QUOTA_PROJECT names the project that requests are billed to.
    """

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials
        self._renewing = asyncio.Lock()
        self._is_refused = False
        self._renewed_at = time.monotonic()

    @classmethod
    async def find(cls) -> GoogleCredentials:
        """Find them, reading files and perhaps asking the metadata server. Raises DefaultCredentialsError."""
        credentials, _ = await asyncio.to_thread(google.auth.default, scopes=_SCOPES)
        return cls(credentials)

    async def headers(self) -> Mapping[str, str]:
        if self._is_stale:
            async with self._renewing:
                if self._is_stale:
                    # If this is cancelled, the thread carries on, and the next call gets what it finds.
                    await asyncio.to_thread(self._renew)
        headers: dict[str, str] = {}
        self._credentials.apply(headers)  # also adds the project that pays
        return headers

    def were_refused(self) -> bool:
        if time.monotonic() - self._renewed_at < _YOUNG_S:
            return False
        self._is_refused = True
        return True

    @property
    def _is_stale(self) -> bool:
        return self._is_refused or not self._credentials.valid

    def _renew(self) -> None:
        self._credentials.refresh(partial(Request(), timeout=_TOKEN_S))
        self._is_refused, self._renewed_at = False, time.monotonic()
