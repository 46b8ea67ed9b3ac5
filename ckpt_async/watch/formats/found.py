"""What was found in a folder: a checkpoint, complete or not, with its name and step. Pure."""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt_async.watch.tree import Identity, Tree

METADATA = ".metadata"
# A number that is neither part of a longer one (a date with its time) nor of a fraction (a metric).
_NUMBER = re.compile(r"(?<![0-9])(?<![0-9]\.)([0-9]{1,12})(?![0-9])(?!\.[0-9])")
_NAMED_STEP = re.compile(r"(?:step=?[-_]?|iter[-_]?|ba|checkpoint-)" + _NUMBER.pattern)
# Lightning's names also have metrics (`val_loss=0.29`, `train_loss_step=0.29`) and versions (`-v1`).
_LIGHTNING_STEP = re.compile(r"(?<![A-Za-z_])(?:global_)?step=([0-9]{1,12})(?!\.?[0-9])")
# How much of a pickle is searched for a number. DeepSpeed's come after the names of all tensors.
_SEARCHED_BYTES = 1 << 22
_NS = 1_000_000_000
# A checkpoint waits at most this long, or this many settle times, for what is added to it.
GROWING_S, NUM_SETTLES = 60.0, 10
# The same where other nodes wait for the announcement: time for one file to be added, and to settle.
NUM_SETTLES_OF_NODES = 2
# Lightning's formats, with the file that tells the step where the folder's name does not.
_SAYS_STEP = {"lightning": "meta.pt", "nemo": "weights/common.pt"}


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user said about how to recognise checkpoints. `done`, `pattern` and `quiet_s` replace the table."""

    formats: tuple[str, ...] = ()  # only these of the table
    done: str = ""  # a folder is complete once it has a file of this name
    pattern: str = ""  # paths like this are given by renaming once complete
    quiet_s: float = 0.0  # complete when nothing in it has changed for this long
    ignores_times: bool = False
    ranks: int = 0  # trainer processes on all nodes, where the format does not tell; 0: unknown
    num_nodes: int = 1
    settle_s: float = 1.0  # what is added within this time belongs to the checkpoint

    @property
    def growing_s(self) -> float:
        """How long after its mark a checkpoint may go on growing."""
        return max(GROWING_S, NUM_SETTLES * self.settle_s)

    @property
    def held_back_s(self) -> float:
        """How long a checkpoint is held back for that.

        With several nodes it is shorter, because the others may rotate away their parts in the meantime.
        """
        return self.growing_s if self.num_nodes == 1 else NUM_SETTLES_OF_NODES * self.settle_s


Files = Mapping[str, Identity]


@dataclass(frozen=True, slots=True)
class Version:
    """A version that was seen complete, and when its mark was written."""

    files: Files
    marked_ns: int

    @property
    def body(self) -> Files:
        """The files that the mark stood for, without those added after it."""
        return {path: was for path, was in self.files.items() if was.mtime_ns <= self.marked_ns}

    @property
    def added(self) -> Files:
        return {path: was for path, was in self.files.items() if was.mtime_ns > self.marked_ns}


@dataclass(frozen=True, slots=True)
class Known:
    """By path, the files of what was seen complete.

    `growing` may still be added to, `handed` was handed in, and `versions` are all.
    """

    growing: Mapping[str, Sequence[Files]] = field(default_factory=dict)
    handed: Mapping[str, Sequence[Files]] = field(default_factory=dict)
    versions: Mapping[str, Sequence[Version]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was found.

    `files` are those here, by their paths in the folder; `missing` are those that its mark names and that are not
    here (on a single node, it is then incomplete). `reason` says why it is not complete; "" if it is. `is_waiting`:
    only time will tell. `is_refused`: it will never be complete as it is. `left_over`: files in its folder of an
    earlier save. `num_ranks`: how many ranks have written it, 0 if unknown. `of_other_ranks`: files left by ranks
    that only an earlier save had. `is_mixed`: its mark is there, but a file is not of the same save. `unwritten`: files
    that are as they were in an earlier save, and may belong to this one all the same.
    """

    format: str
    path: str  # of its folder ("": the watched folder), or of its one file
    step: int
    name: str
    files: tuple[str, ...]
    mark: str = ""  # the file that marks it complete; "" where the name does
    missing: tuple[str, ...] = ()
    reason: str = ""
    is_waiting: bool = False
    is_refused: bool = False
    left_over: tuple[str, ...] = ()
    num_ranks: int = 0
    of_other_ranks: tuple[str, ...] = ()
    is_mixed: bool = False
    unwritten: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return self.files == (self.path,)

    def shard(self, path: str) -> str:
        """Return the name of one of its files within the checkpoint."""
        return path.rpartition("/")[2] if self.is_file else path[len(self.path) + 1 if self.path else 0 :]

    @property
    def inner(self) -> tuple[str, ...]:
        return tuple(self.shard(each) for each in self.files)


def of_folder(tree: Tree, format_: str, folder: str, *, mark: str = "", reason: str = "") -> Found:
    files = [] if not folder and format_ == "dcp" else tree.below(folder)
    if not folder and format_ == "dcp":
        files = sorted(tree.names(""))  # what is beside its mark; other folders are separate
    files = [each for each in files if not each.endswith(".tmp")]
    name = last(folder) or tree.root
    step = _step_of(name, format_)
    if step is None and format_ in _SAYS_STEP:
        step = said(tree, join(folder, _SAYS_STEP[format_]), ("global_step",)).get("global_step")
    if step is None:
        step = _written_s(tree, mark or max(files, key=lambda each: tree.files[each].mtime_ns, default=""))
    return Found(format_, folder, step, name, tuple(files), mark, (), reason)


def one_file(tree: Tree, format_: str, path: str) -> Found:
    step = _step_of(last(path), format_)
    if step is None:
        step = said(tree, path, ("global_step",)).get("global_step")
    if step is None:
        step = _written_s(tree, path)
    return Found(format_, path, step, last(path), (path,))


def _step_of(name: str, format_: str) -> int | None:
    if format_ in _SAYS_STEP:
        told = _LIGHTNING_STEP.search(name)
        return int(told[1]) if told else None
    if match := _NAMED_STEP.search(name):
        return int(match[1])
    numbers = _NUMBER.findall(name.removesuffix(".safetensors"))
    return int(numbers[-1]) if numbers else None


def _written_s(tree: Tree, path: str) -> int:
    """Return a time as the step where nothing tells one, so that later checkpoints have higher steps."""
    return tree.files[path].mtime_ns // _NS if path in tree.files else 0


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
        () if found.is_file else (tree.changed_ns.get(each, 0) for each in tree.folders_below(found.path))
    )
    return max((*of_files, *of_folders), default=0)


def said(tree: Tree, path: str, keys: tuple[str, ...]) -> dict[str, int]:
    """Return the whole numbers that a torch.save file has under these keys, the first of each. Nothing in it is
    executed.
    """
    if path not in tree.files:
        return {}
    return tree.once("says", path, lambda: said_in(tree.read(path, 0, _SEARCHED_BYTES), keys))


def said_in(data: bytes, keys: tuple[str, ...]) -> dict[str, int]:
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
