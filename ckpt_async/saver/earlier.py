"""What earlier launches of a run have saved in its folder without a remote, on all ranks: there is no other copy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_async.local import sealed
from ckpt_async.local.sealed import Note
from ckpt_async.saver.files import Files
from ckpt_async.torch.agreement import is_alone, told_by_all


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others."""

    takes_part: bool  # writes, and has begun to save here without a remote
    noted: Mapping[str, tuple[int, str]]  # step and name, by mark


class Earlier:
    """What earlier launches have noted, as far as it is still there."""

    def __init__(self, files: Files, rank: int, *, is_writer: bool) -> None:
        notes = there(files, sealed.read(files.private, files.run_id, rank))
        takes_part = is_writer and sealed.has_begun(files.private, files.run_id, rank)
        self._told = [_Told(takes_part, {each.mark: (each.id.step, each.name) for each in notes})]
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


def there(files: Files, notes: Sequence[Note]) -> list[Note]:
    """Return those that still have files."""
    return [
        note for note in notes if any(os.path.lexists(files.folder / each.source) for each in note.shards)
    ]


def _names(noted: set[tuple[int, str]], since: int) -> list[str]:
    return [name for step, name in sorted(noted) if step >= since]
