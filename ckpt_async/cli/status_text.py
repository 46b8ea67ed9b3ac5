"""What `status` prints: a folder, a remote, and what has changed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpt_async.cli.drawing import Block, Table
from ckpt_async.core.units import age, counted, few, in_units, named, one_line
from ckpt_async.monitor.report import Seen, eta_s, hint_for
from ckpt_async.monitor.status import CheckpointStatus

if TYPE_CHECKING:
    from ckpt_async.protocol.overview import Item, Overview

Line = tuple[str, str]  # mood and text

# How many decided checkpoints of a remote are shown; `ls` lists all.
MOST_DECIDED = 10


def folder_blocks(folder: str, by_kind: Mapping[str, Seen], *, is_titled: bool) -> list[Block]:
    """Return a folder as blocks, with its name if it is one of several."""
    has_kinds = len(by_kind) > 1 or any(by_kind)
    blocks = []
    for kind, seen in by_kind.items():
        title: list[Line] = [("strong", folder)] if is_titled else []
        if has_kinds:
            title.append(("", f"kind {kind}" if kind else "the run itself, no kind"))
        blocks.append(_of_kind(folder, seen, title))
    return blocks


def _of_kind(folder: str, seen: Seen, title: list[Line]) -> Block:
    found, owned = seen.status, seen.owned
    is_unfinished = found.at_risk or any(each.num_to_copy for each in found.checkpoints)
    lines = [*title, ("warn" if is_unfinished else "good", found.summary)]
    if found.pending and not owned:
        lines.append(("warn", "no uploader is running here; `ckpt-async drain` finishes what was sealed"))
    ranks = (f"{rank}" if rank in owned else f"{rank} (stopped)" for rank in found.ranks)
    queue = ", ".join(
        f"{count} {state} ({in_units(size_bytes)})"
        for state, (count, size_bytes) in found.queue.items()
        if count
    )
    lines += [
        ("", ""),
        ("", f"remote  {found.remote or 'not recorded'}"),
        ("", f"ranks   {', '.join(ranks)}"),
        ("", f"queue   {queue or 'empty'}"),
    ]
    if speed := _speed(sum(seen.bytes_per_s.values()), sum(_left(each) for each in found.pending)):
        lines.append(("", f"speed   {speed}"))
    titles = ("STEP", "NAME", "GENERATION", "STATE", "UPLOADED", "SHARDS", "SIZE", "")
    rows = [
        (
            str(each.id.step),
            each.name,
            str(each.id.generation),
            each.state,
            f"{each.percent} %",
            f"{each.num_verified}/{each.num_shards}",
            in_units(each.size_bytes),
            each.failure or _to_copy(each) or _speed(seen.bytes_per_s.get(each.id, 0.0), _left(each)),
        )
        for each in found.checkpoints
    ]
    moods = [each.state for each in found.checkpoints]
    hints = [(each, hint_for(each, owned, folder)) for each in found.checkpoints]
    after = [("", f"step {each.id.step}: {hint}") for each, hint in hints if hint]
    return Block(lines, Table(titles, rows, moods, 3, ("GENERATION", "NAME", "SHARDS", "SIZE")), after)


def _left(each: CheckpointStatus) -> int:
    return each.size_bytes - each.uploaded_bytes


def _to_copy(each: CheckpointStatus) -> str:
    return f"{counted(each.num_to_copy, 'file')} to copy" if each.num_to_copy else ""


def _speed(bytes_per_s: float, left_bytes: int) -> str:
    if bytes_per_s <= 0:
        return ""
    left_s = eta_s(bytes_per_s, left_bytes)
    return f"{in_units(bytes_per_s)}/s" + ("" if left_s is None else f", {age(left_s + 0.5)} left")


# --- a remote ----------------------------------------------------------------------------------------------


def remote_block(kind: str, found: Overview, *, is_titled: bool) -> Block:
    """Return a run, or one kind of its checkpoints, as its remote describes it."""
    lines: list[Line] = [("strong", found.url)] if is_titled or kind else []
    newest, flying = found.newest_committed, found.in_flight
    num_damaged = sum(each.is_damaged for each in found.items)
    if newest is None and num_damaged:
        lines.append(
            (
                "bad",
                f"no checkpoint is usable: {counted(num_damaged, 'checkpoint')} committed, all found damaged",
            )
        )
    elif newest is None:
        lines.append(("warn", "nothing committed yet"))
    else:
        ago = age(found.seen_at - (newest.at or 0.0))
        lines.append(("good", f"newest committed step {newest.id.step}, {ago} ago"))
    lines += [("warn", _waiting(each, found.seen_at)) for each in flying]
    ranks = f", {counted(found.world_size, 'rank')}" if found.world_size else ""
    lines += [("", ""), ("", f"start   generation {found.generation}{ranks}")]
    lines += [("bad", f"cannot be read: {key}") for key in found.unreadable]
    decided = [each for each in found.items if each.state != "in_flight"]
    shown = sorted([*decided[-MOST_DECIDED:], *flying], key=lambda each: each.id)
    titles = ("STEP", "NAME", "GENERATION", "STATE", "RANKS", "SIZE", "AGE", "")
    rows = [
        (
            str(each.id.step),
            each.name,
            str(each.id.generation),
            _state(each),
            f"{len(each.ranks)}/{each.world_size or '?'}"
            if each.state == "in_flight"
            else str(each.world_size),
            in_units(each.size_bytes),
            age(found.seen_at - each.at) if each.at else "-",
            ", ".join(_remarks(each, newest)),
        )
        for each in shown
    ]
    older = len(decided) - MOST_DECIDED
    after = [("quiet", f"and {older} older ones, see `ckpt-async ls {found.url}`")] if older > 0 else []
    table = Table(titles, rows, [_state(each) for each in shown], 3, ("GENERATION", "NAME", "SIZE", "AGE"))
    return Block(lines, table, after)


def _waiting(each: Item, now: float) -> str:
    missing = each.missing_ranks
    whom = f"waits for {named('rank', missing)}" if missing else "waits for a decision"
    if each.world_size is None:
        whom = "total number of ranks unknown"
    last = f", last change {age(now - each.at)} ago" if each.at else ""
    left = f" ({one_line(each.reason)})" if each.reason else ""
    delivered = f"{len(each.ranks)} of {each.world_size or '?'} ranks have delivered"
    return f"step {each.id.step}{left}: {delivered}, {whom}{last}"


def _state(each: Item) -> str:
    return "damaged" if each.is_damaged else each.state


def _remarks(each: Item, newest: Item | None) -> Iterator[str]:
    if newest is not None and each.id == newest.id:
        yield "newest"
    if each.is_pinned:
        yield "pinned"
    if each.missing_ranks:
        yield f"missing: {few(each.missing_ranks)}"
    if each.reason:
        yield one_line(each.reason)


# --- what has changed --------------------------------------------------------------------------------------


def folder_states(folder: str, by_kind: Mapping[str, Seen]) -> dict[str, str]:
    """Return the state of each checkpoint, in words that change only if something did."""
    return {
        f"{folder}{f' {kind}' if kind else ''} step {each.id.short}": _in_words(each, seen)
        for kind, seen in by_kind.items()
        for each in seen.status.checkpoints
    }


def _in_words(each: CheckpointStatus, seen: Seen) -> str:
    failure = f": {told}" if (told := each.failure or _to_copy(each)) else ""
    missing = f", waits for {named('rank', seen.missing[each.id])}" if seen.missing.get(each.id) else ""
    return f"{each.state}{missing}{failure}"


def remote_states(found: Overview) -> dict[str, str]:
    """Return the state of each checkpoint in a remote, in words that change only if something did."""
    return {
        f"{found.url} step {each.id.short}": _state(each)
        + (f", {len(each.ranks)} of {each.world_size or '?'} ranks" if each.state == "in_flight" else "")
        + (f": {one_line(each.reason)}" if each.reason else "")
        for each in found.items
    }


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each checkpoint that is new, has changed, or is gone."""
    for name, state in now.items():
        if before.get(name) != state:
            yield f"{name} {state}"
    for name in before.keys() - now.keys():
        yield f"{name} is no longer held here"
