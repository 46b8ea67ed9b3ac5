"""What is checked of every checkpoint that is marked, whatever its format. Pure.

A valid mark is not older than any file that it stands for. An older one belongs to an earlier save to the same place,
and the checkpoint is being written anew.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_async.formats.dcp_files import (
    DISTCP,
    FLASHPOINT_HEAD_BYTES,
    FLASHPOINT_PREFIX_BYTES,
    METADATA,
    flashpoint_is_optimised,
    is_dcp,
    is_metadata,
    named_in,
)
from ckpt_async.formats.files import check_files
from ckpt_async.formats.found import UNCOUNTED_S, Found, Rules, changed_ns, join, last
from ckpt_async.formats.table import TABLE, TENSORS
from ckpt_async.formats.tree import Tree

# How long after the mark a rank that waits for no other may write, and how long before everything that the others
# write it may be done. A file outside these times is of another save.
LATE_RANK_S, EARLY_RANK_S = 60.0, 600.0
# How long after its last byte a file may be renamed into place: some writers sync it first, which waits for all else
# that is being written to the disk.
_RENAMED_NS = 60_000_000_000
# How long after its last byte a writer may tidy up, where nothing is written or renamed last.
_TIDIED_NS = 1_000_000_000
# Two times that the kernel takes one after the other may differ by one tick of its clock.
_TICK_NS = 20_000_000
_NS = 1_000_000_000
_POOL = (
    "ML Flashpoint's buffer pool leaves links to files that it overwrites in place: let it write files of its own"
    " (without the pool), or upload with `Uploader`"
)


def checked(tree: Tree, found: Found, rules: Rules) -> Found:
    """Return what was recognised, with the reason if it is not complete: what its marker says, and then whether a file
    contradicts that.
    """
    if found.reason:
        return found
    if found.is_folder and (path := tree.fetched_to(found.path)):
        reason = f"it is being downloaded, or the download was interrupted: {path} exists"
        return replace(found, reason=reason)
    if _has_all_below(found) and (links := tree.links_below(found.path)):
        what = _POOL if found.format == "ml-flashpoint" else "have the trainer write the file itself"
        reason = f"{links[0]} is a symbolic link, which is not followed: {what}"
        return replace(found, reason=reason, is_refused=True)
    format_ = TABLE[found.format]
    found = format_.check(tree, check_files(tree, found, rules), rules)
    if found.reason:
        return found
    is_told = format_.is_named or (found.is_file and found.format != "pattern")
    found = _with_named(tree, replace(found, names_its_files=found.names_its_files or is_told))
    found = replace(found, reason=found.reason or _broken(tree, found, rules))
    if found.reason:
        return found
    named = named_by_metadata(tree, found)
    is_own = format_.anew if found.is_folder else None
    stood = [
        each for each in found.files if is_own is None or each in named or is_own.fullmatch(found.shard(each))
    ]
    states = [each for each in stood if TENSORS.fullmatch(each) or each in named]
    found = replace(found, state_files=tuple(sorted(states)))
    if not (rules.is_store or rules.ignores_times):
        reason = _contradiction(tree, found, stood) or unrotated(tree, found)
        found = replace(found, reason=reason)
    return found if found.reason else _waited(tree, found, rules)


def named_by_metadata(tree: Tree, found: Found) -> set[str]:
    """Return the paths of all files that its `.metadata` files name."""
    named = set[str]()
    for mark in (path for path in found.files if is_metadata(path)):
        names = named_in(tree, mark)
        named |= set() if isinstance(names, str) else {join(mark.rpartition("/")[0], name) for name in names}
    return named


def _with_named(tree: Tree, found: Found) -> Found:
    """Add the missing files that its `.metadata` files name, or the reason why one of those cannot be read, and leave
    out files of ranks that they do not name: DCP does not read them.
    """
    missing, others = {*found.missing}, set[str]()
    for mark in (path for path in found.files if is_metadata(path)):
        folder, named = mark.rpartition("/")[0], named_in(tree, mark)
        if isinstance(named, str):
            return replace(found, reason=f"{mark} cannot be read: {named}")
        for name, least_bytes in named.items():
            path = join(folder, name)
            if path not in tree.files:
                missing.add(found.shard(path))
                continue
            needed_bytes = least_bytes + _prefix_bytes(tree, found, path, least_bytes)
            if (size_bytes := tree.files[path].size_bytes) < needed_bytes:
                reason = f"{mark} names {needed_bytes} bytes of {path}, which has only {size_bytes}"
                return replace(found, reason=reason)
        here = {join(folder, each) for each in tree.names(folder) if named and DISTCP.fullmatch(each)}
        others |= here - {join(folder, name) for name in named}
    for folder in sorted({path.rpartition("/")[0] for path in found.files}):
        if METADATA not in tree.names(folder) and is_dcp(tree, folder):
            return replace(found, reason=f"{folder} has no {METADATA}, which is written last")
    files = tuple(path for path in found.files if path not in others)
    others &= {*found.files}
    return replace(found, files=files, missing=tuple(sorted(missing)), of_other_ranks=tuple(sorted(others)))


def _prefix_bytes(tree: Tree, found: Found, path: str, least_bytes: int) -> int:
    """Return how long the block is with which ML Flashpoint begins a file: offsets in `.metadata` count from behind
    it.
    """
    if (
        found.format != "ml-flashpoint"
        or tree.files[path].size_bytes >= least_bytes + FLASHPOINT_PREFIX_BYTES
    ):
        return 0
    head = tree.read(path, 0, FLASHPOINT_HEAD_BYTES)
    return 0 if flashpoint_is_optimised(head) is None else FLASHPOINT_PREFIX_BYTES


def _broken(tree: Tree, found: Found, rules: Rules) -> str:
    """Return what is missing or cut short, as far as the files themselves tell; "" if nothing is."""
    if not found.files:
        return "it has no files yet"
    if _has_all_below(found) and (closed := tree.unreadable_below(found.path)):
        return closed
    # Of several nodes, the others may have all the rest.
    if found.files == (found.mark,) and not TABLE[found.format].is_named and rules.num_nodes == 1:
        return f"it contains nothing but {last(found.mark)} yet"
    for path in () if rules.is_store else found.files:
        if not tree.is_whole(path):
            return f"{path} is truncated or still being written"
    if found.mark.endswith(".json") and not tree.is_json(found.mark):
        return f"{found.mark} is truncated or still being written"
    return ""


def _has_all_below(found: Found) -> bool:
    """Return whether everything below its folder belongs to it."""
    return found.is_folder and (found.format != "dcp" or bool(found.path))


def _contradiction(tree: Tree, found: Found, stood: list[str]) -> str:
    """Return why its mark cannot be of the same save as the files that it stands for; "" if it may be."""
    if not found.mark:
        return ""
    late, marked_ns = TABLE[found.format].late, tree.files[found.mark].mtime_ns
    late_ranks = [each for each in found.files if late.fullmatch(found.shard(each))]
    for path in sorted({*stood, *late_ranks}):
        allowed_ns = LATE_RANK_S * _NS if path in late_ranks else 0
        if tree.files[path].mtime_ns > marked_ns + allowed_ns:
            return (
                f"{path} is newer than its marker {found.mark}: it is being rewritten, or was copied without preserving"
                " timestamps (see --once --ignore-times)"
            )
    began_ns = min((tree.files[each].mtime_ns for each in stood if each not in late_ranks), default=0)
    for path in late_ranks:
        if tree.files[path].mtime_ns < began_ns - EARLY_RANK_S * _NS:
            return (
                f"{path} belongs to an earlier save to the same place: its rank is late, or it can be deleted"
            )
    return ""


def _waited(tree: Tree, found: Found, rules: Rules) -> Found:
    """Return `found`, not complete while nothing tells what else may be written and something was just now.

    Without times, only ongoing writes distinguish a save that has begun from the one that it overwrites.
    """
    is_told_by_time = rules.ignores_times and found.is_folder and found.format != "pattern"
    is_quiet = rules.is_store or abs(tree.now_ns - changed_ns(tree, found)) >= UNCOUNTED_S * _NS
    if found.missing or is_quiet or not (found.is_waiting or is_told_by_time):
        return replace(found, is_waiting=False)
    if is_told_by_time:
        reason = f"it changed within the last {UNCOUNTED_S:g} s, and --ignore-times waits for that"
    else:
        reason = f"more may be written to it, and it changed within the last {UNCOUNTED_S:g} s"
    return replace(found, reason=reason, is_waiting=True)


def unrotated(tree: Tree, found: Found) -> str:
    """Return the reason if something seems to have been deleted from it, as a rotation that has begun does, and its
    mark, which does not name all files, cannot tell; "" if nothing was.

    Each change of a folder sets its time. What was made in it since has at least that time, and what was renamed into
    it at least that ctime; but our own links set ctimes, too. Whoever renamed the folder since, or set its times (a
    faithful copy), has changed its ctime only: nothing tells what was deleted before.
    """
    if not found.is_folder or (found.names_its_files and found.mark):
        return ""
    files = found.files if _has_all_below(found) else ()
    since_ns = tree.files[found.mark].mtime_ns if found.mark else 0
    all_ns = max((tree.files[each].mtime_ns for each in files), default=0)
    for folder in tree.folders_below(found.path) if files else ():
        changed_ns_ = tree.changed_ns.get(folder, 0)
        if tree.ctime_ns.get(folder, 0) > changed_ns_:
            continue
        here = [join(folder, each) for each in tree.names(folder)]
        parts = [join(folder, each) for each in tree.parts(folder)]
        # Nothing tells when an empty folder was made.
        made = [tree.files[each].mtime_ns for each in here] + [tree.changed_ns.get(each, 0) for each in parts]
        latest_ns = max((since_ns, *made)) if made else max(since_ns, all_ns)
        if TABLE[found.format].is_renamed:
            renamed_ns = max((tree.ctime_ns.get(each, 0) for each in here), default=0)
            latest_ns = max(latest_ns, min(renamed_ns, latest_ns + _RENAMED_NS))
        if changed_ns_ > latest_ns + (_TICK_NS if found.mark else _TIDIED_NS):
            when = f"its marker {found.mark} was written" if found.mark else "it was complete"
            return (
                f"something was removed from {folder or 'it'} after {when}, or it was copied without preserving"
                " timestamps (see --once --ignore-times)"
            )
    return ""
