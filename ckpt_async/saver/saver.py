"""`CheckpointSaver`: decides when to save, names the files, copies the state, and has it written and uploaded while
training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ckpt_async import StoreOptions
from ckpt_async.core import arguments, launch
from ckpt_async.errors import CkptAsyncError, SettingsError, UploaderClosedError
from ckpt_async.restore import Checkpoint
from ckpt_async.saver import schedule as schedules
from ckpt_async.saver.asking import Asking
from ckpt_async.saver.auto import Choice
from ckpt_async.saver.files import FILENAME, LATEST_FILENAME, Files, Templates, files_of
from ckpt_async.saver.hooks import FailureHook, Hook, Hooks
from ckpt_async.saver.resuming import Resuming, uploader_of
from ckpt_async.saver.saving import Saving, What, check
from ckpt_async.saver.schedule import Due, Interval, Past
from ckpt_async.saver.signals import on_signals, watch
from ckpt_async.saver.timestamp import Event, Timestamp
from ckpt_async.saver.writing import SavedCheckpoint
from ckpt_async.trainer.closing import FlushReport
from ckpt_async.trainer.uploader import CLOSE_AFTER_ERROR_S

logger = logging.getLogger(__name__)

State = Callable[[], Any] | Any

# How soon hooks that are called at once see a decision.
WATCH_S = 0.2
# Of the seconds that SIGTERM leaves, for the training loop to come by and save.
SAVING_SHARE = 0.5


class CheckpointSaver:
    """Saves training checkpoints: when they are due, under the names you want, without holding up training.

        saver = CheckpointSaver("{run_name}/checkpoints", "s3://bucket/{run_name}", run_name="llm-7b",
                                save_interval="500ba", num_checkpoints_to_keep=3)
        for batch, data in enumerate(loader, start=1):
            train(data)
            saver.step(lambda: {"model": model.state_dict(), "batch": batch}, batch)
        saver.close()

    Every rank makes one, with the same arguments, and calls `step` after every training step. The first rank writes
    (with `is_writer` or `sharded` others do too); all take part in the commit.

    Args:
        folder: Local folder; may use `{run_name} {rank} {local_rank} {world_size} {local_world_size} {node_rank}`.
        remote: As of `Uploader`; may use `{run_name}`. None: nothing is uploaded; each rank's files are durable, linked
            and pruned on its node.
        filename: Of a checkpoint's file in `folder`. The variables above, and those of `Timestamp`: `{epoch} {batch}
            {batch_in_epoch} {sample} {sample_in_epoch} {token} {token_in_epoch} {iteration} {step}` and the seconds
            `{total_wct} {epoch_wct} {batch_wct}`. Its suffix chooses the format (see `ckpt_async.torch.dump`).
        checkpoint_name: Of the checkpoint as a whole: its folder in the store.
        latest_filename: Symlink in `folder` to the newest committed checkpoint; None for none.
        publish: Exact key, below the remote, for tools that want one: the store copies this rank's file to it once the
            checkpoint is committed. May use all variables.
        latest_remote_filename: Composer's text pointer to the newest committed file, below the remote; `.symlink` is
            added.
        save_interval: `"1ep"`, `"500ba"`, `"10000sp"`, `"1e9tok"`, `"2iter"`, `"0.1dur"` of `max_duration`, `"30min"`
            of wall clock, a whole number of epochs, `Auto(…)`, a function `(timestamp, event) -> bool` that answers the
            same on all ranks, or a list of several. None: only what the following ask for.
        fixed_steps: Batches at which to save as well.
        ephemeral_save_interval: For checkpoints that are kept only until a newer one is committed.
        max_duration: Length of the run, like `"10ep"`. What ends it is saved.
        saves_last: On `close`, save what the last `step` was called with, unless that was saved.
        weights_only: Save the model's part only.
        ignore_keys: Leave parts out: globs over '/'-joined keys (`state/model/layer*.weights`), or a function that
            changes a copy of the state's containers.
        overwrite: Whether files of another run in `folder` may be replaced.
        resume_from: Where the run continues; else `load_state_dict` tells.
        run_name: What `{run_name}` stands for.
        kind: For several savers in one run, e.g. `"weights"`: a schedule, retention and `latest` of its own. Its files
            are in a folder of this name, unless `filename` says otherwise.
        is_writer: Whether this rank has a file (or, if sharded, a part) of its own. Default: the first rank; with
            `sharded`, all. Under HSDP: whether this is the first replica.
        deepspeed: Every rank writes an archive of its own; `.tar` is added to a `filename` that is none's.
        sharded: Save with torch.distributed.checkpoint into a folder, all ranks of `process_group`.
        process_group: Of the sharded save; its collectives run beside those of training. Default: a gloo group of all
            ranks.
        blocking: Write in `step` itself, as `torch.save` would, instead of beside training from a copy.
        save_signals: Signals on which to save at the next step, for example `(signal.SIGUSR1,)`.
        save_on_exception: Save what the last `step` was called with if the `with` block ends with an exception.
        on_saved, on_committed, on_failed: Called with a `SavedCheckpoint` (and the error): written and enqueued on this
            rank; committed with all ranks; neither. On the trainer's thread at its next `step`, or, with
            `hooks_at_once`, on a thread of the saver.
        uploader: Everything else is for `Uploader`: `num_checkpoints_to_keep`, `rank`, `store_options`, …

    In strict mode (`on_error="raise"`) a save that failed raises SaveFailedError at the next `step`; else it is logged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/checkpoints",
        remote: str | None = None,
        *,
        filename: str = FILENAME,
        checkpoint_name: str = "ep{epoch}-ba{batch}",
        latest_filename: str | None = LATEST_FILENAME,
        publish: str | None = None,
        latest_remote_filename: str | None = None,
        save_interval: Interval = "1ep",
        fixed_steps: Iterable[int] = (),
        ephemeral_save_interval: Interval = None,
        max_duration: int | str | None = None,
        saves_last: bool = True,
        weights_only: bool = False,
        ignore_keys: Sequence[str] | Callable[[Any], None] = (),
        overwrite: bool = False,
        resume_from: Timestamp | int | None = None,
        run_name: str | None = None,
        kind: str | None = None,
        is_writer: bool | None = None,
        deepspeed: bool = False,
        sharded: bool = False,
        process_group: Any = None,
        blocking: bool = False,
        save_signals: Sequence[int] = (),
        save_on_exception: bool = False,
        on_saved: Hook | None = None,
        on_committed: Hook | None = None,
        on_failed: FailureHook | None = None,
        hooks_at_once: bool = False,
        **uploader: Any,
    ) -> None:
        rank, world_size = launch.rank_and_world_size(
            os.environ, uploader.get("rank"), uploader.get("world_size")
        )
        schedule = schedules.parse(save_interval, fixed_steps, ephemeral_save_interval, max_duration)
        writes = (sharded or deepspeed or rank == 0) if is_writer is None else is_writer
        what = What.of(writes, sharded, blocking, overwrite, weights_only, ignore_keys, process_group)
        templates = (os.fspath(folder), remote or "", filename, checkpoint_name, latest_filename)
        files = files_of(
            Templates.of(*templates, publish, latest_remote_filename, kind, deepspeed, weights_only),
            launch.placement(os.environ, rank, world_size),
            run_name,
            kind,
            has_several_writers=(bool(is_writer) or deepspeed) and world_size > 1 and not sharded,
        )
        self._past = Past(decided=None if resume_from is None else Timestamp.of(resume_from))
        self._hooks = Hooks.of(on_saved, on_committed, on_failed, hooks_at_once)
        check(files, what, schedule, self._past.decided)
        self._saves_last, self._saves_on_exception = saves_last, save_on_exception
        self._schedule = schedule
        self.uploader = uploader_of(files, kind, uploader)
        try:
            self._begin(files, what, (rank, world_size), uploader.get("store_options"), save_signals)
        except BaseException:
            with contextlib.suppress(CkptAsyncError):  # else the folder stays in use, by nobody
                self.uploader.close(0)
            raise

    def _begin(
        self,
        files: Files,
        what: What,
        place: tuple[int, int],
        store_options: StoreOptions | None,
        save_signals: Sequence[int],
    ) -> None:
        self._metrics = self.uploader.metrics
        self._resuming = Resuming(files, self.uploader, store_options)
        if self._past.decided is not None and self._past.decided.batch > 0:
            self._resuming.continue_run()
        self._asking = Asking(self._schedule, *place, chosen=self._metrics.save_interval_chosen)
        self._saving = Saving(self.uploader, files, what, self._hooks, self._asking.ended)
        self._metrics.saver_opened()
        self._is_strict = self.uploader.settings.on_error == "raise"
        self._seen: tuple[State, Timestamp] | None = None
        self._is_closed = False
        self._restore_signals = on_signals(save_signals, self.save_now)
        self.uploader.before_sigterm_flush = self._save_before_flush
        self.uploader.before_exit = self._saving.wait  # what was taken is saved, if nobody calls `close`
        self._stop_watching = watch(self._saving.settle, WATCH_S) if self._hooks.is_at_once else None

    @property
    def saved_checkpoints(self) -> list[SavedCheckpoint]:
        """What was saved and is still on the local disk, oldest first; after `load_state_dict` earlier starts' too."""
        with_files = (each for each in self._saving.saved if each.paths)
        return [each for each in with_files if all(os.path.lexists(path) for path in each.paths)]

    @property
    def save_interval(self) -> Choice | None:
        """What `Auto` has chosen, and why. None without it, and on all ranks but the first."""
        return self._asking.interval

    # --- the trainer's calls -------------------------------------------------------------------------------

    def step(
        self,
        state: State,
        timestamp: Timestamp | int,
        *,
        event: Event = Event.BATCH_CHECKPOINT,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Save if that is due at `timestamp` (a number is the batch). Returns whether it was. Every rank calls it after
        each training step; it costs some microseconds when nothing is due. Raises SettingsError if an interval counts
        what the timestamp does not tell, epochs for example.

        `state` is called, on every rank, only if it is (it may hold collectives, as FSDP's do). This blocks while an
        earlier save is still being written, and until the state is copied to CPU memory; the rest goes on beside
        training. `metrics` (a loss, for example) are stored with the commit, for retention by value.

        On return nothing is durable: `on_saved` and `uploader.wait(step)` tell. Raises SaveFailedError (in strict mode)
        and what `Uploader.enqueue` raises for failures since the last call, FencedError, and what `state` raises.
        """
        began_s = time.monotonic()
        self._asking.meter.step_ended(began_s)
        now = Timestamp.of(timestamp)
        self._schedule.check_counts(now, is_number=now is not timestamp)
        self._seen = (state, now)
        self._saving.settle()
        self._hooks.deliver()
        self._raise_failures()
        if self._is_closed:  # perhaps by a hook
            raise UploaderClosedError("the saver is closed")
        due, self._past = schedules.decide(
            self._schedule, self._past, now, event, is_asked=self._asking.answer()
        )
        if due is Due.REPEATED:
            self._saving.refuse_repeated(now)
            self._raise_failures()
        elif due is not Due.NO:
            self._save(state, now, due, metrics)
        self._asking.meter.step_began(time.monotonic())
        return due > Due.NO

    def save_now(self) -> None:
        """Save at the next `step`, on all ranks at the same one: it may take a second until all know. Returns at once;
        from any thread, and from a signal handler. Where torch.distributed is not initialized, every rank must call it
        before the same step.
        """
        self._asking.ask(Due.YES)

    def find(self, **options: Any) -> Checkpoint | None:
        """`restore.find` for this run, on the first rank for all. A collective where there are several ranks."""
        return self._resuming.find(**options)

    def load_latest(self, *, wait_s: float = 0.0, **options: Any) -> Any:
        """The state in the newest complete checkpoint, this rank's file of it (or the only one); None if there is none:
        a fresh start. One that turns out damaged on any rank is passed over by all. `wait_s`: for what a killed start
        was still uploading. `options` are those of `ckpt_async.torch.load_remote`. Blocks; a collective where there are
        several ranks.

        Raises what `restore.find` and `load_remote` raise. For sharded checkpoints: `ckpt_async.torch.load_latest`.
        """
        if wait_s:
            self.uploader.wait_for_predecessor(wait_s)
        return self._resuming.load_latest(**options)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the newest save is written, and committed with all ranks. Raises SaveFailedError (in strict mode)
        and what `Uploader.wait` raises.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._saving.wait(timeout_s)
        self._raise_failures()
        if self._saving.newest_step is not None:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self.uploader.wait(self._saving.newest_step, left_s)

    def flush(self, timeout_s: float) -> FlushReport:
        """Write what was copied, and upload as much as can be within `timeout_s`: see `Uploader.flush`."""
        deadline = time.monotonic() + timeout_s
        self._saving.wait(timeout_s)
        return self.uploader.flush(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float | None = None) -> None:
        """Save the last step, unless that was saved (or `saves_last` is off), finish writing, and close the uploader:
        see `Uploader.close`. Idempotent. Raises SaveFailedError (in strict mode) and what `Uploader.close` raises.
        """
        if self._is_closed:
            return
        if self._saves_last:
            self._save_seen()
        self._close(timeout_s)
        self._raise_failures()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for the state that is saved: where the run is, and what is kept locally."""
        taking = [self._saving.taking] if self._saving.taking is not None else []
        return {
            "timestamp": None if self._seen is None else self._seen[1].state_dict(),
            "saved_checkpoints": [each.state_dict() for each in (*self.saved_checkpoints, *taking)],
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from there: the same steps are saved as if the run had never ended. Raises SettingsError."""
        if not isinstance(state, Mapping) or not {"timestamp", "saved_checkpoints"} <= state.keys():
            raise SettingsError(
                f"load_state_dict wants what state_dict returned, not {arguments.shown(state)}",
                hint="put saver.state_dict() into the state that is saved",
            )
        if state["timestamp"] is not None:
            self._past = Past(decided=Timestamp.from_state_dict(state["timestamp"]))
        self._resuming.continue_run()
        self._saving.saved = [SavedCheckpoint.from_state_dict(each) for each in state["saved_checkpoints"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            if self._saves_on_exception:
                self._save_seen()
            self._close(CLOSE_AFTER_ERROR_S)
        except Exception:
            logger.exception("close_failed; the exception of the training loop is raised")

    # --- within --------------------------------------------------------------------------------------------

    def _save(self, state: State, now: Timestamp, due: Due, metrics: Mapping[str, float] | None) -> None:
        began_s = time.monotonic()
        self._asking.began(due, now.step)
        checkpoint = self._saving.save(state, now, due, metrics)
        blocked_s = time.monotonic() - began_s
        self._asking.meter.save_began(now.step, began_s, blocked_s)
        self._metrics.save_blocked(blocked_s)
        logger.info(
            "checkpoint_taken name=%s step=%d blocked_s=%.3f", checkpoint.name, checkpoint.step, blocked_s
        )
        self._hooks.deliver()
        self._raise_failures()

    def _save_seen(self) -> None:
        """What the last `step` was called with, unless that was saved."""
        saved = self._past.saved
        if self._seen is None or (saved is not None and saved.batch >= self._seen[1].batch):
            return
        state, now = self._seen
        self._past = Past(now, now, Due.YES)
        self._save(state, now, Due.YES, None)

    def _save_before_flush(self, budget_s: float) -> None:
        """SIGTERM has come; this thread is not the trainer's, which may come by and save."""
        self.save_now()
        self._saving.wait_for_next(budget_s * SAVING_SHARE)

    def _raise_failures(self) -> None:
        failure = self._saving.take_failure()
        if failure is not None and self._is_strict:
            raise failure

    def _close(self, timeout_s: float | None) -> None:
        self._is_closed = True
        self._asking.leave()
        self._restore_signals()
        try:
            self._saving.wait(timeout_s)
            self.uploader.close(timeout_s)
        finally:
            if self._stop_watching is not None:
                self._stop_watching()
            self._saving.settle()
            self._hooks.deliver()
