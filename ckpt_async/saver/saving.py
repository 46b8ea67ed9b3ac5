"""The way of one checkpoint from the trainer's state to the uploader: copy, write, enqueue, seal."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_async.torch as ckpt
from ckpt_async import threads
from ckpt_async.core import arguments
from ckpt_async.core.retention import EPHEMERAL
from ckpt_async.errors import (
    CheckpointAbortedError,
    CheckpointConflictError,
    CkptAsyncError,
    FencedError,
    InTheWayError,
    InvalidNameError,
    NoSpaceError,
    SaveFailedError,
    SealedError,
    SettingsError,
    UploaderClosedError,
)
from ckpt_async.saver import names
from ckpt_async.saver.files import Files, conflict
from ckpt_async.saver.local_only import LocalOnly
from ckpt_async.saver.schedule import Due, Schedule
from ckpt_async.saver.timestamp import Timestamp
from ckpt_async.threads import Latch
from ckpt_async.torch.agreement import is_alone, spell, told_by_all
from ckpt_async.torch.loadable import LoadCheck
from ckpt_async.trainer.uploader import Uploader

logger = logging.getLogger(__name__)

# How torch says that what the ranks hold leaves gaps or overlaps.
_INVALID_PLAN = "Failed to validate global plan"


@dataclass(frozen=True, slots=True)
class What:
    """Which part of the state is saved, and how."""

    is_writer: bool  # this rank writes a file of its own; otherwise it only seals
    is_sharded: bool
    is_blocking: bool
    overwrite: bool
    weights_only: bool
    ignore_keys: Any
    process_group: Any = None
    planner: Any = None  # torch's, of sharded saves

    @classmethod
    def of(cls, is_writer: bool, is_sharded: bool, *others: Any) -> What:
        """Return the validated options. Raises SettingsError.

        If shards are saved, this is a collective of all ranks.
        """
        found = cls(is_writer, is_sharded, *others)
        if isinstance(found.ignore_keys, str):
            raise SettingsError(f"ignore_keys={found.ignore_keys!r} must be a list of globs, or a function")
        if found.planner is not None and not is_sharded:
            raise SettingsError("planner= is about sharded saves", hint="pass sharded=True, or leave it out")
        if is_sharded:
            return replace(found, process_group=_group_of_writers(is_writer, found.process_group))
        return found


def _group_of_writers(is_writer: bool, given: Any) -> Any:
    """Return a group of the saver's own, of exactly the ranks that write; None on the others.

    `given` only says which ranks these are: in a group of training's, its collectives and those of a save, which run
    at the same time, would mix. A collective. Raises SettingsError on all ranks.
    """
    mine = None
    if is_writer and given is not None and not is_alone():
        mine = sorted(dist.get_process_group_ranks(given)) if dist.get_rank(given) >= 0 else []
    told = told_by_all((is_writer, mine))
    writers = [rank for rank, (writes, _) in enumerate(told) if writes]
    if not writers:
        raise SettingsError(
            "is_writer=False: no rank would write", hint="with sharded=True it is true on the first replica"
        )
    for rank in writers:
        ranks = told[rank][1]
        if ranks is not None and ranks != writers:
            raise SettingsError(
                f"process_group of rank {rank} has {spell(ranks) if ranks else 'not this rank'}, but {spell(writers)}"
                " would write",
                hint="pass is_writer=, true on the ranks of one replica, and leave out process_group",
            )
    return ckpt.own_group(None if len(writers) == len(told) else writers)


def check(files: Files, what: What, schedule: Schedule, resumed: Timestamp | None) -> None:
    """Refuse, before training, files that could not be written and arguments that differ between ranks.

    A collective. Raises FormatError, CheckpointConflictError, RanksDisagreeError.
    """
    ckpt.agree(
        {**schedule.told, **files.told}, what="what a CheckpointSaver saves, when, and under which names"
    )
    if what.is_writer and not what.is_sharded:
        ckpt.check_writable(files.filename)
    if what.is_sharded and (of_rank := names.used(files.publish) & names.OF_RANK):
        raise InvalidNameError(
            f"publish={files.publish!r}: with sharded=True it is one folder for all ranks",
            hint=f"leave {{{min(of_rank)}}} out",
        )
    is_checked = what.is_writer and not what.overwrite
    found = ckpt.on_all_ranks(lambda: conflict(files, resumed or Timestamp(batch=0)) if is_checked else "")
    if wrong := next(filter(None, told_by_all(found)), ""):
        raise CheckpointConflictError(
            wrong, hint="use another folder, pass resume_from= if this continues that run, or overwrite=True"
        )


class Saving:
    """Copies, writes, enqueues and seals checkpoints, and keeps track of what becomes of them.

    Called only from the trainer's thread, except for `settle` and `wait_for_next`.
    """

    def __init__(
        self,
        uploader: Uploader | LocalOnly,
        files: Files,
        what: What,
        hooks: Hooks,
        ended: Callable[[int, bool], None],
    ) -> None:
        self._uploader, self._files, self._what, self._hooks = uploader, files, what, hooks
        self._buffers = ckpt.SnapshotBuffers()
        self._load_check = LoadCheck()
        self._writer = Writer()
        self._lock = threading.Lock()  # taken directly: Ctrl-C may come within a condition's `__enter__`
        self._changed = threading.Condition(self._lock)
        self._undecided: list[SavedCheckpoint] = []
        self._failures: list[SaveFailedError] = []
        self._lost: list[tuple[SavedCheckpoint, str]] = []  # failed, and not given up yet
        self.saved: list[SavedCheckpoint] = []
        self.taking: SavedCheckpoint | None = None
        self.newest_step: int | None = None  # saved by this launch
        self.begun: SavedCheckpoint | None = (
            None  # the last one that was begun: it is saved, or is told to have failed
        )
        self._num_begun = self._num_ended = 0
        self._ended = ended

    def save(
        self, state: Any, now: Timestamp, kept: Due, metrics: Mapping[str, float] | None
    ) -> SavedCheckpoint:
        """Block until any earlier save is written and this one's state is copied (or, if blocking, written).

        Failures, now or later, are reported by `raise_failures`. Only FencedError and what `state` itself raises are
        raised here. `begun` tells, also after Ctrl-C, whether the save takes its course.
        """
        is_ephemeral = kept is Due.EPHEMERAL
        if is_ephemeral:
            metrics = {**(metrics or {}), EPHEMERAL: 1}
        checkpoint = SavedCheckpoint(now, self._files.name(now), self._paths(now), is_ephemeral)
        self._writer.wait()
        self.taking = checkpoint  # so that `state_dict`, called by `state`, includes this checkpoint
        try:
            value = state() if callable(state) else state
        finally:
            self.taking = None
        self._num_begun += 1
        before = self._writer.last
        try:
            self._uploader.check_takes(now.step, checkpoint.name)
            # The ranks of a sharded save write together, so none leaves it out.
            if not self._what.is_sharded and self._uploader.skips(now.step, checkpoint.name):
                full = NoSpaceError("there is too little space on the disk, so the save was skipped")
                self._tell(checkpoint, _failure_of(checkpoint, full), is_raised=False)
                self._ended(checkpoint.step, False)
                self.begun = checkpoint
                return checkpoint
            self._begin(checkpoint, value, metrics)
            if self._what.is_blocking:
                self._writer.wait()
        except FencedError:
            with self._lock:
                self._count_end()
            raise
        except (Exception, CheckpointException) as error:  # noqa: BLE001  for `raise_failures`; training goes on
            self._failed(checkpoint, error)
        except BaseException as error:
            self._interrupted(checkpoint, error, has_job=self._writer.last is not before)
            raise
        self.begun = checkpoint
        return checkpoint

    def _interrupted(self, checkpoint: SavedCheckpoint, error: BaseException, *, has_job: bool) -> None:
        """Find out what Ctrl-C, in the middle of `save`, has left of this one."""
        if has_job and self._writer.last is not None and not self._writer.last.cancelled():
            self.begun = checkpoint  # its thread goes on
        elif self._what.is_sharded and self._what.is_writer:
            self.begun = checkpoint  # torch may be at it, so it cannot be tried again
            self._failed(checkpoint, error)
        else:
            with self._lock:
                self._count_end()

    def refuse_repeated(self, now: Timestamp) -> None:
        """Report a failed save, because this batch was saved before.

        Staying silent would leave a run that restarts its batch count every epoch without any checkpoints. What was
        saved at this batch before is not touched.
        """
        checkpoint = SavedCheckpoint(now, self._files.name(now), ())
        error = SealedError(
            f"batch {now.batch} was already passed: a launch cannot save a batch twice, or one before its last save",
            hint="count batches through the whole run, not from 0 in each epoch; after going back on purpose, close"
            " this saver and create a new one",
        )
        self._num_begun += 1
        self._tell(checkpoint, _failure_of(checkpoint, error))

    def _paths(self, now: Timestamp) -> tuple[Path, ...]:
        if self._what.is_sharded:
            return (self._files.folder / self._files.name(now),)
        return (self._files.path(now),) if self._what.is_writer else ()

    def _begin(self, checkpoint: SavedCheckpoint, state: Any, metrics: Mapping[str, float] | None) -> None:
        what, step, ended = self._what, checkpoint.step, partial(self._written, checkpoint)
        if not (what.is_writer or what.is_sharded):
            self._writer.start(
                partial(self._uploader.seal, step, name=checkpoint.name, metrics=metrics), ended
            )
            return
        name = "" if what.is_sharded else checkpoint.paths[0].name
        chosen = ckpt.selected(state, name, ignore_keys=what.ignore_keys, weights_only=what.weights_only)
        if what.is_sharded:
            self._begin_sharded(checkpoint, chosen, metrics)
            return
        (path,) = checkpoint.paths
        if not what.overwrite and any(path in each.paths for each in self.saved):
            raise InTheWayError(
                f"{path} was written by an earlier save",
                hint="put {batch} into filename, or pass overwrite=True",
            )

        published = self._files.published(checkpoint.timestamp)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(self._uploader, LocalOnly):
                self._uploader.begin_file(path)
            # `dump` fsyncs a file first if it replaces another; the engine fsyncs this one in any case.
            ckpt.dump(copied, path, overwrite=os.path.lexists(path))
            self._uploader.enqueue(path, step, checkpoint.name, publish_as=published)
            self._uploader.seal(step, metrics=metrics)
            self._load_check.warn(copied, path.name)

        copied = chosen if what.is_blocking else self._buffers.take(chosen)
        self._writer.start(write, ended)

    def _begin_sharded(
        self, checkpoint: SavedCheckpoint, state: Any, metrics: Mapping[str, float] | None
    ) -> None:
        what, ended = self._what, partial(self._written, checkpoint)
        if not what.is_writer:  # another replica writes the same data
            seal = partial(self._uploader.seal, checkpoint.step, name=checkpoint.name, metrics=metrics)
            self._writer.start(seal, ended)
            return
        save = ckpt.save if what.is_blocking else partial(ckpt.async_save, buffers=self._buffers)
        found = save(
            state,
            checkpoint.step,
            cast(Uploader, self._uploader),  # LocalOnly has all that `save` uses
            name=checkpoint.name,
            metrics=metrics,
            publish_as=self._files.published(checkpoint.timestamp),
            process_group=what.process_group,
            planner=what.planner,
        )
        if not isinstance(found, Future):
            done: Future[Any] = Future()
            done.set_result(found)
            found = done
        self._writer.follow(found, ended)

    # --- outcomes, on any thread ---------------------------------------------------------------------------

    def _written(self, checkpoint: SavedCheckpoint, ending: Future[Any]) -> None:
        if ending.cancelled():  # before it began; `save` knows
            return
        error = ending.exception()
        if error is not None:
            self._failed(checkpoint, error)
            return
        with self._lock:
            self.saved.append(checkpoint)
            self.newest_step = checkpoint.step
            self._undecided.append(checkpoint)
            self._count_end()
        self._uploader.metrics.save_finished("ok")
        self._hooks.saved(checkpoint)

    def settle(self) -> None:
        """Find out which saves have been decided since the last call, and tell the hooks.

        May be called from any thread.
        """
        self._give_up_lost()
        with self._lock:
            undecided = list(self._undecided)
        for each in undecided:
            try:
                if not self._uploader.is_committed(each.step):
                    continue
                error = None
            except CheckpointAbortedError as aborted:
                error = aborted
            except UploaderClosedError:
                return  # the engine has stopped, and its knowledge is gone
            with self._lock:
                if each not in self._undecided:
                    continue  # another thread was faster
                self._undecided.remove(each)
            if error is None:
                logger.info("committed step %d name=%s", each.step, each.name)
                self._hooks.committed(each)
            else:
                self._hooks.failed(each, error)
            self._ended(each.step, error is None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is being written, at most `timeout_s`. Return whether that was reached."""
        return self._writer.wait(timeout_s)

    def wait_for_next(self, timeout_s: float) -> None:
        """Block until a save that begins after this call is written or has failed, at most `timeout_s`.

        A save that is being written already does not count. Must not be called from the trainer's thread.
        """
        with self._lock:
            before = self._num_begun
            self._changed.wait_for(lambda: self._num_ended > before, timeout_s)

    def _count_end(self) -> None:
        """Call it with the lock held."""
        self._num_ended += 1
        self._changed.notify_all()

    def raise_failures(self) -> None:
        """Raise, in strict mode, the error of the first save that has failed since the last call."""
        with self._lock:
            found, self._failures = self._failures, []
        if found and self._uploader.settings.on_error == "raise":
            raise found[0]

    def _failed(self, checkpoint: SavedCheckpoint, error: BaseException) -> None:
        failure = _failure_of(checkpoint, error)
        with self._lock:
            self._lost.append((checkpoint, str(failure.without_hint)))
        self._give_up_lost()
        self._tell(checkpoint, failure)
        self._ended(checkpoint.step, False)

    def _give_up_lost(self) -> None:
        """Release what was enqueued of failed saves, for which the other ranks need not wait; later, if the disk is too
        full to note even that.
        """
        with self._lock:
            lost, self._lost = self._lost, []
        for checkpoint, why in lost:
            try:
                self._uploader.give_up(checkpoint.step, why, name=checkpoint.name)
            except NoSpaceError:
                with self._lock:
                    self._lost.append((checkpoint, why))
            except CkptAsyncError:
                pass  # sealed already, closed or fenced: then the others learn it in another way

    def _tell(self, checkpoint: SavedCheckpoint, failure: SaveFailedError, *, is_raised: bool = True) -> None:
        logger.error("save_failed checkpoint=%s error=%r", checkpoint.name, failure.__cause__)
        self._uploader.metrics.save_finished("failed")
        with self._lock:
            if is_raised:
                self._failures.append(failure)
            self._count_end()
        self._hooks.failed(checkpoint, failure)


def _failure_of(checkpoint: SavedCheckpoint, error: BaseException) -> SaveFailedError:
    why, hint = str(error), "training may continue; the next save is not affected"
    if isinstance(error, NoSpaceError):  # its own hint says to give up the step, as the saver does
        why = error.without_hint
        hint = (
            "training may continue; for the next save free space, lower num_checkpoints_to_keep, or put the folder"
            " on a larger disk"
        )
    elif isinstance(error, CheckpointException):  # its own text has all tracebacks
        causes = ((number, cause) for number, (cause, _) in error.failures.items())
        why = "; ".join(f"writer {number}: {type(cause).__name__}: {cause}" for number, cause in causes)
        if _INVALID_PLAN in why:
            hint = (
                "together, the ranks with is_writer=True must hold every part of every tensor: if one is sharded across"
                " replicas, all of these must write"
            )
    failure = SaveFailedError(
        f"checkpoint {checkpoint.name} was not saved: {type(error).__name__}: {why}", hint=hint
    )
    failure.__cause__ = error
    return failure


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One save: its place in the run, its name, and this rank's files on the local disk."""

    timestamp: Timestamp
    name: str
    paths: tuple[Path, ...]
    is_ephemeral: bool = False

    @property
    def step(self) -> int:
        return self.timestamp.step

    def state_dict(self) -> dict[str, Any]:
        return {
            "timestamp": self.timestamp.state_dict(),
            "name": self.name,
            "paths": [str(each) for each in self.paths],
            "is_ephemeral": self.is_ephemeral,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        paths = tuple(Path(each) for each in state["paths"])
        return cls(
            Timestamp.from_state_dict(state["timestamp"]), state["name"], paths, bool(state["is_ephemeral"])
        )


class Writer:
    """Runs one job at a time on a thread of its own; a `Future` tells how each ended.

    It does not use a thread pool: at exit Python would wait for the pool's threads before anyone could tell it not to.
    """

    def __init__(self) -> None:
        self.last: Future[Any] | None = None  # cancelled if Ctrl-C came before its job had begun
        self._over = Latch()
        self._over.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is being written, at most `timeout_s`. Return whether that was reached.

        Never raises what a job raised.
        """
        return self._over.wait(timeout_s)

    def start(self, job: Callable[[], Any], ended: Callable[[Future[Any]], None]) -> None:
        """Run `job` on a thread, and then `ended`. The previous job must have ended.

        Whatever this raises, Ctrl-C included, the job runs only if `last` is a new future that is not cancelled.
        """
        ending: Future[None] = Future()

        def work() -> None:
            if not ending.set_running_or_notify_cancel():
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001  the future carries it
                ending.set_exception(error)
            else:
                ending.set_result(None)

        try:
            self.follow(ending, ended)
            threads.start(work, "ckpt-async-save")
        except BaseException:
            # No memory, too many threads, or Ctrl-C: the job is not to run, unless its thread was faster.
            ending.cancel()
            raise

    def follow(self, ending: Future[Any], ended: Callable[[Future[Any]], None]) -> None:
        """Treat `ending`, a write that someone else carries out, as the running job."""
        over = Latch()
        ending.add_done_callback(ended)
        ending.add_done_callback(lambda _: over.set())
        self.last, self._over = ending, over


Hook = Callable[[SavedCheckpoint], Any]
FailureHook = Callable[[SavedCheckpoint, Exception], Any]


@dataclass(slots=True)
class Hooks:
    """The user's functions, called on the thread that calls `deliver`.

    With `is_at_once` they are called on whichever thread learns of the outcome. An exception in one is logged, because
    neither training nor a checkpoint may depend on it.
    """

    on_saved: Hook | None = None
    on_committed: Hook | None = None
    on_failed: FailureHook | None = None
    is_at_once: bool = False
    _waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=deque)

    @classmethod
    def of(cls, on_saved: Any, on_committed: Any, on_failed: Any, is_at_once: bool) -> Hooks:
        """Return the hooks. Raises SettingsError for anything that cannot be called."""
        given = {"on_saved": on_saved, "on_committed": on_committed, "on_failed": on_failed}
        for name, each in given.items():
            if each is not None and not callable(each):
                raise SettingsError(f"{name}={arguments.shown(each)} must be a function")
        return cls(on_saved, on_committed, on_failed, is_at_once)

    def saved(self, checkpoint: SavedCheckpoint) -> None:
        self._tell(self.on_saved, checkpoint)

    def committed(self, checkpoint: SavedCheckpoint) -> None:
        self._tell(self.on_committed, checkpoint)

    def failed(self, checkpoint: SavedCheckpoint, error: Exception) -> None:
        self._tell(self.on_failed, checkpoint, error)

    def deliver(self) -> None:
        while self._waiting:
            _call(*self._waiting.popleft())

    def _tell(self, hook: Callable[..., Any] | None, *what: Any) -> None:
        if hook is None:
            return
        if self.is_at_once:
            _call(hook, what)
        else:
            self._waiting.append((hook, what))


def _call(hook: Callable[..., Any], what: tuple[Any, ...]) -> None:
    try:
        hook(*what)
    except Exception:
        logger.exception("hook_failed hook=%r checkpoint=%s", hook, what[0].name)
