"""What Google's store enforces, which is everything, and emulators, which is less."""

from __future__ import annotations

import asyncio

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.gcs.answers import ALGORITHM
from ckpt_async.stores.http.probe import Probe
from ckpt_async.stores.interface import Create

OTHER_GENERATION = "1"


class GcsProbe(Probe):
    """Seven requests on one object, some of them concurrent; six if the store has no multipart uploads."""

    async def find_out(self) -> tuple[bool, bool]:
        """Return whether the store has conditional writes, and multipart uploads."""
        try:
            created = await self.within(lambda: self.put(ALGORITHM, Create()))
            async with asyncio.TaskGroup() as group:
                is_conditional = group.create_task(self.has_conditions(ALGORITHM, created))
                has_multipart = group.create_task(self.within(self._has_multipart))
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            await self.clean()
        return is_conditional.result(), has_multipart.result()

    async def _has_multipart(self) -> bool:
        """Return whether the store supports the XML API."""
        try:
            upload_id = await self._store.create_multipart(self._key)
        except StoreError as error:
            if error.reason in (FailureReason.NOT_FOUND, FailureReason.OTHER):
                return False
            raise
        await self._store.abort_multipart(self._key, upload_id)
        return True
