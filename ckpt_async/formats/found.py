"""What was found in a listing: a checkpoint, complete or not, with its name and step. Pure."""

from __future__ import annotations

import functools
import pickletools
import re
import struct
from contextlib import suppress
from dataclasses import dataclass

from ckpt_async.formats.tree import Tree

# How long nothing may have changed where it is unknown what else will be written.
UNCOUNTED_S = 30.0
# A number that stands alone in a name: no part of a word, of a date with its time, or of a fraction (a metric).
_NUMBER = r"([0-9]{1,12})(?![0-9])(?!\.[0-9])"
_ALONE = re.compile(r"(?<![0-9A-Za-z])(?<![0-9]\.)" + _NUMBER + r"(?![A-Za-z])")
_WORDS = tuple(
    re.compile(rf"(?<![A-Za-z])(?:{words})[-_=]?{_NUMBER}", re.IGNORECASE)
    for words in ("(?:global_?)?steps?|iter(?:ation)?s?|ba|batch", "checkpoint|ckpt", "epoch|ep")
)
# Numbers that are no steps: of versions, ranks, trials … and dates and times.
_NO_STEP = re.compile(
    r"(?<![A-Za-z])(?:v|version|rank|trial|run|seed|node|fold|ws|world[-_]?size)[-_=]?[0-9]+(?![0-9.])",
    re.IGNORECASE,
)
_DATE = re.compile(r"(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])[0-9]*|1[5-9][0-9]{8}")
# Lightning's names also have metrics (`val_loss=0.29`, `train_loss_step=0.29`) and versions (`-v1`).
_LIGHTNING_STEP = re.compile(r"(?<![A-Za-z_])(?:global_)?step=([0-9]{1,12})(?!\.?[0-9])")
# Lightning's formats, with the file that tells the step where the folder's name does not.
_SAYS_STEP = {"lightning": "meta.pt", "nemo": "weights/common.pt"}
# How much of a pickle is searched for a number. DeepSpeed's come after the names of all tensors.
_SEARCHED_BYTES = 1 << 22
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rules:
    """How checkpoints are recognised. `done` and `pattern`, if given, replace the table.

    `is_store`: the listing is a store's. It has no times and no folders of its own, and an object is there as a whole
    or not at all: what compares times, or waits, is left out.
    """

    formats: tuple[str, ...] = ()  # only these of the table
    done: str = ""  # a folder is complete once it has a file of this name
    pattern: str = ""  # paths like this are given by renaming once complete
    ignores_times: bool = False
    ranks: int = 0  # trainer processes on all nodes, where the format does not tell; 0: unknown
    num_nodes: int = 1
    settle_s: float = 1.0  # how long a complete checkpoint must be quiet before it is handed in
    is_store: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was found.

    `files` are those here, by their paths in the tree; `missing` are those that its marker names and that are not here
    (on a single node, it is then incomplete). `reason` says why it is not complete; "" if it is. `is_waiting`: only
    time will tell. `is_refused`: it will never be complete as it is, and the reason says what to do. `is_begun`: its
    writer has not marked it. `num_ranks`: how many ranks have written it, 0 if unknown. `of_other_ranks`: files of
    ranks that its `.metadata` does not name, which are no part of it. `state_files`: those that every save must write
    anew. `names_its_files`: the marker, or the number of ranks, tells all files that there are on all nodes.
    `is_plain`: one or several files without any marker, taken only by their name and end.
    """

    format: str
    path: str  # of its folder ("": the tree's own), of its one file, or what the names of a set of files have in common
    step: int
    name: str
    files: tuple[str, ...]
    mark: str = ""  # the file that marks it complete; "" where the name, or what is beside it, does
    missing: tuple[str, ...] = ()
    reason: str = ""
    is_waiting: bool = False
    is_refused: bool = False
    is_begun: bool = False
    num_ranks: int = 0
    of_other_ranks: tuple[str, ...] = ()
    state_files: tuple[str, ...] = ()
    names_its_files: bool = False
    is_plain: bool = False

    @property
    def is_file(self) -> bool:
        return self.files == (self.path,)

    @property
    def is_folder(self) -> bool:
        return not self.path or any(each.startswith(f"{self.path}/") for each in self.files)

    @property
    def is_complete(self) -> bool:
        return not (self.reason or self.missing)

    def shard(self, path: str) -> str:
        """Return the name of one of its files within the checkpoint."""
        if self.path and path.startswith(f"{self.path}/"):
            return path[len(self.path) + 1 :]
        above = self.path.rpartition("/")[0]
        return path[len(above) + 1 :] if above else path

    @property
    def inner(self) -> tuple[str, ...]:
        return tuple(self.shard(each) for each in self.files)


def of_folder(tree: Tree, format_: str, folder: str, mark: str = "", *, begun: str = "") -> Found:
    """Return the checkpoint that a folder is, with its marker, or with the reason why it has only begun."""
    files = tuple(each for each in tree.below(folder) if not each.endswith(".tmp"))
    step = _step(
        tree, format_, folder, mark or max(files, key=lambda each: tree.files[each].mtime_ns, default="")
    )
    return Found(
        format_, folder, step, last(folder) or tree.root, files, mark, (), begun, is_begun=bool(begun)
    )


def of_files(tree: Tree, format_: str, path: str, files: tuple[str, ...] = ()) -> Found:
    """Return the checkpoint that one file is, or several whose names have `path` in common."""
    files = files or (path,)
    return Found(format_, path, _step(tree, format_, path, files[0]), last(path), files)


def _step(tree: Tree, format_: str, path: str, written: str) -> int:
    """Return the step: of its name or of the nearest folder above that has one, else what the file says.

    Where nothing tells one, it is the time in seconds, so that later checkpoints have higher steps.
    """
    name = last(path) or tree.root
    if format_ in _SAYS_STEP:
        told = _LIGHTNING_STEP.search(name)
        step = int(told[1]) if told else None
        says = written if path in tree.files else join(path, _SAYS_STEP[format_])
    else:
        step, above = step_named(name), path
        while step is None and "/" in above:
            above = above.rpartition("/")[0]
            step = step_named(last(above))
        step, says = (number_in(name) if step is None else step), path
    if step is None:
        step = said(tree, says, ("global_step",)).get("global_step")
    return step if step is not None else tree.files[written].mtime_ns // _NS if written in tree.files else 0


@functools.lru_cache(maxsize=1 << 14)
def step_named(name: str) -> int | None:
    """Return the step if the name says that it is one: it is a number, or has a word for it."""
    if name.isdecimal() and name.isascii() and len(name) <= 12:
        return None if _DATE.fullmatch(name) else int(name)
    return next((int(match[1]) for word in _WORDS[:2] if (match := word.search(name))), None)


def number_in(name: str) -> int | None:
    """Return the step, or else the last number that stands alone in the name and may be one."""
    if (step := step_named(name)) is not None:
        return step
    if epoch := _WORDS[2].search(name):
        return int(epoch[1])
    numbers = [each for each in _ALONE.findall(_NO_STEP.sub("-", name)) if not _DATE.fullmatch(each)]
    return int(numbers[-1]) if numbers else None


def step_folder(path: str) -> str:
    """Return the nearest folder above, or the folder itself, that is the place of one step; "" if there is none."""
    while path and step_named(last(path)) is None:
        path = path.rpartition("/")[0]
    return path


def marked_ns(tree: Tree, found: Found) -> int:
    """Return when it was complete, by its mark or else by its newest file; 0 if nothing of it is here."""
    told_by = [found.mark] if found.mark in tree.files else found.files
    return max((tree.files[each].mtime_ns for each in told_by), default=0)


def changed_ns(tree: Tree, found: Found) -> int:
    """Return when something was last written to it, made in it or removed from it.

    A copy that keeps times sets back those of its files, and that of a folder once all of it is there.
    """
    of_files = (tree.files[each].mtime_ns for each in found.files)
    of_folders = (
        (tree.changed_ns.get(each, 0) for each in tree.folders_below(found.path)) if found.is_folder else ()
    )
    return max((*of_files, *of_folders), default=0)


def said(tree: Tree, path: str, keys: tuple[str, ...]) -> dict[str, int]:
    """Return the whole numbers that a torch.save file has under these keys, the first of each. Nothing in it is
    executed.
    """
    if path not in tree.files:
        return {}
    return tree.once(f"says {keys}", path, lambda: _said_in(tree.read(path, 0, _SEARCHED_BYTES), keys))


def _said_in(data: bytes, keys: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    if data[:4] != b"PK\x03\x04" or len(data) < 30:
        return found
    name_bytes, more_bytes = struct.unpack_from("<HH", data, 26)
    key = ""
    with suppress(ValueError, IndexError, struct.error, UnicodeDecodeError):
        for opcode, argument, _ in pickletools.genops(data[30 + name_bytes + more_bytes :]):
            if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                continue
            if key and isinstance(argument, int) and "INT" in opcode.name:
                found.setdefault(key, argument)
            key = argument if argument in keys else ""
            if len(found) == len(keys):
                break
    return found


def last(path: str) -> str:
    return path.rpartition("/")[2]


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
