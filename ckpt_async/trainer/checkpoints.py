"""The checkpoints of this launch while the trainer fills and seals them. What becomes of them later is in the
journal.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_async.core import naming
from ckpt_async.core.arguments import shown
from ckpt_async.core.model import CheckpointId, FileIdentity, Shard
from ckpt_async.errors import InvalidNameError, InvalidShardError, SealedError, SettingsError
from ckpt_async.stores import check_key_length

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint that accepts shards."""

    id: CheckpointId
    name: str
    shards: dict[str, Shard] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)  # of these shards, as in their names
    growing: set[str] = field(default_factory=set)  # being written through `Uploader.open`

    def not_yet_in(
        self, named: Sequence[tuple[str, str]], is_same: Callable[[str, FileIdentity], bool]
    ) -> list[tuple[str, str]]:
        """Return those of `named`, pairs of a source and a shard's name, that were not enqueued before. Raises
        InvalidShardError for one that was enqueued with other content, or whose name is the folder of another one.
        """
        new = []
        names = {name for _, name in named}
        folders = {folder for name in names for folder in folders_of(name)}
        for name in (names & (folders | self.folders)) | (folders & self.shards.keys()):
            raise InvalidShardError(
                f"shard {name!r} of step {self.id.step} cannot also be the folder of other shards"
            )
        for source, name in named:
            before = self.shards.get(name)
            if before is None:
                new.append((source, name))
            elif before.source != source or not is_same(source, before.identity):
                raise InvalidShardError(
                    f"shard {name!r} of step {self.id.step} was already enqueued with different content"
                )
        return new

    def add(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            self.shards[shard.name] = shard
            self.folders.update(folders_of(shard.name))

    def check_published(self, published: Mapping[str, str]) -> None:
        """Raise InvalidShardError if a shard was enqueued before with a different exact key than `published` gives
        it by name, or if another shard is published under one of these keys.
        """
        if not published:
            return
        taken = {each.publish_as: each.name for each in self.shards.values() if each.publish_as}
        for name, key in published.items():
            if taken.setdefault(key, name) != name:
                raise InvalidShardError(
                    f"shards {taken[key]!r} and {name!r} of step {self.id.step} are both published as {key!r}"
                )
            if name in self.shards and self.shards[name].publish_as != key:
                raise InvalidShardError(
                    f"shard {name!r} of step {self.id.step} was already enqueued without publish_as={key!r}"
                )


def folders_of(name: str) -> Iterator[str]:
    """Return the folders in a shard's name, from the outermost to the innermost."""
    return itertools.accumulate(name.split("/")[:-1], "{}/{}".format)


class Checkpoints:
    """The checkpoints of one generation, by step. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._open: dict[int, OpenCheckpoint] = {}
        # Every sealed step of this launch, in order: it is rejected if it comes again.
        self._sealed = array("q")
        # Shards that the garbage collector has dropped while they were written. Not recorded yet.
        self.dropped: deque[tuple[OpenCheckpoint, str]] = deque()
        self._skipped: set[int] = set()

    def skip(self, step: int) -> None:
        """Note that this checkpoint is given up before it begins: what is enqueued of it is left out."""
        self._skipped.add(step)

    def is_skipped(self, step: int) -> bool:
        return step in self._skipped

    def is_sealed(self, step: int) -> bool:
        place = bisect.bisect_left(self._sealed, step)
        return place < len(self._sealed) and self._sealed[place] == step

    def is_begun(self, step: int) -> bool:
        return step in self._open or self.is_sealed(step)

    def open_or_new(self, id_: CheckpointId, name: str) -> OpenCheckpoint:
        """Return the checkpoint to add shards to; a new one counts only once it is passed to `keep`. Raises
        SealedError, and InvalidNameError if it already has another name.
        """
        if self.is_sealed(id_.step):
            raise SealedError(
                f"step {id_.step} was sealed in generation {id_.generation} and accepts no more shards"
            )
        found = self._open.get(id_.step) or OpenCheckpoint(id_, name)
        if found.name != name:
            raise InvalidNameError(f"step {id_.step} is already named {found.name!r}, not {name!r}")
        return found

    def keep(self, checkpoint: OpenCheckpoint) -> None:
        self._open[checkpoint.id.step] = checkpoint

    def to_seal(self, id_: CheckpointId, name: str | None) -> OpenCheckpoint:
        """Return the checkpoint to `seal` now; `name` is its name if it has no shards. Raises SealedError."""
        if self.is_sealed(id_.step):
            raise SealedError(f"step {id_.step} was already sealed in generation {id_.generation}")
        found = self._open.get(id_.step) or OpenCheckpoint(id_, naming.checkpoint_name(name, id_.step))
        if found.growing:
            raise SealedError(
                f"step {id_.step} has shards that are still being written: {', '.join(sorted(found.growing))}",
                hint="close them first",
            )
        return found

    def seal(self, step: int) -> None:
        bisect.insort(self._sealed, step)
        self._open.pop(step, None)


def exact_keys(
    publish_as: str, names: Sequence[str], remote: str, *, is_folder: bool, may_publish: bool
) -> dict[str, str]:
    """Return the exact keys under which shards are published, by the shards' names. Raises SettingsError,
    InvalidNameError.
    """
    if not may_publish:
        raise SettingsError(
            f"publish_as={publish_as!r} needs publish_copies=True",
            hint="with it, opening the uploader checks that the store can copy objects",
        )
    found = {name: f"{publish_as}/{name}" if is_folder else publish_as for name in names}
    for key in found.values():
        check_key_length(remote, naming.check_publish_as(key))
    return found


def metric_values(metrics: Mapping[str, float], step: int) -> tuple[tuple[str, float], ...]:
    """Return the metrics as Python numbers by name; values that convert to one (of numpy, or a tensor) are
    accepted. Values that are not finite are left out: a loss that is nan must not end the training.
    """
    found = {}
    for key, value in metrics.items():
        try:
            number = value if type(value) in (int, float) else float(value)
            is_finite = math.isfinite(number)  # raises OverflowError for an int that is too large for a float
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number, is_finite = None, False
        if type(key) is not str or number is None or isinstance(value, str | bytes | bool):
            raise InvalidNameError(f"metrics: {shown(key)}: {shown(value)} is not a name with a number")
        if is_finite:
            found[key] = number
        else:
            logger.warning("metric_left_out step=%d metric=%s value=%r", step, key, number)
    return tuple(sorted(found.items()))
