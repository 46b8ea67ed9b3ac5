"""Finds the runs below a prefix, and the kinds of checkpoints below a run. Each kind is a run of its own.

The run itself knows only where its kinds are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_async.core import keys
from ckpt_async.errors import UnknownKindError
from ckpt_async.transfer.patient import PatientStore

# Those of a run's records that exist from its first launch on.
_RECORDS = (keys.GENERATIONS, keys.DECISIONS, keys.MEMBERS)


def run_of(key: str) -> str | None:
    """Return the run whose record this is, or None if the key is not a record's. Pure.

    The run is relative to where the listing began ("": right there).
    """
    for records in _RECORDS:
        place, found, _ = f"/{key}".partition(f"/{records}")
        if not found:
            continue
        run, is_below, kind = place.rpartition(f"/{keys.KINDS}")
        return (run if is_below and keys.is_kind(kind) else place).removeprefix("/")
    return None


async def runs_below(store: PatientStore) -> list[str]:
    """Return the runs' prefixes relative to the store's, sorted.

    Costs one LIST for each run, plus those for what lies between runs. Nothing below a run is listed, except what sorts
    before its records.
    """
    found: list[str] = []
    after = ""
    while True:
        listing = await store.list("", start_after=after, enough=lambda _: True)
        for each in listing.objects:
            if found and each.key.startswith(f"{found[-1]}/"):
                continue
            run = run_of(each.key)
            if run:
                found.append(run)
        if listing.is_whole:
            return sorted(found)
        last = listing.objects[-1].key
        # Past everything below the run: '0' follows '/'.
        after = f"{found[-1]}0" if found and last.startswith(f"{found[-1]}/") else last


async def kinds_below(store: PatientStore) -> list[str]:
    """Return the kinds for which an Uploader was ever opened, in order.

    Costs one LIST, plus one for each kind that has many objects.
    """
    found: set[str] = set()
    after = ""
    while True:
        listing = await store.list(keys.KINDS, start_after=after, enough=lambda _: True)
        for each in listing.objects:
            parsed = keys.parse_kind_key(each.key)
            if parsed is not None and parsed[1].startswith(f"{keys.PRIVATE}/"):
                found.add(parsed[0])
        if listing.is_whole:
            return sorted(found)
        last = listing.objects[-1].key.removeprefix(keys.KINDS).partition("/")[0]
        after = f"{keys.KINDS}{last}0"  # past everything below it: '0' follows '/'


async def check_known(run: PatientStore, kind: str) -> None:
    """Raise UnknownKindError for a kind without an Uploader ("": the run itself) if other kinds have saved something.

    If nothing was saved at all, or an Uploader was ever opened for this kind, it may be a fresh start.
    """
    if await _has_any(run, kind, keys.GENERATIONS):
        return
    others = [each for each in ("", *await kinds_below(run)) if each != kind]
    saved = [each for each in others if await _has_any(run, each, keys.DECISIONS)]
    if saved:
        raise unknown_kind(run.url, kind, saved)


def unknown_kind(url: str, kind: str, there: Sequence[str]) -> UnknownKindError:
    """Return the error for a kind that was asked for and does not exist. Pure."""
    what = f"checkpoints of kind {kind!r}" if kind else "checkpoints without a kind"
    names = [f"kind {each!r}" if each else "checkpoints without a kind" for each in there]
    return UnknownKindError(f"{url} has no {what}", hint=f"it has {', '.join(names)}")


async def _has_any(run: PatientStore, kind: str, prefix: str) -> bool:
    below = f"{keys.kind_place(kind)}/{prefix}" if kind else prefix
    return bool((await run.list(below, enough=lambda _: True)).objects)
