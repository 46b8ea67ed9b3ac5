"""The engine of one rank: observe, decide, act, record. It has no rules of its own about checkpoints.

THEORY OF OPERATION

One round of the loop (`_start_due`):

    1. refresh    fold the rows that were appended to the journal into `state.local`
    2. decide     ask `core/decide.py` what is due
    3. start      give each action that is due, not under way and not held back a task
    4. sleep      until something changes, until the next time that `decide` named, or for POLL_S

A task carries out one action, or a series of small uploads, and records what came of it: as rows of the journal, if it
must survive a crash, else in a part of `state.remote`. Then the next round begins. Nothing else changes the state:
tasks run on one event loop and change it between two awaits; other threads only append to the journal and call `wake`.

Uploads take a second step, because they are many and share one link: they wait in the `UploadQueue`, in the order of
`core/order.py`, and each that ends begins the next without asking `decide` again.

When an action fails:
    an error of ours, a full disk, no memory    logged once, told to the trainer; held back for a while (`InFlight`)
    a source that is lost, a store that refuses for good      a row `Failed`: `decide` then aborts the checkpoint
    anything else, or a journal that the loop itself cannot read      `run` raises, and whoever runs it starts another

Cancelled: an upload whose checkpoint was given up; all tasks at the end. A cancelled action waits for its thread
(`threads.in_thread`), because the journal is closed and the rank's lock is released next. Nothing here blocks the event
loop: disk work goes to worker threads.

After a crash or SIGKILL, the next engine begins with `recovery.recover` and the journal; what was only in memory
(`state.remote`, work under way, pauses) is found out anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, assert_never

from ckpt_async.core import backlog, decide, errnos, order
from ckpt_async.core.failures import Failing, Failure, Outcomes
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, Failed, Opened
from ckpt_async.engine import committing, fencing, on_disk, recovery, uploading
from ckpt_async.engine.in_flight import InFlight, UploadQueue
from ckpt_async.engine.state import State
from ckpt_async.errors import CkptAsyncError, FailureReason, JournalError, SourceError, StoreError
from ckpt_async.threads import in_thread

logger = logging.getLogger(__name__)

# A wake-up is only a hint; polling is the safety net. Another process may have appended to the journal (DCP's PROCESS
# mode), or a second thread's wake-up may have been lost at shutdown.
POLL_S = 1.0


class Engine:
    """Carries one rank's checkpoints from the spool to a decision, and cleans up after them.

    `on_change` is called on the event loop after every change.
    """

    def __init__(self, state: State, on_change: Callable[[], None] = lambda: None) -> None:
        self.state = state
        self.num_due = 0  # own actions that are due or under way, not counting looks at other ranks
        self.num_rounds = 0
        self.last_seen_wake = 0  # `num_due` includes all that was in the journal before this call of `wake`
        self._on_change = on_change
        self._in_flight = InFlight()
        self._queue = UploadQueue(state, self._in_flight)
        state.store.set_urgency(self._queue.place_of)
        self._is_retry_asked = False
        self._housekeep_at = 0.0
        self._behind_since = 0.0
        self._log_at = 3  # log that uploads fall behind when so many checkpoints wait
        self._wakes, self._last_wake = itertools.count(1), 0
        self._woken = asyncio.Event()
        self._crash: asyncio.Future[None] = state.loop.create_future()

    def succeed(self, dead: Engine) -> None:
        """Take over what a crashed engine knew that is not in the journal."""
        self.state.succeed(dead.state)
        # Callers that wait for rounds to pass and for work to be done must not notice the change.
        self.num_due, self.num_rounds = dead.num_due, dead.num_rounds
        self.last_seen_wake, self._last_wake, self._wakes = dead.last_seen_wake, dead._last_wake, dead._wakes

    # --- what is known: any thread -------------------------------------------------------------------------

    @property
    def local(self) -> Local:
        return self.state.local

    @property
    def outcomes(self) -> Outcomes:
        return self.state.reports.outcomes

    @property
    def failures(self) -> deque[Failure]:
        return self.state.reports.failures

    @property
    def failing(self) -> frozenset[Failing]:
        return self.state.reports.failing

    @property
    def fenced_by(self) -> int | None:
        return self.state.fence.by

    @property
    def absent_ranks(self) -> list[int] | None:
        return self.state.fence.absent_ranks

    @property
    def store_error(self) -> str:
        return self.state.store.last_error

    def fresh_local(self) -> Local:
        return self.state.fresh_local()

    def missing_ranks(self, id_: CheckpointId) -> list[int]:
        return committing.missing_ranks(self.state, id_)

    # --- from other threads --------------------------------------------------------------------------------

    def wake(self) -> int:
        """Make the engine look at the journal now, because something was appended. Any thread.

        Once `last_seen_wake` has reached the number that this returns, `num_due` includes what was appended.
        """
        self._last_wake = number = next(self._wakes)
        self._soon(lambda: None)
        return number

    def hurry(self, is_hurried: bool) -> None:
        """While someone waits, look for the other ranks' receipts at the shortest interval, and retry what failed. Any
        thread.
        """
        self._is_retry_asked |= is_hurried  # not in `change`: a later `wake` must not take effect before this

        def change() -> None:
            state = self.state
            state.is_hurried = is_hurried
            if is_hurried:
                polls = replace(state.commits.polls, next_at=0.0)
                state.commits = replace(state.commits, polls=polls)

        self._soon(change)

    def look_for_members(self) -> None:
        """Find out which ranks never opened this generation (`absent_ranks`), and whether there is a newer one. Any
        thread.
        """

        def change() -> None:
            self.state.fence = replace(self.state.fence, are_members_asked_for=True)

        self._soon(change)

    def turn_to_newest(self) -> None:
        """Upload the newest sealed checkpoint next, for when there may be little time left. Any thread."""

        def change() -> None:
            state = self.state
            owed = decide.owed(state.fresh_local(), state.policy)
            turn = order.to_newest(state.uploads.turn, owed, state.now())
            state.uploads = replace(state.uploads, turn=turn)
            self._queue.stop_all_but(turn.sending)

        self._soon(change)

    def stop(self) -> None:
        """Make `run` return soon. Work in flight is cancelled, and can be resumed from the journal. Any thread."""

        def change() -> None:
            self.state.is_stopping = True

        self._soon(change)

    def _soon(self, change: Callable[[], None]) -> None:
        """Make a change on the event loop, and begin a round."""

        def work() -> None:
            change()
            self._woken.set()

        with contextlib.suppress(RuntimeError):  # the loop is closing: what matters is in the journal
            self.state.loop.call_soon_threadsafe(work)

    # --- the loop ------------------------------------------------------------------------------------------

    async def recover(self, before: Opened | None, *, adopts_copy: bool = False) -> None:
        """See `recovery.recover`."""
        await recovery.recover(self.state, before, adopts_copy=adopts_copy)

    async def run(self) -> None:
        """Work until `stop`. Raises only because of a bug or if the journal cannot be used."""
        try:
            self._begin()
            while not self.state.is_stopping:
                self._woken.clear()
                last_wake = self._last_wake
                self.state.refresh()
                pause_s = self._start_due()
                self.last_seen_wake = last_wake
                self._on_change()
                await self._sleep(pause_s)
                if self._crash.done():
                    self._crash.result()
                await self._housekeep()
        finally:
            await self._cancel_all()
            self._in_flight.log_troubles(self.state.now(), is_end=True)
            self._on_change()

    def _begin(self) -> None:
        state = self.state
        state.refresh()
        loadable = (id_ for id_, each in state.local.checkpoints.items() if decide.is_loadable(each))
        state.published = replace(state.published, to_publish=max(loadable, default=None))

    def _start_due(self) -> float:
        """Start what is due and not under way; return for how long nothing else can become due."""
        state, in_flight, now = self.state, self._in_flight, self.state.now()
        if self._is_retry_asked:
            self._is_retry_asked = False
            in_flight.retry_all()
        state.fence = decide.noticed_idleness(state.local, state.fence, state.policy, now)
        state.uploads = decide.noticed_turn(state.local, state.uploads, state.policy, now)
        wake_at, num_due = now + POLL_S, 0
        due: set[decide.Action] = set()
        uploads: list[decide.Upload] = []
        for action in decide.decide(state.local, state.remote, state.policy, now):
            if isinstance(action, decide.WaitUntil):
                wake_at = min(wake_at, action.time)
                continue
            due.add(action)
            held_until = in_flight.held_until(action)
            if now < held_until:
                wake_at = min(wake_at, held_until)
                num_due += state.is_hurried and in_flight.may_heal(action)
            elif isinstance(action, decide.Upload):
                num_due += 1
                uploads.append(action)
            else:
                num_due += not self._is_by_the_way(action)
                if action not in in_flight.running and not in_flight.is_in_use(action):
                    self._start((action,), self._perform(action))
        in_flight.forget_all_but(due)
        if state.reports.failing:
            state.reports.failing &= {
                (each.checkpoint, type(each).__name__)
                for each in due
                if isinstance(each, decide.OfCheckpoint)
            }
        self._queue.refill(uploads, due)
        self._start_uploads()
        self.num_due, self.num_rounds = num_due, self.num_rounds + 1
        return max(0.0, wake_at - now)

    def _is_by_the_way(self, action: decide.Action) -> bool:
        """Return whether an action does not count as own work that is due.

        Looks at other ranks do not, once the receipts have been listed for the first time: until then, shards or the
        commit wait for the look.
        """
        commits = self.state.commits
        if isinstance(action, decide.ListReceipts | decide.ReadDecision):
            return action.checkpoint in commits.watches
        if isinstance(action, decide.Poll):
            return commits.polls.has_polled
        if isinstance(action, decide.LookForSuccessor):
            return not action.is_first
        return isinstance(
            action, decide.SendAhead | decide.LookForMembers | decide.NameTarget | decide.ReportOwed
        )

    def _start_uploads(self) -> None:
        """Fill the free places with uploads. A checkpoint of 10,000 shards is 10,000 actions but few tasks."""
        while self._queue.may_begin():
            series = self._queue.next_series()
            self._start(series, self._perform_series(series) if len(series) > 1 else self._perform(series[0]))
        self.state.store.has_more(self._start_uploads if self._queue else None)

    def _start(self, actions: Sequence[decide.Action], work: Coroutine[Any, Any, None]) -> None:
        task = self.state.loop.create_task(work, name=type(actions[0]).__name__)
        self._in_flight.begin(actions, task)
        task.add_done_callback(lambda task: self._finished(actions, task))

    def _finished(self, actions: Sequence[decide.Action], task: asyncio.Task[None]) -> None:
        self._in_flight.end(actions)
        uploads = [each for each in actions if isinstance(each, decide.Upload)]
        for each in uploads:
            self.state.progress.sent_bytes.pop(each, None)
        if uploads:
            self._queue.ended(uploads)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not self._crash.done():
                self._crash.set_exception(error)
        elif uploads and self._queue.may_begin(after=uploads[0].checkpoint):
            self._start_uploads()  # without asking `decide` after each of many small shards
            return
        self._woken.set()

    async def _sleep(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._woken.wait()

    async def _cancel_all(self) -> None:
        while self._in_flight.running:  # a task that ends just now may still start another
            self._queue.clear()
            tasks = set(self._in_flight.running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # From Python 3.12 on, awaiting tasks that have all ended does not let `_finished` run.
            await asyncio.sleep(0)
        self.state.store.has_more(None)
        if self._crash.done():
            self._crash.exception()  # marked as retrieved: it was raised, or something worse is being raised

    async def _housekeep(self) -> None:
        """Do, once every POLL_S, the upkeep that the trainer's own appends must not pay for."""
        state = self.state
        if state.now() < self._housekeep_at:
            return
        self._housekeep_at = state.now() + POLL_S
        self._in_flight.log_troubles(state.now())
        self._log_if_behind()
        try:
            await in_thread(self._keep_house)
            self._note_shortage()
            if state.progress.is_new and not state.folder.reserve.was_needed:  # the space is for commits
                state.progress.is_new = False
                state.journal.note_progress(
                    [(each.checkpoint, each.shard, sent) for each, sent in state.progress.sent_bytes.items()]
                )
        except (JournalError, OSError) as error:  # such as a full disk: no reason to stop uploads under way
            logger.debug("housekeeping_skipped error=%s", error)

    def _log_if_behind(self) -> None:
        """Log that uploads fall behind, and again each time that twice as many checkpoints wait."""
        state = self.state
        num_waiting = len(backlog.backlog(state.local))
        turn = state.uploads.turn
        if num_waiting < self._log_at or not (text := backlog.behind(state.local, turn.upload_s)):
            self._behind_since = 0.0
        elif not self._behind_since:
            self._behind_since = turn.free_at
        elif turn.free_at > self._behind_since:  # so the next upload took as long: it was no outage
            self._log_at, self._behind_since = 2 * num_waiting, 0.0
            logger.warning("uploads_fall_behind %s", text)

    def _note_shortage(self) -> None:
        state = self.state
        free_bytes, num_ranks = state.folder.space()[0], state.folder.num_ranks()
        found = backlog.shortage(state.settings, state.local, free_bytes, num_ranks)
        is_to_supersede = found is not None and found.reaction == "supersede" and state.is_trainer
        # What was given up frees its space only later.
        is_known = is_to_supersede and not decide.is_freeing(state.local)
        state.uploads = replace(state.uploads, shortage=found if is_known else None)

    def _keep_house(self) -> None:
        state = self.state
        try:
            state.journal.compact()
        finally:
            state.folder.tend()
        state.note_link()  # last, because it may lack space

    # --- actions -------------------------------------------------------------------------------------------

    async def _perform(self, action: decide.Action) -> None:
        """Carry out one action.

        If it fails with an error of ours, or the disk or the memory is full, that is noted and the action is tried
        again later; any other exception is a bug and crashes the engine.
        """
        try:
            await self._carry_out(action)
        except (CkptAsyncError, OSError, MemoryError) as error:
            state = self.state
            self._in_flight.note_trouble(action, error, self._hold_back(action, error), state.now())
            # Whatever is wrong with one that is for no checkpoint will also fail those of checkpoints.
            if not isinstance(action, decide.OfCheckpoint):
                return
            if isinstance(error, JournalError | OSError | MemoryError):
                state.observer.attempt_failed(FailureReason.DISK)  # recovers once there is space again
            else:
                name = type(action).__name__
                state.reports.failing |= {(action.checkpoint, name)}
                state.reports.failures.append(Failure(error, action.checkpoint, action=name))

    async def _carry_out(self, action: decide.Action) -> None:
        state = self.state
        match action:
            case decide.MakeDurable():
                await on_disk.make_durable(state, action)
            case decide.SendAhead():
                await uploading.send_ahead(state, action)
            case decide.Upload():
                await self._upload(action)
            case decide.StoreReceipt():
                await committing.store_receipt(state, action)
            case decide.ListReceipts():
                await committing.list_receipts(state, action)
            case decide.Poll():
                await committing.poll(state, action)
            case decide.ReadDecision():
                await committing.read_decision(state, action)
            case decide.LookForSuccessor():
                await fencing.look_for_successor(state)
                if action.is_first:  # one that was under way before may have seen nothing yet
                    state.fence = replace(state.fence, must_look_first=False)
            case decide.LookForMembers():
                await fencing.look_for_members(state)
            case decide.NameTarget():
                await committing.name_target(state)
            case decide.ReportOwed():
                await committing.report_owed(state)
            case decide.GiveUpForNewer():
                await committing.give_up_for_newer(state, action)
            case decide.Commit():
                await committing.commit(state, action)
            case decide.Abort():
                await committing.abort(state, state.checkpoint(action.checkpoint), action.reason)
            case decide.MoveLatest():
                await committing.move_latest(state, action)
            case decide.MoveLocalLatest():
                await on_disk.move_local_latest(state, action)
            case decide.Copy():
                await committing.copy_shards(state, action)
            case decide.MovePointer():
                await committing.move_pointer(state, action)
            case decide.Release():
                await on_disk.release(state, action)
            case decide.Remove():
                await on_disk.remove(state, action)
            case decide.Keep():
                await on_disk.keep(state, action.checkpoint)
            case decide.Forget():
                await on_disk.forget(state, action.checkpoint)
            case decide.WaitUntil():
                pass
            case _:
                assert_never(action)

    async def _upload(self, action: decide.Upload) -> None:
        try:
            await uploading.upload(self.state, action)
        except (SourceError, StoreError) as error:
            self._hold_back(action, error)
            failed = Failed(action.checkpoint, action.shard, error.reason, str(error))
            self.state.fail(action.checkpoint, [failed])

    async def _perform_series(self, actions: Sequence[decide.Upload]) -> None:
        """Upload small shards as a series; those that cannot be sent that way are uploaded alone next."""
        left = actions
        # Unrecorded shards are sent again, which reports the error.
        with contextlib.suppress(JournalError, MemoryError):
            left = await uploading.upload_series(self.state, actions)
        self._queue.send_alone(left)

    def _hold_back(self, action: decide.Action, error: Exception) -> float:
        has_space = errnos.is_full(error) and self.state.folder.reserve.release()
        is_hurried = self.state.is_hurried or has_space
        return self._in_flight.hold_back(action, error, self.state.now(), is_hurried=is_hurried)
