"""OLMo-core: a callback that uploads what `Trainer` saves, and the newest checkpoint to resume from."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ckpt_async import StoreOptions, Uploader
from ckpt_async.errors import SaveFailedError, SettingsError
from ckpt_async.integrations.managed import (
    CLOSE_TIMEOUT_S,
    DRAIN_TIMEOUT_S,
    ManagedUploader,
    fetch_newest,
)
from ckpt_async.integrations.olmo_names import core_step, later

try:
    from olmo_core.distributed.utils import (
        OLMO_FS_LOCAL_RANK_ENV_VAR,
        barrier,
        broadcast_object,
        get_local_rank,
        get_rank,
        get_world_size,
    )
    from olmo_core.io import is_url
    from olmo_core.train import Trainer
    from olmo_core.train.callbacks import Callback
except ImportError as error:
    raise ImportError(
        "ckpt_async.integrations.olmo_core needs OLMo-core: pip install ai2-olmo-core"
    ) from error

logger = logging.getLogger(__name__)


@dataclass
class CkptAsyncCallback(Callback):
    """Uploads every checkpoint that the `Trainer` saves, whether synchronously or asynchronously.

        TrainerConfig(…).with_callback("ckpt_async", CkptAsyncCallback(remote))

    Each rank enqueues the files it wrote when its part of the save is finished: after that SIGKILL does not lose them.
    They are uploaded in the background, and the rank that finishes last commits. The uploader is opened on the
    trainer's `save_folder`, which must be local, when training starts, and closed when it ends. Invalid settings,
    credentials or buckets raise at the start. Later failures are logged and counted, and training continues. With
    `on_error="raise"` they end training at the next batch, even if they occurred during an asynchronous save, in a
    thread whose exceptions OLMo-core only logs.

    Args:
        remote: As for `Uploader`.
        settings: Settings of `Uploader`, including `store_options`: `settings={"num_checkpoints_to_keep": 3}`.
        close_timeout_s: How long the end of training may wait for uploads. The rest stays in the journal.
    """

    # Run after the checkpointer and all callbacks that write into a checkpoint's folder when it is saved.
    priority: ClassVar[int] = -100

    remote: str
    settings: dict[str, Any] = field(default_factory=dict)
    close_timeout_s: float = CLOSE_TIMEOUT_S

    # Until it is attached to a trainer, the callback is a plain value that `TrainerConfig` copies.
    _managed: ManagedUploader | None = field(default=None, init=False, repr=False)

    def post_attach(self) -> None:
        if is_url(self.trainer.save_folder):
            raise SettingsError(
                f"save_folder is {self.trainer.save_folder!r}: OLMo-core would upload there itself and block"
                " training",
                hint="give the trainer a local save_folder, and the URL to CkptAsyncCallback",
            )
        self._managed = ManagedUploader(self.remote, None, self.close_timeout_s, self.settings)
        # Guards the attributes below: `post_checkpoint_saved` may be called by another thread.
        self._lock = threading.Lock()
        self._is_open = False
        self._early: list[Path] = []  # saved by the checkpointer's `pre_train`, which runs before ours
        self._seen: set[Path] = set()
        self._failure: Exception | None = None
        self._metrics: tuple[int, Mapping[str, float]] = (-1, {})
        self._first_step = 0

    @property
    def uploader(self) -> Uploader | None:
        """The uploader while training runs, e.g. for its metrics or `wait`; else None."""
        return None if self._managed is None else self._managed.uploader

    @property
    def _uploads(self) -> ManagedUploader:
        assert self._managed is not None
        return self._managed

    def pre_train(self) -> None:
        self._uploads.open(self.trainer.save_folder, get_rank(), get_world_size())
        with self._lock:
            self._is_open, self._failure, self._first_step = True, None, self.step
            early, self._early = self._early, []
        for path in early:
            self._hand_over(path)
        self._raise_failure()

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics = (step, metrics)

    def post_checkpoint_saved(self, path: str | os.PathLike[str]) -> None:
        """Hand over the checkpoint. After an asynchronous save, the thread that wrote it calls this."""
        with self._lock:
            if not self._is_open:
                self._early.append(Path(path))
                return
        self._hand_over(Path(path))

    def post_train_batch(self) -> None:
        self._raise_failure()

    def post_train(self) -> None:
        # The checkpointer has waited for the last save, but not for the callbacks that it calls. And if a
        # callback before ours raised there, which OLMo-core only logs, ours was not called.
        barrier()
        folder = Path(self.trainer.save_folder)
        for name in broadcast_object(self._finished() if get_rank() == 0 else []):
            if (folder / name).is_dir():
                self._hand_over(folder / name)
        self._raise_failure()

    def close(self) -> None:
        """Close the uploader. The trainer calls this in any case, also when training has failed."""
        with self._lock:
            self._is_open = False
        self._uploads.close()

    def _finished(self) -> list[str]:
        """Return the checkpoints of this training that are complete here; only rank 0's node must have all marks."""
        folder, is_complete = Path(self.trainer.save_folder), self.trainer.checkpointer.dir_is_checkpoint
        ours = later(os.listdir(folder), self._first_step, until=self.step)
        return [name for name in ours if is_complete(folder / name)]

    def _hand_over(self, path: Path) -> None:
        """Hand over a checkpoint, once. May run in any thread; raises nothing, because nobody would see it."""
        with self._lock:
            if path in self._seen:
                return
            self._seen.add(path)
        uploader, step = self._uploads.uploader, core_step(path.name)
        try:
            if uploader is None or step is None:
                raise SaveFailedError(f"{path} was saved, but is not a checkpoint of the running training")
            if uploader.rank == 0 and not self.trainer.checkpointer.dir_is_checkpoint(path):
                raise SaveFailedError(f"OLMo-core did not finish {path}: its .metadata.json is missing")
            files = self._uploads.own_files(path)
            if (own := f"train/rank{uploader.rank}.pt") not in files:
                raise SaveFailedError(f"this rank's {own} is missing in {path}")
            logged_at, metrics = self._metrics
            self._uploads.hand_over(
                path, step, path.name, files=files, metrics=metrics if logged_at == step else None
            )
        except Exception as error:  # OLMo-core's thread would only log it
            self._failure = error
            if uploader is not None and step is not None:
                self._uploads.fail(path, step, path.name, error)
            else:
                logger.exception("checkpoint_not_handed_over path=%s", path)

    def _raise_failure(self) -> None:
        """Raise a failure on the training thread, if the uploader was opened to raise."""
        uploader, failure = self._uploads.uploader, self._failure
        if uploader is not None and uploader.settings.on_error == "raise":
            uploader.raise_failures()
            if failure is not None:
                self._failure = None
                raise SaveFailedError(f"a checkpoint was not handed over: {failure}") from failure


def use_node_folders(trainer: Trainer) -> None:
    """Let each node have its own `save_folder` and `work_dir`, at the same path on all nodes.

    OLMo-core creates a trainer only if all ranks share these folders, so call this on every rank after it is created
    and before anything is loaded.

    From then on ranks count by node (FS_LOCAL_RANK in the environment is LOCAL_RANK). The trainer must not look for a
    checkpoint itself (`load_strategy=LoadStrategy.never`): it would look only on the node of rank 0, where a checkpoint
    that the other nodes have lost looks complete. Load what `newest_checkpoint` returns with `trainer.load_checkpoint`.
    """
    local_rank = get_local_rank()
    os.environ[OLMO_FS_LOCAL_RANK_ENV_VAR] = str(local_rank)
    trainer.data_loader.fs_local_rank = local_rank
    for folder in (trainer.save_folder, trainer.work_dir, trainer.checkpointer.work_dir):
        Path(folder).mkdir(parents=True, exist_ok=True)


def newest_checkpoint(
    save_folder: str | os.PathLike[str],
    remote: str,
    *,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    store_options: StoreOptions | None = None,
) -> str | None:
    """Fetch the newest usable checkpoint to `<save_folder>/step<N>` and return that path, or None for a fresh start.

    Call it on all ranks, then `trainer.load_checkpoint(path)` and `trainer.fit()`, with `load_strategy` set to `never`:
    on its own, the trainer takes the local folder with the highest step, even one that was never committed.

    All ranks get the same checkpoint. Whatever a killed trainer left on this node is uploaded first, for at most
    `drain_timeout_s`. A local file is reused if its checksum matches, and replaced otherwise. Every byte is verified.
    Blocks.

    Raises the errors of `restore.find` and `restore.fetch`, also if there are checkpoints but none is usable.
    """
    found = fetch_newest(save_folder, remote, drain_timeout_s, store_options)
    newest = -1 if found is None else found[0].step
    for name in later(os.listdir(save_folder) if os.path.isdir(save_folder) else [], newest):
        logger.warning(
            "never_committed path=%s: load the checkpoint that is returned; the trainer alone would load this one",
            Path(save_folder, name),
        )
    return None if found is None else str(found[1])
