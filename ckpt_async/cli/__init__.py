"""The command line, `ckpt-async`. `docs/cli.md` documents commands, JSON fields and exit codes.

It parses, calls and prints; it knows no rule. What a command needs is imported when it runs, so that those that only
look answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from ckpt_async import __version__
from ckpt_async.cli.output import ANY, Exit, Which, print_json
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
    UnreliableReadError,
)

_STEP = re.compile(r"(\d{1,18})(?:@g(\d{1,18}))?", re.ASCII)


class _UsageError(Exception):
    """The command line makes no sense."""

    def __init__(self, message: str, program: str, *, meant: str = "") -> None:
        super().__init__(message)
        self.hint = f"did you mean {meant}?" if meant else f"see `{program} --help`"


class _Parser(argparse.ArgumentParser):
    """Takes options by their full names only: a script's abbreviation would break, or change its meaning, with the
    next option that begins like it. What is not known is refused with what was probably meant.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, **more)
        self.commands: Iterable[str] = ()

    def error(self, message: str) -> NoReturn:
        raise _UsageError(message, self.prog)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.commands and args and not args[0].startswith("-") and args[0] not in self.commands:
            meant = _similar(args[0], self.commands)
            raise _UsageError(f"there is no command {args[0]!r}", self.prog, meant=meant)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = _similar(unknown[0].partition("=")[0], self._option_string_actions)
            raise _UsageError(f"unrecognized arguments: {' '.join(unknown)}", self.prog, meant=meant)
        return found, unknown


def _similar(word: str, known: Iterable[str]) -> str:
    """The one of `known` that was probably meant, or nothing."""
    begun = [each for each in known if word.lstrip("-") and each.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, known, n=1)), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Prints nothing but results to stdout."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_json = "--json" in arguments
    _prepare_streams()
    try:
        try:
            options = _parser().parse_args(arguments)
            with _logging(options.verbose):
                code = int(options.run(options))
        except SystemExit as ended:  # --help and --version
            code = int(ended.code or 0)
        except KeyboardInterrupt:
            code = Exit.INTERRUPTED
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  the outermost frame: told in one line
            code = _tell(error, is_json=is_json)
        sys.stdout.flush()
    except OSError as error:  # of stdout itself: all else is told already
        code = Exit.BROKEN_PIPE  # whoever read us has seen enough
        if not isinstance(error, BrokenPipeError):
            print(f"ckpt-async: the output cannot be written: {error.strerror}", file=sys.stderr)
            code = Exit.ERROR
        # What Python flushes at exit must not complain again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(code)


def _prepare_streams() -> None:
    """Let nothing that is printed fail for a stream that was closed before we began, or that has no such character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ckpt-async",
        description="Look at and finish checkpoints that ckpt_async uploads.",
        epilog="exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 incomplete, 5 try again later,"
        " 6 not drained in time, 7 what arrives is spoilt on its way, 130 interrupted, 141 output closed",
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
    where = "s3://bucket/prefix/run or file:///path/run"
    policies = (
        "last=N, every-steps=N, every-seconds=T, best=K:METRIC:min|max, named=NAME, all; joined by commas"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.commands = commands.choices

    def add(name: str, module: str, help_: str, *parents: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=help_, description=f"{help_[0].upper()}{help_[1:]}.", parents=[common, *parents]
        )
        made.set_defaults(run=partial(_run, module, name))
        return made

    status = add("status", "node", "what this node holds, and what would be lost if it died now")
    status.add_argument(
        "folder",
        metavar="FOLDER",
        type=_folder("`ckpt-async ls {}` shows what is there"),
        help="the folder that the uploader was opened with",
    )
    ls = add("ls", "listing", "committed checkpoints of a run", store)
    ls.add_argument("remote", metavar="REMOTE", help=where)
    ls.add_argument("--all", action="store_true", help="also those given up or pruned")
    drain = add("drain", "node", "finish what a trainer that has ended left on this node", store)
    drain.add_argument(
        "folder",
        metavar="FOLDER",
        type=_folder("the folder's journal says where it goes, else `--remote {}`"),
        help="the folder that the uploader was opened with",
    )
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
    sweep = add("sweep", "upkeep", "finish what dead trainers left, and clean up remotely", store)
    sweep.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        type=_folder("say `--remote {}`"),
        help="folders of trainers on this node; '*' matches names",
    )
    sweep.add_argument(
        "--remote", metavar="URL", action="append", default=[], help="also this remote; repeatable"
    )
    sweep.add_argument(
        "--keep",
        metavar="POLICY",
        help=f"remote retention (default: the setting remote_retention): {policies}",
    )
    sweep.add_argument(
        "--dry-run", action="store_true", help="print the plan with its reasons; touch nothing"
    )
    sweep.add_argument(
        "--verify", action="store_true", help="also verify every committed checkpoint: one HEAD per shard"
    )
    sweep.add_argument(
        "--folders-only",
        action="store_true",
        help="finish what is in the folders, which takes a trainer's rights; leave the remotes to another sweeper",
    )
    sweep.add_argument(
        "--metrics-port", metavar="P", type=_port, default=-1, help="Prometheus port (0: any free one)"
    )
    how_often = sweep.add_mutually_exclusive_group()
    how_often.add_argument("--once", action="store_true", help="sweep once (the default)")
    how_often.add_argument(
        "--interval", metavar="S", type=_pause, help="sweep every S seconds, until SIGTERM"
    )
    prune = add("prune", "upkeep", "remove committed checkpoints that a policy does not keep", store)
    prune.add_argument("url", metavar="REMOTE", help=where)
    prune.add_argument(
        "--keep", metavar="POLICY", help=f"what stays (default: the setting remote_retention): {policies}"
    )
    prune_how = prune.add_mutually_exclusive_group()
    prune_how.add_argument("--dry-run", action="store_true", help="only print the plan (the default)")
    prune_how.add_argument("--yes", action="store_true", help="do it")
    for name, help_ in (
        ("pin", "keep a checkpoint whatever the policy says"),
        ("unpin", "take a pin back"),
        ("unmark", "take a reader's mark of damage back"),
    ):
        pin = add(name, "upkeep", help_, store)
        pin.add_argument("url", metavar="REMOTE", help=where)
        pin.add_argument(
            "checkpoint",
            metavar="STEP|STEP@gN|NAME",
            type=_which,
            help="as `ckpt-async ls` shows it; 100@g2 is step 100 of generation 2",
        )
    verify = add("verify", "upkeep", "recompute what must hold from the store alone", store)
    verify.add_argument("url", metavar="REMOTE", help=where)
    verify.add_argument(
        "--step",
        metavar="S[@gN]",
        type=_step,
        default=ANY,
        help="only checkpoints of this step (and generation)",
    )
    verify.add_argument(
        "--read-data", metavar="PERCENT", type=_percent, default=0.0, help="read so many of the shards whole"
    )
    verify.add_argument("--seed", type=int, default=0, help="which shards are read")
    pull = add("pull", "pull", "bring a checkpoint back to a local folder, verified", store)
    pull.add_argument("url", metavar="REMOTE", help=where)
    pull.add_argument(
        "destination",
        metavar="DEST",
        type=_folder("first the remote, then where to bring it"),
        help="folder for the files, under their names",
    )
    pull.add_argument(
        "--step",
        metavar="S[@gN]",
        type=_step,
        default=ANY,
        help="not the newest complete one, but this step's (100@g2: that of generation 2)",
    )
    pull.add_argument("--only", metavar="GLOB", action="append", help="files whose names match; repeatable")
    pull.add_argument("--rank", metavar="R", type=int, action="append", help="files of this rank; repeatable")
    pull.add_argument(
        "--folder", metavar="F", type=_path, help="a trainer's folder that may still have some of the files"
    )
    pull.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare every file with its checksum (the default)",
    )
    pull.add_argument("--overwrite", action="store_true", help="replace other files of the same names")
    pull.add_argument("--concurrency", metavar="N", type=_reads, default=8, help="reads at once (default: 8)")
    pull.add_argument("--dry-run", action="store_true", help="only print what would be pulled")
    doctor = add("doctor", "health", "try out whether a run may be trusted to this node and remote", store)
    doctor.add_argument(
        "places",
        metavar="FOLDER|REMOTE",
        nargs="*",
        type=_path,
        help="where the trainer will write, and where to upload (default: as the folder's journal says)",
    )
    doctor.add_argument("--speed", action="store_true", help="also send 64 MiB there and back")
    doctor.add_argument(
        "--checkpoint-bytes",
        metavar="SIZE",
        type=_size,
        help="of this node's part of a checkpoint, e.g. 40GiB: is there room, how long it takes (implies --speed)",
    )
    add("version", "version", "print the version")
    return parser


def _run(module: str, name: str, options: argparse.Namespace) -> Exit:
    """The command `name` is the function of that name in a module of this package."""
    run: Callable[[argparse.Namespace], Exit] = getattr(
        importlib.import_module(f"ckpt_async.cli.{module}"), name
    )
    return run(options)


def _path(text: str) -> str:
    if text:
        return text
    raise argparse.ArgumentTypeError("'' is not a path: '.' is the working directory")


def _folder(instead: str) -> Callable[[str], str]:
    """The type of a folder on this node. A remote is refused with what to do `instead`, which may name it."""

    def parse(text: str) -> str:
        if "://" not in text:
            return _path(text)
        raise argparse.ArgumentTypeError(
            f"{text} is a remote, not a folder of this node: {instead.format(text)}"
        )

    return parse


def _which(text: str) -> Which:
    """A checkpoint by its step, by step and generation, or by its name."""
    if match := _STEP.fullmatch(text):
        return Which(int(match[1]), int(match[2]) if match[2] else None, text)
    return Which(None, None, text)


def _step(text: str) -> Which:
    if (which := _which(text)).step is not None:
        return which
    raise argparse.ArgumentTypeError(f"{text!r} is not a step such as 100, or 100@g2 of generation 2")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 604_800:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 604800")


def _pause(text: str) -> float:
    if value := _seconds(text):
        return value
    raise argparse.ArgumentTypeError("0 would sweep without a pause")


def _percent(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 100:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")


def _reads(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 1024:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1024")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:([KMGTP])(i?))?B?", text, re.IGNORECASE)
    if match is not None:
        power = "KMGTP".index(match[2].upper()) + 1 if match[2] else 0
        if (size_bytes := int(float(match[1]) * (1024 if match[3] else 1000) ** power)) >= 1:
            return size_bytes
    raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 40GiB or 500MB")


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= 65_535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")


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
        print_json(
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
        case UnreliableReadError():
            return Exit.UNRELIABLE
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
