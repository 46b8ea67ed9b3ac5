"""Ray Train: an `Uploader` with the ranks of Ray's worker group, and reports that wait for the commit."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.errors import CheckpointGoneError, FormatError
from ckpt_async.integrations.files import files_of_rank
from ckpt_async.integrations.managed import DRAIN_TIMEOUT_S, fetch_newest
from ckpt_async.torch import launch_id

try:
    from ray import train
    from ray.train import Checkpoint, CheckpointConsistencyMode
    from ray.train.collective import broadcast_from_rank_zero
except ImportError as error:
    raise ImportError(
        "ckpt_async.integrations.ray needs Ray Train 2.60 or newer: pip install 'ray[train]'"
    ) from error

if TYPE_CHECKING:
    UploadFn = Callable[[Checkpoint, str], Checkpoint]

_KEY = "ckpt_async"  # in the metadata of Ray's checkpoint


@contextmanager
def open_in_ray(folder: str | os.PathLike[str], remote: str, **settings: Any) -> Iterator[Uploader]:
    """Open an `Uploader` for this worker. Call it in the training function, on all workers of the group.

    Rank and world size are those of Ray's context; a text that rank 0 broadcasts tells this launch apart from earlier
    ones. `folder` is on a local disk, and everything that is reported lies below it. At the end of the `with` block it
    waits for the reports that Ray is still uploading (`CheckpointUploadMode.ASYNC`) and closes the uploader; after an
    exception it only closes, within 10 s. `settings` are those of `Uploader`. Blocks; raises what opening and closing
    an `Uploader` raises.
    """
    context = train.get_context()
    with Uploader(
        folder,
        remote,
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        launch_id=launch_id() or broadcast_from_rank_zero(uuid.uuid4().hex),
        **settings,
    ) as uploader:
        yield uploader
        train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)


def upload_fn(
    uploader: Uploader,
    step: int,
    metrics: Mapping[str, float] | None = None,
    *,
    is_shared: bool = False,
    timeout_s: float | None = None,
) -> UploadFn:
    """Return a function for `ray.train.report(…, checkpoint_upload_fn=upload_fn(uploader, step))`.

    Ray hears of the checkpoint only once it is committed, with the files of all workers verified in the store.

    What Ray stores is a pointer: a folder in Ray's own storage that says where the checkpoint is and contains none of
    its files. Ray orders, keeps and deletes pointers according to its `CheckpointConfig`; `checkpoint_of` follows them.
    A worker that reports without a checkpoint must call `uploader.seal(step)` first, or the commit waits for it.

    Args:
        step: Step of the checkpoint; used once per start.
        metrics: Stored with the commit, for retention by value.
        is_shared: Several workers have written to one folder: each enqueues its own files, by the ranks in their
            names (`files_of_rank`). Otherwise all files in the folder are this worker's.
        timeout_s: How long to retry, and to wait for other workers. None: the setting `upload_timeout_s`.

    The report raises what `enqueue`, `seal` and `wait` raise, and Ray restarts the group as its `FailureConfig` says.
    """
    is_sealed = False

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        nonlocal is_sealed
        if not is_sealed:  # Ray may try an upload again
            files = files_of_rank(checkpoint.path, uploader.rank, uploader.world_size) if is_shared else None
            if files is None or files:
                uploader.enqueue(checkpoint.path, step, files=files)
            uploader.seal(step, metrics=metrics)
            is_sealed = True
        uploader.wait(step, uploader.settings.upload_timeout_s if timeout_s is None else timeout_s)
        return _pointer(uploader, step, name)

    return upload


def checkpoint_of(checkpoint: Checkpoint, *, store_options: StoreOptions | None = None) -> restore.Checkpoint:
    """Return the committed checkpoint that a pointer of `upload_fn` leads to, for `restore.fetch`.

    Works outside Ray, too. Raises FormatError if it is not such a pointer, CheckpointGoneError if retention has pruned
    the checkpoint.
    """
    place = checkpoint.get_metadata().get(_KEY)
    if place is None:
        raise FormatError(
            f"{checkpoint} was not reported with upload_fn: it does not refer to a checkpoint of ckpt_async"
        )
    remote, step, generation = place["remote"], place["step"], place["generation"]
    found = restore.find(remote, step=step, generation=generation, store_options=store_options)
    if found is None:
        raise CheckpointGoneError(
            f"{checkpoint} refers to step {step} of {remote}, which no longer exists",
            hint="make the sweeper keep what Ray keeps: see docs/integrations.md",
        )
    return found


def newest_checkpoint(
    folder: str | os.PathLike[str],
    remote: str,
    *,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    store_options: StoreOptions | None = None,
) -> str | None:
    """Fetch the newest usable checkpoint to `<folder>/<its name>` and return that path, or None for a fresh start.

    Call it in the training function, on all workers, before `open_in_ray`. With a process group, as in `TorchTrainer`,
    all workers get the same checkpoint. It is at least as new as `ray.train.get_checkpoint()`: a commit that Ray was no
    longer told of counts too. What a killed worker left on this node is uploaded first, for at most `drain_timeout_s`.
    Every byte is verified. Blocks.

    Raises the errors of `restore.find` and `restore.fetch`, also if there are checkpoints but none is usable.
    """

    found = fetch_newest(folder, remote, drain_timeout_s, store_options)
    return None if found is None else str(found[1])


def _pointer(uploader: Uploader, step: int, name: str) -> Checkpoint:
    """Write a pointer to the committed checkpoint into Ray's storage.

    Every worker writes the same one; Ray counts the checkpoint when all have.
    """
    storage = train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(name)
    storage.storage_filesystem.create_dir(path)
    pointer = Checkpoint(path, filesystem=storage.storage_filesystem)
    pointer.set_metadata({_KEY: {"remote": uploader.remote, "step": step, "generation": uploader.generation}})
    return pointer
