"""What became of checkpoints, for whoever asks after they have left the journal. Pure."""

from __future__ import annotations

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decided, Outcome

# Of so many checkpoints, the newest, all that their decisions say is kept.
MAX_OUTCOMES = 1000
_FORGOTTEN = "the log of that time says why"


class Outcomes:
    """The decisions that an engine has learned. Of the older ones only the outcome is kept, as a number each.

    One thread may add, and any thread may ask.
    """

    def __init__(self) -> None:
        self._newest: dict[CheckpointId, Decided] = {}
        self._committed: set[int] = set()
        self._aborted: set[int] = set()

    def add(self, decided: Decided) -> None:
        self._newest[decided.checkpoint] = decided
        while len(self._newest) > MAX_OUTCOMES:
            id_, oldest = next(iter(self._newest.items()))
            # First, so that it is known at any moment.
            (self._aborted if oldest.outcome is Outcome.ABORT else self._committed).add(_number(id_))
            del self._newest[id_]

    def of(self, id_: CheckpointId) -> Decided | None:
        """Return the decision on a checkpoint, of an older one without its name and reason; None if it is not known."""
        if (decided := self._newest.get(id_)) is not None:
            return decided
        if (number := _number(id_)) in self._committed:
            return Decided(id_, Outcome.COMMIT, "")
        return Decided(id_, Outcome.ABORT, "", _FORGOTTEN) if number in self._aborted else None

    def newest(self) -> list[Decided]:
        """Return the newest decisions, in the order in which they were learned."""
        return list(self._newest.values())

    def __len__(self) -> int:
        return len(self._newest)


def _number(id_: CheckpointId) -> int:
    return id_.generation * (keys.MAX_STEP + 1) + id_.step
