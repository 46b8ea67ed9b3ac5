"""How all ranks of one launch agree on its generation through the store, without a collective.

The first rank of a launch creates `generations/<g>.json`; the others find it by the launch key that they share, and
each takes its place in it. But a launch key may recur (a gang that is started again on the same port, an operator's
own id), and a free place proves nothing, because its rank may have died before it opened. So the creator sends
heartbeats (it counts up a small object until all ranks are there), and a rank joins only once it has seen that the
creator was alive after the rank itself began. As long as no process of an earlier launch lives, all members of a
generation belong to one launch.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpt_async.core import keys, records, waiting
from ckpt_async.core.model import Beat, CheckpointId, Generation, Opened
from ckpt_async.errors import (
    CapabilityError,
    FencedError,
    InvalidRecordError,
    SettingsError,
    UnknownVersionError,
)
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import advance, create_once, read, read_record
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none, both

logger = logging.getLogger(__name__)

# How often a rank looks for the generation that rank 0 claims, in a store without conditional PUT.
CLAIM_POLL_S = 0.5
# The pause between two heartbeats; it grows while a rank does not come.
BEAT_S, BEAT_MAX_S = 0.2, 2.0
# A write may still be on its way when its writer dies, so it takes two to prove that the writer lives.
NUM_SIGNS = 2
# How long a creator may be silent before it is taken for dead: longer than a starved node delays a heartbeat. A rank
# that takes it for dead wrongly fences the others, which are told so.
PATIENCE_S = 10.0


async def agree(
    store: PatientStore,
    *,
    rank: int,
    world_size: int,
    launch_key: str,
    explicit: int | None,
    now: float,
    member: str | None = None,
) -> Generation:
    """Join or claim this launch's generation and return its record.

    Takes a handful of small requests. If there are several ranks, the one that has claimed the generation must `beat`
    from now on.

    `explicit` is a generation that was given to all ranks (for example, broadcast at start); it must be new for this
    rank. Raises FencedError if a newer one exists, SettingsError if it was used before. `member` identifies the
    trainer, also if another process continues for it.
    """
    me = records.encode_member(member or uuid.uuid4().hex, rank)
    agreement = _Agreement(store, rank, world_size, launch_key, now, me)
    return await (agreement.find() if explicit is None else agreement.take(explicit))


async def beat(
    store: PatientStore,
    number: int,
    *,
    rank: int,
    world_size: int,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Send heartbeats for the rank that claimed this generation, until all ranks are there or `is_over`.

    Returns at once for any other rank.
    """

    def next_beat(there: bytes | None) -> bytes | None:
        last = records.decode_beat(there, number) if there is not None else None
        if last is None or last.rank != rank:
            return None
        return records.encode_beat(Beat(number, rank, last.count + 1))

    # After an outage, the other ranks may ask again at once, and would take a creator in a long back-off for dead.
    store = store.pausing_at_most(BEAT_MAX_S)
    key, beaten_s = keys.beat_key(number), 0.0
    while not is_over():
        there = await advance(store, key, next_beat)
        if there is None or records.decode_beat(there, number).rank != rank:
            return
        if not await absent_ranks(store, number, world_size):
            return
        pause_s = beat_pause_s(beaten_s)
        await asyncio.sleep(pause_s)
        beaten_s += pause_s


def beat_pause_s(beaten_s: float) -> float:
    """Return the pause before the next heartbeat, after sending them for `beaten_s`.

    Waiting for a rank that never comes must not cost a request five times a second.
    """
    return min(BEAT_MAX_S, max(BEAT_S, beaten_s / 50))


async def newest_generation(store: PatientStore, *, after: int = 0) -> int:
    """Return the newest generation after `after`, or `after` itself if there is none. Costs one listing."""
    start = keys.generation_key(after) if after else ""
    listing = await store.list(keys.GENERATIONS, start_after=start)
    numbers = (keys.parse_generation_key(each.key) for each in listing.objects)
    return max((number for number in numbers if number is not None), default=after)


async def look_from(store: PatientStore, number: int) -> tuple[int, ObjectInfo | None]:
    """Return the newest generation from `number` on (`number` itself if there is none), and what a listing says of the
    record of `number`. Costs one listing.
    """
    listing = await store.list(
        keys.GENERATIONS, start_after=keys.generation_key(number - 1) if number > 1 else ""
    )
    found = {keys.parse_generation_key(each.key): each for each in listing.objects}
    return max((each for each in found if each is not None), default=number), found.get(number)


async def _newest_decided(store: PatientStore, *, after: int) -> int:
    """Return the newest generation after `after` that has a decision, or `after` itself if there is none: the store may
    have lost its record. Costs one listing, which is normally empty.
    """
    listing = await store.list(
        keys.DECISIONS, start_after=keys.decision_key(CheckpointId(after, keys.MAX_STEP))
    )
    found = (keys.parse_decision_key(each.key) for each in listing.objects)
    return max((each.generation for each in found if each is not None), default=after)


async def is_forgotten(store: PatientStore, number: int, rank: int, nonces: Mapping[int, str]) -> bool:
    """Return whether the store cannot be where this rank took its place in generation `number`: it was wiped since, or
    is another store. Only reads.

    Of generations before the newest, a sweeper has removed the places, but not the records: see `is_taken`.
    """
    newest, is_others = await both(newest_generation(store), is_taken(store, nonces))
    if is_others:
        return True
    if newest < number and await nonce_of(store, number) is not None:
        newest = number  # a listing may lag
    if newest == number:
        # Whoever has claimed it again for this rank has not taken its place; the nonce tells all the better.
        return not nonces.get(number) and await read(store, keys.member_key(number, rank)) is None
    return newest < number


async def is_taken(store: PatientStore, nonces: Mapping[int, str]) -> bool:
    """Return whether the store has given one of these generations to another launch, and with it the keys of what was
    saved in it. `nonces` are those of their records, as this rank has read them. Costs one GET for each.
    """
    there = await all_or_none(nonce_of(store, number) for number in nonces)
    return any(found not in (None, "", mine) for found, mine in zip(there, nonces.values(), strict=True))


async def reclaim(store: PatientStore, opened: Opened) -> bool:
    """Return whether the generation that this rank has opened last is there. If the store has lost it (it was wiped, or
    put back), it is claimed again, so that later launches take other numbers and never write the same keys.

    But not if another launch may have begun there since, which would be fenced: what is there must belong to the
    history of this rank. Costs one GET if the generation is there.
    """
    number, nonce = opened.generation, opened.nonce
    there = await nonce_of(store, number)
    if there is None:
        newest = await newest_generation(store)
        is_other = newest not in (0, number)  # a listing may lag
        if is_other and await nonce_of(store, newest) != opened.nonces.get(newest):
            return False
        mine = Generation(number, nonce, opened.world_size, socket.gethostname(), nonce, time.time())
        await create_once(store, keys.generation_key(number), records.encode_generation(mine))
        there = await nonce_of(store, number)
    return there in ("", nonce)


async def nonce_of(store: PatientStore, number: int) -> str | None:
    """Return the nonce in a generation's record; None if there is none, "" if it is unreadable."""
    try:
        found = await read_record(
            store, keys.generation_key(number), lambda data: records.decode_generation(data, number)
        )
    except InvalidRecordError as error:
        logger.warning("generation_unreadable error=%s; whose it is remains unknown", error)
        return ""
    return found[0].nonce if found else None


async def absent_ranks(store: PatientStore, number: int, world_size: int) -> list[int]:
    """Return the ranks that have not taken their places in a generation, as far as the listing goes.

    It ends with the first page that lacks a rank.
    """

    def ranks(objects: Sequence[ObjectInfo]) -> set[int]:
        return {found[1] for each in objects if (found := keys.parse_member_key(each.key)) is not None}

    prefix = keys.members_prefix(number)
    listing = await store.list(prefix, enough=lambda objects: waiting.has_gap(ranks(objects)))
    return waiting.missing_among(ranks(listing.objects), world_size, is_whole=listing.is_whole)


async def _read_generation(store: PatientStore, number: int) -> Generation | None:
    """Return a generation's record; None if it is unreadable.

    Such a generation is skipped, because otherwise no launch would ever get past it.

    Raises InvalidRecordError for a record of a newer version, and if two reads differ: then the network is at fault,
    and other ranks may well be able to read it.
    """
    key = keys.generation_key(number)
    seen: list[str] = []
    for _ in range(2):
        try:
            found = await read_record(store, key, lambda data: records.decode_generation(data, number))
            return found[0] if found else None
        except UnknownVersionError:
            raise
        except InvalidRecordError as error:
            if seen and str(error) != seen[0]:
                raise
            seen.append(str(error))
    logger.warning("generation_unreadable error=%s; skipping it", seen[0])
    return None


class _Agreement:
    """One rank's way to the generation of its launch."""

    def __init__(
        self, store: PatientStore, rank: int, world_size: int, launch_key: str, now: float, member: bytes
    ) -> None:
        self._store = store
        self._rank, self._world_size, self._launch_key, self._now = rank, world_size, launch_key, now
        self._member = member
        self._has_told_of_wait = False
        self._waited_in = 0  # the newest generation of our launch key in which this rank waited for a sign
        is_first = rank == 0
        # Without conditional PUT, two ranks could claim one generation. So only rank 0 claims, and it joins no other's.
        self._may_claim = store.capabilities.conditional_put or is_first
        self._may_join = world_size > 1 and (store.capabilities.conditional_put or not is_first)

    async def take(self, number: int) -> Generation:
        newest = await newest_generation(self._store)
        if newest > number:
            raise FencedError(f"generation {number} was given, but generation {newest} has already started")
        key, proposal = keys.generation_key(number), records.encode_generation(self._proposal(number))
        generation = records.decode_generation(await create_once(self._store, key, proposal), number)
        if generation.world_size != self._world_size:
            raise SettingsError(
                f"generation {number} has world size {generation.world_size}, but this rank has"
                f" {self._world_size}"
            )
        if not await self._join(number):
            raise SettingsError(
                f"generation={number} was already used by rank {self._rank}: every launch needs a new one",
                hint="leave it out, or pass the last one plus 1",
            )
        # Without conditional PUT, another rank may replace the record at the same time.
        return generation if self._store.capabilities.conditional_put else replace(generation, nonce="")

    async def find(self) -> Generation:
        began_with = number = await newest_generation(self._store)
        if not began_with:
            await steps.refuse_unfinished_copy(self._store)
        while True:
            if (found := await self._of_our_key(number)) is not None:
                newest = await self._wait_for_sign(number, is_new=number > began_with)
                if newest is not None and newest > number:
                    number = newest
                    continue
                if newest is not None and await self._join(number):
                    return found
            if not self._may_claim:
                number = await self._wait_for_newer(number)
                continue
            number = 1 + await _newest_decided(self._store, after=number)
            if number > keys.MAX_GENERATION:
                raise CapabilityError(f"this run has had {number - 1} generations; use a new run name")
            # If another process has won, the next round joins its generation if it is of our start, else goes past it.
            proposal = self._proposal(number)
            if await self._claim(proposal):
                self._store = self._store.pausing_at_most(BEAT_MAX_S)  # as in `beat`
                if await self._join(number):
                    await self._beat_first(number)
                    return proposal

    async def _claim(self, proposal: Generation) -> bool:
        data = records.encode_generation(proposal)
        return await create_once(self._store, keys.generation_key(proposal.number), data) == data

    async def _beat_first(self, number: int) -> None:
        """Write the first heartbeat, after taking our own place and before any other rank joins.

        If another process continues for us, it finds our place.
        """
        if self._world_size > 1:
            first = records.encode_beat(Beat(number, self._rank, 1))
            await create_once(self._store, keys.beat_key(number), first)

    def _proposal(self, number: int) -> Generation:
        host, nonce = socket.gethostname(), uuid.uuid4().hex
        return Generation(number, self._launch_key, self._world_size, host, nonce, self._now)

    async def _of_our_key(self, number: int) -> Generation | None:
        """Return the generation if it may be that of our start. Raises FencedError if our start is over."""
        if not number or not self._may_join:
            return None
        found = await _read_generation(self._store, number)
        if found is not None:
            self._reject_if_superseded(found)
        ours = (self._launch_key, self._world_size)
        return found if found is not None and (found.launch_key, found.world_size) == ours else None

    def _reject_if_superseded(self, found: Generation) -> None:
        """Raise FencedError if another launch has begun since this rank waits for the others of its own. A claim of the
        next generation would fence the newer launch.
        """
        if self._waited_in and found.launch_key != self._launch_key:
            raise FencedError(
                f"generation {found.number} of another launch began while this rank waited for the others of its own"
                f" launch in generation {self._waited_in}",
                hint="if this is the launch that you want, start it again",
            )

    async def _wait_for_sign(self, number: int, *, is_new: bool) -> int | None:
        """Return this generation once its creator has shown that it lives.

        Returns a newer one as soon as there is one, and None if this one's start appears to be over. `is_new`: the
        generation was not there when this rank began, so that its appearance is the first sign.
        """
        if not is_new:
            place = await read(self._store, keys.member_key(number, self._rank))
            if place is not None and place[0] == self._member:
                # Nobody joins without a heartbeat. So if there is none, it was us who claimed this generation.
                await self._beat_first(number)
                return number
            if place is not None:
                return None  # taken by a process of an earlier launch
        self._waited_in = number
        seen = await self._count_beats(number)
        proven_by, quiet_s = (-1 if is_new else seen) + NUM_SIGNS, 0.0
        while seen < proven_by:
            if quiet_s >= PATIENCE_S and self._may_claim:
                logger.warning(
                    "generation_is_dead generation=%d silent_for_s=%.0f; an earlier launch used the same"
                    " launch key, or the requests of its first rank take too long (few connections, a slow store)",
                    number,
                    quiet_s,
                )
                return None
            self._tell_of_wait(quiet_s)
            pause_s = 1.25 * BEAT_S * (proven_by - seen)
            await asyncio.sleep(pause_s)
            before, seen = seen, max(seen, await self._count_beats(number))
            quiet_s = quiet_s + pause_s if seen == before else 0.0
            if seen < proven_by:
                newest = await newest_generation(self._store, after=number)
                if newest > number:
                    return newest
        return number

    async def _count_beats(self, number: int) -> int:
        found = await read(self._store, keys.beat_key(number))
        try:
            return records.decode_beat(found[0], number).count if found else 0
        except InvalidRecordError as error:
            logger.warning("beat_unreadable error=%s; not counted as a sign of life", error)
            return 0

    async def _wait_for_newer(self, number: int) -> int:
        waited_s = 0.0
        while True:
            self._tell_of_wait(waited_s)
            await asyncio.sleep(CLAIM_POLL_S)
            waited_s += CLAIM_POLL_S
            newest = await newest_generation(self._store, after=number)
            if newest > number:
                return newest

    def _tell_of_wait(self, waited_s: float) -> None:
        """Say once that this rank, which may not claim, has waited for long."""
        if waited_s < PATIENCE_S or self._has_told_of_wait:
            return
        self._has_told_of_wait = True
        logger.warning(
            "waits_for_rank_0 rank=%d waited_s=%.0f; in a store without conditional PUT, only rank 0 can begin a"
            " start: check that it is running, and that it has the same remote and launch id",
            self._rank,
            waited_s,
        )

    async def _join(self, number: int) -> bool:
        """Take this rank's place in a generation; return False if another process had taken it."""
        key = keys.member_key(number, self._rank)
        return await create_once(self._store, key, self._member) == self._member
