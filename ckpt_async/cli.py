"""The command line, `ckpt-async`. `docs/cli.md` documents commands, JSON fields and exit codes.

It parses, calls and prints; it knows no rule. What a command needs is imported when it runs, so that those that only
look answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_async import __version__
from ckpt_async.errors import (
    CkptAsyncError,
    DamagedCheckpointError,
    FailureReason,
    FolderInUseError,
    IntegrityError,
    InvalidNameError,
    InvalidRecordError,
    NoJournalError,
    NoUsableCheckpointError,
    SettingsError,
    StoreError,
)

if TYPE_CHECKING:
    from ckpt_async.drain import DrainReport, Fate, RankReport
    from ckpt_async.model import Boundary, CheckpointId, Decision, RemoteAddress
    from ckpt_async.requests import Requests
    from ckpt_async.status import CheckpointStatus, Status
    from ckpt_async.store import ObjectInfo, Store

Json = dict[str, Any]

# How long `ls` tries a store that fails: someone is waiting.
LS_TIMEOUT_S = 20.0


class Exit(enum.IntEnum):
    """What a script may branch on."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    INCOMPLETE = 4
    TEMPORARY = 5
    NOT_DRAINED = 6
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class _UsageError(Exception):
    """The command line makes no sense."""

    def __init__(self, message: str, program: str) -> None:
        super().__init__(message)
        self.hint = f"see `{program} --help`"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message, self.prog)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Prints nothing but results to stdout."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_json = "--json" in arguments
    try:
        try:
            options = _parser().parse_args(arguments)
            with _logging(options.verbose):
                code: int = options.run(options)
        except SystemExit as ended:  # --help and --version
            code = int(ended.code or 0)
        except KeyboardInterrupt:
            code = Exit.INTERRUPTED
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  the outermost frame: told in one line
            code = _tell(error, is_json=is_json)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read us has seen enough. What Python flushes at exit must not complain again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = Exit.BROKEN_PIPE
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ckpt-async",
        description="Look at and finish checkpoints that ckpt_async uploads.",
        epilog="exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 incomplete, 5 try again later,"
        " 6 not drained in time",
    )
    parser.add_argument("--version", action="version", version=f"ckpt-async {__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object instead of text")
    common.add_argument(
        "-v", "--verbose", action="count", default=0, help="log to stderr; twice for every shard"
    )
    store = _Parser(add_help=False)
    store.add_argument("--endpoint-url", metavar="URL", help="of an S3-compatible server")
    store.add_argument("--region", help="of the bucket")
    store.add_argument("--profile", help="of the AWS configuration files")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], help_: str, *parents: Any
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=help_, description=f"{help_[0].upper()}{help_[1:]}.", parents=[common, *parents]
        )
        made.set_defaults(run=run)
        return made

    status = add("status", _status, "what this node holds, and what would be lost if it died now")
    status.add_argument("folder", metavar="FOLDER", help="the folder that the uploader was opened with")
    ls = add("ls", _ls, "committed checkpoints of a run", store)
    ls.add_argument("remote", metavar="REMOTE", help="s3://bucket/prefix/run or file:///path/run")
    ls.add_argument("--all", action="store_true", help="also those given up or pruned")
    drain = add("drain", _drain, "finish what a trainer that has ended left on this node", store)
    drain.add_argument("folder", metavar="FOLDER", help="the folder that the uploader was opened with")
    drain.add_argument("--remote", metavar="URL", help="where it goes (default: as the trainer recorded)")
    drain.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=3600.0,
        help="give up after this long (default: 3600)",
    )
    drain.add_argument(
        "--grace",
        metavar="S",
        type=_seconds,
        help="wait this long for ranks elsewhere once all of this folder is uploaded (default: close_grace_s)",
    )
    sweep = add("sweep", _sweep, "finish what dead trainers left, and clean up remotely", store)
    sweep.add_argument(
        "folders", metavar="FOLDER", nargs="*", help="folders of trainers on this node; '*' matches names"
    )
    sweep.add_argument(
        "--remote", metavar="URL", action="append", default=[], help="also this remote; repeatable"
    )
    sweep.add_argument("--keep", metavar="POLICY", help="remote retention, e.g. last=3,every-steps=1000")
    sweep.add_argument(
        "--dry-run", action="store_true", help="print the plan with its reasons; touch nothing"
    )
    sweep.add_argument(
        "--verify", action="store_true", help="also verify every committed checkpoint: one HEAD per shard"
    )
    sweep.add_argument(
        "--metrics-port", metavar="P", type=_port, default=-1, help="Prometheus port (0: any free one)"
    )
    how_often = sweep.add_mutually_exclusive_group()
    how_often.add_argument("--once", action="store_true", help="sweep once (the default)")
    how_often.add_argument(
        "--interval", metavar="S", type=_seconds, help="sweep every S seconds, until SIGTERM"
    )
    prune = add("prune", _prune, "remove committed checkpoints that a policy does not keep", store)
    prune.add_argument("url", metavar="REMOTE")
    prune.add_argument("--keep", metavar="POLICY", help="default: the setting remote_retention")
    prune_how = prune.add_mutually_exclusive_group()
    prune_how.add_argument("--dry-run", action="store_true", help="only print the plan (the default)")
    prune_how.add_argument("--yes", action="store_true", help="do it")
    for name, help_ in (("pin", "keep a checkpoint whatever the policy says"), ("unpin", "take a pin back")):
        pin = add(name, _pin, help_, store)
        pin.add_argument("url", metavar="REMOTE")
        pin.add_argument("checkpoint", metavar="STEP|NAME")
    verify = add("verify", _verify, "recompute what must hold from the store alone", store)
    verify.add_argument("url", metavar="REMOTE")
    verify.add_argument("--step", metavar="S", type=int, help="only checkpoints of this step")
    verify.add_argument(
        "--read-data", metavar="PERCENT", type=float, default=0.0, help="read so many of the shards whole"
    )
    verify.add_argument("--seed", type=int, default=0, help="which shards are read")
    pull = add("pull", _pull, "bring a checkpoint back to a local folder, verified", store)
    pull.add_argument("url", metavar="REMOTE")
    pull.add_argument("destination", metavar="DEST", help="folder for the files, under their names")
    pull.add_argument("--step", metavar="S", type=int, help="not the newest complete one, but this step's")
    pull.add_argument("--only", metavar="GLOB", action="append", help="files whose names match; repeatable")
    pull.add_argument("--rank", metavar="R", type=int, action="append", help="files of this rank; repeatable")
    pull.add_argument(
        "--folder", metavar="F", help="a trainer's folder that may still have some of the files"
    )
    pull.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare every file with its checksum (the default)",
    )
    pull.add_argument("--overwrite", action="store_true", help="replace other files of the same names")
    pull.add_argument("--concurrency", metavar="N", type=int, default=8, help="reads at once (default: 8)")
    pull.add_argument("--dry-run", action="store_true", help="only print what would be pulled")
    add("version", _version, "print the version")
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 604_800:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 604800")


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= 65_535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")


# --- status ------------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    from ckpt_async import status

    found = status.load(options.folder)
    owned = {rank for rank in found.ranks if status.has_owner(options.folder, rank)}
    if options.json:
        _print_json(_status_json(options.folder, found, owned))
        return Exit.OK
    print(found.summary)
    if found.pending and not owned:
        print("no uploader is running here: `ckpt-async drain` finishes what was sealed")
    print(f"\nremote  {found.remote or 'not recorded'}")
    ranks = (f"{rank}" if rank in owned else f"{rank} (stopped)" for rank in found.ranks)
    print(f"ranks   {', '.join(ranks)}")
    queue = ", ".join(
        f"{count} {state} ({_size(size_bytes)})"
        for state, (count, size_bytes) in found.queue.items()
        if count
    )
    print(f"queue   {queue or 'empty'}")
    if found.checkpoints:
        print()
        rows = [
            (
                str(each.id.step),
                each.name,
                str(each.id.generation),
                each.state,
                f"{each.percent} %",
                f"{each.num_verified}/{each.num_shards}",
                _size(each.size_bytes),
                each.failure,
            )
            for each in found.checkpoints
        ]
        _print_table(("STEP", "NAME", "GENERATION", "STATE", "UPLOADED", "SHARDS", "SIZE", ""), rows)
    return Exit.OK


def _status_json(folder: str, found: Status, owned: set[int]) -> Json:
    committed = found.last_committed
    return {
        "folder": os.path.realpath(folder),
        "remote": found.remote,
        "summary": found.summary,
        "last_committed": None
        if committed is None
        else {
            **_id(committed),
            "committed_at": found.last_committed_at,
            "age_s": max(0.0, found.now - found.last_committed_at),
        },
        "queue": {
            state: {"shards": count, "bytes": size_bytes}
            for state, (count, size_bytes) in found.queue.items()
        },
        "ranks": [{"rank": rank, "is_running": rank in owned} for rank in found.ranks],
        "checkpoints": [_checkpoint_json(each) for each in found.checkpoints],
    }


def _checkpoint_json(each: CheckpointStatus) -> Json:
    return {
        **_id(each.id),
        "name": each.name,
        "state": each.state,
        "ranks": list(each.ranks),
        "world_size": each.world_size,
        "shards": each.num_shards,
        "shards_verified": each.num_verified,
        "size_bytes": each.size_bytes,
        "uploaded_bytes": each.uploaded_bytes,
        "percent": each.percent,
        "failure": each.failure or None,
    }


# --- ls ----------------------------------------------------------------------------------------------------


def _ls(options: argparse.Namespace) -> int:
    import asyncio

    from ckpt_async.model import Outcome

    url, decisions, server_time = asyncio.run(_list_decisions(options))
    newest = max((each.checkpoint for each in decisions if each.outcome is Outcome.COMMIT), default=None)
    shown = [each for each in decisions if options.all or each.outcome is Outcome.COMMIT]
    if options.json:
        _print_json(
            {
                "remote": url,
                "latest": None if newest is None else _id(newest),
                "checkpoints": [_decision_json(each, newest, server_time) for each in shown],
            }
        )
        return Exit.OK
    if not shown:
        print("no checkpoint is committed yet")
        return Exit.OK
    from ckpt_async.status import age

    titles = ("STEP", "NAME", "GENERATION", "RANKS", "SHARDS", "SIZE", "AGE", "")
    rows = [
        (
            str(each.checkpoint.step),
            each.name,
            str(each.checkpoint.generation),
            str(each.world_size),
            str(each.num_shards),
            _size(each.size_bytes),
            age(server_time - each.decided_at),
            ", ".join(_remarks(each, newest)),
        )
        for each in shown
    ]
    _print_table(titles, rows)
    return Exit.OK


async def _list_decisions(options: argparse.Namespace) -> tuple[str, list[Decision], float]:
    """What was decided, oldest first, without what the boundary voids; and the store's time.

    Only reads: it needs no right to write. Raises ObjectNotFoundError if no run was ever here.
    """
    from ckpt_async import keys, plan, protocol
    from ckpt_async.errors import ObjectNotFoundError
    from ckpt_async.observe import NullObserver
    from ckpt_async.requests import Requests
    from ckpt_async.settings import Settings
    from ckpt_async.stores import StoreOptions, open_store
    from ckpt_async.transfer import all_or_none

    store = open_store(
        options.remote,
        StoreOptions(endpoint_url=options.endpoint_url, region=options.region, profile=options.profile),
    )
    requests = Requests(Settings(upload_timeout_s=LS_TIMEOUT_S), NullObserver(), store.url)
    try:
        await store.open(is_read_only=True)
        listing = await requests.control("list", lambda: store.list(keys.DECISIONS))
        if not listing.objects:
            started = await requests.control("list", lambda: store.list(keys.GENERATIONS))
            if not started.objects:
                raise ObjectNotFoundError(f"{store.url} holds no run of ckpt_async")
        boundary: Boundary | None = await protocol.read_boundary(store, requests)
        found = await all_or_none(_read_decision(store, requests, each) for each in listing.objects)
    finally:
        await store.close()
    decisions = [each for each in found if each is not None and not plan.is_void(each.checkpoint, boundary)]
    return store.url, sorted(decisions, key=lambda each: each.checkpoint), listing.server_time


async def _read_decision(store: Store, requests: Requests, listed: ObjectInfo) -> Decision | None:
    from ckpt_async import keys, protocol

    checkpoint = keys.parse_decision_key(listed.key)
    return None if checkpoint is None else await protocol.read_decision(store, requests, checkpoint)


def _decision_json(each: Decision, newest: CheckpointId | None, server_time: float) -> Json:
    return {
        **_id(each.checkpoint),
        "name": each.name,
        "outcome": each.outcome.value,
        "is_latest": each.checkpoint == newest,
        "is_pinned": each.is_pinned,
        "ranks": each.world_size,
        "shards": each.num_shards,
        "size_bytes": each.size_bytes,
        "decided_at": each.decided_at,
        "age_s": max(0.0, server_time - each.decided_at),
        "metrics": dict(each.metrics),
        "reason": each.reason or None,
    }


def _remarks(each: Decision, newest: CheckpointId | None) -> Iterator[str]:
    if each.checkpoint == newest:
        yield "latest"
    if each.is_pinned:
        yield "pinned"
    said = {"abort": "given up", "pruning": "being pruned", "pruned": "pruned"}.get(each.outcome.value)
    if said:
        yield f"{said}: {each.reason}" if each.reason else said


# --- drain -------------------------------------------------------------------------------------------------


def _drain(options: argparse.Namespace) -> int:
    import asyncio

    from ckpt_async.drain import drain

    settings = _settings(os.environ)
    report = asyncio.run(
        drain(
            options.folder,
            timeout_s=options.timeout,
            grace_s=settings.close_grace_s if options.grace is None else options.grace,
            settings=settings,
            change=_change_of(options),
            profile=options.profile,
        )
    )
    code = _drain_code(report)
    if options.json:
        _print_json(_drain_json(report, code))
        return code
    lines = [line for each in report.ranks for line in _rank_lines(each)]
    for line in lines or ["nothing to do"]:
        print(line)
    if report.uploaded_bytes:
        print(f"{_size(report.uploaded_bytes)} uploaded to {', '.join(report.remotes)}")
    return code


def _settings(environment: Mapping[str, str]) -> Any:
    """As a trainer in the same environment would have them."""
    from ckpt_async.settings import load

    path = environment.get("CKPT_ASYNC_SETTINGS_FILE")
    if path is None:
        return load({}, environment)
    try:
        with open(path, encoding="utf-8") as file:
            return load({}, environment, file.read())
    except OSError as error:
        raise SettingsError(f"settings file {path!r} cannot be read: {error.strerror}") from error


def _change_of(options: argparse.Namespace) -> Callable[[RemoteAddress | None], RemoteAddress] | None:
    """How the flags change the remote that a journal recorded, if there are any."""
    if not (options.remote or options.endpoint_url or options.region):
        return None
    from dataclasses import replace

    from ckpt_async.stores import StoreOptions, address_of

    given = StoreOptions(endpoint_url=options.endpoint_url, region=options.region)
    if options.remote:
        address_of(options.remote, given, env=os.environ)  # refused here, before anything is touched

    def change(recorded: RemoteAddress | None) -> RemoteAddress:
        url = options.remote or (recorded.url if recorded else None)
        if url is None:
            raise SettingsError("the journal does not say where it uploads to", hint="say so with --remote")
        if recorded is None or recorded.url != url:
            recorded = replace(
                address_of(url, given, env=os.environ), put_args=recorded.put_args if recorded else {}
            )
        return replace(
            recorded,
            endpoint_url=options.endpoint_url or recorded.endpoint_url,
            region=options.region or recorded.region,
        )

    return change


def _drain_code(report: DrainReport) -> Exit:
    """The worst of the ranks: not all uploaded, then a live owner with work, then ranks elsewhere."""
    if any(each.error for each in report.ranks):
        return Exit.ERROR
    if any(each.left for each in report.ranks):
        return Exit.NOT_DRAINED
    if any(each.in_use_by for each in report.ranks):
        return Exit.TEMPORARY
    return Exit.INCOMPLETE if any(each.waiting for each in report.ranks) else Exit.OK


def _drain_json(report: DrainReport, code: Exit) -> Json:
    return {
        "folder": report.folder,
        "remotes": list(report.remotes),
        "is_drained": code is Exit.OK,
        "exit_code": int(code),
        "uploaded_bytes": report.uploaded_bytes,
        "ranks": [
            {
                "rank": each.rank,
                "in_use_by": each.in_use_by or None,
                "committed": [_fate_json(fate) for fate in each.committed],
                "aborted": [_fate_json(fate) for fate in each.aborted],
                "waiting": [_fate_json(fate) for fate in each.waiting],
                "left": [_fate_json(fate) for fate in each.left],
                "uploaded_bytes": each.uploaded_bytes,
                "error": each.error or None,
            }
            for each in report.ranks
        ],
    }


def _fate_json(fate: Fate) -> Json:
    return {
        **_id(fate.checkpoint),
        "name": fate.name,
        "reason": fate.reason or None,
        "missing_ranks": list(fate.missing_ranks),
    }


def _rank_lines(each: RankReport) -> Iterator[str]:
    rank = f"rank {each.rank}:"
    if each.in_use_by:
        yield f"{rank} in use by {each.in_use_by}; left alone"
    for fate in each.committed:
        yield f"{rank} step {fate.checkpoint.step} is committed"
    for fate in each.aborted:
        yield f"{rank} step {fate.checkpoint.step} was given up: {fate.reason}"
    for fate in each.waiting:
        missing = ", ".join(map(str, fate.missing_ranks[:8])) + (" …" if fate.missing_ranks[8:] else "")
        yield f"{rank} step {fate.checkpoint.step} is uploaded and waits for ranks {missing or 'elsewhere'}"
    for fate in each.left:
        yield f"{rank} step {fate.checkpoint.step} is not uploaded: {fate.reason}"
    if each.error:
        yield f"{rank} failed: {each.error}"


# --- commands of `cli_sweep` ------------------------------------------------------------------------------


def _sweep(options: argparse.Namespace) -> int:
    from ckpt_async import cli_sweep

    return Exit.OK if cli_sweep.sweep(options, _settings(os.environ)) else Exit.ERROR


def _prune(options: argparse.Namespace) -> int:
    from ckpt_async import cli_sweep

    return Exit.OK if cli_sweep.prune(options, _settings(os.environ)) else Exit.ERROR


def _pin(options: argparse.Namespace) -> int:
    from ckpt_async import cli_sweep

    cli_sweep.pin(options, is_pinned=options.command == "pin")
    return Exit.OK


def _verify(options: argparse.Namespace) -> int:
    from ckpt_async import cli_sweep

    return Exit.OK if cli_sweep.verify_remote(options) else Exit.INCOMPLETE


# --- pull --------------------------------------------------------------------------------------------------


def _pull(options: argparse.Namespace) -> int:
    from ckpt_async import cli_restore

    cli_restore.pull(options)
    return Exit.OK


# --- version -----------------------------------------------------------------------------------------------


def _version(options: argparse.Namespace) -> int:
    if options.json:
        _print_json({"version": __version__, "python": ".".join(map(str, sys.version_info[:3]))})
    else:
        print(f"ckpt-async {__version__}")
    return Exit.OK


# --- output ------------------------------------------------------------------------------------------------


def _id(checkpoint: CheckpointId) -> Json:
    return {"generation": checkpoint.generation, "step": checkpoint.step}


def _print_json(value: Json) -> None:
    print(json.dumps(value, indent=2))


def _print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    is_number = [all(row[column][:1].isdigit() for row in rows) for column in range(len(titles))]
    for row in (titles, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        print("  ".join(cells).rstrip())


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


# --- errors and logging ------------------------------------------------------------------------------------


def _tell(error: Exception, *, is_json: bool) -> Exit:
    """One line to stderr, with --json also an object to stdout; a traceback only when asked for."""
    if os.environ.get("CKPT_ASYNC_DEBUG") == "1":
        traceback.print_exception(error)
    code, message, hint = _explain(error)
    told = " ".join(f"{message} ({hint})".split() if hint else message.split())
    print(f"ckpt-async: {told}", file=sys.stderr)
    if is_json:
        kind = type(error).__name__.lstrip("_")
        _print_json(
            {"error": {"kind": kind, "message": message, "hint": hint or None, "exit_code": int(code)}}
        )
    return code


def _explain(error: Exception) -> tuple[Exit, str, str]:
    """Exit code, message and hint."""
    if isinstance(error, _UsageError):
        return Exit.USAGE, str(error), error.hint
    if isinstance(error, CkptAsyncError):
        message = str(error).removesuffix(f" ({error.hint})") if error.hint else str(error)
        return _code(error), message, error.hint
    hint = "CKPT_ASYNC_DEBUG=1 shows where"
    if isinstance(error, OSError):
        return Exit.ERROR, str(error), hint
    return Exit.ERROR, f"this is a bug: {error!r}", hint


def _code(error: CkptAsyncError) -> Exit:
    match error:
        case SettingsError() | InvalidNameError():
            return Exit.USAGE
        case NoJournalError() | StoreError(reason=FailureReason.NOT_FOUND):
            return Exit.NOT_FOUND
        case InvalidRecordError() | IntegrityError() | DamagedCheckpointError() | NoUsableCheckpointError():
            return Exit.INCOMPLETE
        case FolderInUseError():
            return Exit.TEMPORARY
        case StoreError(reason=FailureReason.THROTTLED | FailureReason.TRANSIENT | FailureReason.TIMEOUT):
            return Exit.TEMPORARY
        case _:
            return Exit.ERROR


@contextlib.contextmanager
def _logging(verbosity: int) -> Iterator[None]:
    """Our own log to stderr while a command runs: warnings, with -v what happens, with -vv everything."""
    logger, handler = logging.getLogger("ckpt_async"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)])
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
