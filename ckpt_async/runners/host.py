"""The life of one rank's engine on an event loop: open the store, agree on the generation, work, restart after a
crash. The caller holds the rank's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from weakref import WeakValueDictionary

from ckpt_async.core import backlog, keys
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import Opened
from ckpt_async.core.observe import Observer
from ckpt_async.core.recovery import OnDisk, put_back, wiped
from ckpt_async.core.settings import EVENTS, RECORDED
from ckpt_async.engine import recovery
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.errors import JournalError, SettingsError
from ckpt_async.events.delivery import close_on_thread
from ckpt_async.events.event import parse_wants
from ckpt_async.events.run_events import CLOSE_S, RunEvents
from ckpt_async.local.folder import Folder, boot_id
from ckpt_async.local.journal import Journal
from ckpt_async.protocol import copies
from ckpt_async.protocol import generation as generations
from ckpt_async.runners import Start
from ckpt_async.threads import in_thread
from ckpt_async.transfer.budgets import Budgets
from ckpt_async.transfer.link import KnownLink, known_file_name, recall_known
from ckpt_async.transfer.patient import PatientStore, connect
from ckpt_async.transfer.together import both

logger = logging.getLogger(__name__)

# A store may be briefly away when training starts; wrong credentials and a missing bucket fail at once.
START_TIMEOUT_S = 60.0
ENGINE_RESTART_S = 1.0


class Backends:
    """The open stores, and the budgets, that the engines of an event loop share.

    Engines that use one remote in the same way share a store. Engines that use one run share budgets, so that the
    limits of requests and bandwidth hold for its ranks and kinds together, which take turns. The limits are those
    of the first engine.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Backend] = {}
        self._budgets: WeakValueDictionary[str, Budgets] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def use(
        self, start: Start, observer: Observer, known: KnownLink | None
    ) -> AsyncIterator[PatientStore]:
        """Yield the store for an engine. `known` is what an earlier process learned about the link. Raises
        SettingsError or StoreError if the store cannot be opened.
        """
        key = repr((start.address, start.options))
        backend = self._open.get(key)
        if backend is None:
            backend = self._open[key] = _Backend(start, observer, self._budgets_of(start, known))
        backend.num_users += 1
        try:
            async with backend.opening:
                if not backend.is_open:
                    await backend.store.open(START_TIMEOUT_S)
                    backend.is_open = True
                if start.settings.publish_copies and not backend.can_copy:
                    await copies.check_can_copy(backend.store.answering_within(START_TIMEOUT_S))
                    backend.can_copy = True
            yield backend.store.of((start.kind, start.rank), observer)
        finally:
            backend.num_users -= 1
            if not backend.num_users:
                self._open.pop(key, None)
                await backend.store.close()

    def _budgets_of(self, start: Start, known: KnownLink | None) -> Budgets:
        run = replace(start.address, url=keys.run_remote(start.address.url, start.kind))
        key = repr((run, start.options))
        budgets = self._budgets.get(key)
        if budgets is None:
            budgets = self._budgets[key] = Budgets(start.settings, known=known)
        return budgets


class _Backend:
    def __init__(self, start: Start, observer: Observer, budgets: Budgets) -> None:
        self.store = connect(start.address.url, start.options, start.settings, observer, budgets=budgets)
        self.opening = asyncio.Lock()
        self.is_open = False
        self.can_copy = False  # as far as this was tried
        self.num_users = 0


class Host:
    """One rank's engine, from its start to its end."""

    def __init__(
        self,
        start: Start,
        folder: Folder,
        journal: Journal,
        observer: Observer,
        on_change: Callable[[], None],
        backends: Backends,
    ) -> None:
        self.engine: Engine | None = None
        self._events: RunEvents | None = None
        self.reports_for_s = CLOSE_S  # how long to deliver events at the end
        self._beating: asyncio.Future[None] | None = None
        self._is_stopping = False
        self.is_end_expected = False  # then a crash is raised: there is no time left to heal it
        self._start, self._folder, self._journal = start, folder, journal
        self._observer, self._on_change, self._backends = observer, on_change, backends

    async def run(self, started: Callable[[int], bool]) -> None:
        """Work until the engine is told to stop. `started` is called with the generation, and returns whether
        anybody is still interested. Raises what keeps the engine from starting, and also a crash if the end is
        expected.
        """
        found = await in_thread(self._earlier)
        known = await in_thread(self._known_link)
        async with self._backends.use(self._start, self._observer, known) as store:
            generation = self._start.generation
            if generation is None:
                generation = await self._agree(store, found)
            self._beating = asyncio.ensure_future(self._beat(store, generation))
            wants = parse_wants(self._start.wants)
            events = self._events = RunEvents(
                self._start.address.url, self._journal, self._start.settings, wants
            )
            try:
                self.engine = self._new_engine(store)
                # Recover only at the first start: after a restart the trainer is alive, and files that it is
                # just linking would look left behind.
                if self._start.generation is None:
                    await self.engine.recover(found.local.opened)
                else:
                    self.engine.state.look_first()
                if started(generation):
                    await self._work(store, self.engine)
            finally:
                self.stop_beating()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._beating
                await close_on_thread(events.delivery, self.reports_for_s)

    async def _work(self, store: PatientStore, engine: Engine) -> None:
        while True:
            try:
                return await engine.run()
            except Exception:
                if self.is_end_expected:
                    raise
                logger.exception("engine_failed; restarting in %.0f s", ENGINE_RESTART_S)
            self._observer.engine_restarted()
            await asyncio.sleep(ENGINE_RESTART_S)
            dead, engine = engine, self._new_engine(store)
            self.engine = engine
            engine.succeed(dead)
            if self._is_stopping:
                return None

    def stop(self) -> None:
        """Make `run` return soon, if it has started. Safe from any thread."""
        self._is_stopping = True
        if self.engine is not None:
            self.engine.stop()

    def stop_beating(self) -> None:
        """Stop the heartbeat because the trainer is gone: no other rank may take this launch for a live one."""
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self, store: PatientStore, generation: int) -> None:
        """Send heartbeats for the ranks that are still to come, if that is this rank's task."""
        if self._start.world_size == 1 or self._start.explicit_generation is not None:
            return
        try:
            await generations.beat(
                store,
                generation,
                rank=self._start.rank,
                world_size=self._start.world_size,
                is_over=lambda: self.engine is not None and self.engine.fenced_by is not None,
            )
        except Exception:
            logger.exception(
                "beat_ended generation=%d; ranks that open later will fence this one", generation
            )

    def _earlier(self) -> OnDisk:
        """Return what earlier launches left. If that is of another remote, all of it must be decided."""
        remote = self._start.address.url
        found = recovery.on_disk(self._folder, self._journal.local())
        recovery.refuse_copy(self._folder, found)
        if (elsewhere := found.unfinished_elsewhere(remote)) is not None:
            id_, there = elsewhere
            run = keys.run_remote(there, self._start.kind)
            raise SettingsError(
                f"folder {self._start.folder!r} still holds {id_}, which was being uploaded to {there!r}",
                hint=f"finish it with `ckpt-async drain --remote {run}`, or use another folder",
            )
        for lost in found.local.to_rescue if found.is_of_another(remote) else ():
            spool = self._folder.private / keys.spool_checkpoint(lost, self._start.rank)
            if spool.exists():
                raise SettingsError(
                    f"folder {self._start.folder!r} has {lost}, which its remote has lost before it was committed",
                    hint=f"copy what you need from {str(spool)!r} and delete that, or use another folder",
                )
        return found

    def _known_link(self) -> KnownLink | None:
        path = self._folder.private / known_file_name("up")
        return recall_known(path, self._start.address.url, time.time())

    async def _agree(self, store: PatientStore, found: OnDisk) -> int:
        start = self._start
        is_of_another = found.is_of_another(start.address.url)
        if found.generation and not is_of_another:  # first: a refused start must leave the store as it is
            is_forgotten, lost = await both(
                generations.is_forgotten(store, found.generation, start.rank, found.nonces),
                recovery.lost(store, found, start.address),
            )
            if is_forgotten:
                raise wiped(found, start.folder, start.address)
            if lost:
                raise put_back(lost, found.local, start.folder, start.address)
        claim = await generations.agree(
            store,
            rank=start.rank,
            world_size=start.world_size,
            launch_key=start.launch_key,
            explicit=start.explicit_generation,
            now=time.time(),
            member=start.member,
        )
        if not found.may_open(claim.number, start.address.url, is_again=start.is_again):
            raise wiped(found, start.folder, start.address)
        if is_of_another:  # only once this remote could be opened: its URL may have been a mistake
            await in_thread(self._let_go_of_all, found.local)
        recorded = tuple((name, getattr(start.settings, name)) for name in RECORDED)
        if start.wants:
            recorded += ((EVENTS, start.wants),)
        opened = Opened(claim.number, start.world_size, start.address, recorded, boot_id(), claim.nonce)
        unproven = await recovery.unproven(store, found.local, start.address)
        self._journal.append(found.rows_of(opened, unproven))
        return claim.number

    def _let_go_of_all(self, local: Local) -> None:
        """Let go of another remote's checkpoints. All of them are decided; their local files belong to the user from
        now on.
        """
        if left := backlog.undecided(local):
            raise JournalError(
                f"{left[-1].id} of folder {self._start.folder!r} is not decided: it is not forgotten"
            )
        rank = self._start.rank
        for id_ in local.checkpoints:
            self._folder.remove_spool(keys.spool_checkpoint(id_, rank))
            self._folder.unlink(keys.spool_manifest(id_, rank))
        self._folder.remove_spool(keys.kept_rank(rank))

    def _new_engine(self, store: PatientStore) -> Engine:
        state = State(
            rank=self._start.rank,
            folder=self._folder,
            journal=self._journal,
            store=store,
            settings=self._start.settings,
            observer=self._observer,
            clock=time.time,
            reporter=self._events.reporter if self._events else None,
        )
        return Engine(state, self._changed)

    def _changed(self) -> None:
        """Handle the end of a round of the engine."""
        self._on_change()
        engine, events = self.engine, self._events
        if engine is None or events is None:
            return

        def missing() -> list[int]:
            waiting = sorted(id_ for id_, each in engine.local.checkpoints.items() if each.decision is None)
            return engine.missing_ranks(waiting[0]) if waiting else []

        sent_bytes = sum(engine.state.progress.sent_bytes.values())
        try:
            events.look(engine.local.generation, engine.local, sent_bytes, missing)
        except JournalError as error:  # a full disk, for example
            logger.warning("backlog_not_reported error=%s", error)
