"""Shows what folders of this node hold, and how far runs have come in their remotes: `status`."""

from __future__ import annotations

import abc
import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckpt_async.cli.output import (
    Block,
    Exit,
    Json,
    Screen,
    Table,
    code_of,
    drawn,
    pause_for_reader,
    print_json,
    print_line,
    say,
    terminal,
    told,
)
from ckpt_async.cli.parsing import add_store_options, as_path, as_seconds
from ckpt_async.core import keys
from ckpt_async.core.units import age, counted, few, in_units, named, one_line
from ckpt_async.errors import CkptAsyncError, ObjectNotFoundError
from ckpt_async.monitor.report import FolderWatch, Seen, eta_s, folder_json, hint_for
from ckpt_async.monitor.status import CheckpointStatus

if TYPE_CHECKING:
    from ckpt_async.protocol.overview import Overview
    from ckpt_async.protocol.steps import KnownDecisions
if TYPE_CHECKING:
    from ckpt_async.protocol.overview import Item, Overview


# The default time between two looks: a folder costs no request, a remote five.
FOLDER_EVERY_S, REMOTE_EVERY_S = 2.0, 10.0


def status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        metavar="FOLDER|REMOTE",
        nargs="+",
        type=as_path,
        help="folders that uploaders were opened with, or remotes of runs",
    )
    parser.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    parser.add_argument(
        "--interval",
        metavar="S",
        type=_pause,
        help="with --watch, refresh every S seconds (2; 10 with a remote)",
    )
    add_store_options(parser)


def status(options: argparse.Namespace) -> Exit:
    """Print what the journals of folders and the records of remotes say. It touches nothing."""
    sights = [_of_target(target, options) for target in options.targets]
    if options.watch:
        return _watch(sights, options)
    for sight in sights:
        sight.look()
    if len(sights) == 1 and sights[0].error is not None:
        raise sights[0].error
    _print_errors(sights)
    if options.json:
        print_json(sights[0].json() if len(sights) == 1 else _json(sights))
    else:
        on = terminal(os.environ)
        seen = [sight for sight in sights if sight.error is None]
        blocks = [block for sight in seen for block in sight.blocks(is_titled=len(sights) > 1)]
        if blocks:
            print("\n".join(drawn(blocks, on)))
    return next((sight.code for sight in sights if sight.code), Exit.OK)


def _print_errors(sights: Sequence[_Sight]) -> None:
    for sight in sights:
        if sight.error is not None:
            say(f"ckpt-async: {sight.target}: {told(sight.error)}", "not_seen", target=sight.target)


def _json(sights: Sequence[_Sight]) -> Json:
    """Return all sights in the shape of the page's `/status.json`."""
    return {
        "now": time.time(),
        "folders": [each.json() for each in sights if isinstance(each, _FolderSight)],
        "remotes": [each.json() for each in sights if not isinstance(each, _FolderSight)],
    }


# --- again and again ---------------------------------------------------------------------------------------


def _watch(sights: Sequence[_Sight], options: argparse.Namespace) -> Exit:
    """Redraw in place on a terminal; elsewhere print each change.

    A change is a line of text or, with --json, an object for each look that found one.
    """
    every_s = options.interval or max(each.every_s for each in sights)
    screen = Screen()
    before: dict[str, str] | None = None
    while True:
        for sight in sights:
            sight.look()
        on = terminal(os.environ)
        states = {name: state for sight in sights for name, state in sight.states().items()}
        if on.width is not None and not options.json:
            title = Block(
                [("quiet", f"every {every_s:g} s, {datetime.now().astimezone():%H:%M:%S}; Ctrl-C ends")]
            )
            blocks = [block for sight in sights for block in sight.blocks(is_titled=len(sights) > 1)]
            screen.show(drawn([*blocks, title], on), on)
        elif options.json:
            if states != before:
                print(json.dumps(_json(sights)), flush=True)
        else:
            for line in changes(before or {}, states):
                print_line(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}")
        before = states
        pause_for_reader(every_s)


# --- what is looked at -------------------------------------------------------------------------------------


class _Sight(abc.ABC):
    """A target, and why it could not be looked at, if so."""

    name: str  # JSON field that names the target
    every_s: float

    def __init__(self, target: str) -> None:
        self.target = target
        self.error: CkptAsyncError | OSError | None = None
        self._states_before: dict[str, str] = {}

    @property
    def code(self) -> Exit:
        return Exit.OK if self.error is None else code_of(self.error)

    def look(self) -> None:
        try:
            self._look()
            self.error = None
        except (CkptAsyncError, OSError) as error:
            self.error = error

    def blocks(self, *, is_titled: bool) -> list[Block]:
        """Return the target as text; if it could not be seen, with the error as one line."""
        if self.error is not None:
            return [Block([("strong", self.target), ("bad", told(self.error))])]
        return self._blocks(is_titled=is_titled)

    def states(self) -> dict[str, str]:
        """Return the states to compare from look to look.

        What cannot be seen keeps the states it had: that says nothing about the checkpoints.
        """
        if self.error is not None:
            self._states_before[self.target] = told(self.error)
        else:
            again = {self.target: "can be seen again"} if self.target in self._states_before else {}
            self._states_before = self._states() | again
        return dict(self._states_before)

    def json(self) -> Json:
        if self.error is not None:
            return {self.name: self.target, "error": told(self.error)}
        return self._json()

    @abc.abstractmethod
    def _look(self) -> None: ...
    @abc.abstractmethod
    def _blocks(self, *, is_titled: bool) -> list[Block]: ...
    @abc.abstractmethod
    def _states(self) -> dict[str, str]: ...
    @abc.abstractmethod
    def _json(self) -> Json: ...


class _FolderSight(_Sight):
    """A folder of this node."""

    name, every_s = "folder", FOLDER_EVERY_S

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._watch, self._seen = FolderWatch(folder), dict[str, Seen]()

    def _look(self) -> None:
        self._seen = self._watch.look()

    def _blocks(self, *, is_titled: bool) -> list[Block]:
        return folder_blocks(self.target, self._seen, is_titled=is_titled)

    def _states(self) -> dict[str, str]:
        return folder_states(self.target, self._seen)

    def _json(self) -> Json:
        return folder_json(self.target, self._seen, time.time())


class _RemoteSight(_Sight):
    """A run in its remote, with the kinds below it. Each decision is read only once."""

    name, every_s = "remote", REMOTE_EVERY_S

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        super().__init__(url)
        self._options = options
        self._known: dict[str, KnownDecisions] = {}
        self._seen: dict[str, Overview] = {}

    def _look(self) -> None:
        from ckpt_async import threads

        self._seen = threads.run(self._found())

    async def _found(self) -> dict[str, Overview]:
        from ckpt_async.cli.ls import opened
        from ckpt_async.protocol.overview import look
        from ckpt_async.protocol.runs import kinds_below

        found: dict[str, Overview | None] = {}
        async with opened(self.target, self._options) as (run, heard):
            found[""] = await look(run, self._known.setdefault("", {}))
            kinds = await kinds_below(run)
            heard()
        for kind in kinds:
            async with opened(keys.kind_remote(run.url, kind), self._options) as (store, heard):
                found[kind] = await look(store, self._known.setdefault(kind, {}))
                heard()
        seen = {kind: each for kind, each in found.items() if each is not None}
        if not seen:
            raise ObjectNotFoundError(
                f"{run.url} holds no run of ckpt_async; `ckpt-async ls` lists the runs below a prefix"
            )
        return seen

    def _blocks(self, *, is_titled: bool) -> list[Block]:
        return [remote_block(kind, each, is_titled=is_titled) for kind, each in self._seen.items()]

    def _states(self) -> dict[str, str]:
        return {name: state for each in self._seen.values() for name, state in remote_states(each).items()}

    def _json(self) -> Json:
        from ckpt_async.protocol.overview import overview_json

        told = {kind: overview_json(each) for kind, each in self._seen.items()}
        return {**told.pop("", {"remote": self.target}), "kinds": told}


def _of_target(target: str, options: argparse.Namespace) -> _Sight:
    return _RemoteSight(target, options) if "://" in target else _FolderSight(target)


def _pause(text: str) -> float:
    if value := as_seconds(text):
        return value
    raise argparse.ArgumentTypeError("0 would mean no pause between refreshes")


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
