"""`CheckpointSaver` decides when to save, names the files, copies the state, and has it written and uploaded.

Writing and uploading run beside training.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_async import events
from ckpt_async.core import arguments, launch
from ckpt_async.core.settings_options import SaverSettings
from ckpt_async.errors import CkptAsyncError, SettingsError, UploaderClosedError
from ckpt_async.restore import Checkpoint
from ckpt_async.restore.options import FindOptions
from ckpt_async.restore.options import check as check_options
from ckpt_async.saver import schedule as schedules
from ckpt_async.saver.auto import Choice
from ckpt_async.saver.files import FILENAME, LATEST_FILENAME, Files, Templates, files_of
from ckpt_async.saver.local_only import LocalOnly
from ckpt_async.saver.resuming import Resuming, uploader_of
from ckpt_async.saver.save_requests import SaveRequests, on_signals, watch
from ckpt_async.saver.saving import FailureHook, Hook, Hooks, SavedCheckpoint, Saving, What, check
from ckpt_async.saver.schedule import Due, Interval, Past
from ckpt_async.saver.timestamp import Event, Timestamp
from ckpt_async.stores import StoreOptions
from ckpt_async.torch.agreement import rank_and_world_size
from ckpt_async.torch.options import LoadRemoteOptions
from ckpt_async.trainer.uploader import CLOSE_AFTER_ERROR_S, Uploader
from ckpt_async.trainer.waits import FlushReport

logger = logging.getLogger(__name__)

State = Callable[[], Any] | Any

# How often the saver looks for commits and aborts if hooks are called at once (`hooks_at_once`).
WATCH_S = 0.2
# The share of the seconds left after SIGTERM that the training loop gets to reach its next `step` and save.
SAVING_SHARE = 0.5

# What Composer and OLMo call it, and what it is called here.
_CALLED_HERE = {
    "remote_file_name": "publish",
    "latest_remote_file_name": "latest_remote_filename",
    "save_folder": "folder",
    "save_filename": "filename",
    "save_latest_filename": "latest_filename",
    "save_overwrite": "overwrite",
    "save_weights_only": "weights_only",
    "save_ignore_keys": "ignore_keys",
    "save_num_checkpoints_to_keep": "num_checkpoints_to_keep",
    "save_interval_ephemeral": "ephemeral_save_interval",
    "save_planner": "planner",
    "bucket_uri": "remote",
    "remote_save_folder": "remote",
    "autoresume": "saver.load_latest()",
    "upload_timeout_in_seconds": "upload_timeout_s",
    "use_procs": 'runner="process"',
}


class UploaderOptions(SaverSettings, total=False):
    """What `CheckpointSaver` hands on to its `Uploader`, which describes it."""

    rank: int | None
    world_size: int | None
    generation: int | None
    launch_id: str | None
    store_options: StoreOptions | None
    settings_file: str | os.PathLike[str] | None
    on_event: Callable[[events.Event], object] | None


class CheckpointSaver:
    """Saves training checkpoints when they are due, under the names you choose, without holding up training.

        saver = CheckpointSaver("{run_name}/checkpoints", "s3://bucket/{run_name}", run_name="llm-7b",
                                save_interval="500ba", num_checkpoints_to_keep=3)
        for batch, data in enumerate(loader, start=1):
            train(data)
            saver.step(lambda batch=batch: {"model": model.state_dict(), "batch": batch}, batch)
        saver.close()

    Every rank creates a saver with the same arguments and calls `step` after every training step. The first rank writes
    the files; with `is_writer` or `sharded`, other ranks write too. All ranks take part in the commit.

    Args:
        folder: Local folder; may use `{run_name} {rank} {local_rank} {world_size} {local_world_size} {node_rank}`.
        remote: As for `Uploader`; may use `{run_name}`. With None nothing is uploaded: each rank's files are made
            durable, linked and pruned on its own node.
        filename: Name of a checkpoint's file in `folder`. May use the variables above and those of `Timestamp`:
            `{epoch} {batch} {batch_in_epoch} {sample} {sample_in_epoch} {token} {token_in_epoch} {iteration} {step}`
            and the seconds `{total_wct} {epoch_wct} {batch_wct}`. The suffix selects the format (see
            `ckpt_async.torch.dump`).
        checkpoint_name: Name of the checkpoint as a whole, which is its folder in the store.
        latest_filename: Symlink in `folder` to the newest committed checkpoint; None for no symlink.
        publish: Exact key, below the remote, for tools that expect one: the store copies this rank's file to it once
            the checkpoint is committed. If sharded, this is the folder of all ranks' files. May use all variables.
        latest_remote_filename: Composer's text pointer to the newest committed file, below the remote; `.symlink` is
            added.
        save_interval: `"1ep"`, `"500ba"`, `"10000sp"`, `"1e9tok"`, `"2iter"`, `"0.1dur"` of `max_duration`, `"30min"`
            of wall clock, a whole number of epochs, `Auto(…)`, a function `(timestamp, event) -> bool` that returns the
            same on all ranks, or a list of several. With None, only what the following arguments ask for is saved.
        fixed_steps: Batches at which to save in addition.
        ephemeral_save_interval: Interval of checkpoints that are kept only until a newer one is committed.
        max_duration: Length of the run, for example `"10ep"`. The step that reaches it is saved.
        saves_last: On `close`, save what the last `step` was called with, unless it was saved already. A function is
            called then: what it returns should still be the state of that step.
        weights_only: Save only the model's part of the state.
        ignore_keys: Parts to leave out: globs over '/'-joined keys (`state/model/layer*.weights`), or a function that
            changes a copy of the state's containers.
        overwrite: Whether files of another run in `folder` may be replaced.
        resume_from: Where the run continues. Not needed if you call `load_state_dict`, which sets it.
        run_name: Value of `{run_name}`.
        kind: For several savers in one run, for example `"weights"`: each kind has its own schedule, retention and
            `latest`. Its files are in a folder of this name, unless `filename` says otherwise.
        is_writer: Whether this rank writes a file (or, if sharded, a part) of its own. Default: only the first rank, or
            all ranks if `sharded` or `deepspeed`. Under HSDP: whether this rank belongs to the first replica.
        deepspeed: Every rank writes an archive of its own; `.tar` is added to the names of files (`filename`,
            `latest_filename`, `publish`, `latest_remote_filename`) that have no archive suffix.
        sharded: Save with torch.distributed.checkpoint into a folder; all ranks with `is_writer` take part.
        process_group: Group of the ranks that write, if sharded. It is only compared with `is_writer`: the saver makes
            a gloo group of its own of these ranks, because a save runs beside training.
        planner: torch's planner of what each rank writes, if sharded; used for every save.
        blocking: Write inside `step`, as `torch.save` would, instead of from a copy beside training.
        save_signals: Signals that request a save at the next step, for example `(signal.SIGUSR1,)`.
        save_on_exception: The same if the `with` block ends with an exception, perhaps in the middle of a step.
        on_saved, on_committed, on_failed: Called with a `SavedCheckpoint` (`on_failed` also with the error) when it is
            written and enqueued on this rank, when it is committed with all ranks, and when it is neither. They run on
            the trainer's thread at its next `step` or, with `hooks_at_once`, on one of the saver's threads.
        uploader: All other arguments go to `Uploader`: `num_checkpoints_to_keep`, `rank`, `store_options`, …

    In strict mode (`on_error="raise"`) a failed save raises SaveFailedError at the next `step`; otherwise it is logged.
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
        planner: SavePlanner | None = None,
        blocking: bool = False,
        save_signals: Sequence[int] = (),
        save_on_exception: bool = False,
        on_saved: Hook | None = None,
        on_committed: Hook | None = None,
        on_failed: FailureHook | None = None,
        hooks_at_once: bool = False,
        **uploader: Unpack[UploaderOptions],
    ) -> None:
        rank, world_size = ranks = rank_and_world_size(uploader.get("rank"), uploader.get("world_size"))
        _refuse_mistaken(uploader, remote)
        uploader["rank"], uploader["world_size"] = rank, world_size
        schedule = schedules.parse(save_interval, fixed_steps, ephemeral_save_interval, max_duration)
        writes = (sharded or deepspeed or rank == 0) if is_writer is None else is_writer
        what = What.of(
            writes, sharded, blocking, overwrite, weights_only, ignore_keys, process_group, planner
        )
        templates = (folder, remote or "", filename, checkpoint_name, latest_filename)
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
        with _closed_on_error(self.uploader):
            self._begin(files, what, ranks, uploader.get("store_options"), save_signals)

    def _begin(
        self,
        files: Files,
        what: What,
        place: tuple[int, int],
        store_options: StoreOptions | None,
        save_signals: Sequence[int],
    ) -> None:
        self._pid = os.getpid()
        self._metrics = self.uploader.metrics
        self._resuming = Resuming(files, self.uploader, what, store_options)
        if self._past.decided is not None and self._past.decided.batch > 0:
            self._resuming.continue_run()
        self._requests = SaveRequests(self._schedule, *place, chosen=self._metrics.save_interval_chosen)
        self._saving = Saving(self.uploader, files, what, self._hooks, self._requests.ended)
        self._metrics.saver_opened()
        self._seen: tuple[State, Timestamp] | None = None
        self._is_closed = False
        # Not `save_now`: a forked child, which inherits the handlers, must not raise when a signal arrives.
        self._restore_signals = on_signals(save_signals, partial(self._requests.ask, Due.YES))
        self.uploader.before_sigterm_flush = self._save_before_flush
        self.uploader.before_exit = self._saving.wait  # snapshots taken are written even without `close`
        self._stop_watching = watch(self._saving.settle, WATCH_S) if self._hooks.is_at_once else None

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<CheckpointSaver of {self.uploader!r}, {state}>"

    @property
    def saved_checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints that were saved and are still on the local disk, oldest first.

        After `load_state_dict` this includes those of earlier launches.
        """
        with_files = (each for each in self._saving.saved if each.paths)
        return [each for each in with_files if all(os.path.lexists(path) for path in each.paths)]

    @property
    def save_interval(self) -> Choice | None:
        """The interval that `Auto` has chosen, and why. None without `Auto`, and on all ranks but the first."""
        return self._requests.interval

    # --- the trainer's calls -------------------------------------------------------------------------------

    def step(
        self,
        state: State,
        timestamp: Timestamp | int,
        *,
        event: Event = Event.BATCH_CHECKPOINT,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Save if a checkpoint is due at `timestamp` (a plain number is the batch), and return whether it was.

        Every rank calls this after each training step. It takes a few microseconds when nothing is due.

        `state` is called only if a save is due, and then on every rank, so it may run collectives, as FSDP's does.
        `step` blocks while an earlier save is still being written and until the state is copied to CPU memory; the rest
        happens beside training. `metrics` (a loss, for example) are stored with the commit, for retention by value.

        Nothing is durable on return: `on_saved` and `uploader.wait(step)` tell when it is. Raises SettingsError if an
        interval counts something that the timestamp does not give, for example epochs; CheckpointConflictError if an
        earlier launch has saved, without a remote, what this one would save again, and this one does not continue it,
        or if another one has saved since this one looked; SaveFailedError (in strict mode) and whatever
        `Uploader.enqueue` raises for failures since the last call; FencedError; and whatever `state` raises.
        """
        self._check_process()
        began_s = time.monotonic()
        self._requests.meter.step_ended(began_s)
        now = Timestamp.of(timestamp)
        _refuse_part(state)
        self._schedule.check_counts(now, is_number=now is not timestamp)
        if not self._resuming.has_begun:
            self._resuming.begin(now)
        self._seen = (state, now)
        self._saving.settle()
        self._hooks.deliver()
        self._saving.raise_failures()
        if self._is_closed:  # a hook may have closed it
            raise UploaderClosedError("the saver is closed")
        asked = self._requests.answer()
        due, past = schedules.decide(self._schedule, self._past, now, event, is_asked=asked)
        if due > Due.NO:
            self._save(state, now, due, metrics, past, asked)
        else:
            self._past = past
        if due is Due.REPEATED:
            self._saving.refuse_repeated(now)
            self._saving.raise_failures()
        self._requests.meter.step_began(time.monotonic())
        return due > Due.NO

    def save_now(self) -> None:
        """Save at the next `step`, on all ranks at the same one; it may take a second until all of them know.

        Returns at once. May be called from any thread and from a signal handler. If torch.distributed is not
        initialized, every rank must call it before the same step.
        """
        self._check_process()
        self._requests.ask(Due.YES)

    def find(self, **options: Unpack[FindOptions]) -> Checkpoint | None:
        """Call `restore.find` for this run (and kind) on the first rank and return its result on all ranks.

        A collective if there are several ranks.
        """
        check_options("find", options, FindOptions)
        self._check_process()
        return self._resuming.find(**options)

    def load_latest(
        self, *, wait_s: float = 0.0, may_start_over: bool = False, **options: Unpack[LoadRemoteOptions]
    ) -> Any:
        """Return the state stored in the newest complete checkpoint, or None if there is none (a fresh start).

        Reads this rank's file of the checkpoint, or its only file. A checkpoint that turns out to be damaged on any
        rank is skipped by all. `wait_s` is how long to wait for uploads that a killed launch left unfinished or,
        without a remote, for what an earlier saver of this process is writing. `options` are those of
        `ckpt_async.torch.load_remote`; without a remote nothing is fetched, so only those of `load` matter. Blocks; a
        collective if there are several ranks.

        If nothing is committed, but something that earlier launches have sealed still can be, because every rank's
        part is in the store or in a folder of this launch, it raises NoUsableCheckpointError rather than return None,
        unless it `may_start_over`. A part that was lost with its node is only logged.

        Raises what `restore.find` and `load_remote` raise; NoUsableCheckpointError, too, if the newest were saved
        without a remote, which this saver has, or if this one has none either and not all ranks can use them. For
        sharded checkpoints use `ckpt_async.torch.load_latest`.
        """
        check_options("load_latest", options, LoadRemoteOptions)
        self._check_process()
        if wait_s:
            self.uploader.wait_for_predecessor(wait_s)
        return self._resuming.load_latest(may_start_over=may_start_over, **options)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the newest save is written and committed with all ranks.

        Raises SaveFailedError (in strict mode) and what `Uploader.wait` raises.
        """
        self._check_process()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._saving.wait(timeout_s)
        self._saving.raise_failures()
        if self._saving.newest_step is not None:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self.uploader.wait(self._saving.newest_step, left_s)

    def flush(self, timeout_s: float) -> FlushReport:
        """Finish writing the snapshots, and upload as much as possible within `timeout_s`: see `Uploader.flush`."""
        self._check_process()
        deadline = time.monotonic() + timeout_s
        self._saving.wait(timeout_s)
        return self.uploader.flush(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float | None = None) -> None:
        """Save the last step, finish writing, and close the uploader: see `Uploader.close`.

        The last step is not saved again if it was saved already, nor if `saves_last` is off. Idempotent. Does nothing
        in a forked child. Raises SaveFailedError (in strict mode) and what `Uploader.close` raises.
        """
        if self._is_closed or self._is_fork():
            return
        if self._saves_last:
            self._save_seen()
        self._close(timeout_s)
        self._saving.raise_failures()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data to put into the saved state: where the run is, and which checkpoints are kept locally."""
        taking = [self._saving.taking] if self._saving.taking is not None else []
        return {
            "timestamp": None if self._seen is None else self._seen[1].state_dict(),
            "saved_checkpoints": [each.state_dict() for each in (*self.saved_checkpoints, *taking)],
        }

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` returned: the same steps are saved as if the run had never ended.

        Raises SettingsError.
        """
        if not isinstance(state, Mapping) or not {"timestamp", "saved_checkpoints"} <= state.keys():
            raise SettingsError(
                f"load_state_dict expects what state_dict returned, not {arguments.shown(state)}",
                hint="include saver.state_dict() in the state that you save",
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
        if self._is_fork():
            return
        try:
            if self._saves_on_exception:
                self._save_seen()
            self._close(CLOSE_AFTER_ERROR_S)
        except Exception:
            logger.exception("close_failed; the exception of the training loop is raised")

    # --- internals -----------------------------------------------------------------------------------------

    def _is_fork(self) -> bool:
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        """Refuse a call in a forked child: it would wait for threads, and ranks, that only its parent has."""
        if self._is_fork():
            raise UploaderClosedError(
                f"this saver was created by process {self._pid}, but this is its fork, process {os.getpid()}",
                hint="call it from the process that created it",
            )

    def _save(
        self,
        state: State,
        now: Timestamp,
        due: Due,
        metrics: Mapping[str, float] | None,
        past: Past,
        asked: Due = Due.NO,
    ) -> None:
        """Save; `past` is what holds afterwards. If Ctrl-C comes before the save has begun, nothing has changed."""
        began_s = time.monotonic()
        before, self._past = self._past, past
        try:
            self._requests.began(due, now.step)
            checkpoint = self._saving.save(state, now, due, metrics)
        except BaseException as error:
            begun = self._saving.begun
            if not isinstance(error, Exception) and (begun is None or begun.timestamp is not now):
                self._past = before
                self._requests.ask(asked)
            raise
        blocked_s = time.monotonic() - began_s
        self._requests.meter.save_began(now.step, began_s, blocked_s)
        self._metrics.save_blocked(blocked_s)
        logger.info(
            "checkpoint_taken name=%s step=%d blocked_s=%.3f", checkpoint.name, checkpoint.step, blocked_s
        )
        self._hooks.deliver()
        self._saving.raise_failures()

    def _save_seen(self) -> None:
        """Save what the last `step` was called with, unless it was saved already."""
        saved = self._past.saved
        if self._seen is None or (saved is not None and saved.batch >= self._seen[1].batch):
            return
        state, now = self._seen
        self._save(state, now, Due.YES, None, Past(now, now, Due.YES))

    def _save_before_flush(self, budget_s: float) -> None:
        """Request a save after SIGTERM and wait for it.

        This runs on another thread than the trainer's, which may still reach its next `step` and save.
        """
        self.save_now()
        self._saving.wait_for_next(budget_s * SAVING_SHARE)

    def _close(self, timeout_s: float | None) -> None:
        self._is_closed = True
        try:
            try:
                self._requests.leave()
                self._restore_signals()
                self._saving.wait(timeout_s)
                self.uploader.close(timeout_s)
            finally:
                if self._stop_watching is not None:
                    self._stop_watching()
                self._saving.settle()
                self._hooks.deliver()
        except BaseException as error:
            self._is_closed = isinstance(error, Exception)  # after Ctrl-C, `close` can be called again
            raise


@contextlib.contextmanager
def _closed_on_error(uploader: Uploader | LocalOnly) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptAsyncError):  # otherwise the folder would stay locked with no owner
            uploader.close(0)
        raise


def _refuse_mistaken(others: Mapping[str, Any], remote: str | None) -> None:
    """Refuse other tools' words, and an empty remote: an unset variable in a script is no wish to upload nothing."""
    arguments.check_spelling(others, inspect.signature(CheckpointSaver).parameters, _CALLED_HERE)
    if remote is not None and not arguments.path(remote, "remote").strip():
        raise SettingsError(f"remote={remote!r} is empty", hint="pass a URL, or None to upload nothing")


def _refuse_part(state: State) -> None:
    """Refuse a model, which is callable, too: as a function that returns the state, it would be called."""
    if callable(state) and hasattr(state, "state_dict"):
        raise SettingsError(
            f"state={type(state).__name__} is a part of the state, not a function that returns it",
            hint="pass `lambda: ckpt_async.torch.capture(model=model, optimizer=optimizer)`",
        )
