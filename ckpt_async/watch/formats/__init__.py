"""Finds the checkpoints in a folder and tells which are complete: one table of predicates over a listing. Pure.

`marks` has what each format's mark says, `checks` what is checked of every mark, and `found` the results.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ckpt_async.watch.formats.checks import checked, unrotated, without_left_over
from ckpt_async.watch.formats.found import (
    Found,
    Known,
    Rules,
    changed_ns,
    join,
    last,
    marked_ns,
    of_folder,
    one_file,
)
from ckpt_async.watch.formats.marks import FORMATS, TABLE, torch_file
from ckpt_async.watch.formats.ranks import without_other_ranks
from ckpt_async.watch.tree import Tree

__all__ = ["FORMATS", "Found", "Known", "Rules", "find"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NS = 1_000_000_000


_TABLE_ONLY = Rules()
_NONE = Known()


def find(tree: Tree, rules: Rules = _TABLE_ONLY, known: Known = _NONE) -> list[Found]:
    """Return every checkpoint in the folder that is there or on its way, in the order in which they were complete.

    That order is not by step, because a trainer may have gone back to a lower one; but where times tell nothing,
    steps decide. `known` is what was seen before.
    """
    recognise = _by_rules if rules.done or rules.pattern or rules.quiet_s else _by_table
    there = list(recognise(tree, rules, set()))
    marked = (each for each in there if each.mark in tree.files and not each.reason)
    newest_ns = max((marked_ns(tree, each) for each in marked), default=0)
    found = [
        _guarded(each.format, each.path, tree, partial(_checked, tree, each, rules, known, newest_ns))
        for each in there
    ]

    def place(each: Found) -> tuple[int, int, str]:
        return 0 if rules.ignores_times else marked_ns(tree, each), each.step, each.path

    return sorted(found, key=place)


def _checked(tree: Tree, found: Found, rules: Rules, known: Known, newest_ns: int) -> Found:
    versions = known.versions.get(found.path, ())
    may_be_complete = found.is_waiting or not found.reason
    if may_be_complete and not found.is_file and (path := tree.fetched_to(found.path)):
        reason = f"it is being downloaded, or the download was interrupted: {path} exists"
        return replace(found, reason=reason, is_waiting=False)
    found = without_other_ranks(tree, without_left_over(tree, found, versions), rules, versions)
    if found.is_waiting:
        return unrotated(tree, found, rules)
    if found.reason:
        return found
    files = {path: tree.files[path] for path in found.files}
    found = checked(
        *(tree, found, rules),
        has_grown=any(each.items() <= files.items() for each in known.growing.get(found.path, ())),
        was_handed=any(
            each.get(found.mark) == tree.files.get(found.mark) for each in known.handed.get(found.path, ())
        ),
        versions=versions,
        newest_ns=newest_ns,
    )
    # Of several nodes, the others may have all the rest.
    if found.format == "done" and found.files == (found.mark,) and not found.reason and rules.num_nodes == 1:
        return replace(found, reason=f"it contains nothing but {rules.done} yet")
    return found


def _by_table(tree: Tree, rules: Rules, taken: set[str]) -> Iterator[Found]:
    table = [each for each in TABLE.items() if not rules.formats or each[0] in rules.formats]
    for folder in tree.folders:
        if _is_within(folder, taken):
            continue
        for name, mark_of in table:
            if (found := _guarded(name, folder, tree, partial(mark_of, tree, folder, rules))) is not None:
                if found.path or folder == "":
                    taken.add(folder if not found.is_file else found.path)
                yield found
                break
    for path in sorted(tree.files):
        if _is_within(path, taken):
            continue
        found = _guarded("torch-file", path, tree, partial(torch_file, tree, path))
        if found is not None and (not rules.formats or {"torch-file", found.format} & {*rules.formats}):
            yield found


def _guarded(format_: str, path: str, tree: Tree, judge: Callable[[], T]) -> T | Found:
    """Return what `judge` says, or a refused checkpoint if it fails.

    It reads what anybody may have written. Whatever that causes, only this one is refused, and the others go on.
    """
    try:
        return judge()
    except Exception as error:
        logger.debug("unjudged path=%s", path, exc_info=True)
        files = (path,) if path in tree.files else tuple(tree.below(path))
        reason = f"it cannot be examined: {error!r}"
        return Found(format_, path, 0, last(path) or tree.root, files, "", (), reason, is_refused=True)


def _is_within(path: str, taken: set[str]) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:depth]) in taken for depth in range(1, len(parts) + 1)) or (
        "" in taken and path == ""
    )


def _by_rules(tree: Tree, rules: Rules, taken: set[str]) -> Iterator[Found]:
    """Yield the checkpoints that the user's own rules recognise.

    A pattern alone trusts that names are given by renaming. Without a pattern, a file at the top may be a log, which
    is no checkpoint.
    """
    if rules.done:
        for folder in tree.folders:
            if not _is_within(folder, taken) and rules.done in tree.names(folder):
                taken.add(folder)
                yield of_folder(tree, "done", folder, mark=join(folder, rules.done))
        return
    for path in [*tree.folders[1:], *sorted(tree.files)]:
        is_top = "/" not in path and path not in tree.files
        is_wanted = fnmatch.fnmatchcase(path, rules.pattern) if rules.pattern else is_top
        if not is_wanted or _is_within(path, taken):
            continue
        taken.add(path)
        kind = "quiet" if rules.quiet_s else "pattern"
        found = one_file(tree, kind, path) if path in tree.files else of_folder(tree, kind, path)
        # The ctime, which nobody can set back, also changes with a link. Where there is a mark, that link
        # would be ours.
        newest_ns = max(changed_ns(tree, found), *(tree.ctime_ns.get(each, 0) for each in found.files), 0)
        if rules.quiet_s and tree.now_ns - newest_ns < rules.quiet_s * _NS:
            found = replace(found, reason=f"it changed within the last {rules.quiet_s:g} s", is_waiting=True)
        yield found
