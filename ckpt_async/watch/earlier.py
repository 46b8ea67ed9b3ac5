"""What earlier launches of the run have left undecided, above all if there were other nodes then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from ckpt_async.core.model import CheckpointId
from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import NoJournalError
from ckpt_async.monitor import status
from ckpt_async.monitor.status import CheckpointStatus
from ckpt_async.watch import plan
from ckpt_async.watch.entries import Entries, Entry, State
from ckpt_async.watch.lookout import Lookout
from ckpt_async.watch.options import Options
from ckpt_async.watch.remote import Remote

logger = logging.getLogger(__name__)

# With several nodes: how long we wait for a checkpoint that was sealed before a node restarted to be
# committed by the others, before it is handed in again. New checkpoints wait for that, and the other nodes
# hold only a limited number of those that were rotated away.
PREDECESSOR_S = 5.0


def in_journal(options: Options) -> Mapping[CheckpointId, CheckpointStatus]:
    try:
        found = status.load(options.state).get(options.kind or "")
    except NoJournalError:
        return {}
    return {each.id: each for each in found.checkpoints} if found else {}


class Earlier:
    """The checkpoints that earlier launches had sealed. `known` is what the journal said before this launch began."""

    def __init__(
        self,
        options: Options,
        known: Mapping[CheckpointId, CheckpointStatus],
        *,
        read: Callable[[Options], Mapping[CheckpointId, CheckpointStatus]] = in_journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._read, self._clock = options, read, clock
        self._sealed = {id_: each for id_, each in known.items() if each.state != "open"}
        self._since = clock()

    def may_be_finished(self, id_: CheckpointId) -> bool:
        """Return whether this node's uploader, or other nodes, may still finish a checkpoint that is not decided."""
        sealed = self._sealed.get(id_)
        if sealed is None:
            return False
        if max(sealed.world_size or 1, self._options.num_nodes) == 1:
            return True
        # A node that is alone now does not wait for others, but what they have sent may be whole with its own part.
        if self._options.num_nodes == 1 and self._is_sending(id_):
            self._since = self._clock()
        return self._clock() - self._since <= PREDECESSOR_S

    def _is_sending(self, id_: CheckpointId) -> bool:
        now = self._read(self._options).get(id_)
        is_ours = now is not None and now.ranks == (self._options.node,)
        return is_ours and now is not None and now.state in ("uploading", "waiting") and not now.is_delivered


def forget_lost(entries: Entries, lookout: Lookout, remote: Remote) -> None:
    """Let go of what the store has lost since it was committed, so that what the folder still has is taken anew.

    A watcher that was running when the remote was wiped has gone on with what was not committed yet. What would then
    wrongly become the newest is refused.
    """

    def id_of(entry: Entry) -> CheckpointId | None:
        is_known = entry.state is State.COMMITTED and entry.generation > 0
        return CheckpointId(entry.generation, entry.step) if is_known else None

    known = {id_ for each in entries.all.values() if (id_ := id_of(each)) is not None}
    lost = remote.lost(known) if known else []
    for entry in [each for each in entries.all.values() if id_of(each) in lost]:
        logger.error(
            "commit_lost %s name=%s path=%s; the store was wiped or put back: what the folder still has of it is taken"
            " anew",
            *(id_of(entry), entry.name, entry.path),
        )
        lookout.forget(entry)


def release_followed(
    entries: Entries, lookout: Lookout, refuse: Callable[[Entry, Refusal, str], None]
) -> None:
    """Let go of what other nodes have announced, on a node that is alone now: nobody will announce it again.

    It is taken anew if the folder has it whole.
    """
    followed = [each for each in entries.open() if plan.awaits_others(each)]
    for entry in followed:
        if reason := plan.lost_part(entry, (), 1):
            entries.settle(entry, State.REFUSED, reason, Refusal.GIVEN_UP)
            refuse(entry, Refusal.GIVEN_UP, reason)
        else:
            lookout.forget(entry)
    if not followed:
        return
    lookout.take()
    for entry in followed:
        versions = entries.of_path(entry.path)
        if not any(each.step == entry.step and each.number >= entry.number for each in versions):
            reason = f"it was saved by {entry.num_nodes} nodes, another one had its marker, and this node is alone now"
            refuse(entry, Refusal.INCOMPLETE, reason)
