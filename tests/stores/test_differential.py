"""The memory store, on which the protocol is proven, behaves like a real S3 and a real folder, operation by operation.

Random sequences from a seed are run on both, and every answer is compared. Known differences are in `DIFFERENCES`, each
with its reason and a script that shows that it still exists: a difference that has disappeared fails, and so does a new
one. `CKPT_ASYNC_SEED` replays a failure.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.errors import CkptAsyncError, StoreError
from ckpt_async.stores import open_store
from ckpt_async.stores.interface import BytesBody, Condition, Create, Match, ObjectInfo, Store, StoredPart
from tests.stores.bodies import crc, put
from tests.stores.memory import MemoryBucket, MemoryStore

# No key is a folder of another: see `folder_and_object`.
KEYS = ["a", "b/c", "b/c-d", "b/d", "b/d1", "step-1/x", "step-10/x", "step-1.g1/x", "é/ü +%41", "z/y/x/w"]
UNSAFE_KEYS = ["", "/a", "a/", "a//b", "../a", "b/./c", "a\\b", "a\nb"]
PREFIXES = ["", "b", "b/", "b/c", "b/d", "step-1", "step-1/", "step-10/", "é", "no/such", "z/y", "zz"]
PART_BYTES = 5 << 20  # the smallest part that may be followed by another
CONTENTS = [b"", b"one", b"two!", b"one" * 400]

NUM_SEQUENCES = 24
NUM_OPERATIONS = 160


@dataclass
class Sequence:
    """One random sequence on one store.

    Everything random is drawn here, from the sequence's own seed, so that two stores get the same operations as long as
    they give the same answers. Values that only one store knows (an ETag, an upload's id) are named by their place in a
    list.
    """

    store: Store
    rng: random.Random
    is_s3: bool  # otherwise no multipart uploads, and an ETag identifies a version, not a content
    etags: list[str] = field(default_factory=list)
    uploads: list[tuple[str, str]] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    parts: dict[int, dict[int, tuple[StoredPart, bytes]]] = field(default_factory=dict)

    async def next(self) -> tuple[str, Any]:
        """Run one operation and return what it was and its outcome, in terms that all stores share."""
        operations: dict[str, Callable[[], tuple[Any, Awaitable[Any]]]] = {
            "put": self._put,
            "put ": self._put,
            "put create": self._put_create,
            "put match": self._put_match,
            "put wrong": self._put_wrong,
            "get": self._get,
            "get_range": self._get_range,
            "head": self._head,
            "list": self._list,
            "list ": self._list,
            "delete": self._delete,
            "delete_if": self._delete_if,
            "copy": self._copy,
        }
        if self.is_s3:
            operations |= {
                "create_multipart": self._create,
                "put_part": self._part,
                "put_part ": self._part,
                "put_part wrong": self._part_wrong,
                "list_parts": self._list_parts,
                "complete_multipart": self._complete,
                "complete_multipart ": self._complete,
                "abort_multipart": self._abort,
                "list_multiparts": self._list_multiparts,
            }
        name = self.rng.choice(sorted(operations))
        arguments, request = operations[name]()
        try:
            answer = await request
        except CkptAsyncError as error:
            reason = error.reason.value if isinstance(error, StoreError) else ""
            answer = (type(error).__name__, reason)
        return f"{name.strip()} {arguments!r}", answer

    # --- objects -------------------------------------------------------------------------------------------

    def _key(self) -> str:
        return self.rng.choice(UNSAFE_KEYS if self.rng.random() < 0.03 else KEYS)

    async def _store(self, key: str, data: bytes, condition: Condition = None) -> Any:
        info = await put(self.store, key, data, condition=condition)
        self.etags.append(info.etag)
        return _told(info)

    def _put(self) -> tuple[Any, Awaitable[Any]]:
        key, data = self._key(), self.rng.choice(CONTENTS)
        return (key, data[:8], len(data)), self._store(key, data)

    def _put_create(self) -> tuple[Any, Awaitable[Any]]:
        key, data = self._key(), self.rng.choice(CONTENTS)
        return (key, data[:8]), self._store(key, data, Create())

    def _put_match(self) -> tuple[Any, Awaitable[Any]]:
        """Put conditionally, usually with the current ETag."""
        key, data, is_current = self._key(), self.rng.choice(CONTENTS), self.rng.random() < 0.7
        old = self.rng.randrange(len(self.etags)) if self.etags and self.is_s3 else None

        async def swap() -> Any:
            etag = '"none"' if old is None else self.etags[old]
            if is_current:
                etag = (await self.store.head(key)).etag
            return await self._store(key, data, Match(etag))

        return (key, data[:8], "current" if is_current else old), swap()

    def _put_wrong(self) -> tuple[Any, Awaitable[Any]]:
        key, data = self._key(), self.rng.choice(CONTENTS)
        return key, self.store.put(key, BytesBody(data), crc(data + b"?"))

    def _get(self) -> tuple[Any, Awaitable[Any]]:
        key, limit = self._key(), self.rng.choice([4, 5000])

        async def get() -> Any:
            data, info = await self.store.get(key, max_size_bytes=limit)
            return data, _told(info)

        return (key, limit), get()

    def _get_range(self) -> tuple[Any, Awaitable[Any]]:
        key, (offset, size_bytes) = self._key(), self.rng.choice([(0, 0), (0, 1), (1, 2), (3, 1), (0, 500)])

        async def get() -> Any:
            data = bytearray()
            info = await self.store.get_range(key, offset, size_bytes, data.extend)
            return bytes(data), info.size_bytes

        return (key, offset, size_bytes), get()

    def _head(self) -> tuple[Any, Awaitable[Any]]:
        key = self._key()

        async def head() -> Any:
            info = await self.store.head(key)
            return _told(info), info.checksum, info.etag in self.etags

        return key, head()

    def _list(self) -> tuple[Any, Awaitable[Any]]:
        prefix, start = (
            self.rng.choice([*PREFIXES, "/", "../"]),
            self.rng.choice(["", "", "b", "b/c", "step-1/x"]),
        )

        async def listed() -> Any:
            return [_told(each) for each in (await self.store.list(prefix, start_after=start)).objects]

        return (prefix, start), listed()

    def _delete(self) -> tuple[Any, Awaitable[Any]]:
        keys = [self._key() for _ in range(self.rng.choice([0, 1, 1, 3]))]
        return keys, self.store.delete(keys)

    def _delete_if(self) -> tuple[Any, Awaitable[Any]]:
        key, is_current = self._key(), self.rng.random() < 0.7

        async def delete() -> Any:
            etag = (await self.store.head(key)).etag if is_current else '"none"'
            return await self.store.delete_if(key, etag)

        return (key, is_current), delete()

    def _copy(self) -> tuple[Any, Awaitable[Any]]:
        source, is_current = self._key(), self.rng.random() < 0.8
        key = self.rng.choice([each for each in KEYS if each != source])  # S3 refuses a copy onto itself

        async def copy() -> Any:
            etag = (await self.store.head(source)).etag if is_current else '"none"'
            await self.store.copy(source, etag, key)
            self.etags.append((await self.store.head(key)).etag)

        return (source, key, is_current), copy()

    # --- multipart uploads ---------------------------------------------------------------------------------

    def _create(self) -> tuple[Any, Awaitable[Any]]:
        key = self._key()

        async def create() -> Any:
            self.uploads.append((key, await self.store.create_multipart(key)))
            return len(self.uploads)

        return key, create()

    def _upload(self) -> tuple[int, str, str]:
        """Return a started upload, usually a recent one, or sometimes another key's or one that never existed."""
        if not self.uploads:
            return 0, "a", "no-such-upload"
        number = max(self.rng.randrange(len(self.uploads)) for _ in range(3))
        key, upload_id = self.uploads[number]
        return number, ("b/d1" if self.rng.random() < 0.03 else key), upload_id

    def _part(self) -> tuple[Any, Awaitable[Any]]:
        which, key, upload_id = self._upload()
        number = self.rng.choice([1, 2, 2, 3])
        data = CONTENTS[1:][(which + number) % 3]  # always the same data: see `part_sent_twice`
        if number == 1 and which % 3 == 0:
            data = bytes([which % 256]) * PART_BYTES

        async def send() -> Any:
            part = await self.store.put_part(key, upload_id, number, BytesBody(data), crc(data))
            self.parts.setdefault(which, {})[number] = part, data
            return part.number, part.size_bytes

        return (which, key, number, len(data)), send()

    def _part_wrong(self) -> tuple[Any, Awaitable[Any]]:
        which, key, upload_id = self._upload()
        return (which, key), self.store.put_part(key, upload_id, 1, BytesBody(b"one"), crc(b"two"))

    def _list_parts(self) -> tuple[Any, Awaitable[Any]]:
        which, key, upload_id = self._upload()

        async def listed() -> Any:
            have = await self.store.list_parts(key, upload_id)
            sent = {number: part.etag for number, (part, _) in self.parts.get(which, {}).items()}
            return [(part.number, part.size_bytes, sent.get(part.number) == part.etag) for part in have]

        return (which, key), listed()

    def _complete(self) -> tuple[Any, Awaitable[Any]]:
        which, key, upload_id = self._upload()
        mistake = self.rng.choice(["", "", "checksum", "checksum", "order", "missing"])
        if which in self.aborted:
            mistake = ""  # with two mistakes, stores differ in which one they report
        sent = [each for _, each in sorted(self.parts.get(which, {}).items())]
        if (not sent and self.uploads) or which in self.completed:
            return self._list_parts()  # see `completing_without_parts` and `completing_again`
        whole = b"".join(data for _, data in sent)
        parts = [part for part, _ in sent]
        if mistake == "order":
            parts.reverse()
        if mistake == "missing":
            parts.append(StoredPart(9, 3, '"d41d8cd98f00b204e9800998ecf8427e"', crc(b"one")))
        checksum = crc(b"other") if mistake == "checksum" else crc(whole)

        async def complete() -> Any:
            info = await self.store.complete_multipart(key, upload_id, parts, checksum, len(whole))
            self.etags.append(info.etag)
            self.completed.add(which)
            return _told(info)

        return (which, key, [part.number for part in parts], len(whole), mistake), complete()

    def _abort(self) -> tuple[Any, Awaitable[Any]]:
        which, key, upload_id = self._upload()
        self.aborted.add(which)
        return (which, key), self.store.abort_multipart(key, upload_id)

    def _list_multiparts(self) -> tuple[Any, Awaitable[Any]]:
        prefix = self.rng.choice(PREFIXES)

        async def listed() -> Any:
            numbers = {upload_id: number for number, (_, upload_id) in enumerate(self.uploads)}
            found = await self.store.list_multiparts(prefix)
            return sorted((each.key, numbers[each.upload_id]) for each in found)

        return prefix, listed()


def _told(info: ObjectInfo) -> tuple[str, int]:
    """Return what every store reports at once about an object; only `head` must report a checksum
    (`answers_with_checksum`).
    """
    return info.key, info.size_bytes


# --- random sequences --------------------------------------------------------------------------------------


async def compare(seeds: Iterable[int], make_other: Callable[[int], Store], *, is_s3: bool) -> Counter[str]:
    """Run the same sequences on a memory store and on another, and count each kind of outcome."""
    counts: Counter[str] = Counter()

    async def one(seed: int) -> None:
        stores = MemoryStore(MemoryBucket(), prefix="run"), make_other(seed)
        for store in stores:
            await store.open()
        pair = [Sequence(store, random.Random(seed), is_s3) for store in stores]
        done: list[str] = []
        try:
            for _ in range(NUM_OPERATIONS):
                (operation, expected), (_, answer) = [await each.next() for each in pair]
                done.append(operation)
                kind = operation.partition(" ")[0]
                is_error = (
                    isinstance(expected, tuple) and len(expected) == 2 and str(expected[0]).endswith("Error")
                )
                counts[f"{kind} {expected[0] if is_error else 'ok'}"] += 1
                if answer != expected:
                    history = "\n  ".join(done)
                    pytest.fail(
                        f"the memory store answers {expected!r}, the other {answer!r}, to the last of\n  {history}\n"
                        f"CKPT_ASYNC_SEED={seed} ./dev test tests/stores/test_differential.py"
                    )
        finally:
            for store in stores:
                await store.close()

    await asyncio.gather(*(one(seed) for seed in seeds))
    return counts


def seeds() -> list[int]:
    replayed = os.environ.get("CKPT_ASYNC_SEED")
    return [int(replayed)] if replayed else list(range(NUM_SEQUENCES))


def check_counts(counts: Counter[str], wanted: Iterable[str]) -> None:
    """Check that every kind of answer was really compared."""
    if "CKPT_ASYNC_SEED" not in os.environ:
        assert {each: counts[each] for each in wanted if counts[each] < 5} == {}
        assert sum(counts.values()) == NUM_SEQUENCES * NUM_OPERATIONS


OBJECT_ANSWERS = [
    *("put ok", "put PreconditionFailedError", "put IntegrityError", "put StoreError", "get ok"),
    *("get ObjectNotFoundError", "get StoreError", "get_range ok", "get_range StoreError", "head ok"),
    *("head ObjectNotFoundError", "list ok", "list StoreError", "delete ok", "delete StoreError"),
]
MULTIPART_ANSWERS = [
    *("create_multipart ok", "put_part ok", "put_part ObjectNotFoundError", "put_part IntegrityError"),
    *("list_parts ok", "list_parts ObjectNotFoundError", "complete_multipart ok"),
    *("complete_multipart ObjectNotFoundError", "complete_multipart IntegrityError"),
    *("abort_multipart ok", "list_multiparts ok"),
]


def test_memory_store_and_s3_behave_alike(s3_url: str, run: Any) -> None:
    """SeaweedFS stands in for S3."""

    def make(seed: int) -> Store:
        return open_store(f"{s3_url}/differential-{seed}")

    check_counts(run(compare(seeds(), make, is_s3=True)), OBJECT_ANSWERS + MULTIPART_ANSWERS)


def test_memory_store_and_directory_store_behave_alike(tmp_path: Path, run: Any) -> None:
    def make(seed: int) -> Store:
        return open_store(f"file://{tmp_path}/differential-{seed}")

    check_counts(run(compare(seeds(), make, is_s3=False)), OBJECT_ANSWERS)


# --- what is known to differ -------------------------------------------------------------------------------


async def _outcome(request: Awaitable[Any]) -> str:
    try:
        await request
    except CkptAsyncError as error:
        return type(error).__name__
    return "ok"


async def completing_without_parts(store: Store) -> str:
    """This does not happen in practice: an empty shard is a plain PUT."""
    upload_id = await store.create_multipart("a")
    return await _outcome(store.complete_multipart("a", upload_id, [], crc(b""), 0))


async def completing_again(store: Store) -> str:
    """Complete again with another checksum: SeaweedFS repeats its first answer. A real retry sends the same one."""
    upload_id = await store.create_multipart("a")
    part = await store.put_part("a", upload_id, 1, BytesBody(b"one"), crc(b"one"))
    await store.complete_multipart("a", upload_id, [part], crc(b"one"), 3)
    return await _outcome(store.complete_multipart("a", upload_id, [part], crc(b"two"), 3))


async def part_sent_twice(store: Store) -> str:
    """SeaweedFS lists both, with times in whole seconds, so nobody can tell which is newer.

    A part that is reused is first compared with the shard.
    """
    for number in range(1, 21):
        upload_id = await store.create_multipart(f"a/{number}")
        for data in (b"one", b"four"):
            await store.put_part(f"a/{number}", upload_id, 1, BytesBody(data), crc(data))
        (part,) = await store.list_parts(f"a/{number}", upload_id)
        if part.size_bytes != 4:
            return "sometimes the older"
    return "the newer"


async def part_number_zero(store: Store) -> str:
    """This does not happen in practice: nobody sends part 0."""
    upload_id = await store.create_multipart("a")
    return await _outcome(store.put_part("a", upload_id, 0, BytesBody(b"one"), crc(b"one")))


async def empty_range_beyond_the_end(store: Store) -> str:
    """HTTP cannot request an empty range, so S3 is asked for the object's head."""
    await put(store, "a", b"one")
    return await _outcome(store.get_range("a", 5, 0, lambda _: None))


async def folder_and_object(store: Store) -> str:
    """A file cannot also be a folder, but no key of the layout is a folder of another."""
    await put(store, "a", b"one")
    return await _outcome(put(store, "a/b", b"two"))


async def etag_of_content(store: Store) -> bool:
    """If an old ETag comes back, A, B, A passes a compare-and-swap, which is why pointers carry a number (R13)."""
    first, _, third = [await put(store, "a", data) for data in (b"one", b"two", b"one")]
    return first.etag == third.etag


async def listing_with_checksums(store: Store) -> bool:
    """S3 lists no checksums, so the store asks with `head`."""
    await put(store, "a", b"one")
    return (await store.list("")).objects[0].checksum is not None


DIFFERENCES: list[tuple[Callable[[Any], Awaitable[Any]], dict[str, Any]]] = [
    (completing_without_parts, {"memory": "ok", "S3": "ObjectNotFoundError"}),
    (completing_again, {"memory": "ObjectNotFoundError", "S3": "ok"}),
    (part_sent_twice, {"memory": "the newer", "S3": "sometimes the older"}),
    (part_number_zero, {"memory": "StoreError", "S3": "IntegrityError"}),
    (empty_range_beyond_the_end, {"memory": "StoreError", "S3": "ok", "directory": "StoreError"}),
    (folder_and_object, {"memory": "ok", "S3": "ok", "directory": "StoreError"}),
    (etag_of_content, {"memory": True, "S3": True, "directory": False}),
    (listing_with_checksums, {"memory": True, "S3": False, "directory": False}),
]


@pytest.mark.parametrize(("script", "wanted"), DIFFERENCES, ids=lambda value: getattr(value, "__name__", ""))
def test_known_differences_still_exist(
    script: Callable[[Any], Awaitable[Any]], wanted: dict[str, Any], s3_url: str, tmp_path: Path, run: Any
) -> None:
    """A difference that has disappeared must be removed from the list, and its case added to the random sequences."""
    stores: dict[str, Store] = {
        "memory": MemoryStore(MemoryBucket(), prefix="run"),
        "S3": open_store(f"{s3_url}/run"),
        "directory": open_store(f"file://{tmp_path}/run"),
    }

    async def seen() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, store in stores.items():
            await store.open()
            if name in wanted:
                found[name] = await script(store)
            await store.close()
        return found

    assert run(seen()) == wanted
    assert len(set(wanted.values())) > 1
