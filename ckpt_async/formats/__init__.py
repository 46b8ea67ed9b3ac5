"""What a checkpoint of each known format is, how it is recognised in a listing, and when it is complete. Pure.

`table` has an entry for each format of folders, `files` what is recognised by the names of files, `checks` what is
checked of every checkpoint, and `found` the results. Nothing else knows formats.

A checkpoint is the outermost folder or file that was saved as one. Its step is that of its name, or of the nearest
folder above whose name is a number or has a word for steps. One marked folder below such a step folder is, with all
that lies beside it, the checkpoint of that step; of several, each is a part.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from ckpt_async.errors import StoreError
from ckpt_async.formats.checks import checked
from ckpt_async.formats.files import files_in, not_taken
from ckpt_async.formats.found import Found, Rules, join, last, marked_ns, of_files, of_folder
from ckpt_async.formats.ranks import rank_of_file
from ckpt_async.formats.table import FOLDERS, FORMATS, PLAIN_FORMATS, is_late
from ckpt_async.formats.tree import Identity, Tree, files_of

__all__ = [
    "FORMATS",
    "PLAIN_FORMATS",
    "Found",
    "Identity",
    "Rules",
    "Tree",
    "are_same",
    "check",
    "files_of",
    "find",
    "is_late",
    "marked_ns",
    "not_taken",
    "rank_of_file",
    "recognise",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TABLE_ONLY = Rules()


def find(tree: Tree, rules: Rules = _TABLE_ONLY) -> list[Found]:
    """Return every checkpoint in the tree that is there or on its way, in the order in which they were complete.

    That order is not by step, because a trainer may have gone back to a lower one; but where times tell nothing,
    steps decide.
    """
    found = [check(tree, each, rules) for each in recognise(tree, rules)]

    def place(each: Found) -> tuple[int, int, str]:
        return 0 if rules.ignores_times or rules.is_store else marked_ns(tree, each), each.step, each.path

    return sorted(found, key=place)


def recognise(tree: Tree, rules: Rules = _TABLE_ONLY) -> list[Found]:
    """Return what `find` does, judged by names alone: what is not begun has its marker, and is for `check` to examine.

    Few files are read for it, so it suits a listing of thousands.
    """
    return list((_by_rules if rules.done or rules.pattern else _by_table)(tree, rules))


def check(tree: Tree, found: Found, rules: Rules = _TABLE_ONLY) -> Found:
    """Return what was recognised, with the reason if it is not complete. Reads markers, and the ends of files."""
    return _guarded(found.format, found.path, tree, partial(checked, tree, found, rules))


def are_same(tree: Tree, found: Found, other: Found) -> bool:
    """Return whether two are copies of each other: of all files, or of all tensors of a torch.save file."""

    def files_in_it(each: Found) -> list[tuple[str, Identity]]:
        return sorted((each.shard(path), tree.files[path]._replace(mtime_ns=0)) for path in each.files)

    if found.is_file and other.is_file and (sums := tree.tensor_sums(found.path)):
        return sums == tree.tensor_sums(other.path)
    return files_in_it(found) == files_in_it(other)


def _by_table(tree: Tree, rules: Rules) -> Iterator[Found]:
    taken: set[str] = set()
    for folder in tree.folders:
        if _is_within(folder, taken):
            continue
        for name, format_ in FOLDERS.items():
            found = _guarded(name, folder, tree, partial(format_.recognise, tree, folder))
            if found is None or not _is_wanted(found, rules, name):
                continue
            # Of a DCP checkpoint that is the tree's own folder, the folders below are something else.
            is_flat = not folder and found.format == "dcp"
            taken |= {*found.files} if is_flat else {folder}
            yield found
            break
    free = [path for path in tree.files if not _is_within(path, taken)]
    yield from (each for each in files_in(tree, rules, free) if _is_wanted(each, rules))


def _is_wanted(found: Found, rules: Rules, also: str = "torch-file") -> bool:
    """Return whether the user wants it. An entry stands for all that it recognises, `torch-file` for all files."""
    return not rules.formats or not {found.format, also}.isdisjoint(rules.formats)


def _by_rules(tree: Tree, rules: Rules) -> Iterator[Found]:
    """Yield the checkpoints that the user's own rules recognise.

    A pattern trusts that names are given by renaming.
    """
    taken: set[str] = set()
    for path in tree.folders if rules.done else [*tree.folders[1:], *sorted(tree.files)]:
        is_one = rules.done in tree.names(path) if rules.done else fnmatch.fnmatchcase(path, rules.pattern)
        if not is_one or _is_within(path, taken):
            continue
        taken |= {path} - {""}
        if path in tree.files:
            yield of_files(tree, "pattern", path)
        elif rules.done:
            yield of_folder(tree, "done", path, join(path, rules.done))
        else:
            yield of_folder(tree, "pattern", path)


def _guarded(format_: str, path: str, tree: Tree, judge: Callable[[], T]) -> T | Found:
    """Return what `judge` says, or a refused checkpoint if it fails.

    It reads what anybody may have written. Whatever that causes, only this one is refused, and the others go on.
    """
    try:
        return judge()
    except StoreError:
        raise
    except Exception as error:
        logger.debug("unjudged path=%s", path, exc_info=True)
        files = (path,) if path in tree.files else tuple(tree.below(path))
        reason = f"it cannot be examined: {error!r}"
        return Found(format_, path, 0, last(path) or tree.root, files, "", (), reason, is_refused=True)


def _is_within(path: str, taken: set[str]) -> bool:
    parts = path.split("/")
    return "" in taken or any("/".join(parts[:depth]) in taken for depth in range(1, len(parts) + 1))
