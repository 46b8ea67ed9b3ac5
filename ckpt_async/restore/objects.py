"""One object of a store by its URL, no matter who wrote it, and the target of a text pointer (`….symlink`, as
Composer writes it).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ckpt_async import threads
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.naming import MAX_POINTER_BYTES, POINTER_SUFFIX, check_relative
from ckpt_async.errors import FailureReason, FormatError, ObjectNotFoundError, StoreError
from ckpt_async.protocol.cas import read
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile
from ckpt_async.restore.session import Session, session
from ckpt_async.stores import StoreOptions
from ckpt_async.stores.interface import ObjectInfo

MAX_HOPS = 8


@dataclass(frozen=True, slots=True)
class Looked:
    """What is at `url`, after following pointers: an object, in the form that `fetch` takes; None if there is no
    object of that name, in which case it may be a folder.
    """

    url: str
    checkpoint: Checkpoint | None


def look(url: str, options: StoreOptions | None) -> Looked:
    """Look up the object at `url`, following pointers. Blocks. Raises FormatError for a pointer that leads out of
    its place, in a circle or nowhere; StoreError.
    """
    seen = [url]
    while True:
        found, target = threads.run(_look(seen[-1], options))
        if target is None:
            return Looked(seen[-1], found)
        if target in seen or len(seen) > MAX_HOPS:
            raise FormatError(f"{url} is a pointer that forms a loop: {' -> '.join([*seen, target][:4])}")
        seen.append(target)


def own_place(url: str) -> tuple[str, CheckpointId, str] | None:
    """Return the run, the checkpoint and the file ("" for all of it) if the URL is inside one of our checkpoints;
    else None.
    """
    run, separator, rest = url.rstrip("/").rpartition(f"/{keys.DATA}")
    folder, _, file = rest.partition("/")
    found = keys.parse_data_key(f"{keys.DATA}{folder}/{file or 'any'}") if separator else None
    return None if found is None else (run, found[0], file)


def pointed(text: str, what: str) -> str:
    """Return the path in a pointer, without the leading '/', which Composer strips too. Raises FormatError for any
    path that leads out of its place.
    """
    path = text.strip().removeprefix("/").rstrip("/")
    if not path or "\\" in path or not path.isprintable() or set(path.split("/")) & {"", ".", ".."}:
        raise FormatError(
            f"{what} is a pointer to {text[:200]!r}, which is not a path below the pointer's folder"
        )
    return path


async def _look(url: str, options: StoreOptions | None) -> tuple[Checkpoint | None, str | None]:
    """Return the object, or where a pointer leads."""
    base, _, name = url.rstrip("/").rpartition("/")
    if base.endswith(":/") or not name:  # a whole bucket
        return None, None
    try:
        async with session(base, options) as opened:
            info = await _head(opened, name)
            if info is None:
                return None, None
            if name.endswith(POINTER_SUFFIX) and info.size_bytes <= MAX_POINTER_BYTES:
                there = await read(opened.store, name, max_size_bytes=MAX_POINTER_BYTES)
                return None, await _target(opened, base, (there or (b"", ""))[0], url)
    except StoreError as error:
        if error.operation == "open" and error.reason is FailureReason.NOT_FOUND:
            return None, None
        raise
    file = RemoteFile(check_relative(name, "object"), name, info.size_bytes, info.checksum, (0,))
    found = Checkpoint(
        base, CheckpointId(0, 0), name, 1, {name: file}, format="object", store_options=options
    )
    return found, None


async def _head(opened: Session, name: str) -> ObjectInfo | None:
    try:
        return await opened.store.head(name)
    except ObjectNotFoundError:
        return None


async def _target(opened: Session, base: str, text: bytes, what: str) -> str:
    """Resolve a pointer's text relative to the pointer's own place, or else, as Composer does, as the object's full
    name in the bucket.
    """
    path = pointed(text.decode("utf-8", "replace"), what)
    split = urlsplit(base)
    own = keys.path_in(base)
    if own and path.startswith(f"{own}/"):
        return f"{base}/{path.removeprefix(f'{own}/')}"
    if split.scheme == "file" or await _is_there(opened, path):
        return f"{base}/{path}"
    return f"{split.scheme}://{split.netloc}/{path}"


async def _is_there(opened: Session, path: str) -> bool:
    if await _head(opened, path) is not None:
        return True
    return bool((await opened.store.list(f"{path}/")).objects)
