"""Finds the runs below a prefix."""

from __future__ import annotations

from ckpt_async.core import keys
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
