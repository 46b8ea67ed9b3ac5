"""The engine: observe, decide, act, record. One per rank; it owns no rule, only how actions are carried out.

State comes from the journal alone (`fold`), so a new engine continues wherever the last one was killed. What
is in flight is memory only. Nothing here blocks the event loop: disk work goes to worker threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never
from urllib.parse import urlsplit

from ckpt_async.core import decide, keys, naming, records, retention
from ckpt_async.core.failures import Failure
from ckpt_async.core.model import (
    CheckpointId,
    Decided,
    Decision,
    Event,
    Failed,
    Forgotten,
    JournalRow,
    Latest,
    Local,
    LocalCheckpoint,
    LocalShard,
    MadeDurable,
    MultipartOpened,
    Opened,
    Outcome,
    Receipt,
    ReceiptStored,
    Released,
    StoredShard,
    Verified,
    fold,
)
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.core.troubles import Troubles
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    InvalidNameError,
    InvalidRecordError,
    JournalError,
    SourceError,
    StoreError,
)
from ckpt_async.local import kept
from ckpt_async.local.folder import Folder, boot_id, fsync_path, is_final, point_symlink, write_durably
from ckpt_async.local.journal import Journal
from ckpt_async.protocol import cas, steps
from ckpt_async.protocol.generation import absent_ranks, newest_generation
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer import ahead
from ckpt_async.transfer import upload as transfer
from ckpt_async.transfer.patient import PatientStore

logger = logging.getLogger(__name__)

# Another process may have appended (DCP's PROCESS mode, a second thread's wake-up lost at shutdown): the
# wake-up is only a hint, this is the safety net.
POLL_S = 1.0
# After an action failed for good (its own retries are over, the trainer was told) it is tried again this much
# later: an outage longer than any timeout must not need a restart to heal.
RETRY_ACTION_S = 30.0
# While someone waits for it, if the store may heal.
RETRY_HURRIED_S = 1.0
# What nobody waits for as for our own work.
_BY_THE_WAY = (decide.SendAhead, decide.LookForSuccessor, decide.LookForMembers)
# Outcomes remembered for `wait` after a checkpoint has left the journal.
MAX_OUTCOMES = 1000


class Engine:
    """Carries one rank's checkpoints from the spool to a decision, and cleans up behind them.

    Lives on one event loop; `wake`, `hurry` and `stop` may be called from any thread. `local` is an
    immutable snapshot that any thread may read. `on_change` is called on the loop after every change.
    """

    def __init__(
        self,
        *,
        rank: int,
        folder: Folder,
        journal: Journal,
        store: PatientStore,
        settings: Settings,
        observer: Observer,
        clock: Callable[[], float],
        is_trainer: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.local = Local(rank)
        self.outcomes: dict[CheckpointId, Decided] = {}
        self.failures: deque[Failure] = deque(maxlen=MAX_OUTCOMES)
        self.fenced_by: int | None = None
        self.absent_ranks: list[int] | None = None
        self.num_due = 0  # actions of our own that are due or under way, not counting looks at the others
        self.num_rounds = 0
        self.last_seen_wake = 0  # `num_due` counts what was in the journal before this call of `wake`
        self._folder, self._journal, self._store = folder, journal, store
        self._settings, self._observer, self._clock, self._on_change = settings, observer, clock, on_change
        self._is_trainer = is_trainer
        self._policy = decide.Policy(
            local_retention=retention.keep_local(settings.num_checkpoints_to_keep, settings.local_retention),
            may_supersede="supersede" in (settings.on_backlog, settings.on_disk_low),
            has_local_latest=bool(settings.latest_filename),
            may_send_ahead=store.capabilities.multipart,
            may_decide=store.capabilities.conditional_put or rank == 0,
            decides_alone=not store.capabilities.conditional_put and rank == 0,
            is_adopted=not is_trainer,
        )
        self._running: dict[decide.Action, asyncio.Task[None]] = {}
        self._not_before: dict[decide.Action, float] = {}  # of those that failed
        self._may_heal: set[decide.Action] = set()  # of these, those that the store refuses for now
        self._is_retry_asked = False
        self._uploads: deque[decide.Upload] = deque()
        self._num_uploading = 0  # tasks; one may be for many shards
        self._alone: set[decide.Upload] = set()  # that could not be sent in a series
        self._sent_bytes: dict[decide.Upload, int] = {}
        self._ahead: dict[tuple[CheckpointId, str], transfer.Resume] = {}  # sent before they were enqueued
        self._is_progress_new = False
        self._housekeep_at = 0.0
        self._troubles = Troubles()
        self._is_hurried = False
        self._is_newest_first = False
        self._first: CheckpointId | None = None  # while newest first: which one it is now
        self._is_stopping = False
        self._wakes, self._last_wake = itertools.count(1), 0
        self._loop = asyncio.get_running_loop()
        self._remote = decide.has_looked_for_successor(self.local, decide.Remote(), self._loop.time())
        self._woken = asyncio.Event()
        self._crash: asyncio.Future[None] = self._loop.create_future()

    def succeed(self, dead: Engine) -> None:
        """Take over what a crashed engine knew that is not in the journal."""
        self.outcomes, self.failures, self.fenced_by = dead.outcomes, dead.failures, dead.fenced_by
        # Whoever waits for rounds to pass and work to be done must not notice the change.
        self.num_due, self.num_rounds = dead.num_due, dead.num_rounds
        self.last_seen_wake, self._last_wake, self._wakes = dead.last_seen_wake, dead._last_wake, dead._wakes
        self._is_hurried, self._is_newest_first = dead._is_hurried, dead._is_newest_first

    # --- from other threads --------------------------------------------------------------------------------

    def fresh_local(self) -> Local:
        """The state with everything that is in the journal by now: one query. Any thread."""
        local = self.local
        return fold(self._journal.rows(after=local.sequence), local)

    def wake(self) -> int:
        """Something was appended to the journal: look now. Any thread. Once `last_seen_wake` has reached the number
        that this returns, `num_due` counts it.
        """
        self._last_wake = number = next(self._wakes)
        with contextlib.suppress(RuntimeError):  # the loop is closing: the journal has it
            self._loop.call_soon_threadsafe(self._woken.set)
        return number

    def hurry(self, is_hurried: bool) -> None:
        """While someone waits, look for the others' receipts at the shortest interval, and try again what failed. Any
        thread.
        """
        self._is_retry_asked |= is_hurried  # not by `change`: a `wake` that follows must not be seen before

        def change() -> None:
            self._is_hurried = is_hurried
            if is_hurried:
                watches = {id_: replace(each, next_look_at=0.0) for id_, each in self._remote.watches.items()}
                self._remote = replace(self._remote, watches=watches)
            self._woken.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(change)

    def look_for_members(self) -> None:
        """Find out who never opened this generation (`absent_ranks`), and whether there is a newer one. Any thread."""

        def change() -> None:
            self._remote = replace(self._remote, are_members_asked_for=True)
            self._woken.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(change)

    def put_newest_first(self, is_newest_first: bool = True) -> None:
        """Upload the newest sealed checkpoint before all others, and stop what is under way of the others: there may
        be little time left. False: oldest first again. Any thread.
        """

        def change() -> None:
            self._is_newest_first, self._first = is_newest_first, None
            if is_newest_first:
                self._uploads.clear()  # or older ones would still be begun before the next round
            self._woken.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(change)

    def stop(self) -> None:
        """Make `run` return soon, cancelling what is in flight: the journal has it. Any thread."""

        def change() -> None:
            self._is_stopping = True
            self._woken.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(change)

    # --- the loop ------------------------------------------------------------------------------------------

    async def recover(self, before: Opened | None) -> None:
        """Rebuild what the journal lost from the spool's manifests (rule R10), clear the spool of what nobody was
        promised, take up what earlier starts had set aside, and give up what a reboot may have taken; `before` is the
        start that the journal knew.

        Once, after the lock was taken and before anything is enqueued.
        """
        await asyncio.to_thread(self._rebuild)
        await asyncio.to_thread(self._take_up_kept)
        if before is not None and before.boot_id not in ("", boot_id()):
            await asyncio.to_thread(self._distrust_after_reboot)

    async def run(self) -> None:
        """Work until `stop`. Raises only on a bug or when the journal cannot be used."""
        try:
            self._refresh()
            self._remote = replace(self._remote, to_publish=self._newest_loadable())
            while not self._is_stopping:
                self._woken.clear()
                last_wake = self._last_wake
                self._refresh()
                pause_s = self._start_due()
                self.last_seen_wake = last_wake
                self._on_change()
                await self._sleep(pause_s)
                if self._crash.done():
                    self._crash.result()
                await self._housekeep()
        finally:
            await self._cancel_all()
            self._tell_of_troubles(is_end=True)
            self._on_change()

    def _start_due(self) -> float:
        """Start what is due and not under way; return how long nothing else can become due."""
        now = self._loop.time()
        wake_at = now + POLL_S
        if self._is_retry_asked:
            self._is_retry_asked = False
            self._not_before.clear()
        uploads: deque[decide.Upload] = deque()
        due: set[decide.Action] = set()
        num_due = 0
        sent_ahead = {
            (each.checkpoint, each.shard) for each in self._running if isinstance(each, decide.SendAhead)
        }
        if not decide.has_open(self.local):
            self._remote = decide.has_looked_for_successor(self.local, self._remote, now)
        for action in decide.decide(self.local, self._remote, self._policy, now):
            if isinstance(action, decide.WaitUntil):
                wake_at = min(wake_at, action.time)
                continue
            due.add(action)
            is_running = action in self._running
            if self._not_before and not is_running and now < (at := self._not_before.get(action, 0.0)):
                wake_at = min(wake_at, at)
                num_due += self._is_hurried and action in self._may_heal
            elif isinstance(action, decide.Upload):
                num_due += 1
                is_sent_ahead = sent_ahead and (action.checkpoint, action.shard) in sent_ahead
                if not is_running and not is_sent_ahead:  # or its parts would be sent twice
                    uploads.append(action)
            else:
                is_by_the_way = isinstance(action, _BY_THE_WAY)
                num_due += not (is_by_the_way or self._is_look_at_others(action))
                if not is_running and not self._is_in_use(action):
                    self._start(action)
        self._not_before = {action: at for action, at in self._not_before.items() if action in due}
        self._may_heal &= self._not_before.keys()
        self._alone &= due
        for action, task in self._running.items():
            if isinstance(action, decide.Upload) and action not in due:
                task.cancel()  # given up meanwhile: its bytes would only have to be deleted again
        if self._is_newest_first:
            uploads = self._newest_first(uploads)
        self._uploads = uploads
        self._start_uploads()
        self.num_due, self.num_rounds = num_due, self.num_rounds + 1
        return max(0.0, wake_at - now)

    def _is_look_at_others(self, action: decide.Action) -> bool:
        """Until the receipts were listed once a look is our own work: shards, or the commit, wait for it."""
        if not isinstance(action, decide.Look):
            return False
        watch = self._remote.watches.get(action.checkpoint)
        return watch is not None and watch.receipts is not None

    def _is_in_use(self, action: decide.Action) -> bool:
        """Whether it must wait for another: a manifest written after the release would stay behind, and of two moves of
        the symlink the older could end last.
        """
        if isinstance(action, decide.MoveLocalLatest):
            return any(isinstance(each, decide.MoveLocalLatest) for each in self._running)
        return isinstance(action, decide.Release) and decide.MakeDurable(action.checkpoint) in self._running

    def _newest_first(self, uploads: deque[decide.Upload]) -> deque[decide.Upload]:
        """Those of the newest complete checkpoint that has shards to send, and of no other: what is under way of others
        is stopped. It stays the one until all is sent: else a trainer that goes on saving would have each stopped by
        the next. When nothing complete is left, all that there is.
        """
        sealed = {id_ for id_, each in self.local.checkpoints.items() if each.sealed is not None}
        running = [action for action in self._running if isinstance(action, decide.Upload)]
        unsent = sealed & {each.checkpoint for each in (*uploads, *running)}
        if self._first not in unsent:
            self._first = max(unsent, default=None)
        if self._first is None:
            return uploads
        for action in running:
            if action.checkpoint != self._first:
                self._running[action].cancel()  # its finished parts are kept
        return deque(each for each in uploads if each.checkpoint == self._first)

    def _start_uploads(self) -> None:
        """Fill the free places. A checkpoint of 10,000 shards is 10,000 actions but few tasks."""
        while self._uploads and self._num_uploading < self._store.concurrency:
            series = self._next_series()
            if len(series) > 1:
                self._start_task(series, self._perform_series(series))
            else:
                self._start(series[0])
            self._num_uploading += 1
        self._store.has_more(bool(self._uploads))

    def _next_series(self) -> tuple[decide.Upload, ...]:
        """The next upload, with those of the same checkpoint behind it if all of them are so small that they are sent
        in one go; but not more than a place's share, for the last ones shall not wait behind each other.
        """
        share = -(-len(self._uploads) // self._store.concurrency)
        series = [self._uploads.popleft()]
        size_bytes = self._small_bytes(series[0])
        while self._uploads and len(series) < min(share, transfer.SERIES_SHARDS):
            size_bytes += self._small_bytes(self._uploads[0])
            if size_bytes > transfer.SERIES_BYTES or self._uploads[0].checkpoint != series[0].checkpoint:
                break
            series.append(self._uploads.popleft())
        return tuple(series)

    def _small_bytes(self, upload: decide.Upload) -> int:
        """The size of a small shard that is to be sent from its beginning; of others, too much for a series."""
        local = self._checkpoint(upload.checkpoint).shards[upload.shard]
        is_new = local.multipart is None and upload.checkpoint.generation == self.local.generation
        is_new = is_new and not (self._ahead and (upload.checkpoint, upload.shard) in self._ahead)
        is_new = is_new and upload not in self._alone
        size_bytes = local.shard.identity.size_bytes
        return size_bytes if is_new and size_bytes <= transfer.SMALL_BYTES else transfer.SERIES_BYTES + 1

    def _start(self, action: decide.Action) -> None:
        self._start_task((action,), self._perform(action))

    def _start_task(self, actions: Sequence[decide.Action], work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=type(actions[0]).__name__)
        self._running |= dict.fromkeys(actions, task)
        task.add_done_callback(lambda task: self._finished(actions, task))

    def _finished(self, actions: Sequence[decide.Action], task: asyncio.Task[None]) -> None:
        for action in actions:
            del self._running[action]
            self._sent_bytes.pop(action, None) if isinstance(action, decide.Upload) else None
        self._num_uploading -= isinstance(actions[0], decide.Upload)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not self._crash.done():
                self._crash.set_exception(error)
            self._woken.set()
            return
        if len(actions) > 1:  # first of all, so that an outage is waited out by few, not found out by all
            self._uploads.extendleft(each for each in reversed(actions) if each in self._alone)
        if isinstance(actions[0], decide.Upload) and self._uploads:
            self._start_uploads()  # without asking `decide` after each of many small shards
            return
        self._woken.set()

    async def _sleep(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._woken.wait()

    async def _cancel_all(self) -> None:
        while self._running:  # one that ends just now may still begin the next
            self._uploads.clear()
            tasks = set(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._crash.done():
            self._crash.exception()  # it was raised, or something worse is being raised

    def _refresh(self) -> None:
        self.local = fold(self._journal.rows(after=self.local.sequence), self.local)

    def _record(self, *events: Event) -> None:
        """Append to the journal; the next round takes note."""
        self._journal.append(events)

    async def _housekeep(self) -> None:
        """Once in a while: what the trainer's own appends must not pay for."""
        if self._loop.time() < self._housekeep_at:
            return
        self._housekeep_at = self._loop.time() + POLL_S
        self._tell_of_troubles()
        try:
            await asyncio.to_thread(self._keep_house)
            if self._is_progress_new:
                self._is_progress_new = False
                self._journal.note_progress(
                    [(each.checkpoint, each.shard, sent) for each, sent in self._sent_bytes.items()]
                )
        except (
            JournalError,
            OSError,
        ) as error:  # a full disk, say: no reason to cut short what is on its way
            logger.debug("housekeeping_skipped error=%s", error)

    def _keep_house(self) -> None:
        self._folder.tend()
        self._journal.compact()

    # --- recovery ------------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Replay the journal, and take from the spool's manifests what it does not know (rule R10)."""
        self._refresh()
        spool = self._folder.private / keys.spool_rank(self.rank)
        spool.mkdir(parents=True, exist_ok=True)
        known = self.local.checkpoints
        for entry in sorted(os.listdir(spool)):
            tag, dot, suffix = entry.partition(".")
            checkpoint = keys.parse_checkpoint_tag(tag)
            if checkpoint is None:
                (spool / entry).unlink(missing_ok=True)  # a tmp file of a write that a crash cut short
            elif dot and suffix == "json":
                self._complete_from(spool / entry, known.get(checkpoint) or LocalCheckpoint(checkpoint, ""))
            elif checkpoint not in known and not (spool / f"{tag}.json").exists():
                # Links that no journal row and no manifest speaks of: the caller of `enqueue` was never
                # told that they are safe, and the user's own files are untouched.
                self._folder.remove_spool(f"{keys.spool_rank(self.rank)}/{entry}")
        self._refresh()

    def _complete_from(self, path: Path, known: LocalCheckpoint) -> None:
        """Append what the manifest knows of the checkpoint and the journal does not: it may have lost its tail only."""
        if known.decision is not None:
            return
        try:
            enqueued, sealed = records.decode_manifest(path.read_bytes(), known.id)
        except InvalidRecordError as error:
            logger.warning("manifest_unreadable path=%s error=%s; its files are left in place", path, error)
            return
        lost: list[Event] = [each for each in enqueued if each.shard.name not in known.shards]
        if sealed is not None and known.sealed is None:
            lost.append(sealed)
        if lost:
            logger.warning("journal_rebuilt rank=%d %s events=%d", self.rank, known.id, len(lost))
            self._journal.append(lost)

    def _take_up_kept(self) -> None:
        """What earlier starts had kept for good, when this one keeps less."""
        kept.drop_gone(self._folder, self.rank)
        if self._policy.local_retention.is_all:
            return
        for id_, events in kept.events(self._folder, self.rank):
            if id_ not in self.local.checkpoints:
                self._journal.append(events)
            kept.drop(self._folder, self.rank, id_)
        self._refresh()

    def _distrust_after_reboot(self) -> None:
        """Power loss may leave a file its size and times but not its bytes. Only what a manifest lists was fsynced:
        the manifest is written after the fsync, and durably.
        """
        for checkpoint in list(self.local.checkpoints.values()):
            doubtful = [
                each for each in checkpoint.shards.values() if not each.is_durable and each.stored is None
            ]
            if checkpoint.decision is not None or not doubtful:
                continue
            path = self._folder.private / keys.spool_manifest(checkpoint.id, self.rank)
            safe: set[str] = set()
            with contextlib.suppress(OSError, InvalidRecordError):
                enqueued, _ = records.decode_manifest(path.read_bytes(), checkpoint.id)
                safe = {event.shard.name for event in enqueued}
            lost = [
                Failed(
                    checkpoint.id,
                    each.shard.name,
                    FailureReason.SOURCE_CHANGED,
                    f"shard {self._users_path(each)!r} was not fsynced yet when the machine went down",
                )
                for each in doubtful
                if each.shard.name not in safe
            ]
            if lost:
                self._fail(checkpoint, lost)
        self._refresh()

    def _newest_loadable(self) -> CheckpointId | None:
        loadable = (id_ for id_, each in self.local.checkpoints.items() if decide.is_loadable(each))
        return max(loadable, default=None)

    # --- actions -------------------------------------------------------------------------------------------

    async def _perform(self, action: decide.Action) -> None:
        """Carry out one action. Trouble of the store or the disk is noted and tried again later; anything
        else is a bug and stops the engine, loudly.
        """
        try:
            match action:
                case decide.MakeDurable():
                    await self._make_durable(action)
                case decide.SendAhead():
                    await self._send_ahead(action)
                case decide.Upload():
                    await self._upload(action)
                case decide.StoreReceipt():
                    await self._store_receipt(action)
                case decide.Look():
                    await self._look(action)
                case decide.LookForSuccessor():
                    await self._look_for_successor()
                case decide.LookForMembers():
                    await self._look_for_members()
                case decide.Commit():
                    await self._commit(action)
                case decide.Abort():
                    await self._abort(self._checkpoint(action.checkpoint), action.reason)
                case decide.MoveLatest():
                    await self._move_latest(action)
                case decide.MoveLocalLatest():
                    await asyncio.to_thread(self._move_local_latest, action)
                    self._remote = replace(self._remote, local_latest=action.checkpoint)
                case decide.Release():
                    await self._release(action)
                case decide.Remove():
                    await self._remove(action)
                case decide.Keep():
                    await asyncio.to_thread(
                        kept.put, self._folder, self.rank, self._checkpoint(action.checkpoint)
                    )
                    await self._forget(action.checkpoint)
                case decide.Forget():
                    await self._forget(action.checkpoint)
                case decide.WaitUntil():
                    pass
                case _:
                    assert_never(action)
        except (StoreError, JournalError, InvalidRecordError, OSError, MemoryError) as error:
            pause_s = self._hold_back(action, error)
            text = f"action={action} retry_in_s={pause_s:.0f} error={str(error) or repr(error)}"
            if self._troubles.is_new(_kind_of_trouble(error), text, self._loop.time()):
                logger.warning("action_failed %s", text)
            if isinstance(action, decide.WaitUntil | decide.LookForSuccessor | decide.LookForMembers):
                return  # no checkpoint's; what is wrong will fail those too
            if isinstance(error, StoreError | InvalidRecordError):
                known = self.local.checkpoints.get(action.checkpoint)
                was_decided = known is not None and known.decision is not None
                self.failures.append(Failure(error, action.checkpoint, was_decided=was_decided))
            else:
                self._observer.attempt_failed(FailureReason.DISK)  # heals when there is space again

    def _hold_back(self, action: decide.Action, error: Exception) -> float:
        """It has failed: for how long it is not tried again."""
        pause_s = RETRY_ACTION_S
        if isinstance(error, StoreError) and error.reason.is_retryable:
            self._may_heal.add(action)
            if self._is_hurried:
                pause_s = min(pause_s, RETRY_HURRIED_S)
        self._not_before[action] = self._loop.time() + pause_s
        return pause_s

    def _tell_of_troubles(self, *, is_end: bool = False) -> None:
        for num, for_s, last in self._troubles.due(self._loop.time(), is_end=is_end):
            logger.warning("action_failed num_more=%d for_s=%.0f last: %s", num, for_s, last)

    def _checkpoint(self, id_: CheckpointId) -> LocalCheckpoint:
        return self.local.checkpoints[id_]

    async def _make_durable(self, action: decide.MakeDurable) -> None:
        checkpoint = self._checkpoint(action.checkpoint)
        volatile = [each for each in checkpoint.shards.values() if not each.is_durable]
        self._journal.check_there()
        try:
            failed = await asyncio.to_thread(self._fsync_shards, checkpoint, volatile)
            if not failed:
                await asyncio.to_thread(self._write_manifest, checkpoint)
                await asyncio.to_thread(self._journal.sync)
        except OSError as error:
            if not is_final(error):
                raise
            message = f"{error.filename!r}: {error.strerror}: what the disk has cannot be trusted"
            failed = [Failed(checkpoint.id, "", FailureReason.DISK, message)]
        if failed:
            self._fail(checkpoint, failed)
            return
        names = tuple(each.shard.name for each in volatile)
        self._record(MadeDurable(checkpoint.id, names, checkpoint.sealed is not None))

    def _fsync_shards(self, checkpoint: LocalCheckpoint, shards: Iterable[LocalShard]) -> list[Failed]:
        failed, top = [], str(self._folder.path)
        folders = {f"{self._folder.private}/{keys.spool_checkpoint(checkpoint.id, self.rank)}"}
        for each in shards:
            path = self._path(checkpoint, each)
            try:
                fsync_path(path)
            except FileNotFoundError:
                message = f"shard {path!r} is gone: it was deleted before it was uploaded"
                failed.append(Failed(checkpoint.id, each.shard.name, FailureReason.SOURCE_MISSING, message))
            except OSError as error:
                if not is_final(error):
                    raise
                message = f"shard {self._users_path(each)!r}: {error.strerror}: it cannot be trusted"
                failed.append(Failed(checkpoint.id, each.shard.name, FailureReason.SOURCE_CHANGED, message))
            folders.add(path.rpartition("/")[0])
            folders.add(f"{top}/{each.shard.source}".rpartition("/")[0])
        for folder in folders.copy():
            above = folder
            while len(above) > len(top) and (above := above.rpartition("/")[0]) not in folders:
                folders.add(above)
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                fsync_path(folder)
        return failed

    def _write_manifest(self, checkpoint: LocalCheckpoint) -> None:
        if checkpoint.shards or checkpoint.sealed:
            path = self._folder.private / keys.spool_manifest(checkpoint.id, self.rank)
            write_durably(path, records.manifest_of(checkpoint))

    def _spool_path(self, checkpoint: LocalCheckpoint, shard: LocalShard) -> str | None:
        if not shard.shard.is_linked:
            return None
        return f"{keys.spool_checkpoint(checkpoint.id, self.rank)}/{shard.shard.name}"

    def _path(self, checkpoint: LocalCheckpoint, shard: LocalShard) -> str:
        spool = self._spool_path(checkpoint, shard)
        return f"{self._folder.private}/{spool}" if spool else f"{self._folder.path}/{shard.shard.source}"

    def _users_path(self, shard: LocalShard) -> str:
        """For messages."""
        return f"{self._folder.path}/{shard.shard.source}"

    async def _perform_series(self, actions: Sequence[decide.Upload]) -> None:
        """Upload small shards together; what cannot be sent so is uploaded by itself next."""
        left: Sequence[decide.Upload] = actions
        with contextlib.suppress(JournalError):  # what was not recorded is sent again, and says what is wrong
            left = await self._upload_series(actions)
        self._alone.update(left)

    async def _upload_series(self, actions: Sequence[decide.Upload]) -> Sequence[decide.Upload]:
        """Those that were not sent."""
        started = self._loop.time()
        shards = [self._small_shard(action) for action in actions]
        self._observer.uploads_started(len(actions))
        try:
            checksums = await transfer.upload_many(self._store, shards)
        finally:
            self._observer.uploads_ended(len(actions))
        sent = {
            action: StoredShard(action.shard, shard.key, shard.size_bytes, checksum)
            for action, shard, checksum in zip(actions, shards, checksums, strict=True)
            if checksum is not None
        }
        self._record(*(Verified(action.checkpoint, stored) for action, stored in sent.items()))
        self._observer.bytes_uploaded(sum(stored.size_bytes for stored in sent.values()))
        self._observer.shards_finished("ok", len(sent), self._loop.time() - started)
        return [action for action in actions if action not in sent]

    def _small_shard(self, action: decide.Upload) -> transfer.SmallShard:
        checkpoint = self._checkpoint(action.checkpoint)
        local = checkpoint.shards[action.shard]
        key = keys.data_key(checkpoint.name, checkpoint.id.generation, action.shard)
        size_bytes = local.shard.identity.size_bytes
        return transfer.SmallShard(key, size_bytes, functools.partial(self._open, checkpoint, local))

    async def _upload(self, action: decide.Upload) -> None:
        checkpoint = self._checkpoint(action.checkpoint)
        local = checkpoint.shards[action.shard]
        shard, started = local.shard, self._loop.time()
        key = keys.data_key(checkpoint.name, checkpoint.id.generation, shard.name)
        begun = local.multipart
        resume = transfer.Resume(begun.upload_id, begun.part_size_bytes) if begun else None
        if resume is None and (resume := self._ahead.pop((checkpoint.id, shard.name), None)) is not None:
            self._journal.append(
                [MultipartOpened(checkpoint.id, shard.name, resume.upload_id, resume.part_size_bytes)]
            )

        def opened(multipart: transfer.Resume) -> None:
            event = MultipartOpened(checkpoint.id, shard.name, multipart.upload_id, multipart.part_size_bytes)
            self._journal.append([event])

        def sent(size_bytes: int) -> None:
            self._sent_bytes[action] = self._sent_bytes.get(action, 0) + size_bytes
            self._is_progress_new = True
            self._observer.bytes_uploaded(size_bytes)

        self._observer.uploads_started(1)
        try:
            # Microseconds on a local disk; in a thread, a cancellation would leave the descriptor open.
            source = self._open(checkpoint, local)
            try:
                size_bytes, checksum = await transfer.upload(
                    self._store,
                    source,
                    key,
                    smallest_part_bytes=self._settings.part_size_bytes,
                    resume=resume,
                    may_be_there=checkpoint.id.generation < self.local.generation,
                    opened=opened,
                    sent=sent,
                )
            finally:
                source.close()
        except (SourceError, StoreError) as error:
            self._hold_back(action, error)
            self._fail(checkpoint, [Failed(checkpoint.id, shard.name, error.reason, str(error))])
            return
        finally:
            self._observer.uploads_ended(1)
        self._record(Verified(checkpoint.id, StoredShard(shard.name, key, size_bytes, checksum)))
        self._observer.shards_finished("ok", 1, self._loop.time() - started)
        logger.debug("shard_verified key=%s size_bytes=%d", key, size_bytes)

    async def _send_ahead(self, action: decide.SendAhead) -> None:
        checkpoint = self._checkpoint(action.checkpoint)
        key = keys.data_key(checkpoint.name, checkpoint.id.generation, action.shard)

        def is_growing() -> bool:
            now = self.local.checkpoints.get(action.checkpoint)
            if now is None or now.superseded or now.decision is not None or self._is_stopping:
                return False
            return action.shard in now.growing

        resume = await ahead.send_ahead(
            self._store,
            self._folder.path / checkpoint.growing[action.shard],
            key,
            smallest_part_bytes=self._settings.part_size_bytes,
            is_growing=is_growing,
        )
        if resume is None:
            return
        if action.shard in self._checkpoint(action.checkpoint).shards:
            self._ahead[action.checkpoint, action.shard] = resume
        else:  # given up: the sweeper would find it, but not soon
            await self._store.abort_multipart(key, resume.upload_id)

    def _open(self, checkpoint: LocalCheckpoint, local: LocalShard) -> transfer.Source:
        shard = local.shard
        spool = self._spool_path(checkpoint, local)
        descriptor = self._folder.open_source(shard.source, spool, shard.identity)
        return transfer.Source(descriptor, shard.identity, self._users_path(local))

    def _fail(self, checkpoint: LocalCheckpoint, failed: list[Failed]) -> None:
        """Shards reached an end that is not the store: recorded, counted, logged, and handed to the trainer that saved
        them; one that was restarted should not be ended by what its predecessor lost.
        """
        now = self.local.checkpoints.get(checkpoint.id)
        if now is None or now.decision is not None:
            return  # settled meanwhile, its links released: nothing was lost
        self._record(*failed)
        for each in failed:
            is_of_shard = bool(each.shard)
            result = each.reason.value if each.is_loss and is_of_shard else "failed"
            self._observer.shards_finished(result, 1 if is_of_shard else len(checkpoint.shards), 0.0)
            what = f"{checkpoint.id}, shard {each.shard!r}" if is_of_shard else str(checkpoint.id)
            logger.error("shard_failed %s shard=%s error=%s", checkpoint.id, each.shard, each.message)
            if not self._is_left_over(checkpoint.id) or not self._is_trainer:
                error = CkptAsyncError(f"{what}: {each.message}")
                self.failures.append(Failure(error, checkpoint.id, each.shard, is_given_up=each.is_loss))

    async def _store_receipt(self, action: decide.StoreReceipt) -> None:
        checkpoint = self._checkpoint(action.checkpoint)
        assert checkpoint.sealed is not None
        receipt = Receipt(
            checkpoint.id,
            checkpoint.name,
            self.rank,
            checkpoint.sealed.world_size,
            tuple(each.stored for each in checkpoint.shards.values() if each.stored is not None),
            checkpoint.sealed.metrics,
        )
        key, data = keys.receipt_key(checkpoint.id, self.rank), records.encode_receipt(receipt)
        there = await cas.create_once(self._store, key, data)
        if there != data:
            await self._abort(checkpoint, "another process wrote a different receipt for this rank")
            return
        self._record(ReceiptStored(checkpoint.id))

    async def _look(self, action: decide.Look) -> None:
        """See whether the others are done: receipts the first time, from then on the decision first."""
        checkpoint, id_ = self._checkpoint(action.checkpoint), action.checkpoint
        watch = self._remote.watches.get(id_, decide.Watch())
        is_first = watch.num_looks == 0 and id_.generation == self.local.generation
        receipts, next_listing_at = watch.receipts, watch.next_listing_at
        if is_first:
            at_once: tuple[Callable[[], Coroutine[Any, Any, Any]], ...]
            at_once = (lambda: self._list_receipts(id_), self._look_for_successor)
            receipts, _ = await transfer.all_or_none(look() for look in at_once)
        else:
            decision = await steps.read_settled(self._store, id_)
            if decision is not None:
                self._learn(checkpoint, decision)
                return
            if checkpoint.has_receipt and self._loop.time() >= next_listing_at:
                receipts = await self._list_receipts(id_)
        if receipts is not None and receipts is not watch.receipts:
            num_looks, now = watch.num_looks + 1, self._loop.time()
            next_listing_at = decide.next_listing(checkpoint, receipts, self.rank, num_looks, now)
        longest_s = self._settings.decision_poll_s if self._is_hurried else self._settings.decision_poll_max_s
        next_look_at = decide.next_look(
            watch, self._loop.time(), first_s=self._settings.decision_poll_s, longest_s=longest_s
        )
        watch = replace(
            watch,
            num_looks=watch.num_looks + 1,
            next_look_at=next_look_at,
            receipts=receipts,
            next_listing_at=next_listing_at,
        )
        self._watch(id_, self._told_of_wait(id_, watch))

    def _told_of_wait(self, id_: CheckpointId, watch: decide.Watch) -> decide.Watch:
        """Say that a checkpoint waits long for other ranks, if it is time to."""
        now, receipts = self._loop.time(), watch.receipts
        if receipts is None or not self._checkpoint(id_).has_receipt:
            return watch
        if watch.since is None:
            return replace(watch, since=now, tell_at=now + decide.first_tell_s(receipts, self.rank))
        waited_s = now - watch.since
        if now < watch.tell_at:
            return watch
        if text := decide.long_wait(self.local, id_, receipts, waited_s):
            logger.warning("checkpoint_waits %s", text)
        return replace(watch, tell_at=now + waited_s)

    async def _list_receipts(self, id_: CheckpointId) -> decide.Receipts:
        """Who is done; of many ranks, as far as the first that is not: N ranks would list N / 1000 pages each."""
        prefix = keys.receipts_prefix(id_)

        def written(objects: Iterable[ObjectInfo]) -> list[tuple[float, int]]:
            parsed = ((each.last_modified or 0.0, keys.parse_receipt_key(each.key)) for each in objects)
            return sorted((at, found[1]) for at, found in parsed if found is not None and found[0] == id_)

        def is_enough(objects: Sequence[ObjectInfo]) -> bool:
            return decide.has_gap([rank for _, rank in written(objects)])

        listing = await self._store.list(prefix, enough=is_enough)
        there = written(listing.objects)
        newest_at = there[-1][0] if there else 0.0
        ranks = tuple(rank for _, rank in there)
        # By two clocks (NFS), or by one that tells the time in whole seconds only.
        newest_age_s = max(0.0, listing.server_time - newest_at)
        return decide.Receipts(ranks, newest_age_s, listing.is_whole)

    async def _look_for_successor(self) -> None:
        """A newer generation means that this trainer is superseded (rule R11)."""
        own = self.local.generation
        if self._is_trainer and self.fenced_by is None:
            newest = await newest_generation(self._store, after=own)
            if newest > own:
                self.fenced_by = newest
                self._observer.fenced()
                logger.error("fenced generation=%d by=%d; no new checkpoint is taken", own, newest)
        self._remote = decide.has_looked_for_successor(self.local, self._remote, self._loop.time())

    async def _look_for_members(self) -> None:
        await self._look_for_successor()
        opened = self.local.opened
        world_size = opened.world_size if opened else 1
        self.absent_ranks = await absent_ranks(self._store, self.local.generation, world_size)
        self._remote = replace(self._remote, are_members_asked_for=False)

    def missing_ranks(self, id_: CheckpointId) -> list[int]:
        """Ranks whose receipts were not there when this engine last looked: the first, if they are many. Any thread."""
        checkpoint, watch = self.local.checkpoints.get(id_), self._remote.watches.get(id_)
        if checkpoint is None or checkpoint.sealed is None or watch is None or watch.receipts is None:
            return []
        return decide.missing_ranks(watch.receipts, checkpoint.sealed.world_size)

    def _watch(self, id_: CheckpointId, watch: decide.Watch) -> None:
        self._remote = replace(self._remote, watches={**self._remote.watches, id_: watch})

    async def _commit(self, action: decide.Commit) -> None:
        checkpoint = self._checkpoint(action.checkpoint)
        assert checkpoint.sealed is not None
        settled = await steps.settle(
            self._store,
            checkpoint.id,
            world_size=checkpoint.sealed.world_size,
            by=f"rank {self.rank}",
            now=self._clock(),
        )
        if settled is None:
            # Receipts vanish only after an abort: look again, the decision will say so.
            look_at = self._loop.time() + self._settings.decision_poll_s
            self._watch(
                checkpoint.id, decide.Watch(num_looks=1, next_look_at=look_at, receipts=decide.Receipts())
            )
            return
        decision, is_ours = settled
        await self._look_for_successor()  # one may have begun since the first look, however long ago that was
        if is_ours and decision.outcome is Outcome.COMMIT:
            self._publish(checkpoint.id)
        self._learn(checkpoint, decision)

    async def _abort(self, checkpoint: LocalCheckpoint, reason: str) -> None:
        wanted = steps.new_decision(
            checkpoint.id,
            Outcome.ABORT,
            name=checkpoint.name,
            world_size=checkpoint.sealed.world_size if checkpoint.sealed else 1,
            by=f"rank {self.rank}",
            now=self._clock(),
            reason=f"rank {self.rank}: {reason}",
        )
        wanted = replace(wanted, is_superseded=bool(checkpoint.superseded))
        decision, is_ours = await steps.decide_once(self._store, wanted)
        if checkpoint.superseded and is_ours:
            for _ in checkpoint.shards:
                self._observer.shards_finished("superseded", 1, 0.0)
        self._learn(checkpoint, decision)

    def _learn(self, checkpoint: LocalCheckpoint, decision: Decision) -> None:
        """Record a decision that was read back from the store."""
        event = Decided(
            checkpoint.id, decision.outcome, decision.name, decision.reason, decision.is_superseded
        )
        self._record(event)
        self.outcomes[checkpoint.id] = event
        while len(self.outcomes) > MAX_OUTCOMES:
            self.outcomes.pop(next(iter(self.outcomes)))
        watches = {id_: each for id_, each in self._remote.watches.items() if id_ != checkpoint.id}
        self._remote = replace(self._remote, watches=watches)
        if decision.outcome is Outcome.ABORT:
            self._observer.checkpoint_aborted()
            logger.error("checkpoint_aborted %s reason=%s", checkpoint.id, decision.reason)
            is_known = decision.is_superseded or checkpoint.loss is not None
            is_known = is_known or any(each.failure for each in checkpoint.shards.values())
            if checkpoint.sealed and not is_known and not self._is_left_over(checkpoint.id):
                error = CkptAsyncError(f"{checkpoint.id} was given up: {decision.reason}")
                self.failures.append(Failure(error, checkpoint.id, is_given_up=True))
            return
        if decision.outcome is Outcome.COMMIT and self._is_left_over(checkpoint.id):
            # Whoever committed it may have died before it could move latest.
            self._publish(checkpoint.id)
        now = self._clock()
        first = min((each.enqueued_at for each in checkpoint.shards.values()), default=checkpoint.sealed_at)
        self._observer.checkpoint_committed(checkpoint.id.step, max(0.0, now - first), now)

    def _is_left_over(self, id_: CheckpointId) -> bool:
        return not self._is_trainer or id_.generation < self.local.generation

    def _publish(self, id_: CheckpointId) -> None:
        publish = max(filter(None, (self._remote.to_publish, id_)))
        self._remote = replace(self._remote, to_publish=publish)

    async def _move_latest(self, action: decide.MoveLatest) -> None:
        decided = self._checkpoint(action.checkpoint).decision
        assert decided is not None
        name = decided.name
        latest = await steps.move_latest(self._store, action.checkpoint, name)
        if self._settings.composer_symlink and latest.checkpoint == action.checkpoint:
            await self._write_composer_symlink(latest)
        self._remote = replace(self._remote, latest=latest)

    async def _write_composer_symlink(self, latest: Latest) -> None:
        """Composer's remote 'symlink': a text object that holds an object name without its bucket
        (composer/utils/file_helpers.py, create_symlink_file).
        """
        root = urlsplit(self._store.url).path.strip("/")
        target = f"{root}/{latest.prefix}".strip("/")
        key = naming.fill(self._settings.composer_symlink, rank=self.rank)
        await self._store.put(key, target.encode())

    def _move_local_latest(self, action: decide.MoveLocalLatest) -> None:
        checkpoint = self.local.checkpoints.get(action.checkpoint)
        if checkpoint is None:
            return  # forgotten meanwhile
        shards = [each.shard for each in checkpoint.shards.values()]
        # Of what a lost journal's manifests bring back, retention had perhaps removed the files.
        is_here = any(self._folder.is_same(each.source, each.identity) for each in shards)
        target = local_target([(each.source, each.name) for each in shards]) if is_here else None
        link = self._folder.path / naming.fill(self._settings.latest_filename, rank=self.rank)
        try:
            if target is not None:
                point_symlink(link, self._folder.path / target, self._folder.private)
            elif link.is_symlink():
                link.unlink()  # the newest has no files here, and what it pointed at will be removed
        except InvalidNameError as error:
            logger.warning("local_latest_skipped error=%s", error)

    async def _release(self, action: decide.Release) -> None:
        spool = keys.spool_checkpoint(action.checkpoint, self.rank)
        await asyncio.to_thread(self._folder.remove_spool, spool)
        self._record(Released(action.checkpoint))

    async def _remove(self, action: decide.Remove) -> None:
        checkpoint = self._checkpoint(action.checkpoint)

        others = (each for id_, each in self.local.checkpoints.items() if id_ != action.checkpoint)
        # A restarted trainer comes to the same steps again, and may just have made an empty folder for one.
        is_ahead = self._is_trainer and decide.is_still_to_come(self.local, action.checkpoint)
        shared = {
            (shard.shard.source, shard.shard.identity) for each in others for shard in each.shards.values()
        }

        def remove() -> None:
            for each in checkpoint.shards.values():
                if (each.shard.source, each.shard.identity) in shared:
                    continue  # the same file is part of another checkpoint, which goes later or stays
                source, identity = each.shard.source, each.shard.identity
                if not self._folder.remove_source(source, identity, keeps_folders=is_ahead):
                    logger.info("local_file_kept path=%s; it is another file by now", each.shard.source)

        await asyncio.to_thread(remove)
        self._observer.checkpoint_pruned("local")
        logger.info("local_checkpoint_removed %s reason=%s", action.checkpoint, action.reason)
        await self._forget(action.checkpoint)

    async def _forget(self, id_: CheckpointId) -> None:
        checkpoint = self._checkpoint(id_)
        await asyncio.to_thread(self._folder.unlink, keys.spool_manifest(id_, self.rank))
        event = Forgotten(id_, checkpoint.decided_at if checkpoint.was_committed else None)
        self._journal.forget(event)
        row = JournalRow(self.local.sequence, self.rank, self._clock(), event)
        self.local = fold([row], self.local)


def _kind_of_trouble(error: Exception) -> tuple[object, ...]:
    """Of which one is like another, whichever shard or checkpoint they strike."""
    return type(error), getattr(error, "reason", None), getattr(error, "errno", None)


def local_target(shards: list[tuple[str, str]]) -> str | None:
    """What the local symlink points at, from (source, name) of the shards: the folder they were enqueued
    from; the file itself if one file lies in the uploader's folder; None if several do.
    """
    roots = {source.removesuffix(name).rstrip("/") for source, name in shards}
    if len(roots) != 1:
        return None
    root = roots.pop()
    if root:
        return root
    return shards[0][0] if len(shards) == 1 else None
