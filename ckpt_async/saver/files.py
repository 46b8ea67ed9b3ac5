"""Where a checkpoint's files go: templates that are checked before training starts and filled at each save."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

import ckpt_async.torch as ckpt
from ckpt_async.core import arguments, keys, naming
from ckpt_async.core.launch import Placement
from ckpt_async.core.model import without_slash
from ckpt_async.errors import InvalidNameError, JournalError, NoJournalError
from ckpt_async.local import journals, sealed
from ckpt_async.local.folder import place_of
from ckpt_async.saver import names
from ckpt_async.saver.timestamp import Timestamp

FILENAME = "ep{epoch}-ba{batch}-rank{rank}.pt"
LATEST_FILENAME = "latest-rank{rank}.pt"


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of a saver's names; `CheckpointSaver` documents each of them."""

    folder: str
    remote: str
    filename: str
    checkpoint_name: str
    latest_filename: str
    publish: str
    latest_remote_filename: str

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        remote: str,
        filename: str,
        checkpoint_name: str,
        latest_filename: str | None,
        publish: str | None,
        latest_remote_filename: str | None,
        kind: str | None = None,
        is_deepspeed: bool = False,
        weights_only: bool = False,
    ) -> Templates:
        """Return the templates as given. Where the user kept a default, a kind gets file names of its own."""
        if kind:
            filename = f"{kind}/{filename}" if filename == FILENAME else filename
            latest_filename = (
                f"latest-{kind}-rank{{rank}}.pt" if latest_filename == LATEST_FILENAME else latest_filename
            )
        exact = ((each or "").lstrip("/") for each in (publish, latest_remote_filename))
        named = (filename, latest_filename or "", *exact)
        if is_deepspeed:  # all four name the same archive
            named = tuple(each and ckpt.deepspeed_filename(each, weights_only=weights_only) for each in named)
        filename, latest, *exact_names = named
        place = arguments.path(folder, "folder")
        return cls(place, remote, filename, checkpoint_name, latest, *exact_names)


@dataclass(frozen=True, slots=True)
class Files:
    """One rank's templates and the values for them."""

    folder: Path
    remote: str
    latest_filename: str  # empty: no symlink
    run: Mapping[str, object]
    kind: str
    filename: str
    checkpoint_name: str
    publish: str  # empty: not published
    pointer: str  # empty: no pointer

    def published(self, now: Timestamp) -> str | None:
        """Return the exact key below the remote of this rank's file (of the folder, if sharded), or None."""
        return names.fill(self.publish, self._at(now)) if self.publish else None

    @property
    def told(self) -> dict[str, str]:
        """The values that must be the same on all ranks, or they would not save one common checkpoint."""
        names = ("remote", "kind", "filename", "checkpoint_name", "publish")
        return {name: getattr(self, name) for name in names}

    @property
    def run_id(self) -> str:
        """Tells this run from others that save to the same folder: by its name, and by how it names its files."""
        return hashlib.sha256(f"{self.run['run_name']}\0{self.filename}".encode()).hexdigest()[:16]

    @property
    def private(self) -> Path:
        """The private part of the folder."""
        return self.folder / keys.PRIVATE / keys.kind_place(self.kind)

    def path(self, now: Timestamp) -> Path:
        return self.folder / names.fill(self.filename, self._at(now))

    def name(self, now: Timestamp) -> str:
        """Return the checkpoint's name."""
        return naming.checkpoint_name(names.fill(self.checkpoint_name, self._at(now)), now.step)

    def is_own(self, shard: str) -> bool:
        """Return whether a checkpoint's file of this name belongs to this rank."""
        return names.times(shard, PurePosixPath(self.filename).name, self.run) is not None

    def _at(self, now: Timestamp) -> dict[str, object]:
        return {**self.run, **{each: getattr(now, each) for each in names.OF_TIME}}


def files_of(
    templates: Templates,
    placement: Placement,
    run_name: str | None,
    kind: str | None,
    *,
    has_several_writers: bool,
) -> Files:
    """Fill and check the templates.

    Raises InvalidNameError or SettingsError for a template that cannot be filled, or that would make several ranks, or
    several saves, write the same file.
    """
    everything = (*names.OF_RUN, *names.OF_TIME)
    for what, allowed in (
        ("folder", names.OF_RUN),
        ("remote", ("run_name",)),
        ("filename", everything),
        ("checkpoint_name", ("run_name", *names.OF_TIME)),
        ("latest_filename", names.OF_RUN),
        ("publish", everything),
        ("latest_remote_filename", names.OF_RUN),
    ):
        names.check(getattr(templates, what), what, allowed, run_name=run_name)
    if has_several_writers and not {"rank", "local_rank"} & (
        names.used(templates.filename) | names.used(templates.folder)
    ):
        raise InvalidNameError(
            f"filename={templates.filename!r}: every rank writes a file, and all of them would have this name",
            hint="put {rank} into it",
        )
    run = names.variables(run_name, placement)
    latest = names.fill(templates.latest_filename, run)
    found = Files(
        folder=place_of(names.fill(templates.folder, run)),
        remote=names.fill(templates.remote, run),
        latest_filename=naming.check_relative(latest, "latest_filename") if latest else "",
        run=run,
        kind=naming.check_kind(kind),
        filename=templates.filename,
        checkpoint_name=templates.checkpoint_name,
        publish=templates.publish,
        pointer=_pointer(names.fill(templates.latest_remote_filename, run)),
    )
    start = Timestamp(batch=0)
    naming.check_relative(str(PurePosixPath(names.fill(found.filename, found._at(start)))), "filename")  # noqa: SLF001
    found.name(start)
    if (key := found.published(start)) is not None:
        naming.check_relative(key, "publish")
    return found


def _pointer(filename: str) -> str:
    """Return the pointer's key, with the suffix `.symlink` that Composer's pointers have."""
    if not filename:
        return ""
    named = f"{filename.removesuffix(naming.POINTER_SUFFIX)}{naming.POINTER_SUFFIX}"
    return naming.check_relative(named, "latest_remote_filename")


def conflict(files: Files, resumed: Timestamp) -> str:
    """Return what is wrong with a folder in which another run has saved a checkpoint that this run would save again,
    or "".

    What earlier launches of this run left is no conflict: a step that is saved again belongs to another generation, and
    its file is replaced atomically. Nor is what this run has noted before it had a remote, which is told apart later,
    or was writing when it was killed, which is no checkpoint.
    """
    rank = cast(int, files.run["rank"])
    was_here = sealed.has_begun(files.private, files.run_id, rank)
    if files.remote:
        is_ours = is_of_run(files.folder, files.remote, files.kind)
    else:
        is_ours = was_here or sealed.has_begun_with_remote(files.private, files.run_id, rank)
    if is_ours:
        return ""
    # In this order: a saver of this process may be finishing a file, which it notes before it is no more unfinished.
    found = conflicting(files, resumed)
    unfinished = sealed.unfinished_file(files.private, files.run_id, rank)
    notes = sealed.read(files.private, files.run_id, rank)
    known = {unfinished, *(each.source for note in notes for each in note.shards)}
    path = next((each for each in found if each.relative_to(files.folder).as_posix() not in known), None)
    if path is None:
        return ""
    saved = (
        "is not among what this run noted when it saved without a remote (if it was killed just then, delete the file)"
        if was_here
        else "was not saved by this run"
    )
    return (
        f"{path} exists and {saved}: with overwrite=False it may not be replaced by a checkpoint after batch"
        f" {resumed.batch}"
    )


def conflicting(files: Files, resumed: Timestamp) -> list[Path]:
    """Return the files, sorted, that this run would save again after `resumed`."""
    template = str(PurePosixPath(files.filename))
    depth = template.count("/")
    found = sorted(files.folder.glob("/".join(["*"] * (depth + 1))))
    return [
        each
        for each in found
        if names.is_ahead(each.relative_to(files.folder).as_posix(), template, files.run, resumed)
    ]


def is_of_run(folder: Path, remote: str, kind: str = "") -> bool:
    """Return whether an earlier launch of the run at `remote` has opened this folder on this node."""
    try:
        found = journals.read(folder, kind=kind)
    except NoJournalError:
        return False
    except JournalError:
        return True  # opening the uploader will report what is wrong
    remotes = [each.local().remote for each in found.values()]
    here = without_slash(keys.kind_remote(remote, kind))
    return any(each is not None and each.url == here for each in remotes)
