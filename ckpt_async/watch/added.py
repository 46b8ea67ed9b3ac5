"""Handles files that a trainer adds to a checkpoint after its mark: an adapter, a configuration, a log.

Until a checkpoint is handed in, it is staged anew with such files, and its settle time begins again. What its mark
stood for is kept as well until the larger version is committed, since something may write to an added file for ever.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ckpt_async.watch.entries import Entry, State
from ckpt_async.watch.formats import Found, Known, Rules, find
from ckpt_async.watch.formats.checks import (
    are_added,
    is_of_one_node,
    misses_what_is_gone,
    named_by_metadata,
    newer_than_mark,
    unrotated,
)
from ckpt_async.watch.formats.found import Files, Version
from ckpt_async.watch.tree import Tree

# How long a late file must stay before it is reported as left out: one that is there only for a moment, or is
# the first of a save to the same place, was not left out of anything.
LEFT_OUT_S = 10.0


def has_grown(entry: Entry, files: Files) -> bool:
    """Return whether everything that was staged is still there unchanged, and more.

    (The rest of a checkpoint whose rotation has begun does not qualify.)
    """
    return entry.files.items() < files.items()


def has_outlived(entry: Entry, files: Files) -> bool:
    """Return whether the folder has more than was handed in, while the mark still stands for the rest.

    That is so if files were added, or if files newer than the mark were written again.
    """
    rest = {path: was for path, was in entry.files.items() if was.mtime_ns <= entry.marked_ns}
    is_whole = rest.items() <= files.items() and entry.files.keys() <= files.keys()
    return is_whole and files != entry.files


def without_next_save(entry: Entry, files: Files) -> Files:
    """Return the files without those of ranks that were not handed in, on a node without the mark.

    The commit needs the file of every rank that the mark names. So they are of the next save to the same place, on
    other nodes or on more ranks, and the node with the mark judges that one.
    """
    if not entry.is_followed or not (misses_what_is_gone(entry.format) or entry.format == "transformers"):
        return files
    shards = {path: path[len(entry.path) + 1 :] for path in files.keys() - entry.files.keys()}
    next_ = {path for path, shard in shards.items() if is_of_one_node(entry.format, shard, ())}
    return {path: was for path, was in files.items() if path not in next_}


def larger(entry: Entry, known: Collection[Entry]) -> list[Entry]:
    """Return the versions into which the entry has grown."""
    later = (each for each in known if each.path == entry.path and each.number > entry.number)
    return [each for each in later if has_grown(entry, each.files)]


def smaller(entry: Entry, known: Collection[Entry]) -> list[Entry]:
    """Return the versions that have grown into the entry and may still be handed in instead, oldest first."""
    earlier = (each for each in known if each.path == entry.path and each.number < entry.number)
    return [each for each in earlier if _is_fresh(each) and has_grown(each, entry.files)]


def by_path(known: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group entries by path, since a folder may have thousands."""
    found = defaultdict[str, list[Entry]](list)
    for each in known:
        found[each.path].append(each)
    return found


def known_of(
    entries: Iterable[Entry], past: Mapping[str, Collection[Version]] = MappingProxyType({})
) -> Known:
    """Return what is known of each path, with the `past` versions that have no entry.

    A checkpoint may still be added to if none of its versions has been handed in.
    """
    versions = by_path(entries)
    growing, handed = defaultdict[str, list[Files]](list), defaultdict[str, list[Files]](list)
    for entry in itertools.chain(*versions.values()):
        if _is_fresh(entry) and all(
            each.state is State.STAGED for each in larger(entry, versions[entry.path])
        ):
            growing[entry.path].append(entry.files)
        if entry.state in (State.HANDED, State.COMMITTED):
            handed[entry.path].append(entry.files)
    seen = {path: versions_of(each) for path, each in versions.items()}
    for path, others in past.items():
        seen[path] = [*seen.get(path, []), *others]
    return Known(growing, handed, seen)


def versions_of(entries: Iterable[Entry]) -> list[Version]:
    return [version_of(each, each.files) for each in entries]


def version_of(entry: Entry, files: Files) -> Version:
    """Return the entry as a version with these files.

    If another node has announced it, its time is that of the mark that the other node saw.
    """
    return Version(files, entry.told_ns or entry.marked_ns)


def _is_fresh(entry: Entry) -> bool:
    return entry.state is State.STAGED and not (entry.generation or entry.is_followed)


def is_held_back(entry: Entry, known: Collection[Entry], files: Files, now_ns: int, rules: Rules) -> bool:
    """Return whether an entry waits for a larger version that is under way or may still come.

    It does not wait for ever, nor if a larger version was given up. `files` are what its folder has now.
    """
    if not _is_fresh(entry):
        return False
    states = {each.state: each for each in larger(entry, known)}
    if State.HANDED in states or State.COMMITTED in states:
        return True
    if State.REFUSED in states:
        return False
    first = min([entry, *smaller(entry, known)], key=lambda each: each.number)
    if abs(now_ns - first.staged_ns) < rules.held_back_s * 1e9:
        return State.STAGED in states or has_grown(entry, files)
    return State.STAGED in states and has_settled(states[State.STAGED], now_ns, rules.settle_s)


def is_superseded(entry: Entry, tree: Tree, known: Collection[Entry]) -> bool:
    """Return whether an entry is of no use any more.

    Either a larger version of it is in the store, or it is a larger version itself whose files are being written
    anew.
    """
    if not _is_fresh(entry):
        return False
    if any(each.state is State.COMMITTED for each in larger(entry, known)):
        return True
    is_other = any(tree.files.get(path, was) != was for path, was in entry.files.items())
    return is_other and bool(smaller(entry, known))


def marked(
    tree: Tree, path: str, written: Collection[str], rules: Rules, versions: Sequence[Version]
) -> Found | None:
    """Return what the mark of a folder stood for, with added files that nothing has written to since this look.

    `written` are the files that were written to. None if nothing was added, or if something else is missing.
    `versions` are those that were complete at this path.
    """
    candidates = find(tree, rules, Known(growing={path: [{}]}, versions={path: versions}))
    found = next((each for each in candidates if each.path == path), None)
    if found is None or found.reason or found.mark not in tree.files:
        return None
    marked_ns = tree.files[found.mark].mtime_ns
    newer = {*newer_than_mark(tree, found)}
    named = named_by_metadata(tree, found)
    if not newer or not newer.issuperset(written):
        return None
    if not are_added(tree, newer, marked_ns, rules, versions, named=named):
        return None
    if unrotated(tree, found, rules).reason:
        return None
    return replace(found, files=tuple(each for each in found.files if each not in written))


def has_settled(entry: Entry, now_ns: int, settle_s: float) -> bool:
    return abs(now_ns - entry.staged_ns) >= settle_s * 1e9


class LeftOut:
    """Files that came after their checkpoint was handed in; reported once they stay, or when the checkpoint goes."""

    def __init__(
        self, tell: Callable[[Entry, str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock = tell, clock
        self._since: dict[int, tuple[Entry, str, float]] = {}  # by entry number

    def see(self, now: Mapping[int, tuple[Entry, Files]], tree: Tree) -> None:
        """Record the entries that have grown, with their present files."""
        before, self._since = self._since, {}
        for entry, reason, _ in before.values():
            if not entry.files.keys() & tree.files.keys():
                self._tell(entry, reason)
        for entry, files in now.values():
            new = [path for path, is_ in files.items() if entry.files.get(path) != is_]
            first = min(new, key=lambda each: (each in entry.files, files[each].mtime_ns, each))
            came = "appeared after the checkpoint was handed in, and is not in the committed checkpoint"
            if first in entry.files:
                came = "was rewritten after the checkpoint was handed in, and is committed with its earlier content"
            if files[first].mtime_ns <= entry.marked_ns:
                came = (
                    "was added to an earlier save to the same place, and is not in the committed checkpoint"
                )
            advice = (
                "raise --settle-s, or have the trainer write a marker file last and give its name with --done"
            )
            reason = f"{first} {came}: {advice}"
            _, _, since = before.get(entry.number, (entry, reason, self._clock()))
            self._since[entry.number] = entry, reason, since
            if self._clock() - since >= LEFT_OUT_S:
                self._tell(entry, reason)

    def end(self) -> None:
        """Report what is still open; called when no further look will follow."""
        for entry, reason, _ in self._since.values():
            self._tell(entry, reason)
