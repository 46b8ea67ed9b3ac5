"""Putting objects in a single request each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from ckpt_async.core.model import Checksum
from ckpt_async.stores.gcs import answers
from ckpt_async.stores.gcs.related import RelatedBody
from ckpt_async.stores.gcs.session import GcsSession
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.small_uploads import SmallRequest
from ckpt_async.stores.http.uploads import head_of
from ckpt_async.stores.interface import Body, BytesBody, Condition, Create, Match, ObjectInfo, SmallPut

_OF_QUERY = ("kmsKeyName", "predefinedAcl")  # the other put_args belong to the resource
_FIELDS = "kind,name,size,generation,crc32c,updated"


class _SpoiltError(Exception):
    """The store reports other bytes than were sent."""


class Sender:
    """Puts objects, singly or in series."""

    def __init__(self, session: GcsSession) -> None:
        self._session, self._location = session, session.location
        put_args = dict(session.options.put_args)
        self._query = {name: str(put_args.pop(name)) for name in _OF_QUERY if name in put_args}
        self._resource = {"contentType": "application/octet-stream", **put_args}
        # For a copy: the object's other properties are copied along with it.
        self.copied_query: Mapping[str, str] = {
            f"destination{name[0].upper()}{name[1:]}": value for name, value in self._query.items()
        }

    async def put(self, key: str, body: Body, checksum: Checksum, condition: Condition) -> ObjectInfo:
        """Make one attempt. Once this has returned or raised, nothing reads the body or its buffers any more."""
        name = self._session.name(key, "put")
        generation = self._generation(key, condition)
        related = self._related(name, body, checksum)
        url = self._session.upload_url(fields=_FIELDS, **generation, **self._query)
        with self._location.translating("put", key):
            headers = self._headers(await self._session.credentials.headers(), related)
            uploads = self._session.pools.uploads_for(body)
            answer = await uploads.put(url, headers, related, method="POST")
        if answer.status >= 300:
            raise self._session.refused(answer, "put", key)
        return self._stored(key, name, answer)

    async def put_many(
        self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]
    ) -> tuple[SmallPut, ObjectInfo] | None:
        """Put objects one after the other on one connection, up to the first that fails. Return the first object for
        which the store reports other bytes than were sent, or None.
        """
        url = self._session.upload_url(fields=_FIELDS, **self._query)
        under_way: dict[str, SmallPut] = {}
        spoilt: list[tuple[SmallPut, ObjectInfo]] = []

        def requests() -> Iterator[SmallRequest]:
            for put in puts:
                name = self._session.name(put.key, "put")
                related = self._related(name, BytesBody(put.data), put.checksum)
                head = head_of(urlsplit(url), self._headers(credentials, related), "POST")
                under_way[put.key] = put
                yield SmallRequest(put.key, head, related.before + put.data + related.after)

        def answered(request: SmallRequest, answer: Response) -> None:
            put = under_way.pop(request.key)
            info = self._stored(put.key, self._location.root + put.key, answer)
            if info.size_bytes != len(put.data) or info.checksum not in (None, put.checksum):
                spoilt.append((put, info))
                raise _SpoiltError
            stored(info)

        with self._location.translating("put", ""):
            credentials = await self._session.credentials.headers()
            try:
                refused = await self._session.pools.small_uploads.put_many(url, requests(), answered)
            except _SpoiltError:
                return spoilt[0]
        if refused is not None:
            request, answer = refused
            raise self._session.refused(answer, "put", request.key)
        return None

    def _related(self, name: str, body: Body, checksum: Checksum) -> RelatedBody:
        assert checksum.algorithm == answers.ALGORITHM
        return RelatedBody({"name": name, "crc32c": checksum.value, **self._resource}, body)

    def _headers(self, credentials: Mapping[str, str], related: RelatedBody) -> dict[str, str]:
        length = str(related.size_bytes)
        return {**credentials, "content-type": related.content_type, "content-length": length}

    def _stored(self, key: str, name: str, answer: Response) -> ObjectInfo:
        with self._location.translating("put", key):
            return answers.info(key, name, answers.document(answer, "storage#object"))

    def _generation(self, key: str, condition: Condition) -> dict[str, str]:
        match condition:
            case None:
                return {}
            case Create():
                return {"ifGenerationMatch": "0"}
            case Match(etag):
                if not answers.is_generation(etag):
                    raise self._location.unmet("the ETag is not a generation", operation="put", key=key)
                return {"ifGenerationMatch": etag}
