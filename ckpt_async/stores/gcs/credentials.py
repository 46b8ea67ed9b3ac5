"""Who asks: tokens by Google's own default chain, renewed in time and when one was refused."""

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
_TOKEN_S = 30.0  # for one request to whoever gives tokens
# A token that is younger than this was not refused for its age.
_YOUNG_S = 60.0

NO_CREDENTIALS = (
    "no usable credentials: `gcloud auth application-default login`, GOOGLE_APPLICATION_CREDENTIALS, or a service"
    " account for this machine or pod"
)


class Credentials(Protocol):
    """Of one store; belongs to its event loop."""

    async def headers(self) -> Mapping[str, str]:
        """What says who asks. Raises google.auth's errors."""
        ...

    def were_refused(self) -> bool:
        """Told of a 401. Whether the next `headers` will be others."""
        ...


class Anonymous:
    """For emulators, and for public buckets where this machine has no credentials."""

    async def headers(self) -> Mapping[str, str]:
        return {}

    def were_refused(self) -> bool:
        return False


class GoogleCredentials:
    """Whatever `google.auth.default` finds: a file that GOOGLE_APPLICATION_CREDENTIALS names (service account, workload
    identity federation), what `gcloud auth application-default login` has left, else the metadata server (Compute
    Engine, GKE's workload identity). GOOGLE_CLOUD_QUOTA_PROJECT is whom requests are billed to.
    """

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials
        self._renewing = asyncio.Lock()
        self._is_refused = False
        self._renewed_at = time.monotonic()

    @classmethod
    async def find(cls) -> GoogleCredentials:
        """Looks into files and perhaps asks the metadata server. Raises DefaultCredentialsError."""
        credentials, _ = await asyncio.to_thread(google.auth.default, scopes=_SCOPES)
        return cls(credentials)

    async def headers(self) -> Mapping[str, str]:
        if self._is_stale:
            async with self._renewing:
                if self._is_stale:
                    # Cancelled, the thread goes on: what it finds is for the next one.
                    await asyncio.to_thread(self._renew)
        headers: dict[str, str] = {}
        self._credentials.apply(headers)  # who pays too
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
