"""Read-only access to the journals of a folder, even beside live writers: for `status`, metrics, the sweeper and
readers. Creates no file and takes no lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_async.core import keys
from ckpt_async.core.local_state import Local, LocalCheckpoint, fold
from ckpt_async.core.model import CheckpointId, JournalRow
from ckpt_async.errors import NoJournalError
from ckpt_async.local import journal, log
from ckpt_async.local.folder import place_of, spooled_ranks
from ckpt_async.local.journal import PROGRESS


@dataclass(frozen=True, slots=True)
class Place:
    """How far a journal was read, and the progress that was noted last by then."""

    log: log.Place
    progress: Mapping[tuple[CheckpointId, str], int]


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of one rank's journal: its rows in order, and the bytes sent of each unfinished (checkpoint,
    shard).
    """

    rank: int
    rows: list[JournalRow]
    progress: Mapping[tuple[CheckpointId, str], int]
    place: Place
    is_whole: bool = True  # read from the beginning, not only the new rows

    def local(self) -> Local:
        return fold(self.rows, Local(self.rank))


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank's journal says, with the bytes sent of each unfinished (checkpoint, shard)."""

    local: Local
    progress: Mapping[tuple[CheckpointId, str], int]


class Follower:
    """Reads the journals of one kind of checkpoints again and again, and of each only what is new. For one thread at a
    time.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str = "") -> None:
        self._folder, self._kind = folder, kind
        self._readings: dict[int, Reading] = {}
        self._states: dict[int, RankState] = {}

    def look(self) -> list[RankState]:
        """Return what every rank's journal says now. Raises NoJournalError, JournalError."""
        places = {rank: each.place for rank, each in self._readings.items()}
        self._readings = read(self._folder, kind=self._kind, after=places)
        self._states = {
            rank: RankState(
                each.local() if each.is_whole else fold(each.rows, self._states[rank].local), each.progress
            )
            for rank, each in self._readings.items()
        }
        return [each for each in self._states.values() if each.local.sequence]


def read(
    folder: str | os.PathLike[str], *, kind: str = "", after: Mapping[int, Place] | None = None
) -> dict[int, Reading]:
    """Return all journals of a folder (of one kind of checkpoints), by rank. For a rank with a place in `after`,
    only later rows are read, unless it is another journal now, or was compacted since.

    Raises NoJournalError if there is none, JournalError if one cannot be read.
    """
    private = private_of(folder, kind)
    found = {}
    for rank, path in sorted(_there(private).items()):
        reading = _read(rank, path, (after or {}).get(rank))
        if reading is not None:
            found[rank] = reading
    if not found:
        raise none_in(folder, kind)
    return found


def watcher_state(folder: Path) -> Path:
    """Return where a watcher of a folder keeps its journal by default."""
    return folder.parent / f".{folder.name}.ckpt-async"


def watched_from(folder: str | os.PathLike[str]) -> Path | None:
    """Return the state folder of a watcher that works, or has worked, on this folder; None if there is none, or if
    it was told to keep its state elsewhere.
    """
    beside = watcher_state(place_of(folder))
    return beside if (beside / keys.PRIVATE).is_dir() else None


def none_in(folder: str | os.PathLike[str], kind: str = "") -> NoJournalError:
    """Return the error for a missing journal, with a hint where one may be."""
    path = place_of(folder)
    if (beside := watched_from(path)) is not None:
        hint = f"this folder is being watched; use the watcher's state folder instead: {str(beside)!r}"
    elif (path / keys.GENERATIONS).is_dir():
        hint = f"it is a remote, file://{path}: use the local folder that the uploader was opened with"
    else:
        hint = "use the folder that the uploader was opened with"
    of_kind = f" of kind {kind!r}" if kind else ""
    return NoJournalError(f"there is no journal in {str(path)!r}{of_kind}", hint=hint)


def private_of(folder: str | os.PathLike[str], kind: str = "") -> Path:
    """Return the private part of a folder for one kind of checkpoints."""
    return place_of(folder) / keys.PRIVATE / keys.kind_place(kind)


def kinds(folder: str | os.PathLike[str]) -> list[str]:
    """Return the kinds of checkpoints that were ever saved here, "" (the run itself) first. The run itself is left
    out if Uploaders were opened only for other kinds. Raises NoJournalError if the folder is a remote instead.
    """
    private = private_of(folder)
    try:
        found = sorted(each for each in os.listdir(private / keys.KINDS) if keys.is_kind(each))
    except (FileNotFoundError, NotADirectoryError):
        found = []
    is_run_here = bool(_there(private) or spooled_ranks(private))
    if not (is_run_here or found) and os.path.isdir(place_of(folder) / keys.GENERATIONS):
        raise none_in(folder)
    return ["", *found] if is_run_here or not found else found


def read_all(folder: str | os.PathLike[str]) -> dict[str, dict[int, Reading]]:
    """Return the journals of every kind that has any. Raises the same errors as `read`."""
    found: dict[str, dict[int, Reading]] = {}
    missing: NoJournalError | None = None
    for kind in kinds(folder):
        try:
            found[kind] = read(folder, kind=kind)
        except NoJournalError as error:  # its first Uploader is opening right now
            missing = error
    if not found and missing is not None:
        raise missing
    return found


def states(folder: str | os.PathLike[str]) -> dict[str, list[RankState]]:
    """Return what each rank's journal says, by kind of checkpoints. Raises the same errors as `read`."""
    return {
        kind: [RankState(each.local(), each.progress) for each in found.values() if each.rows]
        for kind, found in read_all(folder).items()
    }


def checkpoints(folder: str | os.PathLike[str], kind: str) -> Iterator[LocalCheckpoint]:
    """Yield what every rank knows of a kind's checkpoints; nothing if it has no journal yet. Raises JournalError."""
    with contextlib.suppress(NoJournalError):
        for reading in read(folder, kind=kind).values():
            yield from reading.local().checkpoints.values()


def ranks(private: Path) -> list[int]:
    """Return the ranks that have a journal, or a spool from which a lost journal can be rebuilt (rule R10)."""
    return sorted({*_there(private), *spooled_ranks(private)})


def _there(private: Path) -> dict[int, Path]:
    try:
        names = os.listdir(private)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    ranks = {name: keys.parse_journal_name(name) for name in names}
    return {rank: private / name for name, rank in ranks.items() if rank is not None}


def _read(rank: int, path: Path, after: Place | None) -> Reading | None:
    found = log.look(path, after.log if after else None)
    if found is None:
        return None
    rows = journal.decode_rows(found.records(journal.EVENTS), rank)
    progress = {} if after is None or found.is_whole else after.progress
    for record in found.records(PROGRESS)[-1:]:
        noted = record.parts[PROGRESS]
        progress = {(CheckpointId(generation, step), shard): size for generation, step, shard, size in noted}
    return Reading(rank, rows, progress, Place(found.place, progress), found.is_whole)
