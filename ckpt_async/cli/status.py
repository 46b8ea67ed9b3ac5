"""Shows what folders of this node hold, and how far runs have come in their remotes: `status`."""

from __future__ import annotations

import abc
import argparse
import json
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckpt_async.cli import drawing, status_text
from ckpt_async.cli.drawing import Block
from ckpt_async.cli.failures import code_of, told
from ckpt_async.cli.output import Exit, Json, pause_for_reader, print_json, print_line
from ckpt_async.cli.parsing import add_store_options, as_path, as_seconds
from ckpt_async.cli.stderr import say
from ckpt_async.core import keys
from ckpt_async.errors import CkptAsyncError, ObjectNotFoundError
from ckpt_async.monitor.report import FolderWatch, Seen, folder_json

if TYPE_CHECKING:
    from ckpt_async.protocol.overview import Overview
    from ckpt_async.protocol.steps import KnownDecisions

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
        on = drawing.terminal(os.environ)
        seen = [sight for sight in sights if sight.error is None]
        blocks = [block for sight in seen for block in sight.blocks(is_titled=len(sights) > 1)]
        if blocks:
            print("\n".join(drawing.drawn(blocks, on)))
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
    screen = drawing.Screen()
    before: dict[str, str] | None = None
    while True:
        for sight in sights:
            sight.look()
        on = drawing.terminal(os.environ)
        states = {name: state for sight in sights for name, state in sight.states().items()}
        if on.width is not None and not options.json:
            title = Block(
                [("quiet", f"every {every_s:g} s, {datetime.now().astimezone():%H:%M:%S}; Ctrl-C ends")]
            )
            blocks = [block for sight in sights for block in sight.blocks(is_titled=len(sights) > 1)]
            screen.show(drawing.drawn([*blocks, title], on), on)
        elif options.json:
            if states != before:
                print(json.dumps(_json(sights)), flush=True)
        else:
            for line in status_text.changes(before or {}, states):
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
        return status_text.folder_blocks(self.target, self._seen, is_titled=is_titled)

    def _states(self) -> dict[str, str]:
        return status_text.folder_states(self.target, self._seen)

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
        from ckpt_async.cli.looking import opened
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
        return [
            status_text.remote_block(kind, each, is_titled=is_titled) for kind, each in self._seen.items()
        ]

    def _states(self) -> dict[str, str]:
        return {
            name: state
            for each in self._seen.values()
            for name, state in status_text.remote_states(each).items()
        }

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
