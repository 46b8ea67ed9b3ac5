"""Who signs the requests: what the SDK's chain finds, by one lookup at a time, and read again after a refusal."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import botocore.credentials
import botocore.exceptions
from aiobotocore.session import AioSession

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.s3.signing import Credentials

logger = logging.getLogger(__name__)

# Time limit of whoever provides temporary credentials. Requests that wait for them give up sooner and are retried.
GIVEN_WITHIN_S = 45.0
READ_AGAIN_S = 5.0


class Signer:
    """The credentials of one store's client. Belongs to its event loop."""

    def __init__(self, profile: str | None) -> None:
        self._profile = profile
        self._found: Any = None
        self._renewing: asyncio.Future[Credentials] | None = None
        self._is_refused, self._read_at = False, time.monotonic()

    async def find(self, session: AioSession) -> None:
        """Find the credentials of the session, which its clients share."""
        self._found = await session.get_credentials()

    async def credentials(self) -> Credentials | None:
        """Return the credentials, or None if there are none. One task renews temporary ones, however many callers wait
        for it or give up: otherwise each caller that gives up would leave a `credential_process` running, and the next
        one would start another.
        """
        if self._is_refused and time.monotonic() >= self._read_at + READ_AGAIN_S:
            await self._read_again()
        if not self._renews_itself or not self._found.refresh_needed():
            return None if self._found is None else await self._frozen()
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.ensure_future(asyncio.wait_for(self._frozen(), GIVEN_WITHIN_S))
            # Mark its exception as retrieved.
            self._renewing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(self._renewing)

    def heed(self, error: StoreError) -> StoreError:
        """Take note of an error and return it. If credentials were refused, look for others before the next request."""
        self._is_refused = self._is_refused or error.reason is FailureReason.AUTH
        return error

    def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    @property
    def _renews_itself(self) -> bool:
        return isinstance(self._found, botocore.credentials.RefreshableCredentials)

    async def _frozen(self) -> Credentials:
        try:
            frozen: Credentials = await self._found.get_frozen_credentials()
        except RuntimeError as error:  # the new ones have expired already
            raise botocore.exceptions.CredentialRetrievalError(
                provider=self._found.method, error_msg=str(error)
            ) from error
        return frozen

    async def _read_again(self) -> None:
        """Read the credentials again: keys in a file may have been replaced. Temporary credentials renew themselves."""
        self._is_refused, self._read_at = False, time.monotonic()
        if self._found is None or self._renews_itself:
            return
        try:
            now = await AioSession(profile=self._profile).get_credentials()
            frozen = None if now is None else await now.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001  a file that is just being written, say
            logger.warning("credentials_not_read error=%s; the ones in use were refused; trying again", error)
            self._is_refused = True
            return
        if frozen is not None:
            # Change it in place: the client holds this very object.
            self._found.access_key, self._found.secret_key = frozen.access_key, frozen.secret_key
            self._found.token = frozen.token
