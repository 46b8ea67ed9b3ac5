"""The trainer's side: `Uploader`. Its calls link, append and return; an engine on a background thread, or in a
process of its own, does the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, Self, Unpack

from ckpt_async.core import arguments, keys, naming
from ckpt_async.core.model import CheckpointId, Enqueued, Failed, Growing, Sealed, Shard
from ckpt_async.core.settings_options import SettingsOptions
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    InvalidShardError,
    NoSpaceError,
    SealedError,
    UploaderClosedError,
)
from ckpt_async.events import Event
from ckpt_async.local.folder import Folder
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.stores import StoreOptions, check_key_length
from ckpt_async.threads import promptly
from ckpt_async.trainer import at_exit, waits
from ckpt_async.trainer.checkpoints import Checkpoints, OpenCheckpoint, exact_keys, metric_values
from ckpt_async.trainer.events import Events
from ckpt_async.trainer.exporting import Exporter
from ckpt_async.trainer.handle import EngineHandle, deadline_in
from ckpt_async.trainer.preemption import flush_on_sigterm
from ckpt_async.trainer.shard_writer import ShardWriter
from ckpt_async.trainer.start import start_of
from ckpt_async.trainer.waits import (
    FlushReport,
    is_committed,
    make_room,
    wait_for_commit,
    wait_for_predecessor,
)

logger = logging.getLogger(__name__)

# Time for `close` after an exception in the training loop: long enough for receipts, too short to hide the
# traceback.
CLOSE_AFTER_ERROR_S = 10.0


class Uploader:
    """Uploads the checkpoints of one rank in the background.

    `enqueue`, `seal`, `wait`, `raise_failures` and `close` may be called from any thread of the process that opened
    it. `enqueue` and `seal` cost a hard link and a journal row and never touch the network.

    Args:
        folder: Where the trainer writes its checkpoints, on a local disk. `.ckpt-async/` is created in it.
        remote: `s3://bucket/prefix/run` or `file:///path/run`. One run, one remote.
        kind: For several kinds of checkpoints in one run, e.g. `kind="weights"`. Each kind has its own Uploader, on the
            same folder and remote, with its own checkpoints, `latest` and retention, at `<remote>/kinds/<kind>`. All of
            them share the limits of requests, bytes and bandwidth, which are those of the one opened first. None: the
            run itself.
        rank, world_size: Default: RANK and WORLD_SIZE of the launcher; 0 and 1 if nothing hints at other processes.
            Giving only one of the two is rejected.
        generation: A number that all ranks of this launch share, larger than any before. Default: agreed through the
            store from what the launcher provides (torchrun, Slurm, or CKPT_ASYNC_LAUNCH_ID).
        launch_id: A value that all ranks of this launch share and no other launch has, if the launcher does not provide
            one: for example a random string that one rank broadcast.
        store_options: Endpoint, region, SSE, storage class, tags, …
        settings_file: TOML file with settings; keyword arguments and CKPT_ASYNC_* take precedence over it.
        on_event: Called on rank 0 with a `ckpt_async.Event` when a checkpoint was committed, given up or removed here,
            when this launch was fenced, or when uploads fall behind; also with events of earlier launches that
            nobody was told of. Calls come one after the other, on a separate thread: while one blocks, only
            later events wait. Exceptions are logged. Each event is delivered at least once: one delivered just before a
            kill is delivered again, with the same `id`.
        settings: Any field of `ckpt_async.Settings`, e.g. `num_checkpoints_to_keep=3`.

    Opening blocks until the store was reached and the generation agreed. It raises at once, with nothing changed,
    if a setting, the folder, the credentials or the bucket are wrong. A store that does not respond may be
    restarting: it is retried for a minute, and the log says so at once.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        remote: str,
        *,
        kind: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        generation: int | None = None,
        launch_id: str | None = None,
        store_options: StoreOptions | None = None,
        settings_file: str | os.PathLike[str] | None = None,
        on_event: Callable[[Event], object] | None = None,
        **settings: Unpack[SettingsOptions],
    ) -> None:
        # On this node's clock, which is also that of the folder's local file system.
        self._opened_at = time.time()
        start = start_of(
            folder,
            remote,
            kind=kind,
            rank=rank,
            world_size=world_size,
            generation=generation,
            launch_id=launch_id,
            store_options=store_options,
            settings_file=settings_file,
            settings=settings,
            on_event=on_event,
        )
        self.rank, self.world_size, self.settings = start.rank, start.world_size, start.settings
        self.remote, self.kind = start.address.url, start.kind
        at_exit.refuse_second(start)
        is_trusted = self.settings.allow_unknown_filesystem
        self._folder = Folder(folder, kind=self.kind, allows_unknown_filesystem=is_trusted)
        self.folder = self._folder.path
        self.checkpoints_folder = self.folder / self.kind  # the folder of files written through `open`
        self.pid = os.getpid()
        self._lock, self._checkpoints = threading.Lock(), Checkpoints()
        self._is_closed = self._is_half_closed = False
        self.metrics = Metrics(self.remote, self._folder)
        # Called on a separate thread when SIGTERM has arrived, before the flush, with the seconds that are left.
        self.before_sigterm_flush: Callable[[float], None] = lambda _: None
        # Called before this uploader is closed at exit, if nobody has closed it, with the seconds that are left.
        self.before_exit: Callable[[float], object] = lambda _: None
        self._undo_sigterm: Callable[[], None] = lambda: None
        self._engine = EngineHandle(start, self._folder, self.metrics)
        self.generation = self._engine.generation
        with self._engine.released_on_error() as undo:
            self._events = Events(self._engine, start, on_event)
            undo.callback(self._events.close)
            self.exporter = Exporter(
                self.metrics, self.settings, at_exit.exporters(start), self._engine, self._folder, self.rank
            )
            undo.callback(self.exporter.close)
            if self.settings.sigterm_flush_s:
                self._undo_sigterm = flush_on_sigterm(self._flush_at_the_end, self.settings.sigterm_flush_s)
            at_exit.add(self)

    def __repr__(self) -> str:
        kind = f" kind {self.kind}" if self.kind else ""
        return (
            f"<Uploader of rank {self.rank} of {self.world_size}: {str(self.folder)!r} to {self.remote}{kind},"
            f" generation {self.generation}, {'closed' if self._is_closed else 'open'}>"
        )

    @property
    def metrics_url(self) -> str | None:
        """The URL for Prometheus, or None if this process serves no metrics."""
        return self.exporter.url

    @property
    def page_url(self) -> str | None:
        """The URL of this process's live page, or None if it serves none."""
        return self.exporter.page_url

    # --- the trainer's calls -------------------------------------------------------------------------------

    @promptly()
    def enqueue(
        self,
        path: str | os.PathLike[str],
        step: int,
        name: str | None = None,
        *,
        files: Collection[str] | None = None,
        publish_as: str | None = None,
    ) -> None:
        """Enqueue a finished file, or every regular file of a folder (or only these `files` of it, by their paths
        within it), as shards of the checkpoint at `step`.

        Returns after one hard link per file and one journal transaction. From then on the shards survive SIGKILL,
        and deletion and rotation of the originals; a moment later (see `MadeDurable`) they also survive power loss.
        They must not be overwritten in place: that is detected, and the checkpoint is given up.

        A file becomes a shard with the file's name; the files of a folder keep their paths within it. Enqueueing
        the same file again changes nothing.

        Ranks of a node may share the uploader's folder. But an enqueued folder is taken as it is at that moment,
        including files of other ranks, which may be half-written; the checkpoint would then be given up. So each
        rank should enqueue its own files, or a folder that only it writes to. Shards with the same name must have
        the same content on all ranks; otherwise the checkpoint is given up.

        With `publish_as`, the store copies the file to exactly this key below the remote (the files of a folder to
        their paths below it), for tools that want exact names; this needs `publish_copies=True`. The copy is made
        only after the commit; if several checkpoints use one key, the newest wins; the copy is deleted with its
        checkpoint.

        Raises InvalidShardError or InvalidNameError (not a regular file in the folder, an unsafe name),
        SealedError, NoSpaceError, FencedError, and in strict mode UploadFailedError for failures in the background
        since the last call. Whenever it raises one of these, this call has enqueued nothing. After KeyboardInterrupt
        it has enqueued either all of the files or none; repeating the same call is right in both cases.
        """
        started = time.perf_counter()
        self._check_usable()
        checkpoint = self._checkpoint(step)
        full_name = naming.checkpoint_name(name, checkpoint.step)
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
        published = self._exact_keys(publish_as, [name for _, name in named], is_folder=sources != [root])
        if self._is_skipped(checkpoint, name):
            return
        self._enqueue(checkpoint, full_name, named, published)
        self.metrics.shards_enqueued(len(named), time.perf_counter() - started)

    def check_takes(self, step: int, name: str | None = None) -> None:
        """Raise what `enqueue` would raise for any file, such as SealedError; call it before writing the files."""
        self._check_usable()
        checkpoint = self._checkpoint(step)
        if not self._checkpoints.is_skipped(checkpoint.step):
            self._checkpoints.open_or_new(checkpoint, naming.checkpoint_name(name, checkpoint.step))

    def skips(self, step: int, name: str | None = None) -> bool:
        """Return whether this checkpoint is left out because the disk is nearly full (`on_disk_low="supersede"`), so
        that its files need not be written. Then it is given up for all ranks, and `enqueue` and `seal` do nothing.
        """
        self._check_usable()
        return self._is_skipped(self._checkpoint(step), name)

    def open(
        self, step: int, shard: str, *, name: str | None = None, publish_as: str | None = None
    ) -> ShardWriter:
        """Open a new file `<folder>/[<kind>/]<name>/<shard>` to write a shard to, binary and seekable. Its data is
        uploaded while more is being written. `close` (or the end of its `with`) enqueues it as `enqueue` would, and
        most of it has been sent by then. If the store has no multipart uploads (`file://`), or the shard is small, it
        is sent afterwards. `name` is the checkpoint's, as in `enqueue`.

        Nothing is promised before `close`: after a crash the file is an ordinary one that nobody enqueued. A later
        launch that comes to the same step replaces it (where the folder's file system has hard links). An exception
        in the `with` removes the file. `seal` is rejected while a file is open. `publish_as`: see `enqueue`.

        Raises what `enqueue` raises; InvalidShardError if such a file or shard already exists in this launch.
        """
        self._check_usable()
        id_ = self._checkpoint(step)
        full_name = naming.checkpoint_name(name, id_.step)
        naming.check_relative(shard, "shard")
        check_key_length(self.remote, keys.data_key(full_name, self.generation, shard))
        published = self._exact_keys(publish_as, [shard])
        source = "/".join(filter(None, (self.kind, full_name, shard)))  # two kinds may use the same names
        if self._is_skipped(id_, name):
            raise NoSpaceError(f"step {id_.step} is skipped: there is too little space on the disk")
        with self._lock:
            checkpoint = self._checkpoints.open_or_new(id_, full_name)
            if shard in checkpoint.shards or shard in checkpoint.growing:
                raise InvalidShardError(f"shard {shard!r} of step {id_.step} was already enqueued or opened")
            writer = ShardWriter(
                self.folder / source,
                enqueue=lambda: self._written(checkpoint, source, shard, published),
                drop=lambda: self._not_written(checkpoint, shard),
                drop_later=lambda: self._checkpoints.dropped.append((checkpoint, shard)),
                # Without hard links, what an earlier launch enqueued may still have to be read from its file.
                replaces_before=self._opened_at if self._folder.can_link else 0.0,
            )
            checkpoint.growing.add(shard)
            self._checkpoints.keep(checkpoint)
            self._engine.record(Growing(id_, full_name, shard, source))
        return writer

    @promptly()
    def seal(
        self,
        step: int,
        *,
        name: str | None = None,
        metrics: Mapping[str, float] | None = None,
        expected: Collection[str] = (),
    ) -> None:
        """Declare that this rank has no more shards for `step`. Returns at once; survives SIGKILL.

        The last rank to finish commits the checkpoint, once every rank has sealed it and all shards are verified.
        If no rank has any shard, the checkpoint is given up. A rank without shards must seal too. `metrics` (a
        loss, for example) are stored with the commit, for retention by value; values that are not finite are left
        out.

        `expected` names shards, of any rank: if no rank has one of them, the checkpoint is given up. It is for a
        rank that knows what the whole checkpoint consists of, but not which rank has which shard.
        """
        self._check_usable()
        id_ = self._checkpoint(step)
        kept = metric_values(metrics or {}, id_.step)
        wanted = naming.several(expected, "expected")
        whole = tuple(sorted(naming.check_relative(each, "expected shard") for each in wanted))
        if self._checkpoints.is_skipped(id_.step):
            return
        with self._lock:
            checkpoint = self._checkpoints.to_seal(id_, name)
            self._engine.journal.append([Sealed(id_, checkpoint.name, self.world_size, kept, expected=whole)])
            self._checkpoints.seal(id_.step)
        self._engine.view().wake()

    def give_up(self, step: int, reason: str, *, name: str | None = None) -> None:
        """Declare that this rank will never have its part of the checkpoint at `step`. Returns at once.

        The checkpoint is aborted, and the other ranks learn the reason instead of waiting for it (in a store without
        conditional writes only if this is rank 0). What was enqueued of it is released, also on a full disk.

        Raises SealedError if this rank has sealed it; NoSpaceError if the disk cannot take even this record: then
        call it again once there is space.
        """
        self._check_process()
        id_ = self._checkpoint(step)
        with self._lock:
            checkpoint = self._checkpoints.to_seal(id_, name)
            self._engine.told.add(id_)
            lost = Failed(id_, "", FailureReason.SOURCE_MISSING, reason)
            sealed = Sealed(id_, checkpoint.name, self.world_size, ())
            try:
                self._engine.journal.append([sealed, lost])
            except NoSpaceError:
                if not self._folder.reserve.release():
                    raise
                self._engine.journal.append([sealed, lost])
            self._checkpoints.seal(id_.step)
        self._engine.view().wake()

    def wait(self, step: int, timeout_s: float | None = None) -> None:
        """Block until the checkpoint at `step` is committed, with all ranks. Failed uploads are retried for
        `timeout_s`; without a timeout, once.

        Raises CheckpointAbortedError, UploadFailedError, CommitTimeoutError (which names the ranks whose part is
        missing); FencedError if it waits for ranks and a newer launch has superseded this one; SealedError if this
        rank has not sealed the checkpoint, because then it could never be committed.
        """
        self._check_process()
        id_ = self._checkpoint(step)
        if not self._checkpoints.is_sealed(id_.step):
            raise SealedError(
                f"step {id_.step} was not sealed by this rank: call seal(step={id_.step}) before wait"
            )
        wait_for_commit(self._engine, id_, timeout_s)

    def is_committed(self, step: int) -> bool:
        """Return whether the checkpoint at `step` of this launch is known to be committed, with all ranks. Returns
        at once, also when closed.

        Raises CheckpointAbortedError if it was given up.
        """
        return is_committed(self._engine, self._checkpoint(step))

    def missing_ranks(self, step: int) -> list[int]:
        """Return the ranks that, as far as is known, have not delivered their part of a checkpoint that this rank
        has sealed: those that `wait` would wait for. Returns at once.
        """
        return self._engine.view().missing_ranks(self._checkpoint(step))

    def wait_for_predecessor(self, timeout_s: float) -> bool:
        """Block until everything that an earlier launch of the run had sealed on this rank is decided, or older than
        a commit that this rank knows, for at most `timeout_s`. Returns whether it is. Call it before choosing what to
        resume from: the newest checkpoint is often the one that was still uploading when the trainer was killed.
        """
        self._check_process()
        return wait_for_predecessor(self._engine, self.generation, timeout_s)

    def raise_failures(self) -> None:
        """Raise UploadFailedError for final failures since the last call, in strict mode; else do nothing.

        `enqueue`, `seal` and `close` call it. An error that a retry healed is only counted, never raised. A
        checkpoint that was given up is not raised again once `wait` has raised it.
        """
        self._engine.check_alive()
        if (error := self._engine.take_failure()) is not None:
            raise error

    def flush(self, timeout_s: float) -> FlushReport:
        """Upload as much as possible within `timeout_s`, the newest complete checkpoint first, and report what is
        left. For the last seconds before a node goes away.

        Nothing that is left is lost: the next process on this node, `ckpt-async drain` or the sweeper finishes it.
        The uploader stays open. A concurrent `close` does not return before this does.
        """
        self._check_process(may_be_closing=True)
        return waits.flush(self._engine, timeout_s, lambda: self.metrics.num_committed)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was sealed, stop the engine, release the folder. Idempotent.

        Waits until this rank's part is in the store (at most `timeout_s`, default `upload_timeout_s`), retrying
        failed uploads, and then up to `close_grace_s` for the other ranks, so that latest and local retention are
        done too. What is left on return is in the journal: the next launch, `ckpt-async drain` or the sweeper
        finishes it. Ctrl-C ends the waiting, and the uploader is closed all the same.

        In strict mode, raises what failed and, if called without `timeout_s`, UploadFailedError if this rank's part
        is still not in the store, if the store still refuses to commit it, or if Ctrl-C ended an earlier call and
        something is not committed. Also raises if this launch committed nothing of what it sealed and never can,
        after the other ranks had their time: FencedError if a newer launch has begun, UploadFailedError if some
        ranks never opened it. Both modes log this; ranks that are merely late cause a warning.
        """
        if os.getpid() != self.pid or (self._is_closed and not self._is_half_closed):
            self._engine.raise_cut_short(is_late_an_error=timeout_s is None)
            return
        deadline = deadline_in(self.settings.upload_timeout_s if timeout_s is None else timeout_s)
        self._record_dropped()
        try:
            self._is_closed = True
            at_exit.discard(self)
            error = waits.finish(self._engine, deadline, self.settings, is_late_an_error=timeout_s is None)
            if self._engine.runner.is_alive:
                self._events.wait(deadline)
            failed = self._end(deadline)
        except BaseException:
            self._is_half_closed = True  # another Ctrl-C may come: then the next call goes on
            self._end(deadline)
            self._is_half_closed = False
            raise
        self._engine.check_alive()
        if failed is not None:
            raise failed
        if error is not None and self.settings.on_error == "raise":
            raise error

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
            logger.exception("close_failed; raising the exception of the training loop instead")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Uploader belongs to one process and cannot be pickled; open one in the process that needs it"
        )

    # --- within --------------------------------------------------------------------------------------------

    def _end(self, deadline: float) -> CkptAsyncError | None:
        """Stop the engine, and release the folder whatever fails. Idempotent. Returns what has failed."""
        with contextlib.ExitStack() as at_last:
            at_last.callback(self.exporter.close)
            at_last.callback(self._engine.release)
            at_exit.discard(self)
            self._undo_sigterm()
            self._engine.end(deadline)
            self._events.close()
            waits.note_what_is_left(self._engine, is_cut_short=self._is_half_closed)
            return self._engine.take_failure()

    def _flush_at_the_end(self, budget_s: float) -> FlushReport:
        deadline = deadline_in(budget_s)
        self.before_sigterm_flush(budget_s)
        return self.flush(max(0.0, deadline - time.monotonic()))

    def _check_process(self, *, may_be_closing: bool = False) -> None:
        if os.getpid() != self.pid:
            raise UploaderClosedError(
                f"this uploader was opened by process {self.pid}, but this is its fork, process {os.getpid()}",
                hint="call it from the process that opened it",
            )
        if self._engine.has_ended if may_be_closing else self._is_closed:
            raise UploaderClosedError("the uploader is closed")
        self._record_dropped()

    def _check_usable(self) -> None:
        self._check_process()
        self.raise_failures()
        self._engine.check_not_fenced()
        self._engine.journal.check_there()

    def _checkpoint(self, step: int) -> CheckpointId:
        return CheckpointId(self.generation, arguments.whole(step, "step", 0, keys.MAX_STEP))

    def _is_skipped(self, id_: CheckpointId, name: str | None) -> bool:
        """Make room for a new checkpoint, as the settings say. Returns whether it is skipped: then the other ranks
        learn that this rank has no part of it.
        """
        if self._checkpoints.is_skipped(id_.step) or self._checkpoints.is_begun(id_.step):
            return self._checkpoints.is_skipped(id_.step)
        reason = make_room(self.settings, self._folder, self._engine, self.metrics, self._check_usable)
        if reason:
            self.give_up(id_.step, f"the save was skipped: {reason}", name=name)
            with self._lock:
                self._checkpoints.skip(id_.step)
            logger.warning("save_skipped step=%d reason=%s", id_.step, reason)
        return bool(reason)

    def _exact_keys(
        self, publish_as: str | None, names: Sequence[str], *, is_folder: bool = False
    ) -> dict[str, str]:
        if publish_as is None:
            return {}
        may_publish = self.settings.publish_copies
        return exact_keys(publish_as, names, self.remote, is_folder=is_folder, may_publish=may_publish)

    def _enqueue(
        self,
        id_: CheckpointId,
        full_name: str,
        named: Sequence[tuple[str, str]],
        published: Mapping[str, str],
    ) -> None:
        """Link sources and record them under their shards' names, all or none."""
        with self._lock:
            checkpoint = self._checkpoints.open_or_new(id_, full_name)
            checkpoint.check_published(published)
            longest = max((name for _, name in named), key=len)
            check_key_length(self.remote, keys.data_key(full_name, self.generation, longest))
            new = checkpoint.not_yet_in(named, self._folder.is_same)
            spool = keys.spool_checkpoint(id_, self.rank)
            shards: list[Shard] = []
            try:
                linked = self._folder.link(new, spool)
                shards = [
                    Shard(name, source, identity, is_linked, published.get(name, ""))
                    for (source, name), (identity, is_linked) in zip(new, linked, strict=True)
                ]
                if shards:
                    self._engine.journal.append([Enqueued(id_, full_name, shard) for shard in shards])
            except BaseException:
                # Ctrl-C may come when the rows are already there. A journal that cannot say has links without rows at
                # worst, which only hold space.
                with contextlib.suppress(CkptAsyncError):
                    if self._engine.has_recorded(id_, shards):
                        checkpoint.add(shards)
                        self._checkpoints.keep(checkpoint)
                    else:
                        self._folder.undo_links(spool, [name for _, name in new])
                raise
            checkpoint.add(shards)
            self._checkpoints.keep(checkpoint)
        self._engine.view().wake()

    def _written(
        self, checkpoint: OpenCheckpoint, source: str, name: str, published: Mapping[str, str]
    ) -> None:
        started = time.perf_counter()
        self._check_usable()
        self._enqueue(checkpoint.id, checkpoint.name, [(source, name)], published)
        with self._lock:
            checkpoint.growing.discard(name)
        self.metrics.shards_enqueued(1, time.perf_counter() - started)

    def _not_written(self, checkpoint: OpenCheckpoint, name: str) -> None:
        with self._lock:
            checkpoint.growing.discard(name)
        if os.getpid() == self.pid and not self._is_closed:
            self._engine.record(Growing(checkpoint.id, checkpoint.name, name, None))

    def _record_dropped(self) -> None:
        while self._checkpoints.dropped:
            # Another thread was faster; or the disk is full, and the engine finds out that the file is gone.
            with contextlib.suppress(IndexError, CkptAsyncError):
                self._not_written(*self._checkpoints.dropped.popleft())
