"""The sweeper: finishes what dead trainers left, applies remote retention, and removes leftovers.

It looks, has `plan` say what to do, and does it. It never touches what a live owner holds. Two sweepers at once are
safe; if one is killed at any point, the next one finishes its work.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckpt_async import private
from ckpt_async.core import keys, naming, retention
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import Outcome, RemoteAddress
from ckpt_async.core.settings import Settings
from ckpt_async.errors import CkptAsyncError, NoJournalError, ObjectNotFoundError, SettingsError
from ckpt_async.events.event import Event
from ckpt_async.events.sinks import check, check_callable
from ckpt_async.local import journals
from ckpt_async.local.folder import place_of
from ckpt_async.monitor.metrics import SweeperMetrics
from ckpt_async.protocol import steps, sweep_plan
from ckpt_async.protocol.runs import kinds_below
from ckpt_async.protocol.verify import verify
from ckpt_async.stores import StoreOptions, address_of, check_allowed, options_of
from ckpt_async.sweep.drain import DrainReport, drain
from ckpt_async.sweep.remote import Done, RemoteReport, RemoteSweep, open_run
from ckpt_async.sweep.reporting import RemoteEvents, default_folder, remote_events
from ckpt_async.sweep.showing import Showing
from ckpt_async.transfer.patient import connect

logger = logging.getLogger(__name__)

# How long to try a store that does not answer; the next sweep comes anyway.
OPEN_TIMEOUT_S = 30.0
REQUEST_PATIENCE_S = 120.0
# How long a sweep waits for ranks on other nodes: not long, since they commit by themselves.
ADOPTION_GRACE_S = 5.0


# --- the process -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What a sweep did for one local folder: `drained`, or the `error` because of which it could not."""

    folder: str
    drained: DrainReport | None = None
    waiting_ranks: tuple[int, ...] = ()  # in a dry run: ranks with unfinished checkpoints
    error: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether everything in the folder that has no live owner is in the store."""
        ranks = self.drained.ranks if self.drained else ()
        return not self.error and not any(each.error or (each.left and not each.in_use_by) for each in ranks)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep over all folders and remotes did."""

    folders: tuple[FolderReport, ...]
    remotes: tuple[RemoteReport, ...]

    @property
    def is_clean(self) -> bool:
        """Whether everything worked and no damage was found."""
        return all(each.is_clean for each in self.folders) and all(each.is_clean for each in self.remotes)

    @property
    def failing(self) -> list[str]:
        """The folders, and the URLs of remotes, where something failed. Damage is reported separately."""
        folders = [each.folder for each in self.folders if not each.is_clean]
        return folders + [each.url for each in self.remotes if each.has_failed]


class Sweeper:
    """Sweeps local folders, the remotes that their journals name, and remotes given by URL. Needs no torch.

    One sweeper per node is enough for the folders; for the remotes there may be any number, anywhere. A folder may be
    a pattern (`/data/*/checkpoints`), which is expanded at every sweep, because trainers come and go.

    A sweep keeps remotely what `settings.remote_retention` says (empty: everything). For a kind of checkpoints, it
    keeps what `kind_retention` says, else what the kind's Uploader was opened with if that was on this node, else
    everything. The kinds of a given remote are found below it.

    With `verifies`, every committed checkpoint is also verified, as by `ckpt-async verify`, with one HEAD per shard.
    With `is_for_folders_only`, the sweeper finishes what dead trainers left, which takes only a trainer's permissions,
    and leaves the remotes to another sweeper. `metrics.registry` can be exported, and `showing` provides the page's
    content.

    Events of remotes (settings `event_…`) wait in `events_folder`, on a local disk, until they are delivered; None
    stands for the user's state folder. `on_event` is called with each event (`ckpt_async.Event`), including those of
    folders that are finished, one after the other on a thread of its own. At its end, a sweep waits for it for at most
    `event_grace_s`. What `on_event` raises is logged, and it is not called again with that event.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]] = (),
        remotes: Sequence[str] = (),
        *,
        settings: Settings | None = None,
        kind_retention: Mapping[str, str] | None = None,
        store_options: StoreOptions | None = None,
        adoption_timeout_s: float = 3600.0,
        verifies: bool = False,
        is_for_folders_only: bool = False,
        events_folder: str | os.PathLike[str] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        self._folders = [os.fspath(folder) for folder in naming.several(folders, "folders")]
        self._settings = settings or Settings()
        self._policy = retention.parse(self._settings.remote_retention)
        self._kind_policies = {
            naming.check_kind(kind): retention.parse(text) for kind, text in (kind_retention or {}).items()
        }
        self._store_options = store_options or StoreOptions()
        self._given = {
            address.url: address
            for address in (
                address_of(url, store_options, env=os.environ) for url in naming.several(remotes, "remotes")
            )
        }
        self._adoption_timeout_s = adoption_timeout_s
        check(self._settings)
        check_callable(on_event)
        self._on_event = on_event
        self._events_folder = None
        if not is_for_folders_only:
            self._events_folder = Path(events_folder) if events_folder else default_folder(os.environ)
        self._events: RemoteEvents | None = None
        self._verifies, self._is_for_folders_only = verifies, is_for_folders_only
        if is_for_folders_only and (remotes or verifies):
            raise SettingsError("a folders-only sweep neither changes nor verifies a remote")
        self._ages = sweep_plan.Ages(
            superseded_s=self._settings.abandon_after_s, newest_s=self._settings.abandon_newest_after_s
        )
        self._known: dict[str, steps.KnownDecisions] = {}  # decisions read so far, by remote
        self.metrics = SweeperMetrics(self._found_folders)
        self.showing = Showing(self._found_folders)

    def __repr__(self) -> str:
        return f"<Sweeper of folders {self._folders} and remotes {list(self._given)}>"

    async def sweep(self, *, is_dry_run: bool = False) -> SweepReport:
        """Sweep once.

        A folder or remote that fails is reported and does not stop the others. A dry run adopts nothing, writes nothing
        and counts nothing.

        A given remote that holds no run counts as a failure, and nothing is created there.
        """
        if is_dry_run:
            return await self._sweep(is_dry_run=True)
        started, report = time.monotonic(), None
        try:
            async with remote_events(self._settings, self._events_folder, self._on_event) as self._events:
                report = await self._sweep(is_dry_run=False)
        finally:
            self._events = None
            self.metrics.swept(
                time.monotonic() - started,
                is_clean=report is not None and report.is_clean,
                failing=None if report is None else report.failing,
            )
        _count(report, self.metrics)
        for each in report.folders:
            self.showing.folder_swept(each.folder, each.drained, each.error)
        for remote in report.remotes:
            self.showing.remote_swept(remote)
        self.showing.swept(is_clean=report.is_clean, failing=report.failing)
        return report

    async def _sweep(self, *, is_dry_run: bool) -> SweepReport:
        found = self._found_folders()
        folders = [await self._sweep_folder(folder, is_dry_run=is_dry_run) for folder in found]
        recorded = [] if self._is_for_folders_only else self._recorded(found)
        given = [_Target(each, self._policy, is_given=True) for each in self._given.values()]
        targets = {each.address.url: each for each in (*recorded, *given)}
        remotes: list[RemoteReport] = []
        for target in list(targets.values()):
            report, kinds = await self._sweep_remote(target, is_dry_run=is_dry_run)
            remotes.append(report)
            for kind in kinds:
                url = keys.kind_remote(target.address.url, kind)
                if url not in targets:
                    policy = self._kind_policies.get(kind, retention.KeepAll())
                    below = targets[url] = _Target(replace(target.address, url=url), policy)
                    remotes.append((await self._sweep_remote(below, is_dry_run=is_dry_run))[0])
        if not any(each.error for each in remotes):
            self._log_unused_policies(targets)
        return SweepReport(tuple(folders), tuple(remotes))

    def _log_unused_policies(self, urls: Iterable[str]) -> None:
        for kind in self._kind_policies:
            if not any(url.endswith(keys.kind_remote("", kind)) for url in urls):
                logger.warning(
                    "keep_unused no remote has checkpoints of kind %r: the policy for it has no effect", kind
                )

    def _recorded(self, folders: Iterable[str]) -> Iterator[_Target]:
        """Yield the remotes that the folders' journals name."""
        for folder in folders:
            with contextlib.suppress(CkptAsyncError, OSError):  # reported by `_sweep_folder`
                for kind, local in _locals(folder):
                    if local.remote is not None:
                        own = self._kind_policies.get(kind) or _recorded_policy(local)
                        yield _Target(local.remote, own if kind else self._policy)

    def _found_folders(self) -> list[str]:
        return list(dict.fromkeys(path for folder in self._folders for path in _folders(folder)))

    async def _sweep_folder(self, folder: str, *, is_dry_run: bool) -> FolderReport:
        try:
            if is_dry_run:
                return FolderReport(folder, waiting_ranks=_unfinished_ranks(folder))
            drained = await drain(
                folder,
                timeout_s=self._adoption_timeout_s,
                grace_s=ADOPTION_GRACE_S,
                settings=self._settings,
                store_options=self._store_options,
                on_event=self._on_event,
            )
        except NoJournalError:
            return FolderReport(folder)  # no trainer has run here yet
        except (CkptAsyncError, OSError) as error:
            logger.warning("sweep_folder_failed folder=%s error=%s", folder, error)
            return FolderReport(folder, error=str(error))
        return FolderReport(folder, drained)

    async def _sweep_remote(self, target: _Target, *, is_dry_run: bool) -> tuple[RemoteReport, Sequence[str]]:
        """Sweep a remote. Returns what was done, and the kinds below a given remote."""
        address, kinds = target.address, list[str]()
        settings = replace(self._settings, upload_timeout_s=REQUEST_PATIENCE_S)
        try:
            if not target.is_given:
                check_allowed(address, self._settings.only_remotes, self._store_options, env=os.environ)
            options = options_of(address, self._store_options, env=os.environ)
            store = connect(address.url, options, settings, self.metrics.of(address.url))
            try:
                is_there = await open_run(store, is_read_only=is_dry_run, timeout_s=OPEN_TIMEOUT_S)
                if target.is_given:
                    kinds = [] if is_there is None else await kinds_below(store)
                    if not is_there and not kinds:
                        raise ObjectNotFoundError(f"{address.url} holds no run of ckpt_async")
                if not is_there:
                    return RemoteReport(address.url), kinds
                sweep = RemoteSweep(store, target.policy, self._ages, time.time)
                sweep.known = self._known.setdefault(address.url, {})
                if (told := self._events) is not None:
                    sweep.on_done = partial(told.done, store)
                report = await sweep.run(is_dry_run=is_dry_run)
                if self._verifies:
                    checked = await verify(store)
                    for each in checked.unread:
                        logger.warning("shard_not_verified url=%s %s", address.url, each)
                    found = checked.violations
                    known = {each.key for each in found}
                    report.violations = [each for each in report.violations if each.key not in known] + found
                if told is not None:
                    names = {each.checkpoint: each.name for _, each in sweep.known.values()}
                    await told.damage(store, report.violations, names)
                return report, kinds
            finally:
                await store.close()
        except (CkptAsyncError, OSError) as error:
            logger.warning("sweep_remote_failed url=%s error=%s", address.url, error)
            return RemoteReport(address.url, error=str(error)), kinds


@dataclass(frozen=True, slots=True)
class _Target:
    """A remote to be swept, with its retention policy.

    One that was given (`is_given`) must hold a run, or kinds of one.
    """

    address: RemoteAddress
    policy: retention.RetentionPolicy
    is_given: bool = False


def _count(report: SweepReport, metrics: SweeperMetrics) -> None:
    for folder in report.folders:
        if not folder.is_clean:
            metrics.failed("folder")
        ranks = folder.drained.ranks if folder.drained else ()
        for rank in ranks:
            metrics.adopted(rank.uploaded_shards, rank.uploaded_bytes)
        committed = {(rank.kind, each.checkpoint) for rank in ranks for each in rank.committed}
        aborted = {(rank.kind, each.checkpoint) for rank in ranks for each in rank.aborted}
        metrics.ended("committed", len(committed))
        metrics.ended("aborted", len(aborted))
    for remote in report.remotes:
        if remote.error:
            metrics.failed("remote")
        for finding in remote.violations:
            metrics.damaged(finding.kind)
        for done in remote.done:
            if done.error:
                metrics.failed("action")
            else:
                _count_done(done, metrics)


def _count_done(done: Done, metrics: SweeperMetrics) -> None:
    match done.outcome:
        case Outcome.COMMIT:
            metrics.ended("committed")
        case Outcome.ABORT:
            metrics.ended("aborted")
        case Outcome.PRUNED:
            metrics.ended("pruned")
        case Outcome.PRUNING | None:
            pass
    match done.action:
        case sweep_plan.AbortMultipart():
            metrics.removed("multipart", 1)
        case sweep_plan.Delete():
            metrics.removed(done.action.kind, len(done.action.object_keys))
        case sweep_plan.CollectDecisions():
            metrics.removed("decision", len(done.action.object_keys))
        case _:
            pass


def _folders(pattern: str) -> list[str]:
    """Return the folder of this name, or else the folders that match the pattern and in which a trainer has run."""
    pattern = os.path.expanduser(pattern)
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [os.path.realpath(pattern)]
    return [
        os.path.realpath(each)
        for each in sorted(glob.glob(pattern))
        if os.path.isdir(f"{each}/{keys.PRIVATE}")
    ]


def _recorded_policy(local: Local) -> retention.RetentionPolicy:
    """Return the retention policy that the kind's Uploader was opened with."""
    recorded = dict(local.opened.settings).get("remote_retention", "") if local.opened else ""
    try:
        return retention.parse(str(recorded))
    except SettingsError as error:  # written by a later version
        logger.warning("recorded_retention_unknown error=%s; keeping everything", error)
        return retention.KeepAll()


def _unfinished_ranks(folder: str) -> tuple[int, ...]:
    unfinished = {
        each.rank
        for _, each in _locals(folder)
        if any(found.decision is None for found in each.checkpoints.values())
    }
    return tuple(sorted(unfinished))


def _locals(folder: str) -> list[tuple[str, Local]]:
    """Return, for each kind and rank, what the folder's journals say."""
    private.check(place_of(folder) / keys.PRIVATE)
    return [(kind, each.local) for kind, states in journals.states(folder).items() for each in states]
