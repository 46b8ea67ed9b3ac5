"""What the engine reports: facts, which an observer counts, and notices of them, to be delivered.

A notice is written to the journal in the same transaction as the fact that it reports, so that no crash can separate
the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_async.core.model import CheckpointId, Decision
from ckpt_async.errors import FailureReason


class Observer:
    """Receives facts, from any thread. It must not raise or block. Subclasses override the methods for what they count,
    or `note` for all facts that they do not.
    """

    def note(self, fact: str, *values: Any) -> None:
        """Receive a fact, by the name of its method and with its values. Ignores it."""

    def uploads_started(self, num_shards: int) -> None:
        """Uploads of this many shards began; they are under way until `uploads_ended`."""
        self.note("uploads_started", num_shards)

    def uploads_ended(self, num_shards: int) -> None:
        """Uploads of this many shards ended: they succeeded, failed or were cut short."""
        self.note("uploads_ended", num_shards)

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        """Single attempts of store requests ended, successfully or not."""
        self.note("requests_finished", operation, durations_s)

    def attempt_failed(self, reason: FailureReason) -> None:
        """One attempt failed; it may be retried."""
        self.note("attempt_failed", reason)

    def bytes_uploaded(self, size_bytes: int) -> None:
        """The store acknowledged this many bytes of shards."""
        self.note("bytes_uploaded", size_bytes)

    def shards_finished(self, result: str, num_shards: int, duration_s: float) -> None:
        """Shards ended, each after `duration_s`.

        `result`: they are verified (ok), failed for now (failed), or can never be sent (source_changed, source_missing,
        superseded).
        """
        self.note("shards_finished", result, num_shards, duration_s)

    def checkpoint_committed(self, step: int, latency_s: float) -> None:
        """A checkpoint was seen committed, `latency_s` after its first shard was enqueued here."""
        self.note("checkpoint_committed", step, latency_s)

    def checkpoint_aborted(self, step: int, reason: str) -> None:
        """A checkpoint was seen aborted."""
        self.note("checkpoint_aborted", step, reason)

    def checkpoint_pruned(self, location: str) -> None:
        """Retention removed a checkpoint; `location` is local or remote."""
        self.note("checkpoint_pruned", location)

    def copies_finished(self, result: str, num_files: int) -> None:
        """Files were published under their exact keys (ok), or could not be for now (failed)."""
        self.note("copies_finished", result, num_files)

    def fenced(self) -> None:
        """A newer generation superseded this trainer's generation."""
        self.note("fenced")

    def engine_restarted(self) -> None:
        """The engine died because of a bug and was started again."""
        self.note("engine_restarted")


@dataclass(frozen=True, slots=True)
class Notice:
    """One message for one sink. Another one with the same `id` for the same sink is a duplicate and is dropped."""

    id: str
    sink: str
    body: str


class Reporter:
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
