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
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch.distributed as dist

from ckpt_async import restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.restore.fetching import Where, use_newest, where
from ckpt_async.restore.options import FetchLatestOptions, FetchOptions, FindOptions, check, part
from ckpt_async.restore.peers import machine, place
from ckpt_async.restore.sources import LocalCopies
from ckpt_async.torch.agreement import on_all_ranks, run_on_one, told_by_all

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


def find_together(
    remote: str, group: dist.ProcessGroup | None = None, **options: Unpack[FindOptions]
) -> restore.Checkpoint | None:
    """Run `restore.find` on the first rank of a group, and return its result on all of them. A collective.

    With `folder` and `drain_timeout_s`, every node finishes first what a dead trainer left there, so that all find it.
    Raises what `restore.find` raises or, in a process group, RankFailedError with that as its cause.
    """
    check("find_together", options, FindOptions)
    folder, drain_timeout_s = options.get("folder"), options.pop("drain_timeout_s", 0.0)
    if folder is not None and drain_timeout_s > 0 and not options.get("passing_over"):
        restore.drain_predecessor(folder, drain_timeout_s, options.get("store_options"))
        told_by_all(None, group=group)
    first = 0 if group is None else dist.get_global_rank(group, 0)
    return run_on_one(lambda: restore.find(remote, **options), rank=first, group=group)


def fetch_together(
    remote: str,
    destination: Where,
    *,
    process_group: dist.ProcessGroup | None = None,
    node: str | None = None,
    peer_host: str | None = None,
    **options: Unpack[FetchLatestOptions],
) -> tuple[restore.Checkpoint, restore.FetchReport] | None:
    """Run `restore.find` and `restore.fetch` on all ranks of a process group at once, with the options of both.

    Without a group there is one rank. Returns None on all ranks if there is no checkpoint. `ranks` and `files` say what
    *this* rank needs (`ranks=[dist.get_rank()]` for a file per rank). `destination` is the folder to fetch to, or a
    function of the checkpoint. What is taken from `local_cache` and can be checked only by size is not served to
    others. `on_progress` counts what this rank fetches from the store for all, and then again all that it needs.

    If any rank finds a checkpoint damaged, all of them go on to the next older one, unless `step` is given. Ranks with
    the same `node` (by default: those that share the destination, on one machine) share its files: each file is fetched
    once, and the others wait for its lock. Other nodes reach this one under `peer_host`, or else at the interfaces that
    GLOO_SOCKET_IFNAME names, or else at the addresses that it has, IPv6 or IPv4. What they cannot get from it comes
    from the store, and is logged in one line. Collective: every rank of the group must call it. Blocks. Only CPU
    objects are sent, so a gloo group works even if the default group uses NCCL.

    Raises on every rank: the rank's own error, or RankFailedError, which names the ranks that failed and why. What
    `restore.find` raises is the cause of a RankFailedError (without a process group, it is raised itself).
    """
    check("fetch_together", options, FetchLatestOptions)
    choice, how = part(options, FindOptions), part(options, FetchOptions)

    def newest(passing_over: Collection[CheckpointId]) -> restore.Checkpoint | None:
        choice["passing_over"] = passing_over
        return find_together(remote, process_group, **choice)

    def use(checkpoint: restore.Checkpoint) -> restore.FetchReport:
        return _fetch(checkpoint, Path(where(destination, checkpoint)), process_group, node, peer_host, how)

    return use_newest(newest, use, may_pass_over=options.get("step") is None)


def _fetch(
    checkpoint: restore.Checkpoint,
    destination: Path,
    group: dist.ProcessGroup | None,
    node: str | None,
    peer_host: str | None,
    options: FetchOptions,
) -> restore.FetchReport:
    copies = LocalCopies(options.get("folder"), checkpoint)
    here = {name: found[0] for name, file in checkpoint.files.items() if (found := copies.find(file))}
    selected = on_all_ranks(
        lambda: checkpoint.select(options.get("ranks"), options.get("files")), group=group
    )
    wanted = frozenset(file.name for file in selected)
    # Wanted files are served, too: they become available once they are complete.
    served = {checkpoint.files[name].key: path for name, path in here.items()}
    served |= {checkpoint.files[name].key: destination / name for name in wanted - here.keys()}
    own_node = node if node is not None else place(destination)
    reports: list[restore.FetchReport] = []

    def fetch(names: Collection[str], peers: Collection[restore.Peer]) -> None:
        if names:
            these = options.copy()
            these["ranks"], these["files"] = None, [glob.escape(name) for name in names]
            these["peers"] = [*options.get("peers", ()), *peers]
            reports.append(restore.fetch(checkpoint, destination, **these))

    with contextlib.ExitStack() as stack:
        server = on_all_ranks(lambda: stack.enter_context(restore.PeerServer(served, peer_host)), group=group)
        needs = told_by_all(Needs(own_node, wanted, frozenset(here)), group=group)
        peers = _peers(own_node, server, group)
        sizes = {name: file.size_bytes for name, file in checkpoint.files.items()}
        first = first_fetches(needs, sizes)[own_node] & wanted
        on_all_ranks(lambda: fetch(first, ()), group=group)  # what only the store has
        on_all_ranks(lambda: fetch(wanted, peers), group=group)
    return _merged(reports, wanted, destination)


def _peers(node: str, server: restore.PeerServer, group: dist.ProcessGroup | None) -> list[restore.Peer]:
    """Return the servers of the other nodes, with the addresses under which this node reaches them."""
    here = machine()
    offers = told_by_all((node, here, server.local_peer, server.peer), group=group)
    if server.peer is None and any(there != here for _, there, *_ in offers):
        logger.warning(
            "no_address_for_peers host=%s; other nodes will load this node's files from the store;"
            " pass peer_host= or set GLOO_SOCKET_IFNAME",
            socket.gethostname(),
        )
    others = [(nearby if there == here else far) for other, there, nearby, far in offers if other != node]
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
