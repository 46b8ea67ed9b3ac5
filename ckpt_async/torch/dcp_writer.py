"""Saves with torch.distributed.checkpoint: torch's own writer, with files that go to an `Uploader`.

The files are those of plain torch: `torch.distributed.checkpoint.FileSystemReader` reads them, here and after a fetch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt_async.core import arguments, naming
from ckpt_async.errors import SettingsError
from ckpt_async.formats.dcp_files import METADATA
from ckpt_async.torch.agreement import sendable
from ckpt_async.torch.snapshot import SnapshotBuffers
from ckpt_async.trainer.uploader import Uploader

MAX_THREADS = 1024


class FolderWriter(FileSystemWriter):
    """torch's FileSystemWriter, made safe for files that are being uploaded. Can be pickled.

    torch overwrites existing files, but an earlier launch's upload may still be reading such a file: so each is
    unlinked first. Each rank also unlinks an old `.metadata` before it writes, so that the folder never looks complete
    while it is a mixture. Nothing is touched before all ranks have a plan. Nothing is fsynced: the uploader's engine
    does that, off the trainer's path.
    """

    def __init__(self, path: str | os.PathLike[str], *, thread_count: int = 1) -> None:
        threads = arguments.whole(thread_count, "thread_count", 1, MAX_THREADS, SettingsError)
        super().__init__(path, thread_count=threads, sync_files=False)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        if metadata.storage_data is None:  # torch 2.11 writes a complete copy, and returns this one
            metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict  # a copy already: a rank that failed here would leave the others waiting

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise SettingsError(
                "a checkpoint saved with use_collectives=False has no .metadata for all ranks"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # torch's own method would warn of an old .metadata.
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        _unlink(Path(self.path), METADATA)  # the new one is written after all ranks have written
        _unlink(Path(self.path), plan.storage_data.prefix)
        return super().write_data(plan, planner)


class CkptAsyncWriter(FolderWriter):
    """A writer for `torch.distributed.checkpoint.save(state_dict, storage_writer=CkptAsyncWriter(uploader, step=100))`.

    Also works with torch's `async_save`, with threads or a process. Each checkpoint needs a new writer.

    Files go to `<uploader's folder>/[<kind>/]<name>/`. Each rank enqueues and seals its own files as soon as they are
    written; the coordinator does so when `.metadata` is written, after all ranks have succeeded. So a save that fails
    on any rank is never committed. But what other ranks had sealed of it is uploaded in vain, and its step cannot be
    saved again in this generation. `ckpt_async.torch.save` and `async_save` hand over only after success.

    All ranks of the uploader take part in the save.
    """

    def __init__(
        self,
        uploader: Uploader | _UploaderElsewhere,
        step: int,
        *,
        name: str | None = None,
        metrics: Mapping[str, float] | None = None,
        thread_count: int = 1,
    ) -> None:
        self._name = naming.checkpoint_name(name, step)
        super().__init__(uploader.checkpoints_folder / self._name, thread_count=thread_count)
        self._uploader, self._step, self._metrics = uploader, step, metrics
        self._is_coordinator = False
        self._files: set[str] = set()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise SettingsError(
                "the uploader determines where the checkpoint goes: leave checkpoint_id out",
                hint="give `name`",
            )
        super().reset()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # torch's own copy of a GPU's memory is much slower, because the memory that it goes to is not page-locked.
        return cast(dict[str, Any], SnapshotBuffers().take(state_dict, keeps_sharing=False))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._uploader.check_takes(self._step, self._name)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        self._files = {each.storage_data.relative_path for each in written.value()}
        if not self._is_coordinator:
            self._hand_over(self._files)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self._hand_over({*self._files, METADATA})

    def _hand_over(self, files: Collection[str]) -> None:
        hand_over(self._uploader, self._step, self._name, files, self._metrics)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch sends the writer to the process that saves, which writes and asks this process for the rest.
        assert isinstance(self._uploader, Uploader)
        ours, theirs = multiprocessing.Pipe()
        threading.Thread(
            target=_answer, args=(self._uploader, ours), name="ckpt-async-writer", daemon=True
        ).start()
        elsewhere = _UploaderElsewhere(self._uploader.checkpoints_folder, theirs)
        options: dict[str, Any] = {
            "name": self._name,
            "metrics": self._metrics,
            "thread_count": self.thread_count,
        }
        return partial(CkptAsyncWriter, elsewhere, self._step, **options), ()


@dataclass(frozen=True, slots=True)
class _UploaderElsewhere:
    """The trainer's uploader, as used by the process that writes for it. Its errors are those of the uploader."""

    checkpoints_folder: Path
    pipe: Connection

    def check_takes(self, step: int, name: str) -> None:
        self._ask("check_takes", (step, name))

    def enqueue(self, path: Path, step: int, name: str, *, publish_as: str | None) -> None:
        self._ask("enqueue", (path, step, name), publish_as=publish_as)

    def seal(self, step: int, *, name: str, metrics: Mapping[str, float] | None) -> None:
        self._ask("seal", (step,), name=name, metrics=metrics)

    def _ask(self, what: str, arguments: tuple[Any, ...], **options: Any) -> None:
        self.pipe.send((what, arguments, options))
        if (error := self.pipe.recv()) is not None:
            raise error


def _answer(uploader: Uploader, pipe: Connection) -> None:
    """Serve requests until the writer at the other end is gone."""
    with pipe, contextlib.suppress(EOFError, OSError):
        while True:
            what, arguments, options = pipe.recv()
            error: Exception | None = None
            try:
                getattr(uploader, what)(*arguments, **options)
            except Exception as raised:  # noqa: BLE001  raised at the other end
                error = sendable(raised)
            pipe.send(error)


def hand_over(
    uploader: Uploader | _UploaderElsewhere,
    step: int,
    name: str,
    files: Collection[str],
    metrics: Mapping[str, float] | None,
    publish_as: str | None = None,
) -> None:
    """Enqueue these files of the checkpoint's folder and seal it, because this rank has no more files."""
    for file in sorted(files):
        published = None if publish_as is None else f"{publish_as}/{file}"
        uploader.enqueue(uploader.checkpoints_folder / name / file, step, name, publish_as=published)
    uploader.seal(step, name=name, metrics=metrics)


def files_of_rank(metadata: Metadata, rank: int) -> set[str]:
    """Return the files of a saved checkpoint that this rank of the process group wrote."""
    written = {each.relative_path for each in metadata.storage_data.values()}
    return {each for each in {*written, METADATA} if _is_of_rank(each, rank)}


def there(path: Path, rank: int) -> frozenset[tuple[str, int, int]]:
    """Return this rank's files in a checkpoint's folder, each with its inode and modification time as its identity."""
    try:
        names = [each for each in os.listdir(path) if _is_of_rank(each, rank)]
    except FileNotFoundError:
        return frozenset()
    facts = [(name, os.stat(path / name, follow_symlinks=False)) for name in names]
    return frozenset((name, each.st_ino, each.st_mtime_ns) for name, each in facts)


def discard(path: Path, rank: int, before: frozenset[tuple[str, int, int]]) -> None:
    """Remove what this rank wrote for a checkpoint that failed, but not what was there before."""
    for name, _, _ in there(path, rank) - before:
        (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()  # succeeds for the last rank, which finds it empty


def _is_of_rank(name: str, rank: int) -> bool:
    return name.startswith(_prefix(rank)) or (rank == 0 and name.startswith(METADATA))


def _prefix(rank: int) -> str:
    return f"__{rank}_"


def _unlink(folder: Path, prefix: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name.startswith(prefix):
                (folder / name).unlink(missing_ok=True)
