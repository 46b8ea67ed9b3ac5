"""Adopts journals whose owner is dead and finishes what they hold. Used by `ckpt-async drain` and the sweeper.

It contains no rules: one engine per rank does the work as it would beside a trainer. This module knows which ranks may
be adopted (those whose lock is free), where the shards go (what the owner recorded), and when the work is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_async import private
from ckpt_async.core import backlog, decide, keys
from ckpt_async.core.failures import last_store_error
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Outcome, RemoteAddress, Unproven
from ckpt_async.core.observe import Observer
from ckpt_async.core.recovery import TAKEN
from ckpt_async.core.settings import EVENTS, INHERITED, Settings
from ckpt_async.engine import recovery
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.errors import CkptAsyncError, FolderInUseError, JournalError, SettingsError, StoreError
from ckpt_async.events.delivery import NO_EVENTS, DeliveryCounts, close_on_thread
from ckpt_async.events.event import Wants, parse_wants
from ckpt_async.events.run_events import CLOSE_S, RunEvents
from ckpt_async.events.sinks import Callback, OnEvent, wants_of
from ckpt_async.local import journals
from ckpt_async.local.folder import Folder, place_of, spooled_ranks
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.stores import StoreOptions, address_of, check_allowed, options_of
from ckpt_async.threads import in_thread
from ckpt_async.transfer.budgets import Budgets
from ckpt_async.transfer.patient import connect
from ckpt_async.transfer.together import all_or_none


@dataclass(frozen=True, slots=True)
class DrainedCheckpoint:
    """What became of one checkpoint of one rank.

    `reason` says why it was given up or is left over; `missing_ranks` have not delivered yet.
    """

    checkpoint: CheckpointId
    name: str
    reason: str = ""
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What was done for one kind of one rank's checkpoints.

    `in_use_by` names the live owner that holds the rank or has taken it back.

    `waiting` checkpoints have all of this rank's shards in the store and wait for other ranks; `left` ones do not.
    `uncopied` ones are committed, but copies of their shards under exact keys are outstanding.
    """

    rank: int
    kind: str = ""
    in_use_by: str = ""
    committed: tuple[DrainedCheckpoint, ...] = ()
    aborted: tuple[DrainedCheckpoint, ...] = ()
    waiting: tuple[DrainedCheckpoint, ...] = ()
    left: tuple[DrainedCheckpoint, ...] = ()
    uncopied: tuple[DrainedCheckpoint, ...] = ()
    uploaded_shards: int = 0
    uploaded_bytes: int = 0
    error: str = ""  # the engine itself failed, or nothing was done
    events: DeliveryCounts = NO_EVENTS


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What was done for one folder, rank by rank."""

    folder: str
    remotes: tuple[str, ...]
    ranks: tuple[RankReport, ...]

    @property
    def uploaded_bytes(self) -> int:
        return sum(each.uploaded_bytes for each in self.ranks)


def why_left(checkpoint: LocalCheckpoint, engine: Engine) -> str:
    """Return why a checkpoint is left over.

    That is a failure of it or one of its shards, else the last thing that went wrong, else that time ran out.
    """
    found = (checkpoint.failure, *(each.failure for each in checkpoint.shards.values()))
    failures = [each.message for each in found if each is not None]
    others: list[CkptAsyncError] = [
        each.error for each in engine.failures if isinstance(each.error, StoreError)
    ]
    return next(iter([*failures, *map(str, reversed(others))]), _out_of_time(engine))


def _out_of_time(engine: Engine) -> str:
    """Say that time ran out and, since the store may be why, what it answered last to a request that failed."""
    return f"time ran out{last_store_error(engine.store_error)}"


def uncopied(local: Local, engine: Engine) -> tuple[DrainedCheckpoint, ...]:
    """Return the committed checkpoints of which copies under exact keys are outstanding, and why."""
    reasons = {
        each.checkpoint: str(each.error)
        for each in engine.failures
        if each.action == decide.Copy.__name__ and isinstance(each.error, StoreError)
    }
    left = [each for _, each in sorted(local.checkpoints.items()) if each.to_copy]
    return tuple(
        DrainedCheckpoint(each.id, each.name, reasons.get(each.id, _out_of_time(engine))) for each in left
    )


logger = logging.getLogger(__name__)

Change = Callable[[RemoteAddress | None], RemoteAddress]

# `status` takes a lock for a microsecond to see whether anybody else holds it; that does not make it an owner.
LOCK_WAIT_S = 0.1
# How often to check whether a trainer wants its lock back; a starting trainer waits much longer.
WANTED_POLL_S = 0.5
# How long to wait for a store that does not answer at all.
OPEN_TIMEOUT_S = 60.0


# --- draining ----------------------------------------------------------------------------------------------


async def drain(
    folder: str | os.PathLike[str],
    *,
    timeout_s: float,
    grace_s: float,
    settings: Settings | None = None,
    change: Change | None = None,
    store_options: StoreOptions | None = None,
    on_event: OnEvent | None = None,
    adopts_copy: bool = False,
) -> DrainReport:
    """Finish what dead owners left in a folder, for all kinds of checkpoints, within `timeout_s`.

    That is: upload, commit, move latest, clean up. Once everything in this folder is in the store, it waits up to
    `grace_s` for other ranks. Whatever is left then stays in the journal, and another call continues.

    `change` returns the remote to use, given the recorded one (None: none was recorded), for a server that has moved or
    a journal that was lost. Of `store_options`, the profile is used, and the endpoint is one that may get credentials
    though only the journal names it. `on_event` is called with what becomes of checkpoints, as in `Sweeper`.

    With `adopts_copy`, a copy of a folder takes its original's place, which nobody must use any more. What it lacks, or
    has with another size or mtime, is given up. Otherwise it is refused if anything in it is unfinished.

    What keeps one rank or remote from being worked on is in the reports; the others are finished. It is raised (as a
    StoreError, say, or as a SettingsError if the remote is not known) if no rank's remote could be worked with.

    Raises NoJournalError, JournalError if the folder is such a copy or another user's, or a kind's folder cannot be
    read.
    """
    path = place_of(folder)
    private.check(path / keys.PRIVATE)
    if not (path / keys.PRIVATE).is_dir():
        raise journals.none_in(path)
    settings, given = settings or Settings(), store_options or StoreOptions()
    reports: list[RankReport] = []
    ranks: list[_Adopted] = []
    adoptions: list[_Adoption] = []
    shared = defaultdict[str, Budgets](lambda: Budgets(settings))
    with contextlib.ExitStack() as held:
        for kind in journals.kinds(path):
            opened = Folder(path, kind=kind)
            adopted, others = await _adopt(opened, held, settings, on_event)
            reports += others
            ranks += adopted
            changed = _change_of_kind(change, kind)
            for each in () if adopts_copy else adopted:
                await in_thread(recovery.refuse_copy, opened, each.found)
            for address, members in _by_remote(adopted, changed, settings.only_remotes, given):
                with _refusing(members):
                    budgets = shared[keys.run_remote(address.url, kind)]
                    adoptions.append(
                        _Adoption(
                            *(opened, address, given, settings, timeout_s, members, budgets),
                            adopts_copy=adopts_copy,
                        )
                    )
        deadline = time.monotonic() + timeout_s
        await all_or_none(each.run(deadline, grace_s) for each in adoptions)
        _check_any_remote(ranks)
        reports += [_report(each) for each in ranks]
    remotes = tuple(each.address.url for each in adoptions)
    return DrainReport(str(path), remotes, tuple(sorted(reports, key=lambda each: (each.rank, each.kind))))


def _check_any_remote(adopted: Iterable[_Adopted]) -> None:
    """Raise why no rank's remote could be worked with, if that is so: another call may succeed."""
    refusals = [each.refusal for each in adopted]
    of_remotes = [each for each in refusals if each is not None and not isinstance(each, JournalError)]
    if of_remotes and len(of_remotes) == len(refusals):
        raise of_remotes[0]


def _change_of_kind(change: Change | None, kind: str) -> Change | None:
    """Return `change` adapted to a kind.

    `change` itself maps remotes of the run; a kind's remote follows from that.
    """
    if change is None or not kind:
        return change

    def changed(recorded: RemoteAddress | None) -> RemoteAddress:
        if recorded is not None:
            recorded = replace(recorded, url=keys.run_remote(recorded.url, kind))
        address = change(recorded)
        return replace(address, url=keys.kind_remote(address.url, kind))

    return changed


async def _adopt(
    folder: Folder, held: contextlib.ExitStack, settings: Settings, on_event: OnEvent | None
) -> tuple[list[_Adopted], list[RankReport]]:
    """Adopt every rank with something to finish whose lock is free; `held` releases them.

    Returns these ranks, and the reports for the others.
    """
    reports: list[RankReport] = []
    adopted: list[_Adopted] = []
    spooled = spooled_ranks(folder.private)
    for rank in journals.ranks(folder.private):
        each = await in_thread(_adopt_rank, folder, rank, held, on_event)
        if isinstance(each, RankReport):
            reports.append(each)
        elif each.before.checkpoints or rank in spooled:
            adopted.append(each)
        else:
            try:
                await each.report_what_waits(settings)
            except JournalError as error:
                each.refuse(error)
            each.release()  # other ranks may take long, and this one's trainer must not wait for them
            refusal = str(each.refusal or "")
            reports.append(RankReport(rank, folder.kind, events=each.deliveries, error=refusal))
    return adopted, reports


def _adopt_rank(
    folder: Folder, rank: int, held: contextlib.ExitStack, on_event: OnEvent | None
) -> _Adopted | RankReport:
    """Adopt a rank, or return the report for it. `held` releases it, also if the caller is cancelled meanwhile."""
    lock = RankLock(folder, rank)
    held.callback(lock.release)
    try:
        lock.acquire(wait_s=LOCK_WAIT_S)
    except FolderInUseError as error:
        return RankReport(rank, folder.kind, in_use_by=_owner(error))
    if lock.is_wanted():
        lock.release()
        return RankReport(rank, folder.kind, in_use_by="a trainer that is starting")
    try:
        adopted = _Adopted(folder, lock, on_event)
    except JournalError as error:  # only of this rank
        logger.warning("drain_failed rank=%d error=%s", rank, error)
        lock.release()
        return RankReport(rank, folder.kind, error=str(error))
    held.callback(adopted.release)
    return adopted


def _owner(error: FolderInUseError) -> str:
    return str(error).rpartition(" is in use by ")[2].removesuffix(f" ({error.hint})")


def _by_remote(
    adopted: Iterable[_Adopted], change: Change | None, only_remotes: str, given: StoreOptions
) -> list[tuple[RemoteAddress, list[_Adopted]]]:
    """Group ranks by remote. Those of one folder and kind normally share one, but nothing forces them to. Refuses those
    whose remote is not known or not allowed.
    """
    groups: list[tuple[RemoteAddress, list[_Adopted]]] = []
    for each in adopted:
        with _refusing([each]):
            address = _remote_of(each, change)
            check_allowed(address, only_remotes, given, env=os.environ)
            group = next((members for known, members in groups if known == address), None)
            if group is None:
                groups.append((address, [each]))
            else:
                group.append(each)
    return groups


def _remote_of(adopted: _Adopted, change: Change | None) -> RemoteAddress:
    local = adopted.before
    address = local.remote
    if address is None and (lost := adopted.found.remote_of_lost()):
        address = address_of(lost, None, env=os.environ)
    address = change(address) if change else address
    if address is None:
        of_kind = f" of kind {adopted.kind!r}" if adopted.kind else ""
        raise SettingsError(
            f"the journal{of_kind} does not name the remote of rank {local.rank}",
            hint="pass the run's remote with --remote",
        )
    if (elsewhere := adopted.found.unfinished_elsewhere(address.url)) is not None:
        id_, there = elsewhere
        raise SettingsError(
            f"rank {local.rank} was uploading {id_} to {there!r}, not to {address.url!r}",
            hint="shards already verified there would be missing here: use the original remote",
        )
    return address


@contextlib.contextmanager
def _refusing(ranks: Sequence[_Adopted]) -> Iterator[None]:
    """Refuse these ranks if there is anything wrong with their remote; others are worked on."""
    try:
        yield
    except (CkptAsyncError, OSError) as error:
        for each in ranks:
            each.refuse(error)
            each.release()  # the others may take long


class _Adopted:
    """An adopted rank: its lock and its journal. Raises JournalError if the journal cannot be used."""

    def __init__(self, folder: Folder, lock: RankLock, on_event: OnEvent | None) -> None:
        self.lock, self.kind = lock, folder.kind
        self.journal = Journal(folder, lock.rank)
        try:
            self.before = self.after = self.journal.local()
            self.found = recovery.on_disk(folder, self.before)
        except BaseException:
            self.journal.close()
            raise
        self.is_given_back = False
        self.observer = _Counter()
        self.engine: Engine | None = None
        self.task: asyncio.Task[None] | None = None
        self.events: RunEvents | None = None
        self.deliveries = NO_EVENTS  # set by `release`
        self.refusal: CkptAsyncError | OSError | None = None  # then nothing is done for this rank
        self._on_event = on_event

    def refuse(self, error: CkptAsyncError | OSError) -> None:
        logger.warning("drain_failed rank=%d error=%s", self.before.rank, error)
        self.refusal = error

    def begin_to_report(self, run: str, settings: Settings) -> RunEvents:
        """Start delivering events as the trainer would have, and to those that the settings name besides.

        Raises SettingsError, JournalError.
        """
        recorded = dict(self.before.opened.settings) if self.before.opened else {}
        wants = {**parse_wants(str(recorded.get(EVENTS, ""))), **self._wants(settings)}
        sinks = [] if self._on_event is None else [Callback(self._on_event, Callback.of_sweeper)]
        self.events = RunEvents(run, self.journal, settings, wants, sinks=sinks)
        return self.events

    def _wants(self, settings: Settings) -> Wants:
        return wants_of(settings, callback=Callback.of_sweeper if self._on_event is not None else "")

    async def report_what_waits(self, settings: Settings) -> None:
        """Deliver waiting events of a rank that has nothing else to finish. Takes as long as the receivers do."""
        if self._wants(settings) and self.before.remote is not None:
            try:
                await in_thread(self.begin_to_report, self.before.remote.url, settings)
            finally:
                if self.events is not None:
                    await close_on_thread(self.events.delivery, settings.event_grace_s)

    def release(self) -> None:
        """Note what is left, and release journal and lock. Idempotent."""
        if self.lock.is_held:
            with contextlib.suppress(JournalError):
                if self.engine is not None:
                    self.after = self.engine.fresh_local()
                done = self.events.delivery.done if self.events is not None else NO_EVENTS
                waiting = self.journal.outbox().num_waiting(but=(Callback.of_trainer, Callback.of_sweeper))
                self.deliveries = replace(done, num_waiting=waiting)
        self.journal.close()
        self.lock.release()

    @property
    def live(self) -> Engine | None:
        """The rank's engine, or None if it has not started or has ended."""
        return self.engine if self.task is not None and not self.task.done() else None


class _Counter(Observer):
    def __init__(self) -> None:
        self.uploaded_shards = self.uploaded_bytes = 0

    def bytes_uploaded(self, size_bytes: int) -> None:
        self.uploaded_bytes += size_bytes

    def shards_finished(self, result: str, num_shards: int, duration_s: float) -> None:  # noqa: ARG002
        self.uploaded_shards += num_shards if result == "ok" else 0


class _Adoption:
    """The engines of ranks that share a remote: one event loop, one store, and one set of budgets for the run."""

    def __init__(
        self,
        folder: Folder,
        address: RemoteAddress,
        given: StoreOptions,
        settings: Settings,
        timeout_s: float,
        adopted: list[_Adopted],
        budgets: Budgets,
        *,
        adopts_copy: bool,
    ) -> None:
        self.address = address
        self.ranks = adopted
        self._folder, self._adopts_copy = folder, adopts_copy
        # Retries go on as long as there is time, and no longer.
        self._settings = replace(settings, upload_timeout_s=min(604_800.0, max(1.0, timeout_s)))
        self._store = connect(
            address.url, options_of(address, given, env=os.environ), self._settings, budgets=budgets
        )
        self._changed = asyncio.Event()

    async def run(self, deadline: float, grace_s: float) -> None:
        """Work until everything is finished, nothing more can be done here, or the time is up."""
        left_s = max(0.0, deadline - time.monotonic())
        try:
            if not await self._open(min(OPEN_TIMEOUT_S, left_s)):
                return
            try:
                for each in self.ranks:
                    if not each.is_given_back and each.refusal is None:
                        try:
                            await self._start(each)
                        except (CkptAsyncError, OSError) as error:
                            each.refuse(error)
                await self._wait_while(self._is_working, deadline)
                await self._wait_while(self._waits_for_others, min(deadline, time.monotonic() + grace_s))
                await self._wait_while(self._is_working, deadline)
            finally:
                await self._stop()
        finally:
            for each in self.ranks:
                each.release()  # adoptions of other remotes may take longer
            await self._store.close()

    async def _open(self, timeout_s: float) -> bool:
        """Open the store. Return False if it cannot be opened, or every trainer came back before that succeeded."""
        opening = asyncio.ensure_future(self._open_and_look(timeout_s))
        try:
            while not opening.done():
                await asyncio.wait({opening}, timeout=WANTED_POLL_S)
                await self._give_back_wanted()
                if all(each.is_given_back for each in self.ranks):
                    return False
            opening.result()
            return True
        except (CkptAsyncError, OSError) as error:
            for each in self.ranks:
                each.refuse(error)
            return False
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    async def _open_and_look(self, timeout_s: float) -> None:
        """Open the store, and find out whether it is still the one that these ranks have used."""
        await self._store.open(timeout_s)
        looking = self._store.answering_within(max(1.0, timeout_s))
        found = await all_or_none(
            recovery.why_refused(looking, each.found, str(self._folder.path), self.address)
            for each in self.ranks
        )
        for each, refusal in zip(self.ranks, found, strict=True):
            if refusal is not None:
                each.refuse(refusal)

    async def _start(self, each: _Adopted) -> None:
        before = each.before.opened
        opened = each.found.opened_at(self.address)
        unproven = await recovery.unproven(self._store, each.before, self.address)
        if unproven or opened != before:  # so that the next launch can tell whose this is
            await in_thread(each.journal.append, [opened, *map(Unproven, unproven)])
        events = await in_thread(each.begin_to_report, self.address.url, self._settings)
        inherited: dict[str, Any] = {name: value for name, value in opened.settings if name in INHERITED}
        state = State(
            rank=each.before.rank,
            folder=self._folder,
            journal=each.journal,
            store=self._store.of((self._folder.kind, each.before.rank), each.observer),
            settings=replace(self._settings, **inherited),
            observer=each.observer,
            clock=time.time,
            is_trainer=False,
            reporter=events.reporter,
        )

        def changed() -> None:
            self._changed.set()
            events.delivery.notify()

        each.engine = engine = Engine(state, changed)
        await engine.recover(each.before.opened, adopts_copy=self._adopts_copy)
        each.task = asyncio.create_task(engine.run(), name=f"drain-rank-{state.rank}")
        each.task.add_done_callback(lambda _: self._changed.set())
        engine.hurry(True)

    def _is_working(self) -> bool:
        # At least two rounds: what the first one starts shows in the second.
        return any(each.live and (each.live.num_rounds < 2 or each.live.num_due > 0) for each in self.ranks)

    def _waits_for_others(self) -> bool:
        return self._is_working() or any(
            backlog.waits_for_others(each.live.local) for each in self.ranks if each.live
        )

    async def _wait_while(self, is_busy: Callable[[], bool], deadline: float) -> None:
        while is_busy():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self._changed.clear()
            await _within(min(left_s, WANTED_POLL_S), self._changed.wait())
            await self._give_back_wanted()

    async def _give_back_wanted(self) -> None:
        """Give back ranks whose trainers are starting: these finish the rest themselves."""
        for each in self.ranks:
            if each.is_given_back or not each.lock.is_wanted():
                continue
            logger.info("adoption_ended rank=%d: its trainer is back", each.before.rank)
            each.is_given_back = True
            if each.engine is not None:
                each.engine.stop()
            if each.task is not None:
                await asyncio.gather(each.task, return_exceptions=True)
            if each.events is not None:
                await close_on_thread(each.events.delivery, CLOSE_S)
            each.release()

    async def _stop(self) -> None:
        tasks = [each.task for each in self.ranks if each.task is not None]
        for each in self.ranks:
            if each.engine is not None:
                each.engine.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        reporting = [each.events.delivery for each in self.ranks if each.events is not None]
        await asyncio.gather(*(close_on_thread(each, self._settings.event_grace_s) for each in reporting))


async def _within(timeout_s: float, waiting: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await waiting


def _report(adopted: _Adopted) -> RankReport:
    engine, task = adopted.engine, adopted.task
    if adopted.refusal is not None:
        return RankReport(adopted.before.rank, adopted.kind, error=str(adopted.refusal))
    if engine is None or task is None:
        return RankReport(adopted.before.rank, adopted.kind, in_use_by="a trainer that has started")
    crash = task.exception() if task.done() and not task.cancelled() else None
    if crash is not None:
        logger.error("drain_failed rank=%d", engine.state.rank, exc_info=crash)
    outcomes = sorted(engine.outcomes.newest(), key=lambda each: each.checkpoint)
    drained = {
        each.checkpoint: DrainedCheckpoint(each.checkpoint, each.name, each.reason) for each in outcomes
    }
    aborted = {each.checkpoint for each in outcomes if each.outcome is Outcome.ABORT}
    local = adopted.after
    undecided = backlog.undecided(local)
    return RankReport(
        engine.state.rank,
        adopted.kind,
        in_use_by="a trainer that has started" if adopted.is_given_back else "",
        committed=tuple(each for id_, each in drained.items() if id_ not in aborted),
        aborted=tuple(each for id_, each in drained.items() if id_ in aborted),
        waiting=tuple(
            DrainedCheckpoint(each.id, each.name, missing_ranks=tuple(engine.missing_ranks(each.id)))
            for each in undecided
            if each.has_receipt
        ),
        left=tuple(
            DrainedCheckpoint(each.id, each.name, why_left(each, engine))
            for each in undecided
            if not each.has_receipt
        ),
        uncopied=uncopied(local, engine),
        uploaded_shards=adopted.observer.uploaded_shards,
        uploaded_bytes=adopted.observer.uploaded_bytes,
        events=adopted.deliveries,
        error=repr(crash) if crash is not None else TAKEN if engine.state.is_taken else "",
    )
