"""The trainer's side: `Uploader`. Its calls link, append and return; an engine on a background thread, or in a
process of its own, does the rest.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from ckpt_async.core import arguments, decide, keys, launch, naming, retention
from ckpt_async.core.failures import Failure, in_vain, to_raise, why_in_vain
from ckpt_async.core.model import CheckpointId, Enqueued, Growing, Outcome, Retried, Sealed, Shard, Superseded
from ckpt_async.core.settings import Settings, load
from ckpt_async.core.units import few
from ckpt_async.errors import (
    BacklogError,
    CheckpointAbortedError,
    CkptAsyncError,
    CommitTimeoutError,
    FencedError,
    InvalidNameError,
    InvalidShardError,
    SealedError,
    SettingsError,
    UploaderClosedError,
    UploadFailedError,
)
from ckpt_async.local.folder import Folder, boot_id
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.monitor.metrics import Metrics, serve
from ckpt_async.runners import EngineView, Start, runner_of
from ckpt_async.stores import StoreOptions, address_of, check_key_length
from ckpt_async.trainer import at_exit
from ckpt_async.trainer.preemption import flush_on_sigterm
from ckpt_async.trainer.shard_writer import ShardWriter

logger = logging.getLogger(__name__)

# A predecessor that was just killed, or a sweeper that is finishing its work, gives the lock back soon.
LOCK_WAIT_S = 15.0
# After an exception in the training loop: long enough for receipts, too short to hide the traceback.
CLOSE_AFTER_ERROR_S = 10.0
# At the end of a start that has committed nothing: for the store to say who is there.
MEMBERS_TIMEOUT_S = 10.0
# While `enqueue` is held up: how often the disk and the backlog are looked at, besides at every change.
BLOCK_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What `flush` got done, and what the next process or the sweeper has to finish."""

    is_done: bool
    num_committed: int
    num_shards_left: int
    size_bytes_left: int
    steps_left: tuple[int, ...]


@dataclass(slots=True)
class _Open:
    """A checkpoint this process is filling."""

    name: str
    shards: dict[str, Shard] = field(default_factory=dict)
    growing: set[str] = field(default_factory=set)  # being written through `open`
    is_sealed: bool = False


_SEALED = _Open("", is_sealed=True)


class Uploader:
    """Hands checkpoints of one rank to the store in the background.

    `enqueue`, `seal`, `wait`, `raise_failures` and `close` may be called from any thread of the process that
    opened it. `enqueue` and `seal` cost a hard link and a journal row and never touch the network.

    Args:
        folder: Where the trainer writes its checkpoints, on a local disk. `.ckpt_async/` is made in it.
        remote: `s3://bucket/prefix/run` or `file:///path/run`. One run, one remote.
        rank, world_size: Default: RANK and WORLD_SIZE of the launcher; 0 and 1 where nothing speaks of other
            processes. One of the two alone is refused.
        generation: A number all ranks of this start were given, larger than any before. Default: agreed
            through the store from what the launcher says (torchrun, Slurm, or CKPT_ASYNC_LAUNCH_ID).
        launch_id: What all ranks of this start share and no other start has, where the launcher does not say it: a
            random text that one rank broadcast, say.
        store_options: Endpoint, region, SSE, storage class, tags, …
        settings_file: TOML file with settings; keyword arguments and CKPT_ASYNC_* go before it.
        settings: Any field of `ckpt_async.Settings`, e.g. `num_checkpoints_to_keep=3`.

    Opening blocks until the store was reached and the generation agreed, and raises at once, with nothing
    changed, when a setting, the folder, the credentials or the bucket are wrong. A store that does not answer may be
    restarting: it is tried for a minute, which the log says at once.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        remote: str,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        generation: int | None = None,
        launch_id: str | None = None,
        store_options: StoreOptions | None = None,
        settings_file: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        environment = dict(os.environ)
        if launch_id is not None:
            environment["CKPT_ASYNC_LAUNCH_ID"] = launch_id
        self.rank, self.world_size = launch.rank_and_world_size(environment, rank, world_size)
        self.settings = load_settings(settings, environment, settings_file)
        if generation is not None:
            generation = arguments.whole(generation, "generation", 1, keys.MAX_GENERATION, SettingsError)
        launch_key = _launch_key(environment, self.world_size, generation)
        naming.fill(self.settings.latest_filename, rank=self.rank)
        if self.settings.sigterm_flush_s and threading.current_thread() is not threading.main_thread():
            raise SettingsError(
                "sigterm_flush_s needs the uploader to be opened in the main thread: only it may set signal handlers"
            )
        address = address_of(remote, store_options, env=environment)
        self.remote = address.url
        self._folder = Folder(folder, allows_unknown_filesystem=self.settings.allow_unknown_filesystem)
        self.folder = self._folder.path
        at_exit.refuse_second(self.folder, self.rank)

        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}
        self._sealed = array("q")  # every step of this start, in order: refused if it comes again
        self._told: set[CheckpointId] = set()  # given up, as `wait` has said
        self._num_waiting = 0
        self._num_flushing = 0
        self._is_closed = self._has_ended = False
        self.metrics = Metrics(self.remote.rstrip("/"), self._folder)
        self._rank_lock = RankLock(self._folder, self.rank)
        with contextlib.ExitStack() as undo:
            self._rank_lock.acquire(wait_s=LOCK_WAIT_S, is_trainer=True)
            undo.callback(self._rank_lock.release)
            self._journal = Journal(self._folder, self.rank)
            undo.callback(self._journal.close)
            self._runner = runner_of(self.settings.runner)(
                Start(
                    str(self.folder),
                    self.rank,
                    self.world_size,
                    address,
                    replace(store_options or StoreOptions(), endpoint_url=address.endpoint_url),
                    self.settings,
                    launch_key,
                    generation,
                ),
                self._folder,
                self._journal,
                self._rank_lock,
                self.metrics,
                self._notify,
            )
            self.generation = self._runner.start()
            undo.pop_all()
        self._metrics_server = serve(
            self.metrics, self.settings.metrics_port, self.settings.metrics_address, environment
        )
        at_exit.add(self)
        self._undo_sigterm: Callable[[], None] | None = None
        if self.settings.sigterm_flush_s:
            self._undo_sigterm = flush_on_sigterm(self, self.settings.sigterm_flush_s)

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus finds this process, or None if it serves no metrics."""
        return self._metrics_server.url if self._metrics_server else None

    # --- the trainer's calls -------------------------------------------------------------------------------

    def enqueue(
        self,
        path: str | os.PathLike[str],
        step: int,
        name: str | None = None,
        *,
        files: Collection[str] | None = None,
    ) -> None:
        """Hand over a finished file, or every regular file of a folder (or these `files` of it, by their paths within
        it), as shards of the checkpoint at `step`.

        Returns after one hard link per file and one journal transaction: from then on the shards survive
        SIGKILL, deletion and rotation of the originals; a moment later (see `MadeDurable`) power loss. They
        must not be overwritten in place: that is found out and the checkpoint is given up.

        A file becomes the shard of its own name; the files of a folder keep their paths within it. Enqueueing
        the same file again changes nothing.

        Ranks of a node may share the uploader's folder, but a folder that is enqueued is taken as it is at that
        moment, with what other ranks have written to it: once more, for nothing, or half-written, which gives the
        checkpoint up. So a rank enqueues its own files, or a folder that only it writes to. Shards of the same name
        must be of the same content on all ranks; else the checkpoint is given up.

        Raises InvalidShardError or InvalidNameError (not a regular file in the folder, an unsafe name),
        SealedError, NoSpaceError, FencedError, and in strict mode UploadFailedError for what failed in the
        background since the last call. Whatever it raises, nothing was enqueued by this call.
        """
        started = time.perf_counter()
        self._check_usable()
        checkpoint = self._checkpoint(step)
        step, full_name = checkpoint.step, naming.checkpoint_name(name, checkpoint.step)
        root = self._folder.relative(path)
        parts = [root]
        if files is not None:
            names = naming.several(files, "files")
            parts = [f"{root}/{naming.check_relative(each, 'file')}" for each in names]
        sources = self._folder.walk(*parts)
        if not sources:
            raise InvalidShardError(f"folder {os.fspath(path)!r} has no files")
        parent = root if sources != [root] else root.rpartition("/")[0]
        named = [(source, source[len(parent) + 1 :] if parent else source) for source in sources]
        if self._there(step) is None:
            self._make_room()
        self._enqueue(checkpoint, full_name, named)
        self.metrics.shards_enqueued(len(named), time.perf_counter() - started)

    def _enqueue(self, checkpoint: CheckpointId, full_name: str, named: Sequence[tuple[str, str]]) -> None:
        """Link and record sources under their shards' names, all or none."""
        step = checkpoint.step
        with self._lock:
            there = self._there(step) or _Open(full_name)
            self._check_takes_shards(there, step, full_name)
            longest = max((name for _, name in named), key=len)
            check_key_length(self.remote, keys.data_key(full_name, self.generation, longest))
            new = self._new(there, step, named) if there.shards else named
            spool = keys.spool_checkpoint(checkpoint, self.rank)
            try:
                linked = self._folder.link(new, spool)
                shards = [
                    Shard(name, source, identity, is_linked)
                    for (source, name), (identity, is_linked) in zip(new, linked, strict=True)
                ]
                if shards:
                    self._journal.append([Enqueued(checkpoint, full_name, shard) for shard in shards])
            except BaseException:
                self._folder.undo_links(spool, [name for _, name in new])
                raise
            there.shards.update((shard.name, shard) for shard in shards)
            self._open[step] = there
        self._engine_now().wake()

    def check_takes(self, step: int, name: str | None = None) -> None:
        """Raise what `enqueue` would raise whatever the files, SealedError say: for asking before they are written."""
        self._check_usable()
        step = self._checkpoint(step).step
        there, full_name = self._there(step), naming.checkpoint_name(name, step)
        if there is not None:
            self._check_takes_shards(there, step, full_name)

    def open(self, step: int, name: str, *, checkpoint_name: str | None = None) -> ShardWriter:
        """A new file `<folder>/<checkpoint>/<name>` to write a shard to, binary and seekable. What is written is sent
        while more is being written; `close` (or the end of its `with`) enqueues it as `enqueue` would, and most of it
        has arrived by then. Where the store takes no parts (`file://`), or the shard is small, it is sent afterwards.

        Nothing is promised before `close`: after a crash the file is an ordinary one that nobody enqueued. A file left
        by an exception is removed. `seal` refuses while one is open.

        Raises what `enqueue` raises; InvalidShardError if there is such a file or shard already.
        """
        self._check_usable()
        checkpoint = self._checkpoint(step)
        step, full_name = checkpoint.step, naming.checkpoint_name(checkpoint_name, checkpoint.step)
        naming.check_relative(name, "shard")
        check_key_length(self.remote, keys.data_key(full_name, self.generation, name))
        source = f"{full_name}/{name}"
        if self._there(step) is None:
            self._make_room()
        with self._lock:
            there = self._there(step) or _Open(full_name)
            self._check_takes_shards(there, step, full_name)
            if name in there.shards or name in there.growing:
                raise InvalidShardError(f"shard {name!r} of step {step} was enqueued or opened before")
            writer = ShardWriter(
                self.folder / source,
                enqueue=lambda: self._written(there, checkpoint, source, name),
                drop=lambda: self._not_written(there, checkpoint, name),
            )
            there.growing.add(name)
            self._open[step] = there
            self._journal.append([Growing(checkpoint, full_name, name, source)])
        self._engine_now().wake()
        return writer

    def _written(self, there: _Open, checkpoint: CheckpointId, source: str, name: str) -> None:
        started = time.perf_counter()
        self._check_usable()
        self._enqueue(checkpoint, there.name, [(source, name)])
        with self._lock:
            there.growing.discard(name)
        self.metrics.shards_enqueued(1, time.perf_counter() - started)

    def _not_written(self, there: _Open, checkpoint: CheckpointId, name: str) -> None:
        with self._lock:
            there.growing.discard(name)
        if os.getpid() == self.pid and not self._is_closed:
            self._journal.append([Growing(checkpoint, there.name, name, None)])
            self._engine_now().wake()

    def _new(self, there: _Open, step: int, named: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those that were not enqueued before."""
        new = []
        for source, name in named:
            before = there.shards.get(name)
            if before is None:
                new.append((source, name))
            elif before.source != source or not self._folder.is_same(source, before.identity):
                raise InvalidShardError(
                    f"shard {name!r} of step {step} was enqueued before, from other content"
                )
        return new

    def _make_room(self) -> None:
        """Apply `on_backlog` and `on_disk_low` before a new checkpoint is begun."""
        settings = self.settings
        if not (settings.max_backlog_checkpoints or settings.max_backlog_bytes or settings.min_free_bytes):
            return
        started = told_at = time.monotonic()
        has_warned = False
        try:
            while (trouble := self._trouble()) is not None:
                what, reaction = trouble
                if reaction == "supersede" and self._supersede(what):
                    continue
                waited_s = time.monotonic() - started
                if reaction == "raise" or waited_s >= settings.block_timeout_s:
                    raise BacklogError(what, hint="save less often, allow more, or see why uploads are slow")
                if not has_warned:
                    has_warned = True
                    logger.warning("trainer_blocked reason=%s", what)
                with self._changed:
                    self._changed.wait(min(BLOCK_POLL_S, settings.block_timeout_s - waited_s))
                now = time.monotonic()
                self.metrics.trainer_blocked(now - told_at)  # now, for it may take hours
                told_at = now
                self._check_usable()
        finally:
            self.metrics.trainer_blocked(time.monotonic() - told_at)

    def _trouble(self) -> tuple[str, str] | None:
        """Why no new checkpoint should be begun now and what the policy does about it, or None."""
        settings = self.settings
        local = self._engine_now().fresh_local()
        free_bytes, _ = self._folder.space()
        if free_bytes < settings.min_free_bytes:
            reaction = settings.on_disk_low
            if reaction == "supersede" and any(each.superseded for each in local.checkpoints.values()):
                reaction = "block"  # what was given up still takes its space: that is enough, maybe
            return f"{free_bytes} bytes are free, min_free_bytes={settings.min_free_bytes}", reaction
        waiting = decide.backlog(local)
        if 0 < settings.max_backlog_checkpoints <= len(waiting):
            limit = settings.max_backlog_checkpoints
            return f"{len(waiting)} checkpoints wait, max_backlog_checkpoints={limit}", settings.on_backlog
        waiting_bytes = sum(decide.unsent_bytes(each) for each in waiting)
        if 0 < settings.max_backlog_bytes <= waiting_bytes:
            limit = settings.max_backlog_bytes
            return f"{waiting_bytes} bytes wait, max_backlog_bytes={limit}", settings.on_backlog
        return None

    def _supersede(self, what: str) -> bool:
        """Give up the oldest checkpoint of the backlog that retention would not keep; False if there is none."""
        policy = retention.parse(self.settings.remote_retention)
        victims = decide.supersedable(self._engine_now().fresh_local(), policy)
        if not victims:
            return False
        reason = f"superseded by newer checkpoints: {what}"
        logger.warning("checkpoint_superseded %s reason=%s", victims[0], what)
        self._journal.append([Superseded(victims[0], reason)])
        self._engine_now().wake()
        return True

    def seal(self, step: int, *, name: str | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Say that this rank has no more shards for `step`. Returns at once; survives SIGKILL.

        The checkpoint is committed once every rank has sealed it and all shards are verified, by whichever
        rank is last; if no rank has any shard, it is given up. A rank without shards of its own seals too.
        `metrics` (a loss, say) are kept with the commit for retention by value; what is not finite is left out.
        """
        self._check_usable()
        checkpoint = self._checkpoint(step)
        step, values = checkpoint.step, _numbers(metrics or {}, checkpoint.step)
        with self._lock:
            there = self._there(step)
            if there is None:
                there = _Open(naming.checkpoint_name(name, step))
            if there.is_sealed:
                raise SealedError(f"step {step} was sealed before in generation {self.generation}")
            if there.growing:
                raise SealedError(
                    f"step {step} has shards that are still being written: {', '.join(sorted(there.growing))}",
                    hint="close them first",
                )
            self._journal.append([Sealed(checkpoint, there.name, self.world_size, values)])
            bisect.insort(self._sealed, step)
            self._open.pop(step, None)
        self._engine_now().wake()

    def wait(self, step: int, timeout_s: float | None = None) -> None:
        """Block until the checkpoint at `step` is committed, of all ranks. What has failed is tried again, for as long
        as `timeout_s` says; without one, once.

        Raises CheckpointAbortedError, UploadFailedError, CommitTimeoutError (it names the ranks whose part
        is missing); FencedError if it waits for ranks and a newer start has superseded this one; SealedError if this
        rank has not sealed it, because then it never would be.
        """
        self._check_process()
        checkpoint = self._checkpoint(step)
        step = checkpoint.step
        there = self._there(step)
        if there is None or not there.is_sealed:
            raise SealedError(f"step {step} was not sealed by this rank: call seal(step={step}) before wait")
        deadline = None if timeout_s is None else _deadline(timeout_s)
        self._retry_failed(checkpoint)
        with self._hurried(), self._changed:
            while not self._is_committed(checkpoint):
                left_s = None if deadline is None else deadline - time.monotonic()
                is_over = left_s is not None and left_s <= 0
                self._raise_shard_failure(checkpoint, is_final=deadline is None or is_over)
                if is_over:
                    raise CommitTimeoutError(self._describe_unfinished(checkpoint, timeout_s))
                if self._engine_now().missing_ranks(checkpoint):  # they may be in the newer start
                    self._check_not_fenced()
                self._changed.wait(left_s)

    def wait_for_predecessor(self, timeout_s: float) -> bool:
        """Block until what an earlier start of the run had sealed on this rank is decided, at most `timeout_s`; True
        if it is. Call it before choosing what to resume from: the newest checkpoint is often the one that was still
        uploading when the trainer was killed.
        """
        self._check_process()

        def is_busy(engine: EngineView) -> bool:
            local = engine.fresh_local()
            return any(each.id.generation < self.generation for each in decide.undecided(local))

        with self._hurried():
            self._wait_while(is_busy, _deadline(timeout_s))
        return not is_busy(self._engine_now())

    def raise_failures(self) -> None:
        """In strict mode raise UploadFailedError for what finally failed since the last call; else nothing.

        `enqueue`, `seal` and `close` call it. A failure that healed is never raised, only counted; nor is a checkpoint
        that was given up, once `wait` has said so.
        """
        self._check_alive()
        if (error := self._take_failures()) is not None:
            raise error

    def _take_failures(self) -> UploadFailedError | None:
        engine = self._engine_now()
        if not engine.failures or self.settings.on_error != "raise":
            return None
        found: list[Failure] = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(engine.failures.popleft())
        return to_raise(found, engine.fresh_local(), self._told)

    def flush(self, timeout_s: float) -> FlushReport:
        """Get as much as possible into the store within `timeout_s`, the newest complete checkpoint first; then say
        what is left. For the last seconds before a node goes away.

        Nothing is lost by what is left: the next process on this node, `ckpt-async drain` or the sweeper finish it.
        The uploader stays open. While it is being closed, `close` returns no sooner than this.
        """
        self._check_process(may_be_closing=True)
        before = self.metrics.num_committed
        with self._newest_first():
            self._drain(_deadline(timeout_s), grace_s=timeout_s)
            return self._report(before)

    def _report(self, committed_before: int) -> FlushReport:
        left = [
            each for each in self._engine_now().fresh_local().checkpoints.values() if each.decision is None
        ]
        shards = [shard for each in left for shard in each.shards.values() if shard.stored is None]
        return FlushReport(
            is_done=not left,
            num_committed=self.metrics.num_committed - committed_before,
            num_shards_left=len(shards),
            size_bytes_left=sum(each.shard.size_bytes for each in shards),
            steps_left=tuple(sorted(each.id.step for each in left)),
        )

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was sealed, stop the engine, release the folder. Idempotent.

        Waits until this rank's part is in the store (at most `timeout_s`, default `upload_timeout_s`), trying again
        what had failed, and then up to `close_grace_s` for the other ranks, so that latest and local retention are
        done too. What is left when it returns is in the journal: the next start, `ckpt-async drain` or the sweeper
        finish it.

        In strict mode raises what failed. So does a start that committed nothing of what it sealed and, when the
        others had their time, never can: FencedError if a newer one has begun, UploadFailedError if ranks never opened
        it. It is logged in either mode; where others are only late there is a warning.
        """
        if os.getpid() != self.pid or self._is_closed:
            return
        deadline = _deadline(self.settings.upload_timeout_s if timeout_s is None else timeout_s)
        self._is_closed = True
        at_exit.discard(self)
        self._runner.expect_end()
        never: CkptAsyncError | None = None
        try:
            if self._runner.is_alive:
                self._drain(deadline, grace_s=self.settings.close_grace_s)
                self._log_what_is_left()
                never = self._why_in_vain(deadline)
        finally:
            if self._undo_sigterm is not None:
                self._undo_sigterm()
            self._end_of_flushes()
            self._runner.end()
            try:
                failed = self._take_failures()
            finally:
                self._journal.close()
                self._rank_lock.release()
                if self._metrics_server is not None:
                    self._metrics_server.close()
        self._check_alive()
        if failed is not None:
            raise failed
        if never is not None and self.settings.on_error == "raise":
            raise never

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(timeout_s=CLOSE_AFTER_ERROR_S)
        except CkptAsyncError:
            logger.exception("close_failed; the exception of the training loop is raised")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Uploader belongs to one process and cannot be pickled; open one where it is needed"
        )

    # --- checks --------------------------------------------------------------------------------------------

    def _check_process(self, *, may_be_closing: bool = False) -> None:
        if os.getpid() != self.pid:
            raise UploaderClosedError(
                f"this uploader was opened by process {self.pid}; this is a fork of it, process {os.getpid()}",
                hint="call it from the process that opened it",
            )
        if self._has_ended if may_be_closing else self._is_closed:
            raise UploaderClosedError("the uploader is closed")

    def _check_usable(self) -> None:
        self._check_process()
        self.raise_failures()
        self._check_not_fenced()
        self._journal.check_there()

    def _check_not_fenced(self) -> None:
        fenced_by = self._engine_now().fenced_by
        if fenced_by is not None:
            raise FencedError(
                f"generation {fenced_by} of this run has started; this trainer is generation {self.generation}",
                hint="stop this process; what it had sealed is still finished. If you made no later start, other ranks"
                " of this one saw no sign of its first rank's life: start all of them again",
            )

    def _there(self, step: int) -> _Open | None:
        place = bisect.bisect_left(self._sealed, step)
        is_sealed = place < len(self._sealed) and self._sealed[place] == step
        return _SEALED if is_sealed else self._open.get(step)

    def _check_takes_shards(self, there: _Open, step: int, name: str) -> None:
        if there.is_sealed:
            raise SealedError(
                f"step {step} was sealed in generation {self.generation} and takes no more shards"
            )
        if there.name != name:
            raise InvalidNameError(f"step {step} is called {there.name!r} already, not {name!r}")

    def _checkpoint(self, step: int) -> CheckpointId:
        return CheckpointId(self.generation, arguments.whole(step, "step", 0, keys.MAX_STEP))

    def _check_alive(self) -> None:
        death = self._runner.death
        if death is not None:
            raise UploadFailedError(f"the uploader's engine has died: {death!r}") from death

    def _engine_now(self) -> EngineView:
        engine = self._runner.engine
        if engine is None:
            raise UploaderClosedError("the uploader's engine has ended")
        return engine

    # --- waiting -------------------------------------------------------------------------------------------

    def _is_committed(self, id_: CheckpointId) -> bool:
        self._check_alive()
        engine = self._engine_now()
        checkpoint = engine.local.checkpoints.get(id_)
        decision = engine.outcomes.get(id_) or (checkpoint.decision if checkpoint else None)
        if decision is not None:
            if decision.outcome is Outcome.ABORT:
                self._told.add(id_)
                raise CheckpointAbortedError(f"{id_} was given up: {decision.reason}")
            return True
        return False

    def _raise_shard_failure(self, id_: CheckpointId, *, is_final: bool) -> None:
        """Raise what failed, unless the store may still heal and there is time left."""
        checkpoint = self._engine_now().local.checkpoints.get(id_)
        if checkpoint is None or checkpoint.loss is not None:  # a loss becomes an abort
            return
        for each in checkpoint.shards.values():
            if each.failure is not None and (is_final or not each.failure.reason.is_retryable):
                raise UploadFailedError(f"{id_}, shard {each.shard.name!r}: {each.failure.message}")

    def _retry_failed(self, *only: CheckpointId) -> None:
        """Have what failed, of these or of all checkpoints, tried again; `hurry` says when: now."""
        local = self._engine_now().fresh_local()
        failed = [id_ for id_, each in local.checkpoints.items() if each.may_be_retried]
        if events := [Retried(id_) for id_ in failed if id_ in only or not only]:
            self._journal.append(events)

    def _describe_unfinished(self, id_: CheckpointId, timeout_s: float | None) -> str:
        engine = self._engine_now()
        checkpoint = engine.local.checkpoints.get(id_)
        message = f"{id_} was not committed within {timeout_s} s"
        if checkpoint is not None and not checkpoint.is_verified:
            done = sum(each.stored is not None for each in checkpoint.shards.values())
            return f"{message}: {done} of {len(checkpoint.shards)} shards of this rank are uploaded"
        missing = engine.missing_ranks(id_)
        return f"{message}: nothing was seen yet of rank {few(missing)}" if missing else message

    @contextlib.contextmanager
    def _hurried(self) -> Any:
        with self._lock:
            self._num_waiting += 1
            self._engine_now().hurry(True)
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._engine_now().hurry(False)

    @contextlib.contextmanager
    def _newest_first(self) -> Any:
        with self._lock:
            if self._has_ended:
                raise UploaderClosedError("the uploader is closed")
            self._num_flushing += 1
            self._engine_now().put_newest_first(True)
        try:
            yield
        finally:
            with self._lock:
                self._num_flushing -= 1
                if not self._num_flushing:
                    self._engine_now().put_newest_first(False)  # or, from now on, older ones might starve
            self._notify()

    def _end_of_flushes(self) -> None:
        """Wait for those under way, as of a signal that came while we closed; then there are no more."""
        while not self._has_ended:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_flushing)
            with self._lock:
                self._has_ended = not self._num_flushing

    def _drain(self, deadline: float, *, grace_s: float) -> None:
        """Wait for our own work, then a while for the others'."""

        def is_busy(engine: EngineView) -> bool:
            if engine.last_seen_wake >= asked:
                return engine.num_due > 0
            engine.wake()  # the one before may have been lost with an engine that died
            return True

        self._retry_failed()
        with self._hurried():
            asked = self._engine_now().wake()
            self._wait_while(is_busy, deadline)
            self._wait_while(
                lambda engine: decide.waits_for_others(engine.local),
                min(deadline, time.monotonic() + grace_s),
            )
            self._wait_while(lambda engine: engine.num_due > 0, deadline)

    def _log_what_is_left(self) -> None:
        report = self._report(0)
        unsealed = sorted(
            each.id.step
            for each in self._engine_now().fresh_local().checkpoints.values()
            if each.decision is None and each.sealed is None
        )
        if unsealed:
            logger.warning(
                "closed_without_seal steps=%s: what is not sealed is never committed; call seal(step) after the last"
                " enqueue of a step, on every rank",
                unsealed,
            )
        if set(report.steps_left) - set(unsealed):
            logger.warning(
                "closed_with_unfinished steps=%s shards_to_upload=%d bytes_to_upload=%d;"
                " the next start, `ckpt-async drain` or the sweeper finish what was sealed",
                list(report.steps_left),
                report.num_shards_left,
                report.size_bytes_left,
            )

    def _why_in_vain(self, deadline: float) -> CkptAsyncError | None:
        """Why nothing that this start has sealed will be committed; None if it may be, or there is no time to tell."""
        steps = in_vain(self._engine_now().fresh_local())
        if not steps or time.monotonic() >= deadline:
            return None
        with self._hurried():
            self._engine_now().look_for_members()
            self._wait_while(
                lambda engine: engine.absent_ranks is None,
                min(deadline, time.monotonic() + MEMBERS_TIMEOUT_S),
            )
        engine = self._engine_now()
        error = why_in_vain(engine.fresh_local(), steps, engine.fenced_by, engine.absent_ranks or ())
        if error is not None:
            logger.error("closed_in_vain error=%s", error)
        return error

    def _wait_while(self, is_busy: Callable[[EngineView], bool], deadline: float) -> None:
        with self._changed:
            while self._runner.death is None and is_busy(self._engine_now()):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _deadline(timeout_s: float) -> float:
    """When `timeout_s`, from now on, are over; at once if they are negative. What is not a number would never be over,
    and no lock waits for ever with a number that says so.
    """
    return time.monotonic() + min(arguments.seconds(timeout_s, "timeout_s"), threading.TIMEOUT_MAX / 2)


def load_settings(
    arguments: Mapping[str, Any], environment: Mapping[str, str], path: str | os.PathLike[str] | None = None
) -> Settings:
    """Settings as an uploader with these arguments has them: then come CKPT_ASYNC_* of the environment, then the TOML
    file `path` (default: CKPT_ASYNC_SETTINGS_FILE). Raises SettingsError naming the setting and what it may be.
    """
    if path is None:
        path = environment.get("CKPT_ASYNC_SETTINGS_FILE")
    if path is None:
        return load(arguments, environment)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"settings file {os.fspath(path)!r} cannot be read: {why}") from error
    return load(arguments, environment, text)


def _numbers(metrics: Mapping[str, float], step: int) -> tuple[tuple[str, float], ...]:
    """Python's numbers, or what becomes one (of numpy, a tensor), by name. What is not finite is left out: that a loss
    is nan must not end the training.
    """
    found = {}
    for key, value in metrics.items():
        try:
            number = value if type(value) in (int, float) else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if type(key) is not str or number is None or isinstance(value, str | bytes | bool):
            raise InvalidNameError(f"metrics: {key!r}: {value!r} is not a name with a number")
        if math.isfinite(number):
            found[key] = number
        else:
            logger.warning("metric_left_out step=%d metric=%s value=%r", step, key, number)
    return tuple(sorted(found.items()))


def _launch_key(environment: Mapping[str, str], world_size: int, generation: int | None) -> str:
    key = launch.launch_key(environment, parent=_parent_identity())
    if key is not None:
        return key
    if world_size == 1 or generation is not None:
        return f"single={os.urandom(16).hex()}"
    raise SettingsError(
        "the launcher does not say which start of the run this is, so ranks of two starts could be taken for one",
        hint="set CKPT_ASYNC_LAUNCH_ID to a value that is equal on all ranks and new at every start,"
        " or pass generation=",
    )


def _parent_identity() -> str:
    """The launching process: its pid alone would be reused."""
    started = ""
    with contextlib.suppress(OSError, IndexError):
        # proc(5): field 22 of stat is the start time; the name in field 2 may hold spaces and parentheses
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot_id()}:{os.getppid()}:{started}"
