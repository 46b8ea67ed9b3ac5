"""Uploads the checkpoints of trainers that know nothing of this package: `watch`, `run`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_async.cli.events import OPTIONS, add_events, event_settings, given
from ckpt_async.cli.output import Exit, Json, going_on_unread, let_go, say, store_options
from ckpt_async.cli.parsing import WHERE, add_kind, add_store_options, as_folder, as_seconds
from ckpt_async.core import launch
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import counted, in_units, one_line
from ckpt_async.errors import SettingsError
from ckpt_async.filesystems import LOCAL_FILESYSTEMS, filesystem_of
from ckpt_async.formats import FORMATS, Rules
from ckpt_async.local.journals import watcher_state
from ckpt_async.stores import folder_of, parse_url
from ckpt_async.watch.background import Stop
from ckpt_async.watch.options import Options
from ckpt_async.watch.reporter import Event, Report
from ckpt_async.watch.supervisor import GRACE_S, SAME_SIGNAL_S, supervise
from ckpt_async.watch.wake import Waker
from ckpt_async.watch.watcher import Watcher

# Settings that a watcher decides by itself, or has a flag of another name for.
_OURS = frozenset(
    "num_checkpoints_to_keep local_retention on_error latest_filename composer_symlink publish_copies sigterm_flush_s"
    # What waits are links, which are not the uploader's to delay or to drop; `min_free_bytes` applies to
    # them.
    " num_concurrent_uploads on_backlog on_disk_low max_backlog_checkpoints max_backlog_bytes min_free_bytes"
    " block_timeout_s abandon_after_s abandon_newest_after_s linger_s node_shared".split()
)

# The exit codes of a shell for a command that it cannot start.
NOT_THERE, NOT_EXECUTABLE = 127, 126


def watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=as_folder("give the folder first, then the remote"),
        help="where the trainer writes its checkpoints; need not exist yet, except with --once",
    )
    parser.add_argument("remote", metavar="REMOTE", help=WHERE)
    parser.add_argument(
        "--once",
        action="store_true",
        help="upload what is complete now, oldest first, and end once it is committed; run it again to"
        " continue",
    )
    _add_common(parser)


def run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("remote", metavar="REMOTE", help=WHERE)
    parser.add_argument(
        "--folder",
        metavar="FOLDER",
        default=".",
        type=as_folder("the remote comes first"),
        help="where the command writes its checkpoints (default: the working directory)",
    )
    _add_common(parser)
    parser.add_argument(
        "--grace",
        metavar="S",
        type=as_seconds,
        default=GRACE_S,
        help="after the command has ended, a signal leaves at most S seconds to finish uploading (10); a"
        " second signal ends it at once",
    )
    parser.set_defaults(argv=[])
    parser.epilog = "the command follows after `--`: ckpt-async run s3://bucket/run-a -- torchrun train.py"


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    add_kind(parser)
    how = parser.add_argument_group(
        "which checkpoints are complete (default: those of every known format, by the format's own marker)"
    )
    how.add_argument(
        "--format", choices=FORMATS, action="append", default=[], help="only this format; repeatable"
    )
    how.add_argument("--done", metavar="FILE", type=_as_name, help="folders that contain a file of this name")
    how.add_argument(
        "--pattern",
        metavar="GLOB",
        default="",
        help="paths that match GLOB; the trainer must rename them into place when they are complete",
    )
    how.add_argument(
        "--ranks",
        metavar="N",
        type=_as_count,
        default=0,
        help="number of trainer processes, for formats that do not record it",
    )
    how.add_argument(
        "--ignore-times",
        action="store_true",
        help="ignore the files' mtimes; only for a folder that nothing writes to and that was copied without"
        " preserving them",
    )
    _add_where_and_when(parser)
    add_events(parser.add_argument_group("events (docs/events.md)"))
    settings = parser.add_argument_group("settings (docs/settings.md)")
    settings.add_argument("--settings-file", metavar="FILE", help="TOML file with settings")
    settings.add_argument(
        "--uploads", metavar="N", type=_as_count, help="initial number of concurrent uploads (8)"
    )
    settings.add_argument(
        "--min-free-bytes",
        metavar="X",
        type=int,
        help="free space to keep for the trainer; below it, unsent checkpoints that the trainer has deleted"
        " are dropped, oldest first (0: room for two of its checkpoints)",
    )
    for each in dataclasses.fields(Settings):
        if each.name not in _OURS and each.name not in OPTIONS.values():
            _add_setting(settings, each)


def _add_where_and_when(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument(
        "--node",
        metavar="I/N",
        type=_as_node,
        help="this is node I of N, each with its own folder (default: as torchrun or Slurm say; 0/1 if the"
        " folder is on a file system that the nodes share)",
    )
    where.add_argument(
        "--state",
        metavar="DIR",
        type=Path,
        help="folder for links and the journal, on a local disk (default: beside the watched folder)",
    )
    where.add_argument(
        "--keep-local",
        metavar="N",
        type=_as_count,
        help="delete the trainer's committed checkpoints except the newest N (default: delete nothing)",
    )
    when = parser.add_argument_group("when")
    when.add_argument(
        "--interval",
        metavar="S",
        type=as_seconds,
        default=5.0,
        help="scan at least this often (5); inotify triggers earlier scans",
    )
    when.add_argument(
        "--settle-s",
        metavar="S",
        type=as_seconds,
        default=1.0,
        help="a complete checkpoint is linked at once and uploaded when it has not changed for S seconds (1)",
    )
    when.add_argument(
        "--drain-timeout",
        metavar="S",
        type=as_seconds,
        default=3600.0,
        help="at the end, wait at most S seconds until everything is committed (3600)",
    )


def _add_setting(group: Any, setting: dataclasses.Field[Any]) -> None:
    flag, help_ = f"--{setting.name.replace('_', '-')}", setting.metadata["help"].replace("%", "%%")
    if setting.type == "bool":
        group.add_argument(flag, action="store_const", const=True, help=help_)
        return
    of_type = {"int": int, "float": float}.get(str(setting.type), str)
    group.add_argument(
        flag,
        metavar="X",
        type=of_type,
        choices=setting.metadata.get("choices"),
        help=f"{help_} ({setting.default})",
    )


@going_on_unread()
def watch(options: argparse.Namespace) -> Exit:
    """Watch a folder until SIGTERM or SIGINT or, with --once, until everything that is complete is committed."""
    parse_url(options.remote)
    if options.once and not os.path.isdir(options.folder):
        raise SettingsError(f"there is no folder {options.folder!r}")
    stopping = Stop()
    watcher = _watcher(options, dict(os.environ))

    def stop(*_: object) -> None:
        if stopping.is_over(SAME_SIGNAL_S):  # some senders, e.g. `timeout`, send the first one twice
            raise KeyboardInterrupt
        stopping.set()
        watcher.waker.wake()

    # A background job of a shell ignores SIGINT.
    taken = [each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in taken}
    try:
        report = watcher.run(stopping)
    except KeyboardInterrupt:
        _leave_at_once(Exit.INTERRUPTED)
        raise
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        watcher.waker.close()
    if options.once and report.is_empty and not report.is_cut_short:
        hint = "it must be the folder above the checkpoints; for a format of your own use --done or --pattern"
        say(f"ckpt-async: {options.folder} has no checkpoint of a known format ({hint})", "nothing_found")
        if options.json:
            print(json.dumps(_json(report, Exit.NOT_FOUND)))
        return Exit.NOT_FOUND
    code = _end(report, options, is_once=options.once)
    if report.is_cut_short:
        _leave_at_once(code)
    return code


@going_on_unread()
def run(options: argparse.Namespace) -> int:
    """Run a command with a watcher beside it. Return the command's exit status, or the watcher's if that is 0."""
    if not options.argv:
        raise SettingsError("no command was given", hint="ckpt-async run REMOTE -- python train.py")
    parse_url(options.remote)  # a bad URL would fail every later launch, too
    options.once = False
    environment = dict(os.environ)
    new_watcher = partial(_watcher, options, environment)
    try:
        status, report, error = supervise(options.argv, environment, new_watcher, options.grace)
    except OSError as problem:
        text = f"ckpt-async: {options.argv[0]!r} cannot be started: {problem.strerror}"
        say(text, "not_started", level=logging.ERROR)
        return NOT_THERE if isinstance(problem, FileNotFoundError) else NOT_EXECUTABLE
    if report is not None:
        code: int = _end(report, options, is_once=False)
    else:
        say(f"ckpt-async: checkpoints may not be in the store: {error}", "watch_failed", level=logging.ERROR)
        code = Exit.NOT_DRAINED
    if isinstance(error, KeyboardInterrupt) or (report is not None and report.is_cut_short):
        _leave_at_once(status or code)
    return status or code


def _leave_at_once(code: int) -> None:
    """Exit at once when the main thread ends, without waiting for threads that wait for the store.

    Python would join those threads otherwise.
    """

    def leave() -> None:
        let_go(sys.stdout)
        let_go(sys.stderr)
        os._exit(code)

    register = getattr(threading, "_register_atexit", None)  # unlike `atexit`, runs before threads are joined
    if register is not None:
        register(leave)


def _watcher(options: argparse.Namespace, environment: dict[str, str], waker: Waker | None = None) -> Watcher:
    if os.path.exists(options.folder) and not os.path.isdir(options.folder):
        raise SettingsError(f"{options.folder!r} is not a folder")
    return Watcher(_options(options, environment), partial(_report_event, options), waker)


def _options(options: argparse.Namespace, environment: dict[str, str]) -> Options:
    folder = Path(os.path.realpath(options.folder))
    kind = f".{options.kind}" if options.kind else ""
    is_shared = filesystem_of(folder) not in LOCAL_FILESYSTEMS
    node, num_nodes = options.node or ((0, 1) if is_shared else launch.node(environment))
    if num_nodes > 1:
        _check_nodes(options)
    state = Path(os.path.realpath(options.state)) if options.state else watcher_state(folder)
    if state == folder or folder in state.parents:
        raise SettingsError(
            f"--state {options.state} is in the watched folder",
            hint="use a folder beside it, on the same disk",
        )
    if folder_of(options.remote) == folder:
        raise SettingsError(
            f"{options.remote} is the watched folder itself", hint="use another folder as the remote"
        )
    # The watcher is not one of the trainer's ranks, though it was started like one.
    for name in environment.keys() - launch.without_rank(environment).keys():
        os.environ.pop(name, None)
    settings = {
        each.name: value
        for each in dataclasses.fields(Settings)
        if (value := getattr(options, each.name, None)) is not None
    }
    event_settings(options, Settings())  # errors name the options
    settings |= given(options)
    if options.uploads is not None:
        settings["num_concurrent_uploads"] = options.uploads
    return Options(
        folder,
        options.remote,
        state,
        folder.parent / f".{folder.name}{kind}.ckpt-async.lock",
        Rules(
            tuple(options.format),
            options.done or "",
            options.pattern,
            options.ignore_times,
            options.ranks,
            num_nodes,
            options.settle_s,
        ),
        kind=options.kind,
        node=node,
        num_nodes=num_nodes,
        launch_id=environment.get("CKPT_ASYNC_LAUNCH_ID", f"watch-{num_nodes}"),
        interval_s=options.interval,
        keep_local=options.keep_local,
        is_once=options.once,
        drain_timeout_s=options.drain_timeout,
        store_options=store_options(options),
        settings=settings,
        settings_file=options.settings_file,
    )


def _check_nodes(options: argparse.Namespace) -> None:
    """Raise SettingsError if an option does not work for several nodes."""
    if options.once:
        raise SettingsError(
            "--once works only for one node; the others would not know when it is over",
            hint="watch on all nodes without --once, or use --node 0/1",
        )
    if options.done or options.pattern:
        raise SettingsError(
            f"{'--done' if options.done else '--pattern'} works only for one node: it does not name the files of the"
            " others",
            hint="let all nodes save to a shared folder and watch it with --node 0/1, or use `ckpt_async.Uploader` in"
            " the trainer",
        )


# --- reporting ---------------------------------------------------------------------------------------------


def _report_event(options: argparse.Namespace, event: Event) -> None:
    if options.json:
        optional = {"reason": event.reason or None, "cause": event.cause or None}
        print(json.dumps({**dataclasses.asdict(event), **optional}), flush=True)
        return
    is_problem = event.event in ("refused", "incomplete")
    text = {
        "committed": f"committed ({event.format}, {in_units(event.size_bytes)})",
        "there": "is already in the store",
        "refused": f"REFUSED: {event.reason}",
        "incomplete": f"is not complete: {event.reason}",
    }[event.event]
    # With `run`, stdout belongs to the command.
    is_ours = options.command == "watch" and not is_problem
    line = one_line(f"{event.path}: step {event.step} {text}")
    if is_ours:
        print(line, flush=True)
        return
    level = logging.WARNING if is_problem else logging.INFO
    say(line, f"watch_{event.event}", level=level, path=str(event.path), step=event.step)


def _end(report: Report, options: argparse.Namespace, *, is_once: bool) -> Exit:
    code = _code(report)
    if report.is_cut_short:
        text = (
            f"stopped before everything was committed (--drain-timeout {options.drain_timeout:g}, or a"
            " signal)"
        )
        text = f"ckpt-async: checkpoints may not be in the store: {text}"
        say(text, "not_drained", level=logging.ERROR)
    if options.json:
        print(json.dumps(_json(report, code)), flush=True)
        return code
    if is_once or not report.stood_by:
        for path, why in report.incomplete.items():
            _say_at_the_end(options, f"{path}: is not complete: {why}")
        for path in report.unfinished:
            _say_at_the_end(options, f"{path}: is not committed yet; the next launch will finish it")
        for reason in report.unknown.values():
            _say_at_the_end(options, reason)
        there = f", {report.num_there} already in the store" if report.num_there else ""
        _say_at_the_end(options, f"{counted(report.num_committed, 'checkpoint')} committed{there}")
    return code


def _say_at_the_end(options: argparse.Namespace, text: str) -> None:
    text = one_line(text)
    if options.command == "watch":
        print(text, flush=True)
    else:
        say(text, "watch_ended", level=logging.INFO)


def _code(report: Report) -> Exit:
    if report.refused:
        return Exit.ERROR
    if report.unfinished or report.is_cut_short:
        return Exit.NOT_DRAINED
    return Exit.NOT_FOUND if report.took_none else Exit.OK


def _json(report: Report, code: Exit) -> Json:
    return {
        "event": "ended",
        "exit_code": int(code),
        "committed": report.num_committed,
        "there": report.num_there,
        "refused": dict(report.refused),
        "incomplete": dict(report.incomplete),
        "unfinished": list(report.unfinished),
        "not_taken": dict(report.unknown),
        "stood_by": report.stood_by,
        "cut_short": report.is_cut_short,
    }


# --- arguments ---------------------------------------------------------------------------------------------


def _as_node(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
    if match and int(match[1]) < int(match[2]):
        return int(match[1]), int(match[2])
    raise argparse.ArgumentTypeError(f"{text!r} is not a node such as 0/2, the first of two")


def _as_count(text: str) -> int:
    if text.isdecimal() and int(text) <= 10**6:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 1000000")


def _as_name(text: str) -> str:
    if text and "/" not in text:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a file name")
