"""What is checked of every mark, whatever its format. Pure.

A valid mark is not older than any file that it stands for. An older one belongs to an earlier save to the same place,
and the checkpoint is being written anew. (Copies that did not keep times look the same: `Rules.ignores_times`.)
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from ckpt_async.errors import UnsafePickleError
from ckpt_async.formats.dcp_files import MAX_METADATA_BYTES, named_files
from ckpt_async.watch.formats.found import METADATA, Found, Rules, Version, changed_ns, join, last, marked_ns
from ckpt_async.watch.tree import Tree

DEEPSPEED_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:model|optim)_states\.pt")
# Written by ranks other than 0, possibly after `latest`, and no file says how many there are: pipeline
# stages, experts.
DEEPSPEED_UNCOUNTED = re.compile(r"(?:layer_|expert_|(?:bf16_|fp16_)?expp_rank_)\d+[-_].*_states\.pt")
RNG = re.compile(r"rng_state_([0-9]+)\.pth|random_states_([0-9]+)\.pkl")
_OLMO_RANK = re.compile(r"(?:.*/)?rank([0-9]+)\.pt")
# What OLMo-core's callbacks write after its mark, and the temporary names of such files.
OLMO_CORE_LATE = re.compile(r"config\.json|data_paths\.txt|tmp[a-z0-9_]{8}")
MAX_JSON_BYTES = 1 << 26
# How long after the mark a rank that waits for no other may write, and how long before everything that the
# others write it may be done. A file outside these times is of another save.
LATE_RANK_S, EARLY_RANK_S = 60.0, 600.0
# How long nothing may have changed where it is unknown what else will be written.
UNCOUNTED_S = 30.0
_NS = 1_000_000_000
# Two times that the kernel takes one after the other may differ by one tick of its clock.
_TICK_NS = 20_000_000
# Formats whose mark, or what comes after it, may be renamed into place, with how long after its last byte.
# OLMo-core first syncs the file, which waits for all else that is being written to the disk. All other
# formats write their marks in place.
_RENAMED_NS = {
    "olmo-core": 60 * _NS,
    "orbax": _NS,
    "megatron": _NS,
    "done": _NS,
    "nemo": 60 * _NS,
    "pattern": 60 * _NS,
}
# How long after the last byte a writer may tidy up, where nothing is written or renamed last.
_TIDIED_NS = {"pattern": _NS, "nemo": _NS}
# Formats whose marks name every file, so that a deleted one is missed.
_NAMING = frozenset({"dcp", "lightning", "nemo", "deepspeed", "composer"})
# Formats of which nothing is known except what the user says.
_OWN = frozenset({"done", "pattern", "quiet"})
# Formats whose marks name no files and to which all ranks write (OLMo: unless its name says otherwise).
_OF_ALL_NODES = _OWN | {"orbax", "megatron", "olmo"}
# Files written by one rank in any format: DCP's, and the state of OLMo-core's trainer.
_ANY_RANK = re.compile(r"(?:.*/)?(?:__[0-9]+_[0-9]+\.distcp|train/rank[0-9]+\.pt)")
# What each rank writes, for formats whose marks name no files: perhaps after the mark, or always before it.
_OF_RANK = {"deepspeed": DEEPSPEED_RANK, "transformers": RNG, "olmo": _OLMO_RANK}
_OF_RANK_BEFORE = {
    "transformers": re.compile(rf"(?:.*/)?{DEEPSPEED_RANK.pattern}"),
    "megatron": re.compile(r"mp_rank_[0-9]+(?:_[0-9]+)*/.*"),
}
# Formats that write all of their tensors and states anew in each save.
_ANEW = frozenset({"transformers", "deepspeed", "megatron"})
_STATE = re.compile(r".*\.(?:pt|pth|bin|safetensors|pkl)")
# A number in a file's name. Longer ones are times and other numbers that are never the same again, as in a log's name.
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,6}(?![0-9])")


def checked(
    tree: Tree,
    found: Found,
    rules: Rules,
    *,
    has_grown: bool = False,
    was_handed: bool = False,
    versions: Sequence[Version] = (),
    newest_ns: int = 0,
) -> Found:
    """Return `found`, with a reason if a file that is here contradicts the mark.

    `has_grown`: it was seen complete, and all of that is still there. `was_handed`: it was handed in with the same
    mark. `versions`: what was complete at its path. `newest_ns`: the time of the newest mark of any checkpoint.
    """
    found = _with_named(tree, found)
    if found.reason:
        return found
    if not found.files:
        return replace(found, reason="it has no files yet")
    if has_all_below(found):
        if links := tree.links_below(found.path):
            reason = f"{links[0]} is a symbolic link, which is not followed: have the trainer write the file itself"
            return replace(found, reason=reason, is_refused=True)
        if closed := tree.unreadable_below(found.path):
            return replace(found, reason=closed)
    for path in found.files:
        if not tree.is_whole(path):
            return replace(found, reason=f"{path} is truncated or still being written")
    if found.mark.endswith(".json") and not _is_json(tree, found.mark):
        return replace(found, reason=f"{found.mark} is truncated or still being written")
    unwritten = _unwritten(tree, found, versions)
    if other := of_another_save(tree, found, rules, versions) or _left(found, unwritten):
        reason = f"{other} belongs to a different save to the same place than the rest"
        return replace(found, reason=reason, is_mixed=True)
    found = replace(found, unwritten=tuple(unwritten))
    if has_grown:
        return found
    # Without times, only ongoing writes distinguish a save that has begun from the one that it overwrites.
    is_told_by_time = rules.ignores_times and not found.is_file and found.format != "pattern"
    if is_told_by_time and abs(tree.now_ns - changed_ns(tree, found)) < UNCOUNTED_S * _NS:
        reason = f"it changed within the last {UNCOUNTED_S:g} s, and --ignore-times waits for that"
        return replace(found, reason=reason, is_waiting=True)
    if found.mark and not rules.ignores_times:
        marked_ns = tree.files[found.mark].mtime_ns
        newer = newer_than_mark(tree, found)
        is_added = are_added(tree, newer, marked_ns, rules, versions, named=named_by_metadata(tree, found))
        if newer and (was_handed or not is_added):
            return replace(
                found,
                reason=f"{newer[0]} is newer than its marker {found.mark}: it is being rewritten, or was"
                " copied without preserving timestamps (see --once --ignore-times)",
            )
        changed = changed_ns(tree, found)  # older than the newest mark: finished
        if newer and changed >= newest_ns and abs(tree.now_ns - changed) < UNCOUNTED_S * _NS:
            reason = (
                f"{newer[0]} was added after its marker, and it changed within the last {UNCOUNTED_S:g} s"
            )
            return replace(found, reason=reason, is_waiting=True)
    return unrotated(tree, found, rules)


def newer_than_mark(tree: Tree, found: Found) -> list[str]:
    """Return the files that were written after the mark, without those that may be written shortly after it."""
    marked_ns = tree.files[found.mark].mtime_ns
    newer = [path for path in found.files if tree.files[path].mtime_ns > marked_ns]
    late_ns = marked_ns + int(LATE_RANK_S * _NS)
    return [
        path
        for path in newer
        if not is_free(found.format, found.shard(path))
        or (is_of_late_rank(found.format, found.shard(path)) and tree.files[path].mtime_ns > late_ns)
    ]


def of_another_save(tree: Tree, found: Found, rules: Rules, versions: Sequence[Version]) -> str:
    """Return a file that is not of the same save as the mark; "" if there is none.

    Either a rank that waits for no other wrote it in an earlier save, or already in the next one: the file is as it
    was in another save, or not as it was in this one, or far older than all the rest. Or every save writes it, and it
    is as it was with another mark: a copy may bring the mark first, and keep old times.
    """
    for each in versions:
        if each.files.get(found.mark, tree.files.get(found.mark)) == tree.files.get(found.mark):
            continue
        for path in found.files:
            is_of_rank = _is_of_rank_before(found.format, found.shard(path))
            if is_of_rank and each.files.get(path) == tree.files[path]:
                return path
    ranks = sorted(path for path in found.files if is_of_late_rank(found.format, found.shard(path)))
    others = (tree.files[path].mtime_ns for path in found.files if path not in ranks)
    began_ns = 0 if rules.ignores_times else min(others, default=0)
    for path in ranks:
        if tree.files[path].mtime_ns < began_ns - EARLY_RANK_S * _NS:
            return path
    for each in versions if ranks else ():
        is_same = is_same_save(tree, found, each)
        for path in ranks if is_same is not None else ():
            if path in each.files and (each.files[path] == tree.files[path]) != is_same:
                return path
    return ""


def _unwritten(tree: Tree, found: Found, versions: Sequence[Version]) -> list[str]:
    """Return the files that this save has not written: they are as they were in an earlier one to the same place.

    None if there is no mark: the same save may have gone on then. None either if only the mark has been written again.
    """
    if not found.path or found.mark not in tree.files:
        return []
    others = other_saves(tree, found, versions)
    same = sorted(
        path for path in found.files if any(each.files.get(path) == tree.files[path] for each in others)
    )
    return same if {*found.files} - {*same, found.mark} else []


def _left(found: Found, unwritten: Sequence[str]) -> str:
    """Return one of the unwritten files that an earlier save must have left; "" if all may belong to this one, too.

    It is one of several that differ by a number, and others of these were written (`shard3.pt`, `mp_rank_02/…`): the
    earlier save had more of them. Or the format writes all such files in each save.
    """
    written = {*found.files} - {*unwritten}
    numberless_ = {numberless(found.shard(path)) for path in written}
    is_anew = found.format in _ANEW and any(_STATE.fullmatch(path) for path in written)
    for path in unwritten:
        if numberless(found.shard(path)) in numberless_ or (is_anew and _STATE.fullmatch(path)):
            return path
    return ""


def numberless(shard: str) -> str:
    """Return a file's name, the same for all that differ by small numbers only."""
    return _NUMBER.sub("#", shard)


def without_left_over(tree: Tree, found: Found, versions: Sequence[Version]) -> Found:
    """Return `found` without files that were added to an earlier save to the same place and not written since.

    They were added after the mark of that save. The corresponding files of this save are still to come, or it has
    none.
    """
    left = set[str]()
    for each in versions:
        same = each.added.items() & tree.files.items()
        here = {path for path, _ in same if not _is_written_by_each(found.format, found.shard(path))}
        if here and is_same_save(tree, found, each) is False:
            left |= here
    if not left:
        return found
    files = tuple(path for path in found.files if path not in left)
    return replace(found, files=files, left_over=tuple(sorted(left)))


def is_same_save(tree: Tree, found: Found, version: Version) -> bool | None:
    """Return whether what the version's mark stood for is here unchanged; None if nothing can tell."""
    rest = {path: was for path, was in version.body.items() if not is_free(found.format, found.shard(path))}
    return rest.items() <= tree.files.items() if rest else None


def other_saves(tree: Tree, found: Found, versions: Sequence[Version]) -> list[Version]:
    """Return the versions that are surely of other saves than this one."""
    at_ns = marked_ns(tree, found)
    return [each for each in versions if each.marked_ns != at_ns and is_same_save(tree, found, each) is False]


def are_added(
    tree: Tree,
    newer: Collection[str],
    marked_ns: int,
    rules: Rules,
    versions: Sequence[Version] = (),
    *,
    named: Collection[str] = (),
) -> bool:
    """Return whether these files were made after the mark, one soon after the other.

    A file that is being rewritten was there before, even if it has another inode now or its rewriting begins later. So
    was one that the mark names (`named`). A file that was also added to an earlier save may be written in place.
    """
    if not {*named}.isdisjoint(newer) or any(not each.body.keys().isdisjoint(newer) for each in versions):
        return False
    again = {path for each in versions for path in each.added}
    end_ns = float(marked_ns)
    for path in sorted(newer, key=lambda each: tree.files[each].mtime_ns):
        began_ns = tree.files[path].mtime_ns if path in again else tree.born_ns(path)
        if not marked_ns <= began_ns <= end_ns + rules.settle_s * _NS:
            return False
        end_ns = tree.files[path].mtime_ns
    return end_ns <= marked_ns + rules.growing_s * _NS


def unrotated(tree: Tree, found: Found, rules: Rules) -> Found:
    """Return `found`, with a reason if something seems to have been deleted from it and its mark cannot tell."""
    if rules.ignores_times or found.is_file:
        return found
    if found.mark and found.format not in _NAMING:
        since_ns, when = tree.files[found.mark].mtime_ns, f"its marker {found.mark} was written"
        tidied_ns = 0
    elif found.format in _TIDIED_NS:
        since_ns, when = _renamed_ns(tree, found.path), "it was complete"
        tidied_ns = 0 if since_ns else _TIDIED_NS[found.format]
    else:
        return found
    changed = _changed_later(tree, found, since_ns, tidied_ns)
    if changed is None:
        return found
    reason = (
        f"something was removed from {changed or 'it'} after {when}, or it was copied without"
        " preserving timestamps (see --once --ignore-times)"
    )
    return replace(found, reason=reason, is_waiting=False)


def _renamed_ns(tree: Tree, folder: str) -> int:
    """Return when a folder was renamed, or 0 if something was made in it or removed from it later.

    Those changes set both of its times.
    """
    ctime_ns = tree.ctime_ns.get(folder, 0)
    return ctime_ns if ctime_ns > tree.changed_ns.get(folder, 0) else 0


def has_all_below(found: Found) -> bool:
    """Return whether everything below its folder belongs to it.

    Not so for a DCP mark directly in the watched folder: a file that it names is missed if it is not read, and
    whatever else is beside it is something else.
    """
    return not found.is_file and (found.format != "dcp" or bool(found.path))


def _is_json(tree: Tree, path: str) -> bool:
    try:
        json.loads(tree.whole(path, MAX_JSON_BYTES))
        return True
    except (ValueError, RecursionError):
        return False


def _changed_later(tree: Tree, found: Found, since_ns: int, tidied_ns: int = 0) -> str | None:
    """Return the folder from which something seems to have been deleted since, as a rotation that has begun does.
    `tidied_ns`: for how long the trainer itself may go on deleting.

    What was made in the folder was written then, and what was renamed into it was changed itself, as its ctime tells.
    """
    made_ns: dict[str, int] = {}  # in each folder: when its newest subfolder changed
    for folder in tree.folders_below(found.path):
        above = folder.rpartition("/")[0]
        made_ns[above] = max(made_ns.get(above, 0), tree.changed_ns.get(folder, 0))
    all_ns = max((tree.files[each].mtime_ns for each in found.files), default=0)
    for folder in tree.folders_below(found.path):
        files = [join(folder, each) for each in tree.names(folder)]
        # Nothing tells when an empty folder was made.
        here_ns = max((tree.files[each].mtime_ns for each in files), default=made_ns.get(folder, all_ns))
        written_ns = max(since_ns, here_ns, made_ns.get(folder, 0))
        renamed_ns = max((tree.ctime_ns.get(each, 0) for each in files), default=0)
        renamed_ns = min(renamed_ns, written_ns + _RENAMED_NS.get(found.format, 0))
        latest_ns = max(written_ns, renamed_ns) + max(_TICK_NS, tidied_ns)
        if tree.changed_ns.get(folder, 0) > latest_ns:
            return folder
    return None


def is_free(format_: str, shard: str) -> bool:
    """Return whether a file may be written after the mark, by a callback or by another rank without a barrier."""
    if format_ == "olmo-core":
        return OLMO_CORE_LATE.fullmatch(shard) is not None
    if format_ == "deepspeed" and DEEPSPEED_UNCOUNTED.fullmatch(shard):
        return True
    of_rank = _OF_RANK.get(format_)
    match = of_rank.fullmatch(shard) if of_rank else None
    return match is not None and int(next(filter(None, match.groups()))) > 0


def _is_written_by_each(format_: str, shard: str) -> bool:
    """Return whether every save writes the file, so that it is never an added one."""
    return is_free(format_, shard) or _is_of_rank_before(format_, shard)


def _is_of_rank_before(format_: str, shard: str) -> bool:
    """Return whether the file is of a rank that writes it in every save, before the mark."""
    of_rank = _OF_RANK_BEFORE.get(format_)
    return bool(_ANY_RANK.fullmatch(shard) or (of_rank and of_rank.fullmatch(shard)))


def is_of_late_rank(format_: str, shard: str) -> bool:
    """Return whether the file is of a rank that writes it in every save and waits for no other."""
    return format_ != "olmo-core" and is_free(format_, shard)


def is_of_one_node(format_: str, shard: str, named: Collection[str]) -> bool:
    """Return whether two nodes with different files of this name cannot both be right.

    That is so if one rank has written it, or if nothing is known about the format. `named` is what the mark names.
    """
    if format_ in _OWN or _is_of_rank_before(format_, shard):
        return True
    of_rank = _OF_RANK.get(format_)
    return (format_ in _NAMING and shard in named) or (of_rank is not None and bool(of_rank.fullmatch(shard)))


def misses_what_is_gone(format_: str) -> bool:
    """Return whether the mark names the files that must be there, on one node or another."""
    return format_ in _NAMING


def is_of_all_nodes(format_: str, name: str, files: Collection[str]) -> bool:
    """Return whether a node that has nothing of the checkpoint must have had something.

    That is so if nothing names its files and all ranks write. `files` are those of the node with the mark.
    """
    if format_ not in _OF_ALL_NODES or name.endswith("-unsharded"):
        return False
    is_file = {*files} == {name}
    return not (is_file or any(last(each) == METADATA for each in files))


def removed_from(tree: Tree, format_: str, folder: str, since_ns: int) -> str | None:
    """Return the folder from which something seems to have been deleted since, if the mark cannot tell."""
    if format_ in _NAMING:
        return None
    return _changed_later(tree, Found(format_, folder, 0, "", tuple(tree.below(folder))), since_ns)


def may_be_left_over(format_: str) -> bool:
    """Return whether the older one of two nodes' files is surely of an earlier save, since one rank on one node writes
    it.
    """
    return format_ not in _OWN


def _with_named(tree: Tree, found: Found) -> Found:
    """Add the missing files that its `.metadata` files name, or the reason why one of those cannot be read."""
    marks = [path for path in found.files if last(path) == METADATA]
    missing = list(found.missing)
    for mark in marks:
        folder = mark.rpartition("/")[0]
        named = named_in(tree, mark)
        if isinstance(named, str):
            return replace(found, reason=f"{mark} cannot be read: {named}")
        for name, least_bytes in named.items():
            path = join(folder, name)
            if path not in tree.files:
                missing.append(found.shard(path))
            elif tree.files[path].size_bytes < least_bytes:
                return replace(found, reason=f"{path} is shorter than {mark} says")
    return replace(found, missing=tuple(sorted({*missing})))


def named_by_metadata(tree: Tree, found: Found) -> set[str]:
    """Return the paths of all files that its `.metadata` files name."""
    named = set[str]()
    for mark in (path for path in found.files if last(path) == METADATA):
        names = named_in(tree, mark)
        named |= set() if isinstance(names, str) else {join(mark.rpartition("/")[0], name) for name in names}
    return named


def named_in(tree: Tree, mark: str) -> dict[str, int] | str:
    """Return the files that a `.metadata` names, with the least size of each, or the reason why it cannot be read."""
    return tree.once("named", mark, functools.partial(_named, tree, mark))


def _named(tree: Tree, mark: str) -> dict[str, int] | str:
    try:
        return named_files(tree.whole(mark, MAX_METADATA_BYTES))
    except UnsafePickleError as error:
        return error.without_hint
