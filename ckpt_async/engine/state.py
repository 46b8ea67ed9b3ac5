"""What one engine works with and what it knows, shared by its loop and the modules that carry out its actions."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ckpt_async.core import decide, keys, retention
from ckpt_async.core.failures import Failing, Failure, Outcomes
from ckpt_async.core.local_state import Local, LocalCheckpoint, LocalShard
from ckpt_async.core.model import CheckpointId, Event, Failed
from ckpt_async.core.observe import Notice, Observer, Reporter
from ckpt_async.core.settings import Settings
from ckpt_async.errors import CkptAsyncError, FailureReason
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.transfer.link import KnownLink, known_file_name, note_known
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.upload import Resume

logger = logging.getLogger(__name__)

# So many failures are kept for the trainer's next call.
MAX_FAILURES = 1000


@dataclass(slots=True)
class Progress:
    """What has been sent of shards that are not verified yet."""

    ahead: dict[tuple[CheckpointId, str], Resume] = field(
        default_factory=dict
    )  # begun before they were enqueued
    sent_bytes: dict[decide.Upload, int] = field(default_factory=dict)
    is_new: bool = False  # since it was last noted in the journal


@dataclass(slots=True)
class Reports:
    """What the trainer is told, also about work of an engine that crashed."""

    outcomes: Outcomes = field(default_factory=Outcomes)
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    failing: frozenset[Failing] = frozenset()  # actions that failed and are still due


class State:
    """One rank's folder, journal and store, and what is known about its checkpoints.

    Belongs to one event loop; `local` and the parts of `remote` are immutable snapshots that any thread may read.
    """

    def __init__(
        self,
        *,
        rank: int,
        folder: Folder,
        journal: Journal,
        store: PatientStore,
        settings: Settings,
        observer: Observer,
        clock: Callable[[], float],
        is_trainer: bool = True,
        reporter: Reporter | None = None,
    ) -> None:
        self.rank, self.folder, self.journal, self.store = rank, folder, journal, store
        self.settings, self.observer, self.clock, self.is_trainer = settings, observer, clock, is_trainer
        self.reporter = reporter or Reporter()
        self.loop = asyncio.get_running_loop()
        has_conditional_put = store.capabilities.conditional_put
        self.policy = decide.Policy(
            local_retention=retention.keep_local(settings.num_checkpoints_to_keep, settings.local_retention),
            may_supersede="supersede" in (settings.on_backlog, settings.on_disk_low),
            remote_retention=retention.parse(settings.remote_retention),
            has_local_latest=bool(settings.latest_filename),
            has_pointer=bool(settings.composer_symlink),
            may_send_ahead=store.capabilities.multipart,
            may_decide=has_conditional_put or rank == 0,
            decides_alone=not has_conditional_put and rank == 0,
            is_adopted=not is_trainer,
        )
        self.local = Local(rank)
        self.uploads, self.commits, self.published = decide.Uploads(), decide.Commits(), decide.Published()
        self.fence = decide.Fence().looked(self.local, self.now())
        self.progress, self.reports = Progress(), Reports()
        self._noted_link: KnownLink | None = None
        self.is_hurried = False
        self.is_stopping = False

    def succeed(self, dead: State) -> None:
        """Take over what a crashed engine knew that is not in the journal."""
        self.reports, self.is_hurried = dead.reports, dead.is_hurried
        self.fence = decide.Fence(dead.fence.by)

    def look_first(self) -> None:
        """Write nothing before a look for a successor: an engine before this one, which died, was the last to look."""
        self.fence = replace(self.fence, look_at=0.0)

    @property
    def remote(self) -> decide.Remote:
        return decide.Remote(self.uploads, self.commits, self.fence, self.published)

    @property
    def is_taken(self) -> bool:
        """Whether another launch has our generation: nothing may be written any more."""
        return self.fence.is_taken(self.local.generation)

    def now(self) -> float:
        return self.loop.time()

    def checkpoint(self, id_: CheckpointId) -> LocalCheckpoint:
        return self.local.checkpoints[id_]

    def is_left_over(self, id_: CheckpointId) -> bool:
        """Return whether an earlier launch left the checkpoint behind, so that nobody here waits for it."""
        return not self.is_trainer or id_.generation < self.local.generation

    def note_link(self) -> None:
        """Save what was found out about the link, for the next process. Any thread. Raises OSError."""
        link = self.store.link
        known = KnownLink(link.limit, link.connection_bytes_per_s)
        if link.is_known and known != self._noted_link:
            path = self.folder.private / known_file_name("up")
            note_known(path, self.store.url, known, self.clock())
            self._noted_link = known

    # --- the journal ---------------------------------------------------------------------------------------

    def fresh_local(self) -> Local:
        """Return the state with everything that is in the journal by now. Costs one short read. Any thread."""
        return self.journal.follow(self.local)

    def refresh(self) -> None:
        self.local = self.fresh_local()

    def record(self, *events: Event, notices: Sequence[Notice] = ()) -> None:
        """Append events and their notices to the journal; the engine's next round sees them."""
        if notices:
            self.journal.append(events, notices)
        elif events:
            self.journal.append(events)

    def fail(self, id_: CheckpointId, failed: list[Failed]) -> None:
        """Record, count and log shards that finally failed, and report them to the trainer that saved them.

        Raises JournalError if they only seem lost because the folder is not there.

        A restarted trainer does not get the failures of its predecessor's shards, because they should not end it.
        """
        checkpoint = self.local.checkpoints.get(id_)
        if checkpoint is None or checkpoint.decision is not None:
            return  # decided in the meantime and its links released: nothing was lost
        failed = [each for each in failed if not self._is_back(checkpoint, each)]
        self.record(*failed)
        for each in failed:
            is_of_shard = bool(each.shard)
            result = each.reason.value if each.is_loss and is_of_shard else "failed"
            self.observer.shards_finished(result, 1 if is_of_shard else len(checkpoint.shards), 0.0)
            what = f"{id_}, shard {each.shard!r}" if is_of_shard else str(id_)
            logger.error("shard_failed %s shard=%s error=%s", id_, each.shard, each.message)
            if not self.is_left_over(id_) or not self.is_trainer:
                error = CkptAsyncError(f"{what}: {each.message}")
                self.reports.failures.append(Failure(error, id_, each.shard, is_given_up=each.is_loss))

    def _is_back(self, checkpoint: LocalCheckpoint, failed: Failed) -> bool:
        shard = checkpoint.shards.get(failed.shard) if failed.reason is FailureReason.SOURCE_MISSING else None
        return shard is not None and self.folder.has(shard.shard.source, self.spool_path(checkpoint, shard))

    # --- where a shard lies --------------------------------------------------------------------------------

    def spool_path(self, checkpoint: LocalCheckpoint, shard: LocalShard) -> str | None:
        """Return the path of the shard's link, relative to the private folder; None if it has no link."""
        if not shard.shard.is_linked:
            return None
        return f"{keys.spool_checkpoint(checkpoint.id, self.rank)}/{shard.shard.name}"

    def path(self, checkpoint: LocalCheckpoint, shard: LocalShard) -> str:
        spool = self.spool_path(checkpoint, shard)
        return f"{self.folder.private}/{spool}" if spool else self.users_path(shard)

    def users_path(self, shard: LocalShard) -> str:
        return f"{self.folder.path}/{shard.shard.source}"
