"""Resuming together: every rank of a job gets the same checkpoint, and each byte of it leaves the store at most once.

What a node still has is used where it is, and what another node has is copied from there. What nobody has is fetched
from the store by one of the nodes that need it, and by the others from that one: replicas (DDP, HSDP) thus load the
store only once. Everything is verified by checksum, so no copy is trusted because of its origin. Collectives carry a
few small objects before and after the transfer; while bytes move nobody waits in one. What fails on one rank is raised
on all of them.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_async import restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import CheckpointGoneError, DamagedCheckpointError, ResumeError
from ckpt_async.restore import addresses
from ckpt_async.restore.fetching import FetchOptions, Where, fetch_as, use_newest
from ckpt_async.restore.session import MAX_CONCURRENT_READS
from ckpt_async.restore.sources import LocalCopies
from ckpt_async.stores import StoreOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Needs:
    """The files that one rank wants of a checkpoint, by name, and those that its node has already (wanted or not)."""

    node: str
    wanted: frozenset[str]
    has: frozenset[str]


def first_fetches(needs: Sequence[Needs], size_bytes: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Return which node fetches which files from the store. Pure, and the same on every rank.

    Every file that some node wants and none has is fetched by one of the nodes that want it; the largest files come
    first, each to the node with the least to fetch.
    """
    wanted_by: dict[str, set[str]] = {}
    there: set[str] = set()
    for need in needs:
        there |= need.has
        for name in need.wanted:
            wanted_by.setdefault(name, set()).add(need.node)
    load = dict.fromkeys(sorted({need.node for need in needs}), 0)
    chosen: dict[str, set[str]] = {node: set() for node in load}
    for name in sorted(wanted_by.keys() - there, key=lambda name: (-size_bytes[name], name)):
        node = min(sorted(wanted_by[name]), key=lambda node: load[node])
        chosen[node].add(name)
        load[node] += size_bytes[name]
    return {node: frozenset(names) for node, names in chosen.items()}


def fetch_together(
    remote: str,
    destination: Where,
    *,
    kind: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    ranks: Collection[int] | None = None,
    files: Collection[str] | None = None,
    step: int | None = None,
    world_size: int | None = None,
    process_group: Any = None,
    node: str | None = None,
    peer_host: str | None = None,
    drain_timeout_s: float = 0.0,
    store_options: StoreOptions | None = None,
    overwrite: bool = False,
    local_cache: str | os.PathLike[str] | None = None,
    num_concurrent_reads: int = MAX_CONCURRENT_READS,
) -> tuple[restore.Checkpoint, restore.FetchReport] | None:
    """Run `restore.find` and `restore.fetch` on all ranks of a process group at once.

    Without a group there is one rank. Returns None on all ranks if there is no checkpoint (of this `kind`). `ranks` and
    `files` say what *this* rank needs (`ranks=[dist.get_rank()]` for a file per rank; by default all). `destination` is
    the folder to fetch to, or a function of the checkpoint. `world_size` is that of `restore.find`. `folder` is the
    trainer's on this node. `overwrite` replaces a file in the destination that is not the checkpoint's, for example one
    torn by a power loss. `local_cache` is that of `fetch`, and used only on this node: files that are checked only by
    size are not served to others.

    If any rank finds a checkpoint damaged, all of them go on to the next older one. Ranks with the same `node` (by
    default: those that share the destination, on one machine) share its files: each file is fetched once, and the
    others wait for its lock. Other nodes reach this one under `peer_host`, or else at the interfaces that
    GLOO_SOCKET_IFNAME names, or else at the addresses that it has, IPv6 or IPv4. What they cannot get from it comes
    from the store, and is logged in one line. Collective: every rank of the group must call it. Blocks. Only CPU
    objects are sent, so a gloo group works even if the default group uses NCCL.

    Raises ResumeError on every rank, naming the ranks that failed and why; errors of the search,
    NoUsableCheckpointError and StoreError, are also raised on all ranks.
    """
    together = _Together(process_group)
    options = FetchOptions(
        destination=destination,
        ranks=ranks,
        files=files,
        folder=folder,
        overwrite=overwrite,
        local_cache=local_cache,
        num_concurrent_reads=num_concurrent_reads,
    )

    def newest(passing_over: Collection[CheckpointId]) -> restore.Checkpoint | None:
        if folder is not None and drain_timeout_s > 0 and not passing_over:
            # Every node drains: what it was still uploading is found by all once it is committed.
            restore.drain_predecessor(folder, drain_timeout_s, store_options)
            together.gather(None)
        found: restore.Checkpoint | None = together.on_first(
            lambda: restore.find(
                remote,
                kind=kind,
                folder=folder,
                step=step,
                world_size=world_size,
                store_options=store_options,
                passing_over=passing_over,
            )
        )
        return found

    return use_newest(
        newest,
        lambda checkpoint: _fetch(together, checkpoint, options, node, peer_host),
        may_pass_over=step is None,
    )


def _fetch(
    together: _Together,
    checkpoint: restore.Checkpoint,
    options: FetchOptions,
    node: str | None,
    peer_host: str | None,
) -> restore.FetchReport:
    destination = Path(options.where(checkpoint))
    copies = LocalCopies(options.folder, checkpoint)
    here = {name: found[0] for name, file in checkpoint.files.items() if (found := copies.find(file))}
    with together.all_or_none("look up what is needed"):
        wanted = frozenset(file.name for file in checkpoint.select(options.ranks, options.files))
    # Wanted files are served, too: they become available once they are complete.
    places = {name: destination / name for name in wanted} | here
    reports: list[restore.FetchReport] = []

    def fetch(names: Collection[str], peers: Collection[restore.Peer]) -> None:
        if names:
            files = [glob.escape(name) for name in names]
            these = replace(options, destination=destination, ranks=None, files=files, peers=peers)
            reports.append(fetch_as(checkpoint, these))

    with contextlib.ExitStack() as stack:
        with together.all_or_none("serve its files to the others"):
            served = {checkpoint.files[name].key: path for name, path in places.items()}
            server = stack.enter_context(restore.PeerServer(served, peer_host))
            own_node = node if node is not None else addresses.place(destination)
        needs = together.gather(Needs(own_node, wanted, frozenset(here)))
        peers = _peers(together, own_node, server)
        sizes = {name: file.size_bytes for name, file in checkpoint.files.items()}
        first = first_fetches(needs, sizes)[own_node] & wanted
        with together.all_or_none("fetch from the store"):
            fetch(first, ())
        with together.all_or_none("fetch what other ranks have"):
            fetch(wanted, peers)
    return _merged(reports, wanted, destination)


def _peers(together: _Together, node: str, server: restore.PeerServer) -> list[restore.Peer]:
    """Return the servers of the other nodes, with the addresses under which this node reaches them."""
    machine = addresses.machine()
    offers = together.gather((node, machine, server.local_peer, server.peer))
    if server.peer is None and any(there != machine for _, there, *_ in offers):
        logger.warning(
            "no_address_for_peers host=%s; other nodes will load this node's files from the store;"
            " pass peer_host= or set GLOO_SOCKET_IFNAME",
            socket.gethostname(),
        )
    others = [(nearby if there == machine else far) for other, there, nearby, far in offers if other != node]
    return [peer for peer in others if peer is not None]


def _merged(
    reports: list[restore.FetchReport], wanted: frozenset[str], destination: Path
) -> restore.FetchReport:
    bytes_from: dict[str, int] = {}
    for report in reports:
        for kind, count in report.bytes_from.items():
            bytes_from[kind] = bytes_from.get(kind, 0) + count
    if len(reports) == 2:  # the second fetch found what the first one had fetched
        brought = reports[0].size_bytes
        bytes_from["there"] = bytes_from.get("there", 0) - brought
        bytes_from = {kind: count for kind, count in bytes_from.items() if count}
    return restore.FetchReport(
        {name: destination / name for name in wanted}, bytes_from, sum(each.duration_s for each in reports)
    )


class _Together:
    """Exchanges small objects between the ranks of a group; an error of one becomes an error of all.

    Without a group there is one rank.
    """

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if is_alone else dist.get_rank(process_group)
        self._size = 1 if is_alone else dist.get_world_size(process_group)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank."""
        if self._size == 1:
            return [value]
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Call `work` on the first rank, and return or raise its result on all of them."""
        value: Any = None
        if self.rank == 0:
            try:
                value = (work(), None)
            except Exception as error:  # noqa: BLE001  raised on every rank
                value = (None, error)
        result, failure = self.gather(value)[0]
        if failure is not None:
            raise failure
        return result

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Run a step that all ranks take: it ends when it has ended on each, and fails on all if it failed on one.

        If it failed only because of a damaged checkpoint, all ranks see it as damaged.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised below, on every rank
            own = error
        is_damaged = isinstance(own, DamagedCheckpointError | CheckpointGoneError)
        told = self.gather(None if own is None else (is_damaged, f"{type(own).__name__}: {own}"))
        failed = {rank: each for rank, each in enumerate(told) if each is not None}
        if not failed:
            return
        causes = "; ".join(f"rank {rank}: {message}" for rank, (_, message) in list(failed.items())[:5])
        more = f"; and {len(failed) - 5} more ranks" if len(failed) > 5 else ""
        kind = DamagedCheckpointError if all(damaged for damaged, _ in failed.values()) else ResumeError
        raise kind(f"could not {what}: {causes}{more}") from own
