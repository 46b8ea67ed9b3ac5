"""Finding out what a store enforces, by a few small requests on objects below `.ckpt-async/probe/`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from ckpt_async.core.keys import PROBES, longest_keys
from ckpt_async.errors import FailureReason, IntegrityError, PreconditionFailedError, StoreError
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.interface import BytesBody, Capabilities, Condition, Create, Match, ObjectInfo, Store
from ckpt_async.stores.opening import in_time
from ckpt_async.stores.s3.answers import CHECKSUM_FIELDS
from ckpt_async.stores.s3.errors import is_reachable_hint
from ckpt_async.stores.s3.sending import Put, Sender
from ckpt_async.stores.s3.session import KEEPS_VERSIONS, S3Session
from ckpt_async.stores.s3.signing import RequestTemplate

T = TypeVar("T")

_OTHER_ETAG = '"0123456789abcdef0123456789abcdef"'
_NO_CHECKSUMS = (
    "this store accepts neither CRC64NVME nor CRC32C: nothing would verify what arrives, so it is not used"
)


class Probe:
    """Seven requests on two objects. Over TLS, three more run at the same time, which also use a third object. All
    objects are deleted again.
    """

    def __init__(self, store: Store, session: S3Session, sender: Sender, request_timeout_s: float) -> None:
        self._store, self._session, self._sender = store, session, sender
        self._timeout_s = request_timeout_s
        # As long as the longest key of a run, to find out here if the store refuses such keys.
        name = f"{PROBES}{secrets.token_hex(8)}".ljust(max(map(len, longest_keys())) - len("-a"), "0")
        self._key, self._spoiled, self._trailed = f"{name}-a", f"{name}-b", f"{name}-c"

    async def capabilities(self) -> Capabilities:
        """Return what the store supports. If it compares neither CRC64NVME nor CRC32C with what arrived, it is used all
        the same, with the algorithm that `head` reports. Such a store only repeats our checksum, so `put` cannot tell
        that bytes have changed on the way; only reading the object back can.
        """
        try:
            found = await self._find_out()
        except StoreError as error:
            if error.reason is not FailureReason.TIMEOUT:
                await self._delete()
            raise
        await self._delete()
        return found

    async def _find_out(self) -> Capabilities:
        created, algorithm, is_enforced = await self._checksums()
        (is_conditional, info), heeds_trailers = await _gather(
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
        is_refused, is_stale_refused, info = await _gather(
            self._is_refused(algorithm, Create()),
            self._is_refused(algorithm, Match(_OTHER_ETAG)),
            self._in_time(lambda: self._store.head(self._key)),
        )
        # If the store refuses every If-Match, it does not enforce conditions either, unless it wants the ETag bare.
        is_swapped = not await self._is_refused(algorithm, Match(created.etag))
        if is_refused and is_stale_refused and not is_swapped:
            self._session.is_etag_quoted = False
            is_swapped = not await self._is_refused(algorithm, Match(created.etag))
            is_stale_refused = await self._is_refused(algorithm, Match(_OTHER_ETAG))
        return is_refused and is_stale_refused and is_swapped, info

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
            return _gather(spoiled, self._put_and_head(template, right))

        try:
            status, stored = await self._in_time(requests)
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
                self._in_time(partial(self._store.put, self._key, BytesBody(b"a"), right)),
                self._in_time(partial(self._store.put, self._spoiled, BytesBody(b"a"), wrong)),
                return_exceptions=True,
            )
            for outcome in (written, spoilt):
                if isinstance(outcome, BaseException) and not _is_verdict(outcome):
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

    async def _is_refused(self, algorithm: str, condition: Condition) -> bool:
        body = BytesBody(secrets.token_bytes(8))
        checksum = checksum_of(body.data, algorithm)
        try:
            await self._in_time(partial(self._store.put, self._key, body, checksum, condition=condition))
        except PreconditionFailedError:
            return True
        except StoreError as error:
            # A refusal of headers that the store does not know is a result too: it enforces nothing.
            if not _is_verdict(error):
                raise
        return False

    async def _delete(self) -> None:
        """Delete the objects, best effort: credentials without the right to delete are allowed, and keep them."""
        with contextlib.suppress(StoreError):
            await self._in_time(lambda: self._store.delete([self._key, self._spoiled, self._trailed]))

    async def _in_time(self, request: Callable[[], Awaitable[T]]) -> T:
        return await in_time(request, self._timeout_s, is_reachable_hint(self._session.location))


def _is_verdict(error: BaseException) -> bool:
    """Return whether a failed request says something about the store's abilities, not about the connection."""
    return isinstance(error, StoreError) and error.reason in (FailureReason.CHECKSUM, FailureReason.OTHER)


async def _gather(*requests: Coroutine[Any, Any, Any]) -> Sequence[Any]:
    """Return all results, or raise the first failure once every request has ended."""
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
