"""Which incarnation of the run this start is, agreed by all its ranks through the store: no collective.

The first rank of a start creates `generations/<g>.json`, the others find it by the launch key they share.
A launch key that is used again (an operator restarts with the same id, elastic agents that disagree about
the restart count) is told apart by the members' objects: a rank joins a generation once, and one whose place
is taken belongs to a later start.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid

from ckpt_async import keys, records
from ckpt_async.conditional import create_once, read_record
from ckpt_async.errors import (
    CapabilityError,
    FencedError,
    InvalidRecordError,
    SettingsError,
    UnknownVersionError,
)
from ckpt_async.model import Generation
from ckpt_async.requests import Requests
from ckpt_async.store import Store

logger = logging.getLogger(__name__)

# Only without conditional PUT: how often a rank looks for the generation that rank 0 claims.
CLAIM_POLL_S = 0.5


async def agree(
    store: Store,
    requests: Requests,
    *,
    rank: int,
    world_size: int,
    launch_key: str,
    explicit: int | None,
    now: float,
    member: str | None = None,
) -> int:
    """Join or claim this start's generation and return it. A handful of small requests.

    `explicit` is a generation that all ranks were given (say, by one broadcast at start); it must be new for
    this rank. `member` names the trainer, also where another process goes on for it. Raises FencedError if a newer one
    exists, SettingsError if it was used before.
    """
    nonce = member or uuid.uuid4().hex

    def proposal(number: int) -> bytes:
        return records.encode_generation(
            Generation(number, launch_key, world_size, socket.gethostname(), uuid.uuid4().hex, now)
        )

    if explicit is not None:
        newest = await newest_generation(store, requests)
        if newest > explicit:
            raise FencedError(f"generation {explicit} was given, but generation {newest} has started already")
        data = await create_once(store, requests, keys.generation_key(explicit), proposal(explicit))
        _check_world_size(records.decode_generation(data, explicit), world_size)
        if not await _join(store, requests, explicit, rank, nonce):
            raise SettingsError(
                f"generation={explicit} was used before by rank {rank}: every start needs a new one",
                hint="leave it out, or pass one more than the last",
            )
        return explicit

    may_claim = store.capabilities.conditional_put or rank == 0
    number = await newest_generation(store, requests)
    while True:
        if number > 0:
            generation = await _read_generation(store, requests, number)
            if (
                generation is not None
                and (generation.launch_key, generation.world_size) == (launch_key, world_size)
                and await _join(store, requests, number, rank, nonce)
            ):
                return number
        if not may_claim:
            await asyncio.sleep(CLAIM_POLL_S)
            number = await newest_generation(store, requests)
            continue
        number += 1
        if number > keys.MAX_GENERATION:
            raise CapabilityError(f"this run has had {number - 1} generations; start a new run name")
        # Whoever wins, the next round joins it if it is of our start and goes past it if not.
        await create_once(store, requests, keys.generation_key(number), proposal(number))


async def _read_generation(store: Store, requests: Requests, number: int) -> Generation | None:
    """Which start it is; None if that cannot be read: it is passed over, for else no start would ever get beyond it.

    Raises InvalidRecordError for one of a newer version, and where two looks differ: that is the wire, and other ranks
    may well read it.
    """
    key = keys.generation_key(number)
    seen: list[str] = []
    for _ in range(2):
        try:
            found = await read_record(
                store, requests, key, lambda data: records.decode_generation(data, number)
            )
            return found[0] if found else None
        except UnknownVersionError:
            raise
        except InvalidRecordError as error:
            if seen and str(error) != seen[0]:
                raise
            seen.append(str(error))
    logger.warning("generation_unreadable error=%s; it is passed over", seen[0])
    return None


async def newest_generation(store: Store, requests: Requests, *, after: int = 0) -> int:
    """The newest generation past `after`, or `after` itself: one listing."""
    start = keys.generation_key(after) if after else ""
    listing = await requests.control("list", lambda: store.list(keys.GENERATIONS, start_after=start))
    numbers = (keys.parse_generation_key(each.key) for each in listing.objects)
    return max((number for number in numbers if number is not None), default=after)


async def _join(store: Store, requests: Requests, number: int, rank: int, nonce: str) -> bool:
    """Take this rank's place in a generation; False if another process had taken it."""
    member = records.encode_member(nonce, rank)
    return await create_once(store, requests, keys.member_key(number, rank), member) == member


def _check_world_size(generation: Generation, world_size: int) -> None:
    if generation.world_size != world_size:
        raise SettingsError(
            f"generation {generation.number} has world size {generation.world_size}, this rank has {world_size}"
        )
