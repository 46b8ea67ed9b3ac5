"""Files that a trainer adds to a checkpoint after its mark: an adapter, a configuration, a log.

Until a checkpoint is handed in, it is staged anew with them, and its settle time begins again. What its mark stood for
is kept beside that until the larger version is committed: something may write to an added file for ever.
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
from ckpt_async.watch.formats.checks import are_added, newer_than_mark, unrotated
from ckpt_async.watch.formats.found import Files, Version
from ckpt_async.watch.tree import Tree

# A file that is there for a moment, or the first of a save to the same place, was not left out of anything.
LEFT_OUT_S = 10.0


def has_grown(entry: Entry, files: Files) -> bool:
    """Whether all that was staged of it is there as it was, and more. (What a rotation has begun with is not.)"""
    return entry.files.items() < files.items()


def has_outlived(entry: Entry, files: Files) -> bool:
    """Whether what was handed in has more by now, or something in it that is newer than its mark was written again,
    and its mark still stands for the rest.
    """
    rest = {path: was for path, was in entry.files.items() if was.mtime_ns <= entry.marked_ns}
    is_whole = rest.items() <= files.items() and entry.files.keys() <= files.keys()
    return is_whole and files != entry.files


def larger(entry: Entry, known: Collection[Entry]) -> list[Entry]:
    """The versions that it has grown to."""
    later = (each for each in known if each.path == entry.path and each.number > entry.number)
    return [each for each in later if has_grown(entry, each.files)]


def smaller(entry: Entry, known: Collection[Entry]) -> list[Entry]:
    """The versions that have grown to it, oldest first, and may still be handed in instead."""
    earlier = (each for each in known if each.path == entry.path and each.number < entry.number)
    return [each for each in earlier if _is_fresh(each) and has_grown(each, entry.files)]


def by_path(known: Iterable[Entry]) -> dict[str, list[Entry]]:
    """A folder may have thousands."""
    found = defaultdict[str, list[Entry]](list)
    for each in known:
        found[each.path].append(each)
    return found


def known_of(
    entries: Iterable[Entry], past: Mapping[str, Collection[Version]] = MappingProxyType({})
) -> Known:
    """What may still be added to is what was not handed in in any version. `past`: versions without an entry."""
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
    """With these files. Of one that another node has announced, with the time of the mark that it told."""
    return Version(files, entry.told_ns or entry.marked_ns)


def _is_fresh(entry: Entry) -> bool:
    return entry.state is State.STAGED and not (entry.generation or entry.is_followed)


def is_held_back(entry: Entry, known: Collection[Entry], files: Files, now_ns: int, rules: Rules) -> bool:
    """Whether a larger version is on its way, or may still come: not for ever, and not where one was given up.
    `files` are what its folder has now.
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
    """Whether it is of no use any more: a larger version of it is in the store; or it is one itself, and what it has is
    being written anew.
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
    """What the mark of a folder stood for, with what was added to that and not `written` to since this look. None if
    nothing was added, or something else is wanting. `versions`: what was complete at its path.
    """
    candidates = find(tree, rules, Known(growing={path: [{}]}, versions={path: versions}))
    found = next((each for each in candidates if each.path == path), None)
    if found is None or found.reason or found.mark not in tree.files:
        return None
    marked_ns = tree.files[found.mark].mtime_ns
    newer = {*newer_than_mark(tree, found)}
    if not newer or not newer.issuperset(written) or not are_added(tree, newer, marked_ns, rules, versions):
        return None
    if unrotated(tree, found, rules).reason:
        return None
    return replace(found, files=tuple(each for each in found.files if each not in written))


def has_settled(entry: Entry, now_ns: int, settle_s: float) -> bool:
    return abs(now_ns - entry.staged_ns) >= settle_s * 1e9


class LeftOut:
    """What came after its checkpoint was handed in: it is told when it stays, or goes with the checkpoint."""

    def __init__(
        self, tell: Callable[[Entry, str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock = tell, clock
        self._since: dict[int, tuple[Entry, str, float]] = {}  # by the entry's number

    def see(self, now: Mapping[int, tuple[Entry, Files]], tree: Tree) -> None:
        """These have grown, to such files."""
        before, self._since = self._since, {}
        for entry, reason, _ in before.values():
            if not entry.files.keys() & tree.files.keys():
                self._tell(entry, reason)
        for entry, files in now.values():
            new = [path for path, is_ in files.items() if entry.files.get(path) != is_]
            first = min(new, key=lambda each: (each in entry.files, files[each].mtime_ns, each))
            came = "was written again" if first in entry.files else "came"
            came += " after it was handed in, and is not so in what is committed"
            if files[first].mtime_ns <= entry.marked_ns:
                came = "was added to an earlier save to the same place, and is not in what is committed"
            advice = "raise --settle-s, or have the trainer write a file last and give its name by --done"
            reason = f"{first} {came}: {advice}"
            _, _, since = before.get(entry.number, (entry, reason, self._clock()))
            self._since[entry.number] = entry, reason, since
            if self._clock() - since >= LEFT_OUT_S:
                self._tell(entry, reason)

    def end(self) -> None:
        """Nobody looks any more."""
        for entry, reason, _ in self._since.values():
            self._tell(entry, reason)
