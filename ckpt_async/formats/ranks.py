"""The ranks in the names of files that each rank writes. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from ckpt_async.formats.found import Found, last

# DCP; transformers; accelerate, and its FSDP; DeepSpeed; torch_xla, OLMo; OLMo-core 0.1.
_RANK = re.compile(
    r"__(\d+)_.*"
    r"|rng_state_(\d+)\.pth"
    r"|random_states_(\d+)\.pkl"
    r"|(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank(\d+)\.bin"
    r"|(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_.*"
    r"|rank(\d+)(?:-of-\d+-.*|\.pt)"
    r"|rank_(\d+)\.safetensors"
)
# What a rank of ML Flashpoint has written, and reads; the rest is for all of them.
_FLASHPOINT = re.compile(r"src([0-9]{1,6})")


def rank_of_file(name: str) -> int | None:
    """Return the rank that writes a file of this name; None if no rank is in it: then rank 0 writes it."""
    match = _RANK.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else None


def with_ranks(found: Found, name: str, count: int, *, at_least: int = 1, alone: str = "") -> Found:
    """Return `found`, which needs a file like `name`, with the rank in place of the `*`, of each of `count` ranks.

    If their number is unknown (0): of as many as there are, `at_least` so many; more may be late. `alone` is what a
    single process writes instead.
    """
    ranks = {
        rank
        for shard in found.inner
        if (rank := rank_of_file(last(shard))) is not None and shard == name.replace("*", str(rank))
    }
    if alone in found.inner and not (ranks and count > 1):
        return replace(found, num_ranks=1, names_its_files=bool(count))
    if count and (beyond := max(ranks, default=-1)) >= count:
        reason = (
            f"{name.replace('*', str(beyond))} belongs to more than its {count} ranks: give --ranks, or delete the file"
            " if it is left over from an earlier save"
        )
        return replace(found, reason=reason)
    wanted = range(count or max(at_least, max(ranks, default=-1) + 1))
    missing = lacking(found, [name.replace("*", str(rank)) for rank in wanted])
    return replace(missing, num_ranks=count, names_its_files=bool(count), is_waiting=not count)


def ranks_reading(found: Found) -> dict[str, tuple[int, ...]]:
    """Return, by name, the ranks that read each file of a set, or of ML Flashpoint, where that is known."""
    if not found.is_folder and len(found.files) > 1:
        return {shard: (rank,) for rank, shard in enumerate(found.inner)}
    if found.format != "ml-flashpoint":
        return {}
    own = {name: (int(match[1]),) for name in found.inner if (match := _FLASHPOINT.search(name))}
    everybody = tuple(sorted({rank for (rank,) in own.values()})) or (0,)
    return {name: own.get(name, everybody) for name in found.inner}


def lacking(found: Found, wanted: Collection[str]) -> Found:
    """Return `found` with those of the wanted files among the missing ones that are not there."""
    return replace(found, missing=tuple(sorted({*found.missing, *wanted} - {*found.inner})))
