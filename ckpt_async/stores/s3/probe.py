"""Finding out what a store enforces, by a few small requests on objects below `.ckpt-async/probe/`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from ckpt_async.errors import FailureReason, IntegrityError, StoreError
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.http.probe import Probe, gathered, is_verdict
from ckpt_async.stores.interface import BytesBody, Capabilities, Create, ObjectInfo, Store
from ckpt_async.stores.s3.answers import CHECKSUM_FIELDS
from ckpt_async.stores.s3.errors import is_reachable_hint
from ckpt_async.stores.s3.sending import Put, Sender
from ckpt_async.stores.s3.session import KEEPS_VERSIONS, S3Session
from ckpt_async.stores.s3.signing import RequestTemplate

T = TypeVar("T")

_NO_CHECKSUMS = (
    "this store accepts neither CRC64NVME nor CRC32C: nothing would verify what arrives, so it is not used"
)


class S3Probe(Probe):
    """Seven requests on two objects. Over TLS, three more run at the same time, which also use a third object. All
    objects are deleted again.
    """

    def __init__(self, store: Store, session: S3Session, sender: Sender, request_timeout_s: float) -> None:
        hint = is_reachable_hint(session.location)
        super().__init__(store, request_timeout_s, hint, other_etag='"0123456789abcdef0123456789abcdef"')
        self._session, self._sender = session, sender

    async def capabilities(self) -> Capabilities:
        """Return what the store supports. If it compares neither CRC64NVME nor CRC32C with what arrived, it is used all
        the same, with the algorithm that `head` reports. Such a store only repeats our checksum, so `put` cannot tell
        that bytes have changed on the way; only reading the object back can.
        """
        try:
            found = await self._find_out()
        except StoreError as error:
            if error.reason is not FailureReason.TIMEOUT:
                await self.clean()
            raise
        await self.clean()
        return found

    async def _find_out(self) -> Capabilities:
        created, algorithm, is_enforced = await self._checksums()
        (is_conditional, info), heeds_trailers = await gathered(
            self._conditions(algorithm, created), self._heeds_trailers(algorithm)
        )
        if is_enforced:
            if "put_object" in self._sender.templates:
                await self._sender.learn_parts(self._trailed, algorithm)
            if heeds_trailers:
                self._sender.trailers_from = -math.inf
        if not is_enforced and info.checksum is not None:
            algorithm = info.checksum.algorithm
        return Capabilities(
            conditional_put=is_conditional,
            multipart=True,
            checksum_algorithm=algorithm,
            reads_back=not is_enforced and info.checksum is None,
            remarks=(KEEPS_VERSIONS,) * self._session.keeps_versions,
        )

    async def _conditions(self, algorithm: str, created: ObjectInfo) -> tuple[bool, ObjectInfo]:
        is_conditional, info = await gathered(
            self.has_conditions(algorithm, created.etag), self.within(lambda: self._store.head(self._key))
        )
        if not is_conditional and await self.is_put_refused(algorithm, Create()):
            # It may want the ETag bare.
            self._session.is_etag_quoted = False
            etag = await self.within(lambda: self.put(algorithm))
            is_conditional = await self.has_conditions(algorithm, etag)
            self._session.is_etag_quoted = not is_conditional
        return is_conditional, info

    async def _heeds_trailers(self, algorithm: str) -> bool:
        """Return whether the store removes the framing of chunks from a body and compares it with the checksum that
        follows. Any other failure of this test is no reason not to open the store.
        """
        template = self._sender.templates.get("put_object")
        if template is None or not template.origin.startswith("https:"):
            return False
        right, wrong = Digest(algorithm), Digest(algorithm)
        wrong.update(b"b")

        # The two requests differ only in key and checksum. SeaweedFS answers the wrong one with 400 IncompleteBody.
        def requests() -> Coroutine[Any, Any, Sequence[Any]]:
            spoiled = self._put_trailed(template, self._spoiled, wrong)
            return gathered(spoiled, self._put_and_head(template, right))

        try:
            status, stored = await self.within(requests)
        except StoreError:
            return False
        return bool(status == 400 and stored == (1, checksum_of(b"a", algorithm)))

    async def _put_trailed(self, template: RequestTemplate, key: str, digest: Digest) -> int:
        put = Put("put_object", key, {})
        return (await self._sender.try_trailer(template, put, BytesBody(b"a"), digest)).status

    async def _put_and_head(self, template: RequestTemplate, digest: Digest) -> object:
        if await self._put_trailed(template, self._trailed, digest) >= 300:
            return None
        info = await self._store.head(self._trailed)
        return info.size_bytes, info.checksum

    async def _checksums(self) -> tuple[ObjectInfo, str, bool]:
        """Create the probe object. Return it, the best algorithm, and whether the store compares that."""
        accepted: tuple[ObjectInfo, str, bool] | None = None
        for algorithm in CHECKSUM_FIELDS:
            right, wrong = checksum_of(b"a", algorithm), checksum_of(b"b", algorithm)
            written, spoilt = await asyncio.gather(
                self.within(partial(self._store.put, self._key, BytesBody(b"a"), right)),
                self.within(partial(self._store.put, self._spoiled, BytesBody(b"a"), wrong)),
                return_exceptions=True,
            )
            for outcome in (written, spoilt):
                if isinstance(outcome, BaseException) and not is_verdict(outcome):
                    raise outcome
            if isinstance(written, BaseException):
                refusal = written
            elif isinstance(spoilt, IntegrityError):
                return written, algorithm, True
            else:
                accepted = accepted or (written, algorithm, False)
        if accepted is None:
            if "checksum" in str(refusal) and isinstance(refusal, StoreError):
                raise StoreError(str(refusal), reason=refusal.reason, hint=_NO_CHECKSUMS) from refusal
            raise refusal
        return accepted
