"""What an Azure store enforces, or an emulator."""

from __future__ import annotations

from functools import partial

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.azure import answers
from ckpt_async.stores.azure.blocks import ALGORITHM
from ckpt_async.stores.azure.sending import BLOB, Compared, Sender
from ckpt_async.stores.azure.session import NOTHING, AzureSession
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.http.failures import reachable_hint
from ckpt_async.stores.http.probe import Probe
from ckpt_async.stores.interface import BytesBody, Store

_WRONG = {
    Compared.CRC64: answers.crc64_header(checksum_of(b"b", ALGORITHM)),
    Compared.MD5: "kutf/uauL+w61xx3dTFXjw==",
}


class AzureProbe(Probe):
    """Five small writes to two blobs, which are deleted again; six if the store does not compare CRC64."""

    def __init__(self, store: Store, session: AzureSession, sender: Sender, request_timeout_s: float) -> None:
        hint = reachable_hint(session.location.account.endpoint_url)
        super().__init__(store, request_timeout_s, hint, other_etag='"0x8D0000000000000"')
        self._session, self._sender = session, sender

    async def is_conditional(self) -> bool:
        """Return whether conditions are enforced, and tell the sender which checksum the store compares. Raises
        StoreError if it compares none.
        """
        try:
            self._sender.compared = await self._compared()
            created = await self.within(lambda: self.put(ALGORITHM))
            return await self.has_conditions(ALGORITHM, created)
        finally:
            await self.clean()

    async def _compared(self) -> Compared:
        for each in Compared:
            headers = {**BLOB, each.value: _WRONG[each]}
            wrong = partial(self._session.put, "put_blob", self._spoiled, NOTHING, headers, BytesBody(b"a"))
            try:
                await self.within(wrong)
            except StoreError as error:
                if error.reason is FailureReason.CHECKSUM:
                    return each
                if error.reason is not FailureReason.OTHER:
                    raise
        raise self._session.location.error(
            "the store verifies neither CRC64 nor MD5 of the bytes that it receives",
            reason=FailureReason.OTHER,
            operation="open",
            hint="is the endpoint Azure, or an emulator that verifies them (Azurite)?",
        )
