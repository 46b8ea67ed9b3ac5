"""Resuming without a remote: the ranks tell each other what they have on their nodes, and load the same checkpoint.

A rank goes by the notes of what it has sealed; by the journal, for what launches of this run with a remote have sealed;
and by the `latest` symlink where that leads to something else, because a note could not be written, for example.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import ckpt_async.torch as ckpt
from ckpt_async.core.model import Shard
from ckpt_async.errors import (
    DamagedCheckpointError,
    FormatError,
    NoJournalError,
    NoUsableCheckpointError,
    SettingsError,
)
from ckpt_async.local import journals, sealed
from ckpt_async.local.zip_records import wrong_record
from ckpt_async.saver import names
from ckpt_async.saver.earlier import never_complete, there, warn_of_incomplete
from ckpt_async.saver.files import Files
from ckpt_async.saver.local_only import LocalOnly
from ckpt_async.torch.agreement import is_alone, spell, told_by_all
from ckpt_async.torch.broadcast import read_on_one
from ckpt_async.torch.options import LoadOptions

logger = logging.getLogger(__name__)

_ANEW = "to start from scratch, use another folder, or pass overwrite=True and do not call load_latest"


@dataclass(frozen=True, slots=True)
class _Offer:
    """A checkpoint that a rank has. Its mark is the same on all ranks that took part in this save, and no others."""

    mark: str
    name: str
    path: Path
    launch: str = ""  # without a remote, if known


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others: what it can load, newest first, and of which ranks there are files on its node."""

    is_writer: bool
    names: Mapping[str, str]  # by mark
    seen: tuple[int, ...]
    launches: frozenset[str]  # of what it can load
    unsealed: frozenset[str]  # see `local_only.unsealed`


class ResumingHere:
    """Finds and loads the checkpoints of a run without a remote."""

    def __init__(self, files: Files, uploader: LocalOnly, *, is_writer: bool, is_sharded: bool) -> None:
        self._files, self._uploader = files, uploader
        self._is_writer, self._is_sharded = is_writer, is_sharded

    def load_latest(self, options: LoadOptions) -> Any:
        """Return the state in the newest checkpoint that all ranks can load, or None if no rank has any. A collective.

        If one rank writes for all, the others get what it has loaded.
        """
        if is_alone() and self._uploader.world_size > 1:
            raise SettingsError(
                f"with remote=None, {self._uploader.world_size} ranks must agree on the checkpoint to resume from, and"
                " torch.distributed is not initialized",
                hint="initialize it before load_latest",
            )
        own = ckpt.on_all_ranks(self._offers)
        seen = ckpt.on_all_ranks(self._seen)
        launches = frozenset(each.launch for each in own)
        can_load = {each.mark: each.name for each in own}
        told = told_by_all(_Told(self._is_writer, can_load, seen, launches, self._uploader.unsealed()))
        writers = [rank for rank, each in enumerate(told) if each.is_writer]
        if not any(told[rank].names for rank in writers):
            self._refuse_unless_new(told)
            return None
        if self._is_sharded:
            raise FormatError(
                f"the checkpoints in {str(self._files.folder)!r} are sharded",
                hint="load them with torch.distributed.checkpoint.load, and pass resume_from=",
            )
        if len(writers) == 1:
            return self._load_on_one(writers[0], own, options)
        if len(writers) < len(told):
            raise FormatError(
                f"{len(writers)} of {len(told)} ranks have saved a file, and the others have none to load",
                hint="load the files with ckpt_async.torch.load, and pass what they hold to load_state_dict",
            )
        return self._load_common(told, {each.mark: each for each in own}, options)

    # --- what is here --------------------------------------------------------------------------------------

    def _offers(self) -> list[_Offer]:
        """What this rank has, newest first. Raises NoUsableCheckpointError if `latest` points to what is gone."""
        if not self._is_writer:
            return []
        linked = self._linked()
        found: list[tuple[int, _Offer]] = []  # with the time when it was written, newest first
        for note in self._uploader.noted():
            path = self._place(note.shards)
            is_unchanged = all(sealed.identity_now(self._files.folder, each) for each in note.shards)
            offer = _Offer(note.mark, note.name, path, note.launch) if is_unchanged else None
            if linked is not None and path == linked.path:
                offer, linked = offer or linked, None
            if offer is not None:
                found.append((max(each.identity.mtime_ns for each in note.shards), offer))
        for written_ns, offer in self._with_remote():
            if linked is not None and offer.path == linked.path:
                linked = None
            _insert(found, written_ns, offer)
        if linked is not None and (not found or self._times(linked.path) is not None):
            # Not always first: a launch with a remote lets the link lead to what is newest in the store.
            _insert(found, linked.path.stat().st_mtime_ns, linked)
        return [offer for _, offer in found]

    def _with_remote(self) -> Iterator[tuple[int, _Offer]]:
        """Yield what launches of this run with a remote have sealed, and when it was written: it may never have come
        into the store.
        """
        files, rank = self._files, self._uploader.rank
        if not sealed.has_begun_with_remote(files.private, files.run_id, rank):
            return
        try:
            local = journals.read(files.folder, kind=files.kind)[rank].local()
        except (NoJournalError, KeyError):
            return
        remote = local.remote.url if local.remote is not None else ""
        for each in local.checkpoints.values():
            shards = [known.shard for known in each.shards.values()]
            is_given_up = each.decision is not None and not each.was_committed
            if each.sealed is None or is_given_up or not shards:
                continue
            if all(sealed.identity_now(files.folder, shard) for shard in shards):
                path = self._place(shards)
                mark = f"{remote} {each.id.generation}-{each.id.step}"
                yield max(shard.identity.mtime_ns for shard in shards), _Offer(mark, each.name, path)

    def _linked(self) -> _Offer | None:
        link = self._files.folder / self._files.latest_filename
        if not self._files.latest_filename or not os.path.lexists(link):
            return None
        if not link.exists():
            raise NoUsableCheckpointError(
                f"{str(link)!r} points to {os.readlink(link)!r}, which is gone",
                hint="delete the link to use the newest checkpoint that is left, or load one yourself and pass it to"
                " `load_state_dict`",
            )
        path = Path(os.path.realpath(link))
        counts = (f"{name} {count:g}" for name, count in (self._times(path) or {}).items())
        return _Offer(f"latest {' '.join(counts)}", self._files.latest_filename, path)

    def _times(self, path: Path) -> dict[str, float] | None:
        """What the name of a file says, if this rank of this run gives such names."""
        if not path.is_relative_to(self._files.folder):
            return None
        relative = path.relative_to(self._files.folder).as_posix()
        return names.times(relative, str(PurePosixPath(self._files.filename)), self._files.run)

    def _place(self, shards: Sequence[Shard]) -> Path:
        path = self._files.folder / shards[0].source
        return path if len(shards) == 1 else path.parent

    def _seen(self) -> tuple[int, ...]:
        """The ranks of which this run has noted files that are on this node."""
        return tuple(
            rank
            for rank in sealed.ranks(self._files.private, self._files.run_id)
            if there(self._files, sealed.read(self._files.private, self._files.run_id, rank))
        )

    def _refuse_unless_new(self, told: Sequence[_Told]) -> None:
        where = [
            f"those of {spell(each.seen)} on the node of rank {n}" for n, each in enumerate(told) if each.seen
        ]
        if where:
            raise NoUsableCheckpointError(
                f"no rank has a checkpoint of its own in {str(self._files.folder)!r}, but there are {'; '.join(where)}",
                hint=f"start the ranks on the nodes where they were, or copy the folder; {_ANEW}",
            )

    # --- loading -------------------------------------------------------------------------------------------

    def _load_on_one(self, writer: int, own: Sequence[_Offer], options: LoadOptions) -> Any:
        def read() -> Any:
            reasons = []
            for offer in own:
                try:
                    return _load(offer.path, options)
                except DamagedCheckpointError as error:
                    reasons.append(_passed_over(offer.name, str(error)))
            raise NoUsableCheckpointError(f"no checkpoint can be loaded: {'; '.join(reasons)}", hint=_ANEW)

        group = ckpt.own_group()  # the default group may be unable to move CPU tensors
        return read() if group is None else read_on_one(read, rank=writer, group=group)

    def _load_common(self, told: Sequence[_Told], own: Mapping[str, _Offer], options: LoadOptions) -> Any:
        if killed := never_complete([each.launches for each in told], [each.unsealed for each in told]):
            names = [list(each.names.values()) for each in told]
            paths = [each.path for each in own.values()]
            warn_of_incomplete(
                names, paths, killed, then="replaced when their step is saved again, or pruned"
            )
            return None
        common = [mark for mark in told[0].names if all(mark in each.names for each in told)]
        reasons = _missing(told, common)
        for mark in common:
            try:
                return ckpt.on_all_ranks(partial(_load, own[mark].path, options))
            except DamagedCheckpointError as error:
                reasons.append(_passed_over(told[0].names[mark], str(error)))
        raise NoUsableCheckpointError(
            f"no checkpoint can be loaded on all ranks: {'; '.join(reasons)}",
            hint="keep at least 3, because each rank prunes on its own (num_checkpoints_to_keep); load the files"
            f" that you want with ckpt_async.torch.load; {_ANEW}",
        )


def agree_on_launch(uploader: LocalOnly, group: Any = None, *, is_writer: bool) -> None:
    """Let all ranks note the same launch, and a generation that is newer than all that they have noted before.

    A collective when torch.distributed is initialized and the ranks have not agreed yet; until then, each counts as a
    launch of its own.
    """
    if uploader.has_joined or is_alone():
        return
    noted = {each.launch for each in uploader.noted()}
    told = told_by_all((uploader.generation, uploader.launch, noted, uploader.unsealed()), group=group)
    generations, launches, all_noted, all_unsealed = zip(*told, strict=True)
    uploader.join(max(generations), launches[0])
    if is_writer and set().union(*all_noted) <= set().union(*all_unsealed):
        uploader.take_part()


def _insert(found: list[tuple[int, _Offer]], written_ns: int, offer: _Offer) -> None:
    place = next((n for n, (ns, _) in enumerate(found) if ns <= written_ns), len(found))
    found.insert(place, (written_ns, offer))


def _missing(told: Sequence[_Told], common: Sequence[str]) -> list[str]:
    """Report, on every rank, what only some of them have and is newer than what all have."""
    newer = {
        mark: each.names[mark]
        for each in told
        for mark in takewhile(lambda mark: mark not in common, each.names)
    }
    without = {mark: [rank for rank, each in enumerate(told) if mark not in each.names] for mark in newer}
    return [
        _passed_over(name, f"{spell(without[mark])} did not save it, has changed it or has pruned it")
        for mark, name in newer.items()
    ]


def _passed_over(name: str, reason: str) -> str:
    logger.warning("checkpoint_passed_over name=%s error=%s", name, reason)
    return f"{name}: {reason}"


def _load(path: Path, options: LoadOptions) -> Any:
    """Load a file once its bytes agree with the checksums in it. Raises DamagedCheckpointError if it cannot be used."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if is_zip and (wrong := wrong_record(path)):
            raise DamagedCheckpointError(f"{path} is damaged: {wrong}")
        # Through a link alone in its folder: `load` prefers a safetensors file of the same stem, which is not ours.
        with tempfile.TemporaryDirectory(prefix="ckpt-async-") as folder:
            link = Path(folder) / path.name
            link.symlink_to(path)
            state = ckpt.load(link, **options)
    except (FormatError, FileNotFoundError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from error
    logger.info("checkpoint_loaded path=%s", path)
    return state
