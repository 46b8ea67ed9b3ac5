"""What the store still has of what it confirmed: somebody may have deleted there, or put the remote back (rule R1)."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_async.errors import ObjectNotFoundError
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none


async def gone(store: PatientStore, prefix: str, expected: Mapping[str, int | None]) -> list[str]:
    """Return the keys of the objects below `prefix` that the store does not have any more, or has with another size
    than `expected` (None: any). A listing may lag, so HEAD is asked for each object that it lacks.
    """
    if not expected:
        return []
    listing = await store.list(prefix)
    there = {each.key: each.size_bytes for each in listing.objects}
    doubtful = {key: size for key, size in expected.items() if not _is_as_expected(there.get(key), size)}
    are_there = await all_or_none(is_there(store, key, size) for key, size in doubtful.items())
    return [key for key, found in zip(doubtful, are_there, strict=True) if not found]


async def is_there(store: PatientStore, key: str, size_bytes: int | None = None) -> bool:
    """Return whether there is such an object, of this size unless it is None. Costs one HEAD."""
    try:
        return _is_as_expected((await store.head(key)).size_bytes, size_bytes)
    except ObjectNotFoundError:
        return False


def _is_as_expected(found: int | None, size_bytes: int | None) -> bool:
    return found is not None and size_bytes in (None, found)
