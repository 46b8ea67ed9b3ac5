"""What the engine tells whoever counts: facts only, no opinion. Observers must not raise or block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_async.errors import FailureReason


class Observer:
    """Receives facts, from any thread, and ignores them: inherit, and define what you count."""

    def shards_enqueued(self, num_shards: int, duration_s: float) -> None:
        """The trainer spent this long in one call of `enqueue`."""

    def trainer_blocked(self, duration_s: float) -> None:
        """The trainer was held up in `enqueue` by the backlog or the disk."""

    def uploads_started(self, num_shards: int) -> None:
        """The uploads of shards are under way, until `uploads_ended`."""

    def uploads_ended(self, num_shards: int) -> None:
        """They ended: well, badly, or cut short."""

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        """Single attempts of store requests ended, well or not."""

    def attempt_failed(self, reason: FailureReason) -> None:
        """One attempt failed; it may be retried."""

    def bytes_uploaded(self, size_bytes: int) -> None:
        """The store acknowledged this many bytes of shards."""

    def shards_finished(
        self, result: str, num_shards: int, duration_s: float, step: int | None = None, at: float = 0.0
    ) -> None:
        """Shards are verified (ok), gave up for now (failed), or can never be sent (source_changed,
        source_missing, superseded), each after `duration_s`. If they are of one checkpoint and were sent: of which
        step, and when that ended.
        """

    def checkpoint_committed(self, step: int, latency_s: float, at: float) -> None:
        """A checkpoint was seen committed, `latency_s` after its first shard was enqueued here."""

    def checkpoint_aborted(self, step: int, reason: str) -> None:
        """A checkpoint was seen given up."""

    def checkpoint_pruned(self, location: str) -> None:
        """Retention removed a checkpoint, location local or remote."""

    def copies_finished(self, result: str, num_files: int) -> None:
        """Files are published under their exact keys (ok), or could not be for now (failed)."""

    def fenced(self) -> None:
        """A newer generation superseded this trainer."""

    def engine_restarted(self) -> None:
        """The engine died of a bug and was started again."""


class Observers(Observer):
    """Tells several."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers


def _to_all(name: str) -> Callable[..., None]:
    def tell(self: Observers, *facts: object) -> None:
        for each in self._observers:
            getattr(each, name)(*facts)

    return tell


for _name in [name for name in vars(Observer) if not name.startswith("_")]:
    setattr(Observers, _name, _to_all(_name))
