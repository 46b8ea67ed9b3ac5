"""Hugging Face transformers: a callback that uploads what `Trainer` saves, and the newest checkpoint to resume from."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_async import StoreOptions, Uploader
from ckpt_async.errors import CkptAsyncError
from ckpt_async.integrations.files import files_of_rank
from ckpt_async.integrations.managed import CLOSE_TIMEOUT_S, DRAIN_TIMEOUT_S, ManagedUploader, fetch_newest

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        "ckpt_async.integrations.transformers needs transformers: run pip install '.[transformers]' in the"
        " clone of ckpt_async"
    ) from error

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
# `enable_jit_checkpoint` keeps this file in a checkpoint's folder while writing it.
_SENTINEL = "checkpoint-is-incomplete.txt"


class CkptAsyncCallback(TrainerCallback):
    """Uploads every checkpoint that the `Trainer` saves: `Trainer(…, callbacks=[CkptAsyncCallback(remote)])`.

    Each rank enqueues the files it wrote, at `on_save`: after that SIGKILL does not lose them, and the `Trainer` may
    delete them. They are uploaded in the background, and the rank that finishes last commits. The uploader is opened on
    `args.output_dir`, which must be on a local disk, when training starts, and closed when it ends. Invalid settings,
    credentials or buckets raise at the start. Later failures are logged and counted, and training continues; with
    `on_error="raise"` they raise.

    Args:
        remote: As for `Uploader`.
        uploader: Instead of `remote`: an open one, on `args.output_dir` or a parent folder. It stays open.
        close_timeout_s: How long the end of training may wait for uploads. The rest stays in the journal.
        settings: Settings of `Uploader`, including `store_options`.
    """

    def __init__(
        self,
        remote: str | None = None,
        *,
        uploader: Uploader | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        self._managed = ManagedUploader(remote, uploader, close_timeout_s, settings)
        self._before: dict[str, int] = {}
        self._announced: set[str] = set()

    @property
    def uploader(self) -> Uploader | None:
        """The uploader while training runs, e.g. for its metrics or `wait`; else None."""
        return self._managed.uploader

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._managed.open(args.output_dir, args.process_index, args.world_size)
        self._before = _folders(args)
        self._announced = set()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._announced.add(name)
        self._hand_over(args, state, name, _files(args, name))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A checkpoint saved on SIGTERM (`enable_jit_checkpoint`) is not announced by `on_save`.
        for name, changed in _folders(args).items():
            if name in self._announced or self._before.get(name) == changed:
                continue
            # With several ranks the sentinel may be another rank's; our own part is complete, or we would not
            # be here. A rank without files did not take part: on SIGTERM, ranks may be a step apart.
            files = _files(args, name)
            is_ours = bool(files) or (args.save_only_model and args.process_index > 0)
            if is_ours and (args.world_size > 1 or not (_folder(args, name) / _SENTINEL).exists()):
                self._hand_over(args, state, name, files)
        self._managed.close()

    def _hand_over(self, args: TrainingArguments, state: TrainerState, name: str, files: list[str]) -> None:
        step = int(name.rpartition("-")[2])
        self._managed.hand_over(_folder(args, name), step, name, files=files, metrics=_metrics(state, step))


def newest_checkpoint(
    output_dir: str | os.PathLike[str],
    remote: str,
    *,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    store_options: StoreOptions | None = None,
) -> str | None:
    """Fetch the newest usable checkpoint to `<output_dir>/checkpoint-<step>` and return that path.

        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir, remote))

    Returns None for a fresh start. Call it on all ranks, after creating `TrainingArguments`, which sets up the process
    group: then all ranks get the same checkpoint. Whatever a killed trainer left on this node is uploaded first, for at
    most `drain_timeout_s`. A local file is reused if its checksum matches, and replaced otherwise. Every byte is
    verified. Blocks.

    If the `Trainer` had recorded a best checkpoint, that is fetched too, as `load_best_model_at_end` needs it. If it
    cannot be, a warning is logged.

    Raises the errors of `restore.find` and `restore.fetch`, also if there are checkpoints but none is usable.
    """
    found = fetch_newest(output_dir, remote, drain_timeout_s, store_options)
    if found is None:
        return None
    checkpoint, path = found
    best_step = _best_step(path)
    if best_step not in (None, checkpoint.step):
        _fetch_best(best_step, output_dir, remote, store_options)
    return str(path)


def _best_step(checkpoint: Path) -> int | None:
    """The step of the best checkpoint so far, as this one states it."""
    try:
        best = json.loads((checkpoint / _STATE).read_bytes())["best_model_checkpoint"]
        _, _, step = Path(best).name.rpartition(f"{PREFIX_CHECKPOINT_DIR}-")
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return int(step) if step.isdecimal() else None


def _fetch_best(
    step: int, output_dir: str | os.PathLike[str], remote: str, store_options: StoreOptions | None
) -> None:
    """Fetch the checkpoint of this step to where transformers looks for the best one.

    Always, as all ranks must, and because what is there may be incomplete. Raises nothing.
    """
    path = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
    was_there = path.exists()
    try:
        if fetch_newest(output_dir, remote, 0.0, store_options, step=step) is not None or was_there:
            return
        why = "it was pruned, or never committed"
    except (CkptAsyncError, OSError) as error:
        why = str(error)
        if not was_there:
            # transformers would take a part for the whole, and only notice when training is over.
            shutil.rmtree(path, ignore_errors=True)
    logger.warning(
        "best_checkpoint_not_fetched step=%d path=%s: %s; without it, load_best_model_at_end ends with another model;"
        " a sweeper keeps the best with --keep last=N,best=1:METRIC:min (or max)",
        step,
        path,
        why,
    )


def _folder(args: TrainingArguments, name: str) -> Path:
    assert args.output_dir is not None  # TrainingArguments fills in a default
    return Path(args.output_dir, name)


def _files(args: TrainingArguments, name: str) -> list[str]:
    files = files_of_rank(_folder(args, name), args.process_index, args.world_size)
    return [each for each in files if each != _SENTINEL]


def _folders(args: TrainingArguments) -> dict[str, int]:
    """The checkpoints' folders and their modification times, which change when the sentinel is added or removed."""
    found = {}
    for each in _folder(args, "").glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if each.name.rpartition("-")[2].isdecimal():
            with contextlib.suppress(FileNotFoundError):  # rank 0 may be deleting old ones
                found[each.name] = each.stat().st_mtime_ns
    return found


def _metrics(state: TrainerState, step: int) -> dict[str, float]:
    """The metrics logged at this step, for retention by value."""
    found: dict[str, float] = {}
    for entry in itertools.takewhile(lambda each: each.get("step") == step, reversed(state.log_history)):
        found |= {key: value for key, value in entry.items() if type(value) in (int, float)}
    return found
