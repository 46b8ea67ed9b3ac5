"""An open store for reading, and the lease that keeps a checkpoint in place while it is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ckpt_async.core import keys, records
from ckpt_async.core.arguments import whole
from ckpt_async.core.model import CheckpointId, Damage, Lease, Outcome
from ckpt_async.core.settings import Settings, load
from ckpt_async.core.units import MIB
from ckpt_async.errors import (
    CheckpointGoneError,
    CkptAsyncError,
    DamagedCheckpointError,
    FailureReason,
    IntegrityError,
    InvalidRecordError,
    SettingsError,
    StoreError,
    UnreliableReadError,
)
from ckpt_async.local.folder import place_of
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import read
from ckpt_async.restore.checkpoint import OWN_FORMAT, Checkpoint
from ckpt_async.restore.options import MAX_CONCURRENT_READS
from ckpt_async.stores import StoreOptions
from ckpt_async.threads import in_thread
from ckpt_async.transfer.budgets import Budgets
from ckpt_async.transfer.link import KnownLink, known_file_name, note_known, recall_known
from ckpt_async.transfer.patient import PatientStore, connect

logger = logging.getLogger(__name__)

# Long enough that renewals may fail for minutes, short enough that a killed reader does not hold data back
# for long.
LEASE_TTL_S = 900.0
CONCURRENT_READS_AT_FIRST = 8
# Each takes a socket and a locked file: at most this fraction of what the process may still open.
OPEN_FILES_SHARE = 1 / 4
# A lease expires by itself, so nobody waits long to drop it.
DROP_TIMEOUT_S = 5.0
# Someone is waiting for the answer, so a store that is away for longer is reported as an error.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Session:
    """The store at `remote`, opened for reading.

    `store` answers within PATIENCE_S or raises. `bulk` is the same store for long transfers: it keeps going through
    outages and credential rotation until nothing has arrived for PATIENCE_S, with as many concurrent requests as
    the link takes.
    """

    remote: str
    options: StoreOptions | None
    store: PatientStore
    bulk: PatientStore
    pace: Pace
    ending: set[asyncio.Task[None]] = field(default_factory=set)  # awaited when the session is closed


@contextlib.asynccontextmanager
async def session(
    remote: str,
    options: StoreOptions | None,
    *,
    num_concurrent_reads: int = MAX_CONCURRENT_READS,
    folder: str | os.PathLike[str] | None = None,
) -> AsyncIterator[Session]:
    """Open `remote` read-only for the duration of the block. If an answer repeatedly fails to match the checksum
    that the store sends with it, the block ends with UnreliableReadError. The trainer's `folder` has what earlier
    readers have learned about the link.
    """
    num_concurrent_reads = whole(num_concurrent_reads, "num_concurrent_reads", 1, 1024, SettingsError)
    num_concurrent_reads = affordable(num_concurrent_reads)
    at_first = min(CONCURRENT_READS_AT_FIRST, num_concurrent_reads)
    settings: Settings = load(
        {"num_concurrent_uploads": at_first, "max_concurrent_uploads": num_concurrent_reads}, os.environ
    )
    path = place_of(folder) / keys.PRIVATE / known_file_name("down") if folder is not None else None
    known = await in_thread(recall_known, path, remote, time.time()) if path is not None else None
    budgets = Budgets(settings, few=num_of_cores(), direction="down", known=known)
    bulk = connect(remote, options, settings, silence_s=PATIENCE_S, budgets=budgets)
    try:
        await bulk.open(PATIENCE_S, is_read_only=True)
        opened = Session(remote, options, bulk.answering_within(PATIENCE_S), bulk, Pace())
        try:
            yield opened
        finally:
            await asyncio.gather(*opened.ending, return_exceptions=True)
    except IntegrityError as error:
        raise unreliable(str(error)) from error
    finally:
        await bulk.close()
        budgets.close()
        if path is not None and bulk.link.is_known:
            with contextlib.suppress(OSError):  # it may be read-only; the next reader measures for itself
                found = KnownLink(bulk.link.limit, bulk.link.connection_bytes_per_s)
                await in_thread(note_known, path, remote, found, time.time())


def affordable(most: int) -> int:
    """Return as many of these as the process may open, given its limit and what is open now: a trainer's data loaders
    may hold hundreds of descriptors.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    num_open = 0
    with contextlib.suppress(OSError):  # not every container has it
        num_open = len(os.listdir("/dev/fd"))
    return min(most, max(1, int((soft - num_open) * OPEN_FILES_SHARE)))


class _NotTakenError(CkptAsyncError):
    """A lease was not taken. Not a StoreError, because patient reads would wait that out."""


class HeldLease:
    """A lease that keeps retention away from a checkpoint while it is read (rule R3). What is read while the lease
    is being taken counts only once it is taken.
    """

    def __init__(self, session: Session, lease: Lease) -> None:
        self._session, self._lease = session, lease
        self._good_until = time.monotonic() + lease.ttl_s * 2 / 3
        self._is_needed, self._is_gone = True, False
        self._taking = asyncio.ensure_future(self._take())

    def check(self) -> None:
        """Raise CheckpointGoneError once the lease no longer protects the checkpoint, or another error if the lease
        could not be taken; `leased` then raises the reason.
        """
        if self._taking.done() and (self._taking.cancelled() or self._taking.exception() is not None):
            raise _NotTakenError("there is no lease")
        if self._is_needed and (self._is_gone or time.monotonic() > self._good_until):
            raise CheckpointGoneError(
                f"{self._lease.checkpoint} "
                + (
                    "was pruned while it was being read"
                    if self._is_gone
                    else "is no longer protected: its lease expired"
                ),
                hint="call `find` again",
            )

    async def taken(self) -> None:
        """Wait until the lease is taken. Raises CheckpointGoneError if the checkpoint no longer exists."""
        await asyncio.shield(self._taking)

    async def _take(self) -> None:
        """Take the lease. If it cannot be written, for lack of permission or space, read without one, which is
        logged.
        """
        try:
            decision = await steps.take_lease(self._session.store, self._lease)
        except StoreError as error:
            if error.reason not in (FailureReason.AUTH, FailureReason.DISK):
                raise
            logger.warning(
                "reading_without_lease %s error=%s; retention may prune the checkpoint while it is read",
                self._lease.checkpoint,
                error,
            )
            self._is_needed = False
            return
        if decision is None:
            self._is_needed = False  # and has been dropped
            raise CheckpointGoneError(
                f"{self._lease.checkpoint} was pruned before it was read", hint="call `find` again"
            )

    async def keep(self) -> None:
        """Renew the lease until cancelled. A failed renewal is retried soon, while the lease is still valid."""
        await self.taken()
        pause_s = self._lease.ttl_s / 3
        while self._is_needed and not self._is_gone:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            try:
                is_kept = await self._renew()
            except CkptAsyncError as error:
                logger.warning("lease_not_renewed %s error=%s", self._lease.checkpoint, error)
                pause_s = self._lease.ttl_s / 30
                continue
            pause_s = self._lease.ttl_s / 3
            if is_kept:
                self._good_until = began + self._lease.ttl_s * 2 / 3
            else:
                self._is_gone = True

    def give_up(self) -> None:
        """Stop taking the lease: nobody needs it any more."""
        self._taking.cancel()

    async def drop(self) -> None:
        """Drop the lease if it was taken, or may have been."""
        try:
            async with asyncio.timeout(DROP_TIMEOUT_S):
                await asyncio.wait([self._taking])
                if self._is_needed:
                    await steps.drop_lease(self._session.store, self._lease)
        except (StoreError, TimeoutError) as error:
            self._taking.cancel()
            logger.warning("lease_not_dropped %s error=%r; it will expire", self._lease.checkpoint, error)

    async def _renew(self) -> bool:
        """Renew the lease, and return whether the checkpoint is still protected. Once retention has decided to
        prune it, it waits for leases to end; it has seen this one, provided that the lease never ran out.
        """
        store, lease = self._session.store, self._lease
        await store.put(keys.lease_key(lease.checkpoint, lease.reader), records.encode_lease(lease))
        decision = await steps.read_settled(store, lease.checkpoint, only_reads=True)
        outcome = decision.outcome if decision is not None else None
        has_run_out = time.monotonic() > self._good_until
        return outcome is Outcome.COMMIT or (outcome is Outcome.PRUNING and not has_run_out)


class _NoLease(HeldLease):
    def __init__(self) -> None:
        pass

    def check(self) -> None:
        """Do nothing: a file that vanishes while it is read without a lease causes an error of its own."""

    async def taken(self) -> None:
        """Return at once."""

    def give_up(self) -> None:
        """Do nothing: there is no lease."""


@contextlib.asynccontextmanager
async def leased(session: Session, checkpoint: Checkpoint) -> AsyncIterator[HeldLease]:
    """Hold a lease on the checkpoint for the duration of the block. The block starts while the lease is still being
    taken, which is three round trips. Checkpoints of other tools cannot be leased.

    Raises CheckpointGoneError if the checkpoint no longer exists: at the end of the block, unless `check` raised it
    before.
    """
    if checkpoint.format != OWN_FORMAT:
        yield _NoLease()
        return
    held = HeldLease(session, Lease(checkpoint.id, _reader_name(), LEASE_TTL_S))
    keeping = asyncio.ensure_future(held.keep())
    try:
        yield held
        await held.taken()
    except _NotTakenError:
        await held.taken()  # raises the reason
        raise
    except BaseException:
        held.give_up()
        raise
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        session.ending.add(asyncio.ensure_future(held.drop()))


def unreliable(what: str) -> UnreliableReadError:
    return UnreliableReadError(
        f"{what}: the data is corrupted between the store and here",
        hint="nothing was marked as damaged; look at this node's network, memory and proxies, or try another node",
    )


async def damaged(session: Session, checkpoint: Checkpoint, reason: str) -> CkptAsyncError:
    """Return the error to raise when the store lacks what was committed, beyond doubt (see `discovery.sure`):
    CheckpointGoneError if the checkpoint has been pruned, else DamagedCheckpointError, of which later readers are
    told.
    """
    if checkpoint.format == OWN_FORMAT:
        if await is_gone(session, checkpoint.id):
            return CheckpointGoneError(
                f"{checkpoint.id} was pruned while it was being read", hint="call `find` again"
            )
        await mark_damaged(session, checkpoint.id, reason)
    return DamagedCheckpointError(f"{checkpoint.name} ({checkpoint.id}) is damaged: {reason}")


async def is_gone(session: Session, checkpoint: CheckpointId) -> bool:
    """Return whether the checkpoint has been pruned: then missing objects are no damage."""
    try:
        decision = await steps.read_settled(session.store, checkpoint, only_reads=True)
    except InvalidRecordError:
        return False
    return decision is None or decision.outcome is not Outcome.COMMIT


async def mark_damaged(session: Session, checkpoint: CheckpointId, reason: str) -> None:
    """Mark the checkpoint as damaged for later readers. This is best effort: the credentials may not permit writes,
    and the finding is reported here anyway.

    Raises UnreliableReadError if a record written here does not come back as it was written.
    """
    damage = Damage(checkpoint, reason, _reader_name(), time.time())
    try:
        await _check_the_wire(session, checkpoint, reason)
        await session.store.put(keys.damage_key(checkpoint), records.encode_damage(damage))
    except StoreError as error:
        logger.warning("damage_not_marked %s error=%s", checkpoint, error)
    logger.error("checkpoint_damaged %s reason=%s", checkpoint, reason)


async def _check_the_wire(session: Session, checkpoint: CheckpointId, reason: str) -> None:
    """Check that a lease written here comes back intact. Bytes that are always corrupted in the same way on their
    way look like damage, but here every byte of the lease is known, and credentials that may mark damage may write
    a lease.
    """
    lease = Lease(checkpoint, _reader_name(), LEASE_TTL_S)
    sent = records.encode_lease(lease)
    try:
        await session.store.put(keys.lease_key(checkpoint, lease.reader), sent)
        there = await read(session.store, keys.lease_key(checkpoint, lease.reader))
    finally:
        await steps.drop_lease(session.store, lease)
    if there is None or there[0] != sent:
        raise unreliable(
            f"{checkpoint} seems to be damaged ({reason}), but a record written just now also came back"
            " corrupted"
        )


def _reader_name() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


# How long a request should take. A longer one loses more with a broken connection, or may end after all the
# others; a shorter one loses more to round trips.
REQUEST_S = 1.0
# How long the last request may run alone: on a fast link this loses less than many small requests would.
LAST_S = 0.1
# On a fast link the requests themselves are the cost: with 16 MiB, loopback loses a tenth of its throughput.
MAX_REQUEST_BYTES = 32 * MIB
# Weight of the newest request in the measured rate, against all those before.
NEWEST = 0.25


class Pace:
    """The measured pace of one reader's connections. Used on one event loop."""

    def __init__(self) -> None:
        self._bytes_per_s = 0.0  # of one connection; 0: unknown so far

    def request_bytes(self, left_bytes: int, num_at_once: int) -> int:
        """Return how many bytes to request next, when nobody has requested `left_bytes` yet and `num_at_once`
        requests run concurrently. As long as the rate is unknown, the result is 0: the least possible.
        """
        share = max(left_bytes // (2 * num_at_once), int(self._bytes_per_s * LAST_S))
        return min(int(self._bytes_per_s * REQUEST_S), share, MAX_REQUEST_BYTES)

    def took(self, size_bytes: int, took_s: float) -> None:
        """Note that a request has transferred this many bytes in this time."""
        rate = size_bytes / max(took_s, 1e-6)
        self._bytes_per_s += (rate - self._bytes_per_s) * (NEWEST if self._bytes_per_s else 1.0)


def num_of_cores() -> int:
    """Return the number of cores this process may use, which is the best number of threads when the cores limit the
    rate: more threads only compete for the GIL and the caches. Measured on two cores: a download over TLS takes an
    eighth longer with three threads than with two, and a third longer with eight; many small files take twice as
    long with eight.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
