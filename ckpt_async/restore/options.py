"""The options of everything that finds, fetches or reads a checkpoint, each described once.

Functions take them as `**options` and pass them on whole, so an option means the same wherever it is accepted. mypy
refuses a name that a function does not take; at run time it raises TypeError, with the name that was probably meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TypedDict, TypeVar, cast, is_typeddict

from ckpt_async.core.model import CheckpointId
from ckpt_async.restore.checkpoint import Peer
from ckpt_async.stores import StoreOptions

# Concurrent requests that carry bytes, if the link can take that many: S3 gives each about 50 to 90 MB/s.
MAX_CONCURRENT_READS = 128

OnProgress = Callable[[int, int], None]
T = TypeVar("T")


class FolderOption(TypedDict, total=False):
    folder: str | os.PathLike[str] | None
    """The trainer's folder on this node. Files that it still has are read there, and what its journal knows of commits
    contradicts a store that shows none."""


class ChoiceOptions(FolderOption, total=False):
    """Which checkpoint of a run to take."""

    kind: str | None
    """Only checkpoints of this kind. Default: only those of no kind."""

    step: int | None
    """Only this step, in its newest generation, whether or not it was marked as damaged."""

    generation: int | None
    """Only checkpoints of this generation."""

    world_size: int | None
    """For a set of another tool with one file per rank: the number of ranks, if the files' names do not give it."""

    drain_timeout_s: float
    """With `folder`: finish first, within this many seconds, what a dead trainer left there. The newest checkpoint is
    often the one that was still uploading when the trainer died. Default: 0, do not. (With an open `Uploader`, call its
    `wait_for_predecessor` instead.)"""

    store_options: StoreOptions | None
    """Endpoint, region and credentials of the store, as for `Uploader`."""


class FindOptions(ChoiceOptions, total=False):
    """The options of `restore.find`."""

    passing_over: Collection[CheckpointId]
    """Checkpoints that you could not use. If it is a mapping, its values are the reasons, which then appear in
    `rejected`."""


class ReadOptions(FolderOption, total=False):
    """The options of `restore.open`: where bytes may come from, the nearest place first."""

    local_cache: str | os.PathLike[str] | None
    """A folder that is named like the checkpoint, or contains such a folder: asked first. It is the only place on this
    node that copies of other tools' checkpoints, which have no checksums, are taken from."""

    peers: Collection[Peer]
    """Other nodes that have files of the checkpoint: asked after this node, and before the store."""

    num_concurrent_reads: int
    """Maximum number of concurrent requests, each of which takes 512 KiB of memory (1 MiB over TLS). Default: 128. The
    actual number is what the link can take."""


class TransferOptions(ReadOptions, total=False):
    """How files are fetched."""

    verify: bool
    """With False, files in the destination and the store are trusted by size alone. Default: True."""

    overwrite: bool
    """Replace a file in the destination that is not the checkpoint's, for example one torn by a power loss. Default:
    False."""

    on_progress: OnProgress | None
    """Called from time to time with the bytes that are there and the total."""


class FetchOptions(TransferOptions, total=False):
    """The options of `restore.fetch`."""

    ranks: Collection[int] | None
    """Only the files of these ranks. Default: all."""

    files: Collection[str] | None
    """Only files that match one of these globs. Default: all."""


class FetchLatestOptions(ChoiceOptions, FetchOptions, total=False):
    """The options of `restore.fetch_latest`: those of `find` and `fetch`."""


def part(options: Mapping[str, object], of: type[T]) -> T:
    """Return those options that are of this kind."""
    names = _names(of)
    return cast(T, {name: value for name, value in options.items() if name in names})


def check(function: str, options: Mapping[str, object], of: type[object]) -> None:
    """Raise TypeError for an option that the function does not take."""
    import difflib

    names = _names(of)
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            told = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(names))}"
            raise TypeError(f"{function}() has no option {name!r}; {told}")


def _names(of: type[object]) -> frozenset[str]:
    assert is_typeddict(of)
    return frozenset(of.__annotations__)
