"""The values of a restore: a readable checkpoint, its files, and the checkpoints that were skipped to find it."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ckpt_async.core.model import CheckpointId, Checksum, Decision, Receipt
from ckpt_async.core.naming import several
from ckpt_async.core.units import few
from ckpt_async.errors import InvalidNameError, SettingsError
from ckpt_async.formats.dcp_files import METADATA, is_metadata
from ckpt_async.stores import StoreOptions

OWN_FORMAT = "ckpt_async"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a checkpoint in the store. `checksum` is None if another tool wrote the file: then only its size
    can be checked. `ranks` are those whose receipts list it.
    """

    name: str  # path within the checkpoint
    key: str
    size_bytes: int
    checksum: Checksum | None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """The address of another node, and the files that it has, by their keys in the store (a key never changes
    content).

    A plain value, to be sent to other ranks; `secret` is shared by them alone. `more_urls` lead to the same node: they
    are tried in turn if nobody answers at `url`. `name` is for people.
    """

    url: str
    keys: frozenset[str]
    name: str = ""
    more_urls: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)

    def has(self, file: RemoteFile) -> bool:
        return file.key in self.keys


@dataclass(frozen=True, slots=True)
class Rejected:
    """A newer checkpoint that cannot be used, and why. `name` is "" if it is recorded only in an object that cannot
    be read.
    """

    id: CheckpointId
    name: str
    reason: str

    def __str__(self) -> str:
        name = f"{self.name}, " if self.name else ""
        return f"step {self.id.step} ({name}generation {self.id.generation}): {self.reason}"


def why_passed_over(passing_over: Collection[CheckpointId], id_: CheckpointId) -> str:
    """Return the caller's reason for passing over this checkpoint, if it gave one; "" if it does not pass it over."""
    if id_ not in passing_over:
        return ""
    return str(passing_over[id_]) if isinstance(passing_over, Mapping) else "skipped by the caller"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint in the store. A plain value, which may be pickled and broadcast to other ranks.

    `format` is "ckpt_async", or the name of the tool whose marker shows that it is complete (then `generation` is 0
    and there are no checksums). `rejected` lists the newer checkpoints that were skipped.
    """

    remote: str
    id: CheckpointId
    name: str
    world_size: int
    files: Mapping[str, RemoteFile]
    metrics: Mapping[str, float] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()
    format: str = OWN_FORMAT
    store_options: StoreOptions | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        others = "" if self.format == OWN_FORMAT else f", of {self.format}"
        return f"<Checkpoint {self.name} ({self.id.short}) in {self.remote}: {len(self.files)} files{others}>"

    @property
    def generation(self) -> int:
        return self.id.generation

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files.values())

    @property
    def dcp_folders(self) -> tuple[str, ...]:
        """The folders of the checkpoint that torch.distributed.checkpoint wrote, which are those with a
        `.metadata`: "" for the checkpoint's own folder, `model_and_optim` for OLMo and OLMo-core. Empty for other
        formats.
        """
        return tuple(sorted(name[: -len(METADATA)].rstrip("/") for name in self.files if is_metadata(name)))

    def select(
        self, ranks: Collection[int] | None = None, files: Collection[str] | None = None
    ) -> list[RemoteFile]:
        """Return the files of these ranks whose names match one of these globs, sorted by name; None means all.

        Raises InvalidNameError for an unknown rank, or for a glob that matches none of their files: a typo must not
        look like a success.
        """
        if isinstance(ranks, int):
            raise InvalidNameError(f"ranks={ranks} is a single rank: pass a list, [{ranks}]")
        for rank in ranks or ():
            if not 0 <= rank < self.world_size:
                raise InvalidNameError(
                    f"{self.name} was saved by ranks 0 to {self.world_size - 1}, so there is no rank {rank}"
                )
        theirs = [
            self.files[name]
            for name in sorted(self.files)
            if ranks is None or not set(ranks).isdisjoint(self.files[name].ranks)
        ]
        globs = None if files is None else several(files, "files")
        for glob in globs or ():
            if not any(fnmatch.fnmatchcase(each.name, glob) for each in theirs):
                names = few([each.name for each in theirs]) or "none"
                raise InvalidNameError(
                    f"no requested file of {self.name} matches {glob!r}", hint=f"it has {names}"
                )
        return [
            each
            for each in theirs
            if globs is None or any(fnmatch.fnmatchcase(each.name, glob) for glob in globs)
        ]


def files_of(receipts: Collection[Receipt]) -> dict[str, RemoteFile]:
    """Return the files that the receipts of ranks list, by name."""
    ranks: dict[str, list[int]] = {}
    found: dict[str, RemoteFile] = {}
    for receipt in receipts:
        for shard in receipt.shards:
            ranks.setdefault(shard.name, []).append(receipt.rank)
            found[shard.name] = RemoteFile(
                shard.name, shard.key, shard.size_bytes, shard.checksum, tuple(ranks[shard.name])
            )
    return found


def checkpoint_of(
    decision: Decision,
    receipts: Collection[Receipt],
    remote: str,
    options: StoreOptions | None,
    rejected: Collection[Rejected],
) -> Checkpoint:
    return Checkpoint(
        remote=remote,
        id=decision.checkpoint,
        name=decision.name,
        world_size=decision.world_size,
        files=files_of(receipts),
        metrics=dict(decision.metrics),
        rejected=tuple(rejected),
        store_options=options,
    )


def check_found(checkpoint: object) -> None:
    """Raise SettingsError for anything that is not a checkpoint, above all for the None of a `find` that found
    nothing.
    """
    if not isinstance(checkpoint, Checkpoint):
        hint = "pass what `find` returns"
        if checkpoint is None:
            hint = "`find` returns None where nothing was committed yet: a fresh start"
        raise SettingsError(f"{checkpoint!r} is not a checkpoint", hint=hint)
