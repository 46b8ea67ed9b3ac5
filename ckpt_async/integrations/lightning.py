"""Lightning: a `CheckpointIO` that uploads what rank 0 saves, a callback for sharded saves, and `newest_checkpoint`.

`lightning.pytorch` and `pytorch_lightning` are two packages with the same code but unrelated classes. This module uses
the one that was imported before it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.errors import SettingsError
from ckpt_async.integrations.managed import (
    CLOSE_TIMEOUT_S,
    DRAIN_TIMEOUT_S,
    ManagedUploader,
    cut_kind,
    fetch_newest,
)

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
else:

    def _lightning():
        names = ("lightning.pytorch", "pytorch_lightning")
        for name in sorted(names, key=lambda name: name not in sys.modules):
            try:
                return tuple(
                    importlib.import_module(f"{name}{part}") for part in ("", ".callbacks", ".plugins.io")
                )
            except ImportError:
                continue
        raise ImportError(
            "ckpt_async.integrations.lightning needs Lightning: run pip install '.[lightning]' in the clone"
            " of ckpt_async"
        )

    _pytorch, _callbacks, _io = _lightning()
    Callback, ModelCheckpoint = _pytorch.Callback, _callbacks.ModelCheckpoint
    CheckpointIO, TorchCheckpointIO = _io.CheckpointIO, _io.TorchCheckpointIO

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step=(\d+)")
_LAST = re.compile(r"last(-v\d+)?\.ckpt")
# What the Tuner saves before a trial, loads after it and removes.
_TUNERS = re.compile(r"\.(lr_find|scale_batch_size)_.*\.ckpt")
_NOT_IN_KIND = re.compile(r"[^a-z0-9_-]+")
_WEIGHTS = "weights"


def _on_cpu(storage: Any, _location: str) -> Any:
    """Lightning's own default: the strategy moves tensors to their devices."""
    return storage


class CkptAsyncCheckpointIO(CheckpointIO):
    """Saves as Lightning does, and uploads: `Trainer(plugins=[CkptAsyncCheckpointIO("checkpoints", remote)])`.

    For strategies that save a single file, written by rank 0: only rank 0 uploads, as a run with one rank. Once a save
    returns, SIGKILL does not lose it; it is uploaded and committed in the background. The uploader is opened by `open`
    or at the first save, and closed when the trainer finishes; a save after that (`trainer.save_checkpoint`, another
    `fit`) opens it for itself and returns when it is committed, for at most `close_timeout_s`. Invalid settings,
    credentials or buckets raise when it is opened. Later failures are logged and counted, and training continues; with
    `on_error="raise"` they raise.

    Files with only weights are uploaded as kind `weights`, because nothing can be resumed from them. If several full
    files are saved at one step, the first is uploaded as the checkpoint of the step. A further one is uploaded as a
    kind of its own if it was saved for a metric (the kind is named after it); else it has the same state and is not
    uploaded. So prefer `save_last="link"` (`save_last=True` writes the same state a second time). Checkpoints that the
    trainer removes are removed only locally.

    Args:
        folder: A folder on a local disk that contains everything saved: the `dirpath` of the `ModelCheckpoint`s, or a
            parent of it.
        remote: As for `Uploader`.
        uploader: Instead of `folder` and `remote`: an open one, with rank 0 and world size 1. It stays open.
        checkpoint_io: Writes and reads the files. Default: Lightning's own `TorchCheckpointIO`.
        close_timeout_s: How long the end of training may wait for uploads. The rest stays in the journal.
        settings: Settings of `Uploader`, including `store_options`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        remote: str | None = None,
        *,
        uploader: Uploader | None = None,
        checkpoint_io: CheckpointIO | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        self._managed = _manage(folder, remote, uploader, close_timeout_s, settings)
        self._folder = folder
        self._checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        # By path, of what was saved or is named in a checkpoint that was loaded: the kind that it may have.
        self._kinds_of: dict[str, str] = {}
        self._handing = _HandingOver(self._managed)
        self._has_ended = False
        if uploader is not None:
            self.open()  # rejects an unsuitable one at once

    @property
    def uploader(self) -> Uploader | None:
        """The open uploader, e.g. for its metrics or `wait`; None while it is closed, and on ranks above 0."""
        return self._managed.uploader

    def open(self) -> None:
        """Open the uploader before the first save, so that configuration errors raise now. Call it on global rank 0."""
        self._managed.open(self._folder, 0, 1)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        self._checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        step = checkpoint.get("global_step")
        # Spawned ranks return their weights through a file, which has no step.
        if step is None or _TUNERS.fullmatch(Path(path).name):
            return
        self.open()
        # Not the step's checkpoint, whichever comes first: nothing can be resumed from it.
        has_weights_only = "optimizer_states" not in checkpoint
        save = _Save(path, step, _name(checkpoint, Path(path)), _scores(checkpoint, path), has_weights_only)
        if (kind := self._handing.hand_over(save)) is not None:
            self._kinds_of[os.fspath(path)] = kind
        if self._has_ended:  # nobody calls `teardown` again
            self._managed.close()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = _on_cpu, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a local file. If a file of this run is missing, fetch it from the store first.

        A file is of this run if it is below the folder, or if a `ModelCheckpoint` in a checkpoint loaded before names
        it. It is searched by its name, in the run and its kinds as far as they are known. If no checkpoint has it, it
        is the one of the step in its name (`step=100`), which has the same state; `last.ckpt` is the newest.
        """
        if not os.path.exists(path):
            path = self._fetch(Path(path))
        how = {} if weights_only is None else {"weights_only": weights_only}  # since Lightning 2.6
        checkpoint = self._checkpoint_io.load_checkpoint(path, map_location, **how)
        for state in _states(checkpoint):
            for each in (*state["best_k_models"], state.get("best_model_path"), state.get("last_model_path")):
                if each:
                    self._kinds_of.setdefault(each, _kind(state["monitor"]) if state.get("monitor") else "")
        return checkpoint

    def _fetch(self, path: Path) -> Path:
        """Fetch the file and return its local path; `path` unchanged if the store does not have it either."""
        given = self._managed.uploader.folder if self._managed.uploader is not None else self._folder
        assert given is not None
        folder = Path(given)
        is_below = path.resolve().is_relative_to(folder.resolve())
        if not is_below and os.fspath(path) not in self._kinds_of:
            return path  # it may belong to another run
        kinds = dict.fromkeys((None, self._kinds_of.get(os.fspath(path)) or None, _WEIGHTS))
        for kind, may_be_named_otherwise in (*((each, False) for each in kinds), (None, True)):
            found = self._find(path, kind, may_be_named_otherwise=may_be_named_otherwise)
            if found is not None:
                checkpoint, name = found
                report = restore.fetch(checkpoint, path.parent if is_below else folder, files=[name])
                logger.info("fetched step=%d path=%s", checkpoint.step, report.paths[name])
                return report.paths[name]
        return path

    def _find(
        self, path: Path, kind: str | None, *, may_be_named_otherwise: bool
    ) -> tuple[restore.Checkpoint, str] | None:
        """Find the newest checkpoint of this kind that has the file, and the file's name in it."""
        said, is_last = _STEP.search(path.name), _LAST.fullmatch(path.name) is not None
        step = int(said[1]) if said else None
        passed: dict[Any, str] = {}
        while True:
            try:
                assert self._managed.remote is not None
                checkpoint = restore.find(
                    self._managed.remote,
                    kind=kind,
                    step=step,
                    store_options=self._managed.store_options,
                    passing_over=passed,
                )
            except (restore.NoUsableCheckpointError, restore.UnknownKindError):
                return None
            if checkpoint is None:
                return None
            files = list(checkpoint.files)
            if path.name in files:
                return checkpoint, path.name
            if said or is_last:
                return (checkpoint, files[0]) if may_be_named_otherwise and len(files) == 1 else None
            passed[checkpoint.id] = f"it has no {path.name}"

    def remove_checkpoint(self, path: str | Path) -> None:
        self._checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        # `validate` before `fit` ends nothing.
        self._has_ended = self._has_ended or self._managed.uploader is not None
        try:
            self._checkpoint_io.teardown()
        finally:
            self._managed.close()


class CkptAsyncCallback(Callback):
    """Uploads sharded saves of FSDP and ModelParallel strategies, which write folders and bypass any `CheckpointIO`.

        Trainer(callbacks=[CkptAsyncCallback("checkpoints", remote), ModelCheckpoint("checkpoints")])

    After a `ModelCheckpoint` has saved, each rank enqueues the files it wrote, before the next batch: from then on
    SIGKILL does not lose them. The rank that finishes its uploads last commits. The uploader is opened when `fit`
    starts and closed when it ends. Arguments and error handling are those of `CkptAsyncCheckpointIO`, except that
    `uploader` must have this rank and world size.

    Use `save_last="link"`: `save_last=True` overwrites `last.ckpt` in place, which aborts a checkpoint whose upload has
    not finished. Checkpoints saved by your own call of `trainer.save_checkpoint` are not uploaded: enqueue them through
    `uploader`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        remote: str | None = None,
        *,
        uploader: Uploader | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        self._managed = _manage(folder, remote, uploader, close_timeout_s, settings)
        self._folder = folder
        self._handing = _HandingOver(self._managed)
        self._seen: dict[str, int] = {}  # by path, when this rank's part was written
        self._files: dict[str, list[str]] = {}  # by path, this rank's

    @property
    def uploader(self) -> Uploader | None:
        """This rank's uploader while `fit` runs, e.g. for its metrics or `wait`; else None."""
        return self._managed.uploader

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._managed.open(self._folder, trainer.global_rank, trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved = {path: self._written_ns(path) for path in _saved(trainer)}
        self._seen = {path: ns for path, ns in saved.items() if ns is not None}  # saved by an earlier launch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._hand_over(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hand_over(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._hand_over(trainer)
        self._managed.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._managed.close()

    def _hand_over(self, trainer: Trainer) -> None:
        if self._managed.uploader is None:
            return
        for path, (scores, has_weights_only) in _saved(trainer).items():
            written_ns = self._written_ns(path)
            if written_ns is None or written_ns <= self._seen.get(path, -1):
                continue
            self._seen[path] = written_ns
            if os.path.isdir(path):
                files = self._files[path] = self._managed.own_files(path)
                step, name = trainer.global_step, Path(path).name
                self._handing.hand_over(_Save(path, step, name, scores, has_weights_only, files))
            else:
                logger.warning(
                    "not_uploaded path=%s: it is a single file; use CkptAsyncCheckpointIO for those", path
                )

    def _written_ns(self, path: str) -> int | None:
        """When this rank's files of the folder were written; None if it is not there.

        Not when the folder was changed: that says nothing of files that are overwritten in place, and changes while
        rank 0 deletes the folder, which other ranks may still list.
        """
        try:
            if not os.path.isdir(path):
                return os.stat(path).st_mtime_ns
            if path not in self._files:
                self._files[path] = self._managed.own_files(path)
            names = self._files[path] or os.listdir(path)
            return max((os.stat(os.path.join(path, name)).st_mtime_ns for name in names), default=0)
        except FileNotFoundError:
            self._files.pop(path, None)
            return None


def newest_checkpoint(
    folder: str | os.PathLike[str],
    remote: str,
    *,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    store_options: StoreOptions | None = None,
) -> str | None:
    """Fetch the newest usable checkpoint into `folder` and return its path, or None for a fresh start.

        trainer.fit(model, ckpt_path=newest_checkpoint("checkpoints", remote))

    It keeps its original name. Call this on all ranks. If `torch.distributed` is already initialized (Lightning uses an
    existing process group), all ranks get the same checkpoint; otherwise each rank searches on its own. Whatever a
    killed trainer left on this node is uploaded first, for at most `drain_timeout_s`. A local file is reused if its
    checksum matches, and replaced otherwise. Every byte is verified. Blocks.

    Raises the errors of `restore.find` and `restore.fetch`, also if there are checkpoints but none is usable.
    """
    found = fetch_newest(folder, remote, drain_timeout_s, store_options, has_bare_files=True)
    return None if found is None else str(found[1])


def _manage(
    folder: str | os.PathLike[str] | None,
    remote: str | None,
    uploader: Uploader | None,
    close_timeout_s: float,
    settings: Mapping[str, Any],
) -> ManagedUploader:
    if (folder is None) != (remote is None):
        raise SettingsError("pass both folder and remote, or an uploader")
    return ManagedUploader(remote, uploader, close_timeout_s, settings)


@dataclass(frozen=True, slots=True)
class _Save:
    """What is to be uploaded: a file, or (these files of) a folder."""

    path: str | Path
    step: int
    name: str
    scores: Mapping[str, float]
    has_weights_only: bool
    files: list[str] | None = None


class _HandingOver:
    """Decides which save of a step is its checkpoint, and of which kinds the others are."""

    def __init__(self, managed: ManagedUploader) -> None:
        self._managed = managed
        self._step_of_weights: int | None = None  # of the newest save with only weights in a lent uploader

    def hand_over(self, save: _Save) -> str | None:
        """Hand it over, and return its kind; None: it is the step's, or the same as that, or its kind is not open."""
        kind = _WEIGHTS if save.has_weights_only else None
        is_of_kind = kind is not None and self._managed.has_kinds
        managed = self._managed.of_kind(_WEIGHTS) if is_of_kind else self._managed
        if managed is None:
            return None  # it is logged
        if _hand_over_to(managed, save):
            if kind is not None and not is_of_kind:
                self._step_of_weights = save.step
        else:
            if kind is None and (save.scores or save.step == self._step_of_weights):
                kind = _kind(next(iter(save.scores), ""))
            self._hand_over_again(save, kind)
        return kind

    def _hand_over_again(self, save: _Save, kind: str | None) -> None:
        """Upload a further save of a step as one of this kind; None: it has the state that is uploaded already."""
        if kind is None:
            logger.info("step_is_uploaded_already step=%d path=%s", save.step, save.path)
        elif not self._managed.has_kinds:
            logger.warning(
                "not_uploaded step=%d path=%s: another file of this step is already uploaded, and only an uploader"
                " that the integration opens itself has further kinds; pass folder and remote instead of uploader",
                save.step,
                save.path,
            )
        elif (of_kind := self._managed.of_kind(kind)) is not None and not _hand_over_to(of_kind, save):
            logger.warning(
                "not_uploaded step=%d path=%s: another file of this step and kind %r is already uploaded",
                save.step,
                save.path,
                kind,
            )


def _hand_over_to(managed: ManagedUploader, save: _Save) -> bool:
    return managed.hand_over(save.path, save.step, save.name, files=save.files, metrics=save.scores)


def _kind(metric: str) -> str:
    """The kind of what is saved for a metric at a step that is uploaded already: `val/loss` becomes `val_loss`."""
    return cut_kind(_NOT_IN_KIND.sub("_", metric.lower()).strip("_-") or "best")


def _states(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of the `ModelCheckpoint`s. Files with only weights have none."""
    states = checkpoint.get("callbacks", {}).values()
    return [each for each in states if isinstance(each, Mapping) and "best_k_models" in each]


def _name(checkpoint: Mapping[str, Any], path: Path) -> str:
    """The name in the store; with the folders of a `filename` that has some, such as `{epoch}/{val_loss}`."""
    for state in _states(checkpoint):
        if state.get("dirpath") and path.is_relative_to(state["dirpath"]):
            return "-".join(path.relative_to(state["dirpath"]).with_suffix("").parts)
    return path.stem


def _scores(checkpoint: Mapping[str, Any], path: str | Path) -> dict[str, float]:
    """The monitored metrics of the `ModelCheckpoint`s that chose this file, for retention by value."""
    return {
        state["monitor"]: float(state["best_k_models"][os.fspath(path)])
        for state in _states(checkpoint)
        if os.fspath(path) in state["best_k_models"]
    }


def _saved(trainer: Trainer) -> dict[str, tuple[dict[str, float], bool]]:
    """The paths that the `ModelCheckpoint`s have saved and kept, with the scores, and whether only weights are there;
    first those from which training can be resumed.
    """
    found: dict[str, tuple[dict[str, float], bool]] = {}
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        for path in (*callback.best_k_models, callback.best_model_path, callback.last_model_path):
            if path and not os.path.islink(path):
                score = callback.best_k_models.get(path)
                scores = {} if score is None or callback.monitor is None else {callback.monitor: float(score)}
                found.setdefault(path, (scores, callback.save_weights_only))
    return dict(sorted(found.items(), key=lambda each: each[1][1]))
