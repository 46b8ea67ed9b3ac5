"""Reading the bytes of objects, by our own threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from ckpt_async.errors import ObjectNotFoundError, StoreError
from ckpt_async.stores.checks import check_size
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.gcs import answers
from ckpt_async.stores.gcs.errors import translating
from ckpt_async.stores.gcs.session import GcsSession
from ckpt_async.stores.http.failures import telling_failures_of
from ckpt_async.stores.http.messages import Response, total_of_range
from ckpt_async.stores.interface import ObjectInfo, Sink, SmallGet


class Reader:
    """Reads ranges, and small objects singly or in series."""

    def __init__(self, session: GcsSession, head: Callable[[str], Awaitable[ObjectInfo]]) -> None:
        self._session, self._location, self._head = session, session.location, head

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        url = self._session.media_url(self._session.name(key, "get"))
        answer = await self._session.request("get", key, "GET", url, max_size_bytes=max_size_bytes)
        if answer.status >= 300:
            raise await self._refused(key, answer)
        data = answer.error
        with translating("get", key, self._location):
            info = answers.info_of_media(key, answer, len(data))
        found = checksum_of(data, answers.ALGORITHM)
        if info.checksum not in (None, found):
            message = f"the bytes have {found.value}, but the object has {info.checksum}"
            raise self._location.spoilt(message, operation="get", key=key)
        return data, info

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        """Read a range of at least one byte."""
        url = self._session.media_url(self._session.name(key, "get"))
        found: list[ObjectInfo] = []

        def check(answer: Response) -> None:
            total_bytes = total_of_range(answer, offset, size_bytes)
            found.append(answers.info_of_media(key, answer, total_bytes))

        with telling_failures_of(sink) as guarded, translating("get", key, self._location):
            headers = await self._session.credentials.headers()
            answer = await self._session.pools.downloads.get_range(
                url, offset, size_bytes, guarded, check, headers
            )
        if not found:
            raise await self._refused(key, answer)
        return found[0]

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        asked = ((each, self._session.media_url(self._session.name(each.key, "get"))) for each in gets)

        def check(get: SmallGet, answer: Response) -> None:
            with translating("get", get.key, self._location):
                check_size(total_of_range(answer, 0, get.size_bytes), get)

        with telling_failures_of(got) as guarded, translating("get", "", self._location):
            headers = await self._session.credentials.headers()
            refused = await self._session.pools.small_downloads.get_many(
                self._session.endpoint, asked, check, guarded, headers
            )
        if refused is not None:
            get, answer = refused
            raise await self._refused(get.key, answer)

    async def _refused(self, key: str, answer: Response) -> StoreError:
        """Return the error that a refusal means. Google reports a missing object in plain text, as any middlebox might,
        so a 404 is confirmed by asking for its metadata.
        """
        if answer.status == 404:
            try:
                await self._head(key)
            except ObjectNotFoundError as error:
                return error
        return self._session.refused(answer, "get", key)
