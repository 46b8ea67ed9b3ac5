"""What somebody outside is to be told, as text for whoever delivers it. Written to the journal in the same transaction
as the fact, so that no crash comes between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_async.core.model import CheckpointId, Decision


@dataclass(frozen=True, slots=True)
class Notice:
    """One message for one sink. A second one with the same `id` for the same sink is the same, and is dropped."""

    id: str
    sink: str
    body: str


class Teller:
    """Says which notices a fact calls for: none, unless whoever inherits knows better. Must not raise or block."""

    def decided(self, decision: Decision) -> Sequence[Notice]:  # noqa: ARG002
        """A decision was read back from the store."""
        return ()

    def fenced(self, generation: int, by: int) -> Sequence[Notice]:  # noqa: ARG002
        """A newer generation superseded this trainer's."""
        return ()

    def removed_locally(self, id_: CheckpointId, name: str, reason: str) -> Sequence[Notice]:  # noqa: ARG002
        """Local retention deleted this rank's own files of a committed checkpoint."""
        return ()
