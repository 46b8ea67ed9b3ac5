"""The memory of a watcher: what it has found, and links to the bytes that are not in the store yet.

One small file records each version of a checkpoint that was seen complete. The calls block.

    <place>/of.json                   which folder and remote this belongs to
    <place>/entries/<number>.json     what was found, and what became of it
    <place>/staged/<number>/<shard>   hard links (copies if on another disk)
    <place>/first.json                the tensor files that were there before the first launch
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ckpt_async import private
from ckpt_async.core import errnos
from ckpt_async.core.model import CheckpointId, without_slash
from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import CkptAsyncError, JournalError, SettingsError
from ckpt_async.formats import Found, Identity, Tree
from ckpt_async.local.durable import write_durably
from ckpt_async.watch.disk import identity_of
from ckpt_async.watch.room import Room

# This many of the settled entries whose files are gone are kept.
MAX_GONE = 1000


class State(enum.Enum):
    """The state of an entry: staged → handed → committed | refused.

    An entry is handed in again in a new generation if nobody had sealed it.
    """

    STAGED = "staged"
    HANDED = "handed"
    COMMITTED = "committed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of one checkpoint.

    `files` maps paths in the watched folder to identities, `shards` maps the same paths to names in the checkpoint.
    `expected` names every file that the marker names, on whichever node it is; it is empty where this node does not
    know.
    """

    number: int
    format: str
    path: str
    step: int
    name: str
    files: Mapping[str, Identity]
    shards: Mapping[str, str]
    marker: str = ""
    expected: tuple[str, ...] = ()
    staged_ns: int = 0
    state: State = State.STAGED
    generation: int = 0  # the one in which it was handed in
    reason: str = ""  # why it was refused
    refusal: Refusal | None = None
    is_copied: bool = False
    is_followed: bool = False  # another node has announced it
    announced_ns: int = 0  # time of its marker, according to the announcing node
    is_doubtful: bool = False  # another watcher, or one that lost its memory, may have sent it
    # For a single file: the checksums of its tensors, as the file records them.
    tensors: Mapping[str, int] = field(default_factory=dict)
    marker_ns: int = 0  # when its marker was written, which may lie beside it; 0: unknown
    is_checked: bool = False  # its bytes match the checksums that it records
    num_nodes: int = 1  # how many there were when it was found
    is_plain: bool = False  # a file that was taken only because its name has a number

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.generation, self.step)

    @property
    def says_sums(self) -> bool:
        """Whether this is a single file that records checksums of its content."""
        return self.path in self.files and bool(self.tensors)

    @property
    def is_settled(self) -> bool:
        return self.state in (State.COMMITTED, State.REFUSED)

    @property
    def is_alive(self) -> bool:
        return self.state is not State.REFUSED

    @property
    def completed_ns(self) -> int:
        """When the checkpoint was complete.

        The oldest file does not tell: a `config.json` may have been copied with its time.
        """
        marker = self.files.get(self.marker)
        return marker.mtime_ns if marker else self.marker_ns or self.written_ns

    @property
    def written_ns(self) -> int:
        return max((each.mtime_ns for each in self.files.values()), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files.values())

    @property
    def content(self) -> Mapping[str, Identity]:
        """The files by their names in the checkpoint. A single file may have any name, so its name here is ""."""
        if self.path in self.files:
            return {"": self.files[self.path]}
        return {shard: self.files[path] for path, shard in self.shards.items()}

    def is_of(self, files: Mapping[str, Identity]) -> bool:
        """Return whether these are the entry's files, or those of them that a rotation has left."""
        return bool(files) and files.items() <= self.files.items()


def entry_of(found: Found, tree: Tree, number: int, *, expected: tuple[str, ...] = ()) -> Entry:
    return Entry(
        number,
        found.format,
        found.path,
        found.step,
        found.name,
        {path: tree.files[path] for path in found.files},
        {path: found.shard(path) for path in found.files},
        found.mark,
        expected,
        tree.now_ns,
        tensors=tree.tensor_sums(found.path) if found.is_file else {},
        marker_ns=tree.files[found.mark].mtime_ns if found.mark in tree.files else 0,
    )


class VanishedError(Exception):
    """A file disappeared or changed while it was being linked; the next scan decides.

    `gone` is the path of a removed one.
    """

    def __init__(self, message: str, gone: str = "") -> None:
        super().__init__(message)
        self.gone = gone


@dataclass(slots=True)
class Entries:
    """The entries of one folder and remote, stored in a `place` of their own. Not thread-safe."""

    source: Path
    place: Path
    remote: str
    room: Room | None = None  # limits copies; None: no limit
    num_nodes: int = 1
    all: dict[int, Entry] = field(default_factory=dict)
    _alike: dict[str | int, set[int]] = field(default_factory=dict)  # entry numbers, by path and by step

    def load(self) -> None:
        """Read the entries, and finish or undo what a kill has interrupted."""
        self.place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.place.mkdir(0o700)
        private.check(self.place)
        for place in (self._entries, self._staged):
            place.mkdir(parents=True, exist_ok=True)
        self._check_place()
        for path in sorted(self._entries.glob("*.json")):
            try:
                entry = _decode(json.loads(path.read_bytes()))
            except (ValueError, LookupError, TypeError) as error:
                raise CkptAsyncError(
                    f"{str(path)!r} cannot be read: {error}",
                    hint="move it aside; the watcher rebuilds its content on the next launch",
                ) from None
            self._remember(entry)
        for folder in self._staged.iterdir():
            number, _, suffix = folder.name.partition(".")
            entry_ = self.all.get(int(number)) if number.isdecimal() else None
            if entry_ is None or entry_.is_settled:
                shutil.rmtree(folder)
            elif suffix:  # the entry was written, so all links are there
                folder.rename(self._staged / number)
        for entry in list(self.all.values()):
            if entry.state is State.STAGED and not self.staged(entry).is_dir():
                self.drop(entry)

    def _check_place(self) -> None:
        of = self.place / "of.json"
        if of.exists() and (theirs := json.loads(of.read_bytes())) != self._of:
            raise SettingsError(
                f"{str(self.place)!r} holds the state of a watcher of {theirs['folder']} for {theirs['remote']}",
                hint="use another folder with --state DIR, or delete this one if you no longer need it",
            )

    def check_there(self) -> None:
        """Raise JournalError if somebody has removed the place: what the process still has open of it is lost."""
        if not self._entries.is_dir():
            raise JournalError(
                f"the watcher's state in {str(self.place)!r} was removed while it was watching",
                hint="start it again: it recognises what is in the store and uploads the rest",
            )

    def bind(self) -> None:
        """Bind the place to this folder and remote; any other is refused from now on."""
        write_durably(self.place / "of.json", json.dumps(self._of).encode())

    @property
    def _of(self) -> dict[str, str]:
        return {"folder": str(self.source), "remote": without_slash(self.remote)}

    @property
    def _entries(self) -> Path:
        return self.place / "entries"

    @property
    def _staged(self) -> Path:
        return self.place / "staged"

    def staged(self, entry: Entry) -> Path:
        return self._staged / f"{entry.number:08d}"

    def next_number(self) -> int:
        return max(self.all, default=0) + 1

    def open(self) -> list[Entry]:
        return [each for each in self.all.values() if not each.is_settled]

    def of_path(self, path: str) -> list[Entry]:
        return self._numbered(self._alike.get(path, set()))

    def akin_to(self, found: Found) -> list[Entry]:
        """Return the entries with the same path or step. Out of thousands, a verdict can depend on these only."""
        return self._numbered(self._alike.get(found.path, set()) | self._alike.get(found.step, set()))

    def _numbered(self, numbers: Iterable[int]) -> list[Entry]:
        return [self.all[each] for each in sorted(numbers)]

    def num_committed_in(self, tree: Tree) -> int:
        """Count the committed entries that are still in the folder."""
        committed = (each for each in self.all.values() if each.state is State.COMMITTED)
        return sum(any(tree.files.get(path) == was for path, was in each.files.items()) for each in committed)

    def stage(self, entry: Entry, source: Path) -> Entry:
        """Link every file of an entry from below `source`, so that the trainer may delete its own.

        Raises VanishedError, or OSError if the disk is full or has no room for a copy. Nothing is left behind then.
        """
        place = self._staged / f"{entry.number:08d}.tmp"
        shutil.rmtree(place, ignore_errors=True)
        is_copied = False

        def may_copy() -> None:
            if self.room is not None and not is_copied:  # the rest is copied, too
                self.room.check_copy(entry.size_bytes)

        try:
            for path, shard in entry.shards.items():
                target = place / shard
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    is_copied |= _link_or_copy(source / path, target, entry.files[path], may_copy)
                except FileNotFoundError as error:
                    raise VanishedError(f"{source / path} is gone", path) from error
            place.mkdir(exist_ok=True)
            entry = replace(entry, is_copied=is_copied, num_nodes=self.num_nodes)
            self.put(entry)
            place.rename(self.staged(entry))
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            self.drop(entry)
            raise
        return entry

    def there_before(self, paths: Iterable[str], tree: Tree, began_ns: int) -> Mapping[str, Identity]:
        """Return those of the paths that were there before the first watcher of this folder was started, at `began_ns`.

        The first call, at the first scan, decides; later launches read what it found.
        """
        path = self.place / "first.json"
        if not path.exists():
            first = {each: tree.files[each] for each in paths if tree.ctime_ns.get(each, 0) < began_ns}
            write_durably(path, json.dumps(first).encode())
        return {each: Identity(*was) for each, was in json.loads(path.read_bytes()).items()}

    def put(self, entry: Entry) -> None:
        """Record an entry. It is durable on return."""
        write_durably(self._entries / f"{entry.number:08d}.json", json.dumps(_encode(entry)).encode())
        self._remember(entry)

    def note_checked(self, entry: Entry) -> Entry:
        """Mark an entry as checked in memory; it is recorded when it is handed in."""
        checked = replace(entry, is_checked=True)
        self._remember(checked)
        return checked

    def _remember(self, entry: Entry) -> None:
        # It may have had another step.
        if (before := self.all.get(entry.number)) is not None:
            for key in (before.path, before.step):
                self._alike[key].discard(entry.number)
        self.all[entry.number] = entry
        for key in (entry.path, entry.step):
            self._alike.setdefault(key, set()).add(entry.number)

    def settle(self, entry: Entry, state: State, reason: str = "", refusal: Refusal | None = None) -> Entry:
        settled = replace(entry, state=state, reason=reason, refusal=refusal)
        shutil.rmtree(self.staged(entry), ignore_errors=True)  # first, since a full disk takes no record
        self.put(settled)
        return settled

    def drop(self, entry: Entry) -> None:
        """Forget an entry as if it had never been seen."""
        if self.all.pop(entry.number, None) is not None:
            for key in (entry.path, entry.step):
                self._alike[key].discard(entry.number)
        (self._entries / f"{entry.number:08d}.json").unlink(missing_ok=True)
        shutil.rmtree(self.staged(entry), ignore_errors=True)

    def is_intact(self, entry: Entry) -> bool:
        """Return whether the staged files are still as they were found."""
        for path, shard in entry.shards.items():
            try:
                facts = identity_of((self.staged(entry) / shard).lstat())
            except OSError:
                return False
            wanted = entry.files[path]
            is_link = not entry.is_copied and facts.inode == wanted.inode
            if facts.size_bytes != wanted.size_bytes or (is_link and facts != wanted):
                return False
        return True

    def forget_gone(self, tree: Tree) -> None:
        """Drop settled entries whose files have all left the folder, except for the newest MAX_GONE."""
        gone = [
            each
            for each in sorted(self.all.values(), key=lambda each: each.number)
            if each.is_settled and not any(tree.files.get(path) == was for path, was in each.files.items())
        ]
        for entry in gone[:-MAX_GONE]:
            self.drop(entry)


def _link_or_copy(source: Path, target: Path, wanted: Identity, may_copy: Callable[[], None]) -> bool:
    """Link a file, or copy it if it cannot be linked. Return whether it was copied.

    `may_copy` raises if a copy is not allowed. Raises FileNotFoundError or VanishedError.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in errnos.NO_LINKS:
            raise
        may_copy()
        _copy(source, target, wanted)
        return True
    if identity_of(target.lstat()) != wanted:
        raise VanishedError(f"{source} has changed")
    return False


def _copy(source: Path, target: Path, wanted: Identity) -> None:
    shutil.copyfile(source, target, follow_symlinks=False)
    if identity_of(source.lstat()) != wanted:
        raise VanishedError(f"{source} has changed")


def _encode(entry: Entry) -> dict[str, object]:
    refusal = entry.refusal.value if entry.refusal else None
    return asdict(entry) | {"state": entry.state.value, "refusal": refusal}


def _decode(fields: dict[str, object]) -> Entry:
    files = fields["files"]
    if not isinstance(files, dict):
        raise TypeError("files")
    return Entry(
        **{  # type: ignore[arg-type]
            **fields,
            "files": {path: Identity(*each) for path, each in files.items()},
            "expected": tuple(fields["expected"]),  # type: ignore[arg-type]
            "state": State(fields["state"]),
            "refusal": Refusal(fields["refusal"]) if fields["refusal"] else None,
        }
    )


def remove_files(source: Path, entry: Entry) -> None:
    """Delete a trainer's committed checkpoint, its marker first; files that are not the ones sent are left alone."""
    paths = sorted(entry.files, key=lambda path: (path != entry.marker, path))
    for path in paths:
        with contextlib.suppress(OSError):
            if identity_of((source / path).lstat()) == entry.files[path]:
                (source / path).unlink()
    folders = {str(parent) for path in paths for parent in Path(path).parents if str(parent) != "."}
    for folder in sorted(folders, key=len, reverse=True):
        if entry.path and (folder == entry.path or folder.startswith(f"{entry.path}/")):
            with contextlib.suppress(OSError):
                (source / folder).rmdir()
