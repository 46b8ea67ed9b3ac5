"""Sending bodies with a digest, so that the service compares what arrives.

Azure's CRC64 is the CRC-64/NVME that is computed for every shard anyway, so it is sent as it is. For a service that
knows only MD5 (an emulator), that is computed by reading the same bytes once more.
"""

from __future__ import annotations

import enum
import hashlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from ckpt_async.core.model import Checksum
from ckpt_async.stores.azure import answers
from ckpt_async.stores.azure.blocks import ALGORITHM
from ckpt_async.stores.azure.session import NOTHING, AzureSession, Query
from ckpt_async.stores.bodies import LocalWriter, send_in_thread
from ckpt_async.stores.checksums import Digest
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.small_uploads import SmallRequest
from ckpt_async.stores.http.uploads import head_of
from ckpt_async.stores.interface import Body, ObjectInfo, SmallPut

BLOB = {"x-ms-blob-type": "BlockBlob"}


class Compared(enum.Enum):
    """The digest that the service compares with the bytes that arrive."""

    CRC64 = "x-ms-content-crc64"
    MD5 = "Content-MD5"


class Sender:
    """Sends bodies in such a way that the service compares their bytes."""

    def __init__(self, session: AzureSession) -> None:
        self._session, self._location = session, session.location
        self.compared = Compared.MD5  # until the probe finds out: Azure takes either

    async def put(
        self,
        operation: str,
        key: str,
        body: Body,
        checksum: Checksum,
        *,
        query: Query = NOTHING,
        headers: Mapping[str, str] = NOTHING,
        is_conditional: bool = False,
    ) -> tuple[Response, Checksum | None]:
        """Make one attempt. Return the answer, and the checksum if the service has told what arrived."""
        digests = await self._digests(operation, key, body, checksum)
        answer = await self._session.put(
            operation, key, query, {**headers, **digests}, body, is_conditional=is_conditional
        )
        with self._location.translating(operation, key):
            return answer, self._checked(operation, key, answer, digests, checksum)

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        """Send objects one after the other on one connection, up to the first that fails."""
        grant = await self._session.access.grant()
        sent: dict[str, tuple[SmallPut, dict[str, str]]] = {}

        def requests() -> Iterator[SmallRequest]:
            for put in puts:
                digests = self._digests_of(put)
                sent[put.key] = put, digests
                url = self._session.url(put.key, "put_blob", grant)
                size = {"Content-Length": str(len(put.data)), "Content-Type": "application/octet-stream"}
                more = {**BLOB, **size, **answers.metadata(put.checksum), **digests}
                yield SmallRequest(
                    put.key, head_of(urlsplit(url), self._session.headers(grant, more)), put.data
                )

        def answered(request: SmallRequest, answer: Response) -> None:
            put, digests = sent.pop(request.key)
            with self._location.translating("put_blob", put.key):
                answers.check_origin(answer)
                told = self._checked("put_blob", put.key, answer, digests, put.checksum)
                stored(ObjectInfo(put.key, len(put.data), answers.etag(answer), told))

        with self._location.translating("put_blob", ""):
            refused = await self._session.pools.small_uploads.put_many(
                self._location.account.endpoint_url, requests(), answered
            )
        if refused is not None:
            request, answer = refused
            raise self._session.refused(answer, "put_blob", request.key)

    async def _digests(self, operation: str, key: str, body: Body, checksum: Checksum) -> dict[str, str]:
        """Return the header by which the service compares what arrives. If the service does not know the algorithm of
        `checksum`, that is compared here, by reading the whole body.
        """
        if self._knows(checksum):
            return {self.compared.value: answers.crc64_header(checksum)}
        digests = _Digests(checksum.algorithm, self.compared)
        await send_in_thread(body, LocalWriter(digests.update))
        return self._header(operation, key, digests, checksum)

    def _digests_of(self, put: SmallPut) -> dict[str, str]:
        if self._knows(put.checksum):
            return {self.compared.value: answers.crc64_header(put.checksum)}
        digests = _Digests(put.checksum.algorithm, self.compared)
        digests.update(memoryview(put.data))
        return self._header("put_blob", put.key, digests, put.checksum)

    def _knows(self, checksum: Checksum) -> bool:
        return self.compared is Compared.CRC64 and checksum.algorithm == ALGORITHM

    def _header(self, operation: str, key: str, digests: _Digests, checksum: Checksum) -> dict[str, str]:
        if (found := digests.checksum()) != checksum:
            raise self._location.spoilt(f"the body has {found}, not {checksum}", operation=operation, key=key)
        return {self.compared.value: digests.compared()}

    def _checked(
        self, operation: str, key: str, answer: Response, digests: Mapping[str, str], checksum: Checksum
    ) -> Checksum | None:
        """Return the checksum if the answer has the digest of these very bytes, None if it has no digest."""
        is_told = False
        for name, sent in digests.items():
            if (told := answer.headers.get(name.lower())) is not None:
                is_told = True
                if told != sent:
                    problem = f"arrived with the {name} {told}, not {sent}"
                    raise self._location.spoilt(problem, operation=operation, key=key)
        return checksum if is_told else None


class _Digests:
    """Two running digests of one body: one in the caller's algorithm, one in that which the service compares."""

    def __init__(self, algorithm: str, compared: Compared) -> None:
        self._own = Digest(algorithm)
        self._crc64 = Digest(ALGORITHM) if compared is Compared.CRC64 else None
        self._md5 = hashlib.md5(usedforsecurity=False)

    def update(self, piece: memoryview) -> None:
        self._own.update(piece)
        if self._crc64 is None:
            self._md5.update(piece)
        else:
            self._crc64.update(piece)

    def checksum(self) -> Checksum:
        return self._own.checksum()

    def compared(self) -> str:
        if self._crc64 is None:
            return b64encode(self._md5.digest()).decode()
        return answers.crc64_header(self._crc64.checksum())
