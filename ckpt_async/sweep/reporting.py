"""The events of a sweep of remotes: decisions that the sweep made itself, and damage that it or a reader has found.

Events of what it finishes in a folder are delivered from that folder's journal, as beside a trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import CkptAsyncError, JournalError
from ckpt_async.events import event as events
from ckpt_async.events.delivery import Delivery, close_on_thread
from ckpt_async.events.event import Event
from ckpt_async.events.sinks import Callback, OnEvent, sinks_of, wants_of
from ckpt_async.local.outbox import OwnOutbox
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.protocol.verify import Finding
from ckpt_async.sweep.remote import Done
from ckpt_async.threads import in_thread
from ckpt_async.transfer.patient import PatientStore

logger = logging.getLogger(__name__)


def default_folder(environment: Mapping[str, str]) -> Path:
    """Return where a process without a journal keeps its events.

    That is systemd's StateDirectory, else the user's state folder.
    """
    if place := environment.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(place) / "events"
    home = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "ckpt-async" / "events"


class RemoteEvents:
    """Events of the remotes that one sweep goes through."""

    def __init__(self, outbox: OwnOutbox, wants: events.Wants, delivery: Delivery) -> None:
        self._outbox, self._wants, self._delivery = outbox, wants, delivery

    async def done(self, store: PatientStore, done: Done) -> None:
        """Report an action of the sweep that has succeeded."""
        if done.outcome not in (Outcome.COMMIT, Outcome.ABORT, Outcome.PRUNED):
            return
        assert isinstance(done.action, sweep_plan.Settle | sweep_plan.GiveUp | sweep_plan.FinishPrune)
        id_ = done.action.checkpoint
        try:
            decision = await steps.read_decision(store, id_)
        except CkptAsyncError as error:
            logger.error("event_not_reported %s error=%s", id_, error)  # noqa: TRY400  no bug of ours
            return
        if decision is None:
            return
        event = events.of_decision(store.url, decision, time.time())
        if event.kind == "pruned":
            event = replace(event, details={**event.details, "reason": done.action.reason})
        self._report([event])

    async def damage(
        self, store: PatientStore, violations: Iterable[Finding], names: Mapping[CheckpointId, str]
    ) -> None:
        """Report checkpoints that readers have marked as damaged, and findings that violate a rule."""
        now, run = time.time(), store.url
        found = [_of_finding(run, each, names, now) for each in violations]
        for id_, reason in (await steps.read_damages(store)).items():
            if id_ in names:
                key = keys.damage_key(id_)
                found.append(events.damaged(run, id_, names[id_], reason, now, key=key))
        self._report(found)

    def _report(self, found: Iterable[Event]) -> None:
        notices = [notice for event in found for notice in events.notices_of(event, self._wants)]
        if notices:
            self._outbox.put(notices, time.time())
            self._delivery.notify()


def _of_finding(run: str, each: Finding, names: Mapping[CheckpointId, str], now: float) -> Event:
    data, receipt = keys.parse_data_key(each.key), keys.parse_receipt_key(each.key)
    id_ = data[0] if data else receipt[0] if receipt else keys.parse_decision_key(each.key)
    if id_ is None:
        return events.of_run("damaged", run, 0, now, about=each.key, reason=each.message, key=each.key)
    return events.damaged(run, id_, names.get(id_, ""), each.message, now, key=each.key)


@contextlib.asynccontextmanager
async def remote_events(
    settings: Settings, folder: Path | None, on_event: OnEvent | None = None
) -> AsyncIterator[RemoteEvents | None]:
    """Provide the events of one sweep, which are kept in `folder`.

    At the sweep's end, those that are due are delivered, for at most `event_grace_s`; the next sweep delivers the rest.

    Yields None if `folder` is None (no remote is swept), if nobody wants events, or if they cannot be stored: no sweep
    fails because of that. Raises SettingsError.
    """
    functions = [] if on_event is None else [Callback(on_event, Callback.of_sweeper)]
    wants = wants_of(settings, callback=Callback.of_sweeper if functions else "")
    if not wants or folder is None:
        yield None
        return
    with contextlib.ExitStack() as held:

        def open_outbox() -> OwnOutbox:  # owned at once: this may be cancelled while the thread opens it
            return held.enter_context(contextlib.closing(OwnOutbox(folder)))

        try:
            outbox = await in_thread(open_outbox)
        except JournalError as error:
            logger.error("events_not_reported error=%s; events of remotes are lost", error)  # noqa: TRY400  no bug of ours
            yield None
            return
        delivery = Delivery(outbox, [*functions, *sinks_of(settings, os.environ)], wants)
        try:
            yield RemoteEvents(outbox, wants, delivery)
        finally:
            await close_on_thread(delivery, settings.event_grace_s)
