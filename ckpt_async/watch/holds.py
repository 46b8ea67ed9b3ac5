"""Links to candidates: a trainer may rotate one away before anybody knows that it is a checkpoint.

    <place>/<number>/<path>   hard links by their paths in the watched folder; a copy of a mark beside the checkpoint
    <place>/<number>.json     the look they are of; the file's mtime tells until when the folder was in that state

The record is written once every file of a look is linked, so it always describes a whole listing; links without a
record are discarded. The calls block.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ckpt_async.core import errnos
from ckpt_async.watch.disk import Disk, identity_of
from ckpt_async.watch.formats import Found
from ckpt_async.watch.room import Room
from ckpt_async.watch.seen import Seen
from ckpt_async.watch.tree import Identity, Tree
from ckpt_async.watch.wake import News

logger = logging.getLogger(__name__)

# How many candidates are held; the newest are kept, since what was rotated away takes space for as long as it
# is held. Fewer while the trainer lacks space.
MAX_HELD, MAX_HELD_LOW = 32, 2


@dataclass(frozen=True, slots=True)
class Hold:
    """One version of a candidate: as far as is known, the folder had exactly these files until `seen_ns`.

    `beside` is its mark, if that is not among the files. `is_waiting`: the mark was there, and only time had to pass.
    """

    number: int
    path: str
    files: Mapping[str, Identity]
    beside: Mapping[str, Identity]
    changed_ns: Mapping[str, int]
    is_waiting: bool = False
    seen_ns: int = 0

    @property
    def written_ns(self) -> int:
        return max((each.mtime_ns for each in self.files.values()), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files.values())


def is_same_version(files: Mapping[str, Identity], others: Mapping[str, Identity]) -> bool:
    """Return whether both are of one save: files were added and have grown, and none was replaced by another file."""
    common = files.keys() & others.keys()
    return bool(common) and all(files[path].inode == others[path].inode for path in common)


@dataclass(slots=True)
class Holds:
    """The held candidates of one folder, stored in a `place` of their own. Not thread-safe."""

    source: Path
    place: Path
    all: dict[int, Hold] = field(default_factory=dict)
    is_possible: bool = True  # False once the disk has refused a link
    room: Room | None = None  # None: no limit
    dropping: Callable[[Hold], None] = lambda _: None  # called with a hold dropped because of too many
    seen: Seen = field(default_factory=Seen)  # includes what cannot be held
    _looked_ns: int = 0  # time of the newest look

    def load(self) -> None:
        """Read the holds, and drop those that a kill has left incomplete."""
        self.place.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.place.glob("*.json")):
            try:
                hold = _decode(json.loads(path.read_bytes()), path.stat().st_mtime_ns)
                self.all[hold.number] = hold
            except (ValueError, LookupError, TypeError) as error:
                logger.warning("links_dropped path=%s error=%s", path, error)
                path.unlink()
        for folder in self.place.iterdir():
            if folder.is_dir() and folder.name.isdecimal() and int(folder.name) not in self.all:
                shutil.rmtree(folder)

    def of_path(self, path: str) -> list[Hold]:
        """Return the holds of a path, oldest first."""
        held = [each for each in self.all.values() if each.path == path]
        return sorted(held, key=lambda each: (each.seen_ns, each.number))

    def gone(self, tree: Tree) -> list[Hold]:
        """Return the holds that the folder no longer has in that form, oldest first.

        They were rotated away, are being rotated, or were written anew.
        """
        return [each for _, each in sorted(self.all.items()) if each.seen_ns != tree.now_ns]

    def miss(self, tree: Tree, news: News) -> None:
        """Extend until when a candidate was there, if the last look saw it and this one does not.

        It was there until the first of its files was removed, if nothing else came to its place since: removing a
        name sets the ctime of the link that we have.
        """
        for hold in self.gone(tree):
            if hold.seen_ns != self._looked_ns or not news.is_untouched(hold.path, hold.changed_ns):
                continue
            now = {path: tree.files[path].inode for path in hold.files.keys() & tree.files.keys()}
            removed = [path for path, was in hold.files.items() if now.get(path) != was.inode]
            ctime_ns = Disk(self.folder(hold)).look().ctime_ns
            removed_ns = min((ctime_ns.get(path, 0) for path in removed), default=0)
            self._record(replace(hold, seen_ns=max(hold.seen_ns, removed_ns)), hold)
        self._looked_ns = tree.now_ns

    def folder(self, hold: Hold) -> Path:
        return self.place / f"{hold.number:08d}"

    def see(self, found: Found, tree: Tree) -> None:
        """Link what the folder has of a candidate now."""
        last = next(reversed(self.of_path(found.path)), None)
        now = _seen(found, tree, max(self.all, default=0) + 1)
        if last is not None and is_same_version(now.files, last.files):
            if now.files.keys() < last.files.keys() or (last.beside and not now.beside):
                # A rotation has begun, or the mark is of another save: keep what was seen before.
                return
            now = replace(now, number=last.number)
        else:
            last = None
        most = MAX_HELD_LOW if self.room is not None and self.room.lacking_bytes() else MAX_HELD
        oldest_ns = min((each.written_ns for each in self.all.values()), default=0)
        if last is None and len(self.all) >= most and now.written_ns < oldest_ns:
            return  # it would be dropped first
        try:
            self._link(now, last)
        except FileNotFoundError:
            return  # the next look sees what happened
        except OSError as error:
            self.is_possible = error.errno not in errnos.NO_LINKS
            logger.warning(
                "not_linked path=%s error=%s; it is not kept if it is removed before it is complete",
                found.path,
                error,
            )
            return
        self._record(now, last)
        if last is None or now.files.keys() != last.files.keys():
            logger.info("held path=%s num_files=%d", found.path, len(now.files))
        for oldest in sorted(self.all.values(), key=lambda each: each.written_ns)[:-most]:
            self.dropping(oldest)
            self.drop(oldest)

    def _link(self, hold: Hold, last: Hold | None) -> None:
        folder = self.folder(hold)
        folder.mkdir(exist_ok=True)
        for path, wanted in hold.files.items():
            if last is not None and path in last.files:
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            os.link(self.source / path, target, follow_symlinks=False)
            if target.lstat().st_ino != wanted.inode:
                target.unlink()
                raise FileNotFoundError(f"{path} has been replaced")
        for path, wanted in hold.beside.items():
            if last is None or last.beside.get(path) != wanted:
                data = (self.source / path).read_bytes()
                if identity_of((self.source / path).lstat()) != wanted:
                    raise FileNotFoundError(f"{path} has changed")
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)

    def take_back(
        self, path: str, files: Mapping[str, Identity], links: Mapping[str, Path], seen_ns: int
    ) -> None:
        """Hold again what was staged to be sent and will not be, because it may be announced once more.

        `links` has the staged links by path.
        """
        if not files or any(files.items() <= each.files.items() for each in self.of_path(path)):
            return
        hold = Hold(max(self.all, default=0) + 1, path, files, {}, {}, seen_ns=seen_ns)
        for each, link in links.items():
            target = self.folder(hold) / each
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(link, target, follow_symlinks=False)
        self._record(hold, None)

    def _record(self, hold: Hold, last: Hold | None) -> None:
        """Write the record of a hold, not durably: after a power loss, links without a record are dropped."""
        path = self.place / f"{hold.number:08d}.json"
        if last is None or replace(last, seen_ns=hold.seen_ns) != hold:
            new = path.with_suffix(".new")
            new.write_text(json.dumps(_encode(hold)))
            os.utime(new, ns=(hold.seen_ns, hold.seen_ns))
            new.rename(path)
        else:
            os.utime(path, ns=(hold.seen_ns, hold.seen_ns))
        self.all[hold.number] = hold

    def tree(self, hold: Hold, tree: Tree) -> Tree | None:
        """Return what is held as a look at the folder; None if something has written to it since it was seen."""
        return None if self.written(hold) else self.as_seen(hold, tree)

    def written(self, hold: Hold) -> set[str]:
        """Return the held files that something has written to since they were seen."""
        links = Disk(self.folder(hold)).look()
        return {path for path, was in hold.files.items() if links.files.get(path) != was}

    def as_seen(self, hold: Hold, tree: Tree) -> Tree:
        """Return what is held as the newest look at the watched folder saw it."""
        links = Disk(self.folder(hold)).look()
        return Tree(
            {**hold.files, **hold.beside},
            links.read,
            tree.root,
            tree.now_ns,
            hold.changed_ns,
            ctime_ns={path: links.ctime_ns[path] for path in links.files},
            born_ns=links.born_ns,
        )

    def drop(self, hold: Hold) -> None:
        self.all.pop(hold.number, None)
        (self.place / f"{hold.number:08d}.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder(hold), ignore_errors=True)

    def drop_version(self, path: str, files: Mapping[str, Identity]) -> None:
        """Drop the holds of a version that has been staged completely."""
        for hold in self.of_path(path):
            if is_same_version(hold.files, files):
                self.drop(hold)


def _seen(found: Found, tree: Tree, number: int) -> Hold:
    beside = {found.mark} - {*found.files, ""}
    return Hold(
        number,
        found.path,
        {path: tree.files[path] for path in found.files},
        {path: tree.files[path] for path in beside},
        {folder: tree.changed_ns.get(folder, 0) for folder in tree.folders_below(found.path)},
        found.is_waiting,
        tree.now_ns,
    )


def _encode(hold: Hold) -> dict[str, object]:
    fields = asdict(hold)
    del fields["seen_ns"]
    return fields


def _decode(fields: dict[str, object], seen_ns: int) -> Hold:
    files, beside = fields["files"], fields["beside"]
    if not (isinstance(files, dict) and isinstance(beside, dict)):
        raise TypeError("files")
    named = {path: Identity(*each) for path, each in files.items()}
    marks = {path: Identity(*each) for path, each in beside.items()}
    return Hold(**{**fields, "files": named, "beside": marks, "seen_ns": seen_ns})  # type: ignore[arg-type]
