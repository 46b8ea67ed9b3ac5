"""Checkpoints that are single files, or sets of one file per rank, told by their names and their ends. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from ckpt_async.core.naming import MAX_POINTER_BYTES, POINTER_SUFFIX
from ckpt_async.formats.found import Found, Rules, join, last, number_in, of_files, step_folder, step_named
from ckpt_async.formats.table import TENSORS, glob_of
from ckpt_async.formats.tree import Tree

_PLAIN = re.compile(r".*\.(?:pt|pth|safetensors)")
_OF_SET = re.compile(r".*-[0-9]{5}-of-[0-9]{5}\.\w+")
_COMPOSER = re.compile(r"ep[0-9]+-ba([0-9]{1,12})\.pt")
_BATCH = re.compile(r"ba([0-9]{1,12})")
# The file of one rank: `-rank3.pt.zst`, `-rank3-of-8.tar`, `_rank3.pt`; and where a name gives the number of ranks.
_RANK = re.compile(
    r"(.*?)[-_.]rank[-_]?([0-9]{1,6})(?:-of-([1-9][0-9]{0,5}))?"
    r"(|\.(?:pt|pth|ckpt|safetensors)(?:\..+)?|(?:\.(?:tar|tgz|bz2|gz|lzma|xz|lz4|lzo|zst))+)"
)
# As NeMo's, with one number or two (nemo/utils/model_utils.py `inject_model_parallel_rank`): `tp_rank_00_pp_rank_001`.
_RANK_FOLDER = re.compile(r"(?:[a-z]+_)?(?:rank|shard)[-_]?([0-9]{1,6})(_.*)?")
_WORLD_SIZE = re.compile(r"(?<![a-z])(?:ws|world[-_]?size)[-_]?([1-9][0-9]{0,5})(?![0-9])")
_MAX_POINTERS = 100


def files_in(tree: Tree, rules: Rules, free: Collection[str]) -> Iterator[Found]:
    """Yield the checkpoints among the files that belong to no folder's."""
    pointed = _pointed(tree)
    plain: dict[str, list[str]] = defaultdict(list)
    sets: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for path in sorted(free):
        name, folder = last(path), path.rpartition("/")[0]
        match, of_folder = _RANK.fullmatch(name), _RANK_FOLDER.fullmatch(last(folder))
        if of_folder and path.endswith((".ckpt", ".pt", ".pth", ".safetensors")):
            ranks = sets[join(folder.rpartition("/")[0], name), "", ""]
            ranks[len(ranks) if of_folder[2] else int(of_folder[1])] = path
        elif match and not name.endswith(POINTER_SUFFIX):
            place = join(folder, match[1]), match[3] or "", match[4]
            # Two files of one rank are never a set: the second gets a rank that no set has.
            sets[place][int(match[2]) if int(match[2]) not in sets[place] else 10**6 + len(sets[place])] = (
                path
            )
        elif path in pointed or _COMPOSER.fullmatch(name):
            yield of_files(tree, "composer", path)
        elif path.endswith(".ckpt"):
            yield of_files(tree, "lightning", path)
        elif _PLAIN.fullmatch(name) and not _OF_SET.fullmatch(name) and _is_numbered(path):
            plain[folder].append(path)
    # Folders in which several ranks write: there, a lone file of rank 0 is what a killed save left.
    several = {stem.rpartition("/")[0] for (stem, _, _), ranks in sets.items() if any(ranks)}
    for (stem, of, suffix), ranks in sorted(sets.items()):
        yield from _set(tree, rules, stem, of, suffix, ranks, pointed, several)
    for folder, paths in plain.items():
        yield from _plain(tree, folder, paths)


def _is_numbered(path: str) -> bool:
    """Return whether a file has its step in its own name, and is no part of a step folder's checkpoint."""
    above = step_folder(path.rpartition("/")[0])
    name = last(path).rpartition(".")[0]
    if step_named(name) is not None:
        return not above or last(above).isdecimal()
    return number_in(name) is not None and not above


def _plain(tree: Tree, folder: str, paths: list[str]) -> Iterator[Found]:
    """Yield plain files, one checkpoint each; or one that is refused, if nothing tells which of them are."""
    patterns = sorted({glob_of(each) for each in paths})
    if len(patterns) > 1:
        newest = max(paths, key=lambda each: (tree.files[each].mtime_ns, each))
        found = of_files(tree, "torch-file", folder or last(newest), tuple(paths))
        some = " or ".join(f"--pattern '{each}'" for each in patterns[:3])
        reason = (
            f"{folder or 'the folder'} has files of several kinds, and nothing tells which are checkpoints: give"
            f" {some}; or let the trainer save what belongs together into one folder, an empty file DONE last, and give"
            " --done DONE"
        )
        yield replace(found, reason=reason, is_refused=True, is_plain=True, step=number_in(last(newest)) or 0)
        return
    for path in paths:
        kind = "safetensors-file" if path.endswith(".safetensors") else "torch-file"
        yield replace(of_files(tree, kind, path), is_plain=True)


def _set(
    tree: Tree,
    rules: Rules,
    stem: str,
    of: str,
    suffix: str,
    ranks: dict[int, str],
    pointed: Collection[str],
    several: Collection[str],
) -> Iterator[Found]:
    """Yield the files of all ranks as one checkpoint, or one file that rank 0 wrote for all of them.

    A set that lacks its last rank looks complete, so it counts only if the number of ranks is known.
    """
    folder, _, name = stem.rpartition("/")
    paths = tuple(ranks[rank] for rank in sorted(ranks))
    is_pointed = not {*pointed}.isdisjoint(paths)
    is_composer = bool(_BATCH.search(name)) or is_pointed
    is_checkable = suffix in ("", ".pt", ".pth", ".ckpt", ".safetensors") and paths[0].endswith(
        ("t", "h", "s")
    )
    if not (is_composer and (rules.is_store or is_checkable)) and not (
        is_checkable and _is_numbered(f"{stem}.pt")
    ):
        return
    told = _WORLD_SIZE.search(name)
    count = int(of or (told[1] if told else rules.ranks))
    is_for_all = is_composer and not count and (is_pointed or suffix.startswith((".pt", ".safetensors")))
    format_ = "composer" if is_composer else "lightning" if stem.endswith(".ckpt") else "torch-file"
    if (
        [*ranks] == [0]
        and is_composer
        and (1 in (count, rules.ranks) or (is_for_all and folder not in several))
    ):
        yield of_files(tree, "composer", paths[0])
        return
    found = replace(of_files(tree, format_, stem, paths), num_ranks=count, names_its_files=bool(count))
    found = replace(found, is_plain=format_ == "torch-file")
    option = "pass world_size" if rules.is_store else "give --ranks with their number"
    if not count:
        what = f"it has files of ranks up to {max(ranks)}, but the number of ranks is unknown: {option}"
        yield replace(found, reason=what, is_refused=True)
    elif missing := {*range(count)} - {*ranks}:
        yield replace(found, reason=f"it has no file of rank {min(missing)}, expected {count} ranks")
    elif [*sorted(ranks)] != [*range(count)]:
        what = f"it has {len(ranks)} files, up to rank {min(max(ranks), len(ranks) - 1)}, expected {count}"
        yield replace(found, reason=what)
    else:
        yield found


def check_files(tree: Tree, found: Found, rules: Rules) -> Found:
    """Return `found`, with a reason if a file cannot be torch's (safetensors are checked like those in folders)."""
    for path in () if rules.is_store or found.reason or found.is_folder else found.files:
        if path.endswith((".pt", ".pth", ".ckpt")) and tree.read(path, 0, 2) != b"PK":
            return replace(found, reason=f"{path} is not a torch.save zip file yet")
    return found


def _pointed(tree: Tree) -> set[str]:
    """Return what Composer's pointers name: `*.symlink`, text files with an object's name in the whole bucket."""
    found, folders = set[str](), {*tree.folders}
    pointers = (each for each in tree.files if each.endswith(POINTER_SUFFIX))
    small = [each for each in sorted(pointers) if tree.files[each].size_bytes <= MAX_POINTER_BYTES]
    for each in small[:_MAX_POINTERS]:
        target = tree.text(each).strip().rstrip("/")
        while target and target not in tree.files and target not in folders:
            target = target.partition("/")[2]
        found |= {target} - {""}
    return found


def not_taken(tree: Tree, candidates: Collection[Found]) -> dict[str, tuple[str, str]]:
    """Return, by folder, the newest file that looks like part of a checkpoint but is in none of the candidates, and
    what to do to have it taken.
    """
    taken = {path for each in candidates for path in (*each.files, *each.of_other_ranks)}
    within = tuple(
        f"{each.path}/" for each in candidates if each.path and each.is_folder and not each.is_plain
    )
    found: dict[str, str] = {}
    for path in tree.files:
        if not TENSORS.fullmatch(path) or path in taken or path.startswith(within or ("\n",)):
            continue
        folder = path.rpartition("/")[0]
        was = found.get(folder, path)
        found[folder] = max(was, path, key=lambda each: (tree.files[each].mtime_ns, each))
    return {folder: (path, _advice(path)) for folder, path in found.items()}


def _advice(path: str) -> str:
    folder = path.rpartition("/")[0]
    is_numbered = step_folder(folder) or number_in(last(folder)) is not None
    if is_numbered or _RANK_FOLDER.fullmatch(last(folder)) or _OF_SET.fullmatch(path):
        return "let the trainer write an empty file DONE into each checkpoint's folder last, and give --done DONE"
    if path.endswith((".pt", ".pth", ".pth.tar", ".ckpt", ".safetensors")):
        return f"give --pattern '{glob_of(path)}' if each such file is a checkpoint"
    return (
        "let the trainer write it under another name, rename it when it is complete, and give"
        f" --pattern '{glob_of(path)}'; or write an empty file DONE beside it last, and give --done DONE"
    )
