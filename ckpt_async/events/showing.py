"""What the status page shows of events: those that no metric covers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpt_async.core.units import in_units, named
from ckpt_async.events.event import Event
from ckpt_async.local.outbox import Posted
from ckpt_async.monitor.recent import Happening

_BACKLOG = {
    "high": ("warn", "uploads are behind"),
    "normal": ("good", "uploads have caught up"),
    "stalled": ("warn", "nothing has moved for a while"),
    "moving": ("good", "uploads move again"),
}


def happenings(told: Iterable[Posted]) -> Iterator[Happening]:
    """Return what was pruned on this node, and the backlog. The engine's metrics cover commits and everything else."""
    known: set[str] = set()
    for each in told:
        try:
            event = Event.from_json(each.body)
        except ValueError:
            continue  # the delivery logs this
        if event.id not in known and (found := _happening(event)) is not None:
            known.add(event.id)  # there is one for each sink that wanted the event
            yield found


def _happening(event: Event) -> Happening | None:
    details = event.details
    if event.kind == "pruned":
        text = "files of this node removed" if details.get("location") == "local" else "pruned from the store"
        reason = f": {details['reason']}" if details.get("reason") else ""
        return Happening(event.time, "note", "pruned", text + reason, event.step)
    if event.kind != "backlog":
        return None
    level, text = _BACKLOG.get(str(details.get("state")), ("note", f"backlog: {details.get('state')}"))
    if level == "warn":
        waits = details.get("num_checkpoints")
        text += (
            f": checkpoints waiting: {waits}, {in_units(float(details.get('size_bytes', 0)))} not uploaded"
        )
        missing = details.get("missing_ranks") or ()
        text += f", waits for {named('rank', missing)}" if missing else ""
    return Happening(event.time, level, "backlog", text, details.get("oldest_step"))
