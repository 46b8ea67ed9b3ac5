"""Finds files of ranks that a save does not have, left by an earlier save to the same place on more ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from ckpt_async.core.units import few
from ckpt_async.watch.formats.checks import (
    DEEPSPEED_RANK,
    EARLY_RANK_S,
    RNG,
    named_in,
    other_saves,
)
from ckpt_async.watch.formats.found import METADATA, Found, Rules, Version, changed_ns, join, last
from ckpt_async.watch.formats.marks import settled
from ckpt_async.watch.tree import Tree

DISTCP = re.compile(r"__[0-9]+_[0-9]+\.distcp")
# The file that a single process writes instead of a numbered one.
_OF_ONE = {"transformers": "rng_state.pth"}
_NS = 1_000_000_000


def without_other_ranks(tree: Tree, found: Found, rules: Rules, versions: Sequence[Version]) -> Found:
    """Return `found` without the files of ranks that its save does not have."""
    others = _unnamed(tree, found) | _beyond(tree, found, rules, versions)
    if others:
        files = tuple(path for path in found.files if path not in others)
        found = replace(found, files=files, of_other_ranks=tuple(sorted(others)))
    return _doubted(tree, found, rules)


def rank_of(format_: str, shard: str) -> int | None:
    """Return the rank that writes this file in every save; None if it is no such file, or the mark names it.

    (OLMo begins each save in an empty folder.)
    """
    match = None
    if format_ == "transformers":  # with DeepSpeed, in a folder of its own
        match = RNG.fullmatch(shard) or DEEPSPEED_RANK.fullmatch(last(shard))
    elif format_ == "deepspeed":
        match = DEEPSPEED_RANK.fullmatch(shard)
    return int(next(filter(None, match.groups()))) if match else None


def _is_numbered(format_: str, shard: str) -> bool:
    """Return whether it is a file that a single process writes under another name."""
    return format_ in _OF_ONE and RNG.fullmatch(shard) is not None


def num_ranks_in(format_: str, names: Collection[str]) -> int:
    """Return how many ranks have written these files, which are all of a checkpoint's; 0 if no name tells."""
    ranks = [rank for name in names if (rank := rank_of(format_, name)) is not None]
    if _OF_ONE.get(format_) in names and not any(_is_numbered(format_, name) for name in names):
        return max(1, *ranks, 1)
    return max(ranks, default=-1) + 1


def is_beyond(format_: str, shard: str, num_ranks: int) -> bool:
    """Return whether a save of so many ranks has no such file."""
    if shard == _OF_ONE.get(format_):
        return num_ranks > 1
    rank = rank_of(format_, shard)
    return rank is not None and (rank >= num_ranks or (num_ranks == 1 and _is_numbered(format_, shard)))


def is_unnamed(shard: str, named: Collection[str], here: Collection[str]) -> bool:
    """Return whether it is a rank's file of DCP's that the `.metadata` beside it does not name.

    `here` are the files of the node that has read it, `named` all that the checkpoint consists of.
    """
    mark = join(shard.rpartition("/")[0], METADATA)
    return DISTCP.fullmatch(last(shard)) is not None and mark in here and shard not in named


def left_out_of(path: str, files: Sequence[str]) -> str:
    return f"{few(files)}: written by ranks of an earlier save to the same place; left out of {path or '.'}"


def _unnamed(tree: Tree, found: Found) -> set[str]:
    """Return the files of ranks that `.metadata` does not name, which DCP does not read."""
    others = set[str]()
    for mark in (path for path in found.files if last(path) == METADATA):
        folder, named = mark.rpartition("/")[0], named_in(tree, mark)
        if isinstance(named, str) or not named:
            continue
        here = {name for name in tree.names(folder) if DISTCP.fullmatch(name)}
        others |= {join(folder, name) for name in here - named.keys()}
    return others & {*found.files}


def _beyond(tree: Tree, found: Found, rules: Rules, versions: Sequence[Version]) -> set[str]:
    """Return files of another save that are of ranks which this save does not have, where marks name no files.

    Where the number of ranks is unknown, these are the last ranks, and only if nothing was written for as long as a
    rank may be late.
    """
    ranks = _ranks(found)
    one = join(found.path, _OF_ONE.get(found.format, ""))
    stale = _stale(tree, found, rules, versions, {*ranks, one} & {*found.files}) if ranks else set()
    if not stale:
        return set()
    if one in tree.files and one not in stale:  # it has one rank
        others = {p for p, rank in ranks.items() if rank or _is_numbered(found.format, found.shard(p))}
        return others if others <= stale else set()
    written = {rank for path, rank in ranks.items() if path not in stale}
    if found.num_ranks:
        first = found.num_ranks
    elif tree.now_ns - changed_ns(tree, found) >= EARLY_RANK_S * _NS:
        first = max(written, default=0) + 1
    else:
        return set()
    beyond = {path for path in stale if ranks.get(path, -1) >= first}
    return beyond | ({one} & stale if written else set())


def _ranks(found: Found) -> dict[str, int]:
    ranks = {path: rank_of(found.format, found.shard(path)) for path in found.files}
    return {path: rank for path, rank in ranks.items() if rank is not None}


def _stale(tree: Tree, found: Found, rules: Rules, versions: Sequence[Version], paths: set[str]) -> set[str]:
    """Return the paths whose files are as they were in another save, or are far older than all the rest."""
    others = other_saves(tree, found, versions)
    rest = [tree.files[path].mtime_ns for path in found.files if path not in paths]
    began_ns = 0 if rules.ignores_times else min(rest, default=0) - int(EARLY_RANK_S * _NS)
    return {
        path
        for path in paths
        if tree.files[path].mtime_ns < began_ns
        or any(each.files.get(path) == tree.files[path] for each in others)
    }


def _doubted(tree: Tree, found: Found, rules: Rules) -> Found:
    """Return `found`, not complete yet if it has a file of a rank that its own arguments do not count.

    Nothing shows that the file is of an earlier save. If the arguments are wrong, ranks up to that one write to it.
    """
    ranks = _ranks(found) if found.format == "transformers" and not (rules.ranks or found.reason) else {}
    numbered = {rank: path for path, rank in ranks.items() if _is_numbered(found.format, found.shard(path))}
    last_rank = max(numbered, default=-1)
    if not found.num_ranks or last_rank < found.num_ranks:
        return found
    if rules.num_nodes > 1:
        reason = (
            f"{numbered[last_rank]} belongs to more ranks than its training_args.bin records ({found.num_ranks}):"
            " give --ranks, or delete the file if it is left over from an earlier save"
        )
        return replace(found, reason=reason)
    lacking = {f"rng_state_{rank}.pth" for rank in {*range(last_rank)} - numbered.keys()}
    return settled(tree, replace(found, missing=tuple(sorted({*found.missing} | lacking))))
