"""The watcher's own requests to the store, beside its uploader's: decisions, and messages between nodes.

The calls block. They come from one thread and use one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import InvalidRecordError
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import create_once, if_readable, read
from ckpt_async.protocol.generation import newest_generation
from ckpt_async.restore.checkpoint import RemoteFile, files_of
from ckpt_async.stores import StoreOptions
from ckpt_async.threads import LoopThread
from ckpt_async.transfer.patient import PatientStore, connect
from ckpt_async.transfer.together import all_or_none
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.background import attend

T = TypeVar("T")

# Each round of a watcher asks the store, and the next round tries again after a failure.
ANSWER_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 60.0


class Remote:
    """A run in the store. Opening it raises whatever keeps the run from being read."""

    def __init__(self, url: str, options: StoreOptions | None, settings: Settings, *, writes: bool) -> None:
        self.while_waiting: Callable[[], None] = lambda: (
            None
        )  # called periodically while waiting for an answer
        self._bulk = connect(url, options, settings)
        self._thread = LoopThread("ckpt-async-watch", asyncio.new_event_loop())
        with contextlib.ExitStack() as opened:
            opened.callback(self._thread.close)
            opened.callback(lambda: self.call(lambda _: self._bulk.close()))
            self.call(lambda _: self._bulk.open(OPEN_TIMEOUT_S, is_read_only=not writes))
            self._opened = opened.pop_all()

    def call(self, work: Callable[[PatientStore], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine with the store, and wait for its end."""
        answer = self._thread.begin(work(self._bulk.answering_within(ANSWER_TIMEOUT_S)))
        try:
            return attend(answer, self.while_waiting)
        except BaseException:
            answer.cancel()
            raise

    def close(self) -> None:
        self.while_waiting = lambda: None
        self._opened.close()

    # --- between nodes -------------------------------------------------------------------------------------

    def announce(self, announced: Announcement) -> Announcement:
        """Announce a complete checkpoint to the other nodes, and return the announcement that holds.

        If several nodes see the marker, the first one's announcement holds.
        """
        key = keys.announcement_key(announced.checkpoint)
        there = self.call(lambda store: create_once(store, key, announced.encode()))
        return Announcement.decode(there, announced.checkpoint)

    def announced(
        self, generation: int, known: Collection[int]
    ) -> list[tuple[CheckpointId, Announcement | InvalidRecordError]]:
        """Return the announcements of this generation, without the `known` steps.

        They are in order of steps. Where an announcement cannot be read, its error is returned.
        """

        def decoded(data: bytes, id_: CheckpointId) -> Announcement | InvalidRecordError:
            try:
                return Announcement.decode(data, id_)
            except InvalidRecordError as error:
                return error

        async def work(store: PatientStore) -> list[tuple[CheckpointId, Announcement | InvalidRecordError]]:
            listing = await store.list(keys.announcements_prefix(generation))
            named = (keys.parse_announcement_key(each.key) for each in listing.objects)
            ids = [each for each in named if each is not None and each.step not in known]
            found = await all_or_none(read(store, keys.announcement_key(id_)) for id_ in ids)
            there = ((id_, each) for id_, each in zip(ids, found, strict=True) if each is not None)
            return [(id_, decoded(each[0], id_)) for id_, each in there]

        return self.call(work)

    def newest_generation(self, generation: int) -> int:
        return self.call(lambda store: newest_generation(store, after=generation))

    def say_ended(self, generation: int, node: int) -> None:
        """Tell the other nodes that this one announces nothing more."""
        self.call(lambda store: create_once(store, keys.ended_key(generation, node), b"{}\n"))

    def ended(self, generation: int) -> set[int]:
        """Return the nodes that have said that they announce nothing more."""

        async def work(store: PatientStore) -> set[int]:
            listing = await store.list(f"{keys.members_prefix(generation)}ended-")
            found = [keys.parse_ended_key(each.key) for each in listing.objects]
            return {each[1] for each in found if each is not None}

        return self.call(work)

    # --- questions -----------------------------------------------------------------------------------------

    def committed_as(self, name: str) -> list[Decision]:
        """Return every readable committed checkpoint of this name."""

        async def work(store: PatientStore) -> list[Decision]:
            listing = await store.list(f"{keys.DATA}{name}.g")
            places = {keys.parse_data_key(each.key) for each in listing.objects}
            ids = sorted(each[0] for each in places if each is not None and each[1] == name)
            found = await all_or_none(if_readable(steps.read_settled(store, each)) for each in ids)
            return [each for each in found if each is not None and each.outcome is Outcome.COMMIT]

        return self.call(work)

    def newest_commit(self) -> Decision | None:
        """Return the commit that `latest` points to, if there is one."""

        async def work(store: PatientStore) -> Decision | None:
            latest = await steps.read_latest(store)
            found = await if_readable(steps.read_settled(store, latest.checkpoint)) if latest else None
            return found if found is not None and found.outcome is Outcome.COMMIT else None

        return self.call(work)

    def lost(self, committed: Collection[CheckpointId]) -> list[CheckpointId]:
        """Return which of these committed checkpoints the store has lost: it was wiped or put back since."""
        return self.call(lambda store: steps.lost(store, committed))

    def decisions(self, ids: Iterable[CheckpointId]) -> Mapping[CheckpointId, Decision]:
        """Return the decisions on these checkpoints, without those that are not decided."""

        async def work(store: PatientStore) -> dict[CheckpointId, Decision]:
            asked = list(ids)
            found = await all_or_none(steps.read_settled(store, each) for each in asked)
            return {id_: each for id_, each in zip(asked, found, strict=True) if each is not None}

        return self.call(work)

    def files(self, decision: Decision) -> Mapping[str, RemoteFile]:
        """Return the files of a committed checkpoint by name; none if its receipts cannot be read."""
        return self.call(lambda store: _files(store, decision))


async def _files(store: PatientStore, decision: Decision) -> Mapping[str, RemoteFile]:
    ranks = range(decision.world_size)
    try:
        return files_of(await all_or_none(steps.bound_receipt(store, decision, rank) for rank in ranks))
    except InvalidRecordError:
        return {}
