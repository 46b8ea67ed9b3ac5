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


def refuse_lost(entries: Entries, remote: Remote, refuse: Callable[[Entry, Refusal, str], None]) -> None:
    """Refuse what the store has lost since it was committed: somebody may have deleted it, so it is not sent again."""
    committed = [each for each in entries.all.values() if each.state is State.COMMITTED and each.generation]
    lost = (
        {*remote.lost({CheckpointId(each.generation, each.step) for each in committed})} if committed else ()
    )
    for entry in (each for each in committed if CheckpointId(each.generation, each.step) in lost):
        reason = (
            "it was committed, and the store has lost it: it was wiped or put back, or a rule of the bucket deletes"
            f" objects. To upload it again, delete {entries.place}"
        )
        refuse(entry, Refusal.OUTDATED, reason)


def release_followed(entries: Entries) -> None:
    """Let go of what other nodes have announced, on a node that is alone now: nobody will announce it again.

    It is taken anew if the folder has it whole, and reported as incomplete if not.
    """
    for entry in [each for each in entries.open() if plan.awaits_others(each)]:
        logger.warning(
            "not_announced_again path=%s step=%d: it was saved by %d nodes, and this node is alone now",
            *(entry.path, entry.step, entry.num_nodes),
        )
        entries.drop(entry)
