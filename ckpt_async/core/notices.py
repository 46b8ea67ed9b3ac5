"""Notices: messages for the outside world, as text for whoever delivers them.

A notice is written to the journal in the same transaction as the fact that it reports, so that no crash can separate
the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_async.core.model import CheckpointId, Decision


@dataclass(frozen=True, slots=True)
class Notice:
    """One message for one sink. Another one with the same `id` for the same sink is a duplicate and is dropped."""

    id: str
    sink: str
    body: str


class Teller:
    """Tells which notices a fact calls for. The base class returns none. Methods must not raise or block."""

    def decided(self, decision: Decision) -> Sequence[Notice]:  # noqa: ARG002
        """A decision was read back from the store."""
        return ()

    def fenced(self, generation: int, by: int) -> Sequence[Notice]:  # noqa: ARG002
        """A newer generation superseded this trainer's generation."""
        return ()

    def removed_locally(self, id_: CheckpointId, name: str, reason: str) -> Sequence[Notice]:  # noqa: ARG002
        """Local retention deleted this rank's own files of a committed checkpoint."""
        return ()
