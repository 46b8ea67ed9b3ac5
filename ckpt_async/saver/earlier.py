"""What earlier launches of a run have saved in its folder without a remote, on all ranks: there is no other copy."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_async import threads
from ckpt_async.core import keys
from ckpt_async.core.backlog import left_by_predecessors
from ckpt_async.core.model import CheckpointId, Outcome, without_slash
from ckpt_async.local import journals, sealed
from ckpt_async.local.sealed import Note
from ckpt_async.protocol import steps
from ckpt_async.restore.session import session
from ckpt_async.saver.files import Files
from ckpt_async.saver.local_only import unsealed
from ckpt_async.stores import StoreOptions
from ckpt_async.torch.agreement import is_alone, spell, told_by_all
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others."""

    takes_part: bool  # writes, and has begun to save here without a remote
    noted: Mapping[str, tuple[int, str]]  # step and name, by mark
    launches: frozenset[str]  # of what it has noted
    unsealed: frozenset[str]  # see `local_only.unsealed`


class Earlier:
    """What earlier launches have noted, as far as it is still there."""

    def __init__(self, files: Files, rank: int, *, is_writer: bool) -> None:
        notes = there(files, sealed.read(files.private, files.run_id, rank))
        takes_part = is_writer and sealed.has_begun(files.private, files.run_id, rank)
        noted = {each.mark: (each.id.step, each.name) for each in notes}
        launches = frozenset(each.launch for each in notes)
        self._told = [_Told(takes_part, noted, launches, unsealed(files.private, files.run_id, rank))]
        self._paths = [files.folder / shard.source for each in notes for shard in each.shards]
        self.is_told = False

    def tell(self, group: Any = None) -> None:
        """Let all ranks know. A collective if torch.distributed is initialized, and nothing the second time."""
        if not self.is_told and not is_alone():
            self._told, self.is_told = told_by_all(self._told[0], group=group), True

    def names(self, since: int = 0) -> list[str]:
        """Return the names of what any rank has saved at this step or later, oldest first."""
        return _names({each for told in self._told for each in told.noted.values()}, since)

    def complete(self, since: int) -> list[str]:
        """The same, without what was saved on some ranks only, because others were killed before."""
        every = [each.noted for each in self._told if each.takes_part]
        common = set.intersection(*map(set, every)) if every else set()
        return _names({every[0][mark] for mark in common}, since)

    def never_complete(self) -> list[int]:
        """See the function of this name."""
        return never_complete([each.launches for each in self._told], [each.unsealed for each in self._told])

    def warn_of_incomplete(self, killed: Sequence[int]) -> None:
        names = [_names(set(each.noted.values())) for each in self._told]
        warn_of_incomplete(names, self._paths, killed, then="replaced when their step is saved again")


def never_complete(launches: Sequence[frozenset[str]], unsealed: Sequence[frozenset[str]]) -> list[int]:
    """Return the ranks that have ended before their part of what others have saved; [] if anything of the run may be,
    or may have been, complete. `launches` and `unsealed` are what each rank tells of itself.
    """
    saved = frozenset().union(*launches)
    if not saved <= frozenset().union(*unsealed):
        return []
    return [rank for rank, each in enumerate(unsealed) if saved & each]


def warn_of_incomplete(
    names: Sequence[Sequence[str]], paths: Sequence[Path], killed: Sequence[int], then: str
) -> None:
    logger.warning(
        "starts_from_scratch incomplete=%s files=%s; no checkpoint was ever complete, because %s had not saved anything"
        " when the launch ended; the files are %s",
        "; ".join(f"{', '.join(each)} of rank {rank}" for rank, each in enumerate(names) if each),
        [str(each) for each in paths],
        spell(killed),
        then,
    )


def there(files: Files, notes: Sequence[Note]) -> list[Note]:
    """Return those that still have files."""
    return [
        note for note in notes if any(os.path.lexists(files.folder / each.source) for each in note.shards)
    ]


def _names(noted: set[tuple[int, str]], since: int = 0) -> list[str]:
    return [name for step, name in sorted(noted) if step >= since]


# --- with a remote: what can still be committed ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a checkpoint that an earlier launch has sealed, and of which no decision is known here."""

    checkpoint: CheckpointId
    world_size: int
    rank: int


def parts_in(folder: str | os.PathLike[str], kind: str, remote: str, generation: int) -> list[Part]:
    """Return what launches before `generation` left in this folder, and what can still be committed of it. Blocks."""
    there = without_slash(remote)
    found = []
    for rank, reading in journals.read(folder, kind=kind).items():
        local = reading.local()
        if local.remote is not None and local.remote.url == there:
            for id_ in left_by_predecessors(local, generation):
                sealed = local.checkpoints[id_].sealed
                found += [Part(id_, sealed.world_size, rank)] if sealed is not None else []
    return found


def missing_parts(
    remote: str, parts: Iterable[Part], store_options: StoreOptions | None
) -> dict[CheckpointId, list[int]]:
    """Return the ranks whose part is neither in `parts` nor in the store, for each checkpoint that was not given up.
    Blocks.
    """
    ranks: dict[CheckpointId, set[int]] = {}
    for each in parts:
        ranks.setdefault(each.checkpoint, {*range(each.world_size)}).discard(each.rank)

    async def one(store: PatientStore, id_: CheckpointId) -> list[int] | None:
        listing = await store.list(keys.receipts_prefix(id_))
        decision = await steps.read_settled(store, id_, only_reads=True)
        if decision is not None:
            return [] if decision.outcome is Outcome.COMMIT else None
        done = [keys.parse_receipt_key(each.key) for each in listing.objects]
        return sorted(ranks[id_] - {each[1] for each in done if each is not None})

    async def work() -> dict[CheckpointId, list[int]]:
        async with session(remote, store_options) as opened:
            found = await all_or_none(one(opened.store, id_) for id_ in ranks)
        return {id_: each for id_, each in zip(ranks, found, strict=True) if each is not None}

    return threads.run(work()) if ranks else {}
