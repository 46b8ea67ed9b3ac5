"""The command line, `ckpt-async`: parses arguments, calls, prints. `docs/cli.md` documents it.

No rule lives here. Each command and its arguments are a module that is imported only when the command runs, so that
read-only commands start at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TextIO, cast

from ckpt_async import __version__
from ckpt_async.cli.metrics_file import measuring
from ckpt_async.cli.output import Exit, Output, OutputError, let_go, say, set_form, tell
from ckpt_async.cli.parsing import Parser, split_command
from ckpt_async.core.json_log import JsonFormatter

# Each command's name, module and summary. In the module, `name` runs it and `name_arguments` defines its
# arguments.
_COMMANDS = (
    ("status", "status", "show what this node holds, and what would be lost if it died now"),
    ("ls", "ls", "list the committed checkpoints of a run, or the runs below a prefix"),
    ("du", "du", "show how much space a run takes in the store"),
    ("watch", "watch", "upload the checkpoints of a trainer that does not use this package"),
    ("run", "watch", "run a command, and upload the checkpoints that it writes"),
    ("drain", "drain", "finish the uploads that a trainer which has ended left on this node"),
    ("sweep", "sweep", "finish the uploads that dead trainers left, and clean up remotes"),
    ("prune", "sweep", "remove committed checkpoints that a policy does not keep"),
    ("pin", "upkeep", "keep a checkpoint whatever the policy says"),
    ("unpin", "upkeep", "remove a pin"),
    ("unmark", "upkeep", "remove a reader's damage mark"),
    ("verify", "upkeep", "check from the store alone that committed checkpoints are complete"),
    ("pull", "pull", "fetch a checkpoint into a local folder and verify it"),
    ("copy", "whole_runs", "copy a run to another place, perhaps in another kind of store"),
    ("delete", "whole_runs", "delete a whole run"),
    ("convert", "convert", "write a checkpoint, sharded or not, as one file"),
    ("doctor", "doctor", "check that this node, the folder and the remote are fit for a run"),
    ("version", "output", "print the version"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Only results are printed to stdout."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    ours, _ = split_command(arguments)
    is_json = "--json" in ours
    _prepare_streams()
    set_form(ours)
    try:
        with contextlib.redirect_stdout(cast(TextIO, Output(sys.stdout))):
            code = _run(arguments, is_json=is_json)
            sys.stdout.flush()
    except OSError as error:  # from stdout itself; other errors are reported already
        code = Exit.BROKEN_PIPE  # the reader of our output has gone
        if not isinstance(error, BrokenPipeError):
            say(
                f"ckpt-async: the output cannot be written: {error.strerror}",
                "output_failed",
                level=logging.ERROR,
            )
            code = Exit.ERROR
        let_go(sys.stdout)
    let_go(sys.stderr)
    return int(code)


def _run(arguments: Sequence[str], *, is_json: bool) -> int:
    """Parse the arguments and run the command. Raises OSError if the output cannot be written."""
    if "--version" in arguments and all(each.startswith("-") for each in arguments):
        arguments = ["version", *(each for each in arguments if each != "--version")]
    try:
        options = _parser().parse_args(arguments)
        with _logging(options.verbose, options.log_format), measuring(options) as tally:
            tally.code = code = int(options.run(options))
    except SystemExit as ended:  # --help and --version
        return int(ended.code or 0)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except (BrokenPipeError, OutputError):
        raise
    except Exception as error:  # noqa: BLE001  the outermost frame: told in one line
        return tell(error, is_json=is_json)
    return code


def _prepare_streams() -> None:
    """Keep prints from failing because a stream was closed before we began or cannot encode a character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _parser() -> Parser:
    parser = Parser(
        prog="ckpt-async",
        description="Inspect, finish, clean up and fetch checkpoints uploaded by ckpt_async.",
        epilog="exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 incomplete, 5 try again later,"
        " 6 not drained in time, 7 data corrupted in transit, 8 different, 130 interrupted, 141 output closed",
    )
    parser.add_argument("--version", action="version", version=f"ckpt-async {__version__}")
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    common.add_argument(
        "-v", "--verbose", action="count", default=0, help="log to stderr; -vv logs every shard"
    )
    common.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of the log and of errors on stderr; json: one object per line",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.commands = commands.choices
    for name, module, help_ in _COMMANDS:
        commands.add_parser(
            name,
            help=help_,
            description=f"{help_[0].upper()}{help_[1:]}.",
            parents=[common],
            define=partial(_define, module, name),
        )
    return parser


def _define(module_name: str, name: str, parser: argparse.ArgumentParser) -> None:
    module = importlib.import_module(f"ckpt_async.cli.{module_name}")
    getattr(module, f"{name}_arguments")(parser)
    parser.set_defaults(run=getattr(module, name))


@contextlib.contextmanager
def _logging(verbosity: int, log_format: str) -> Iterator[None]:
    """Log to stderr while a command runs: warnings; with -v also what happens; with -vv everything."""
    logger, handler = logging.getLogger("ckpt_async"), logging.StreamHandler(sys.stderr)
    as_text = logging.Formatter("%(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else as_text)
    before = logger.level
    logger.addHandler(handler)
    warnings_logger = logging.getLogger("py.warnings")
    if log_format == "json":  # Python's own warnings would be plain text
        warnings_logger.addHandler(handler)
        logging.captureWarnings(True)
    logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)])
    try:
        yield
    finally:
        if log_format == "json":
            logging.captureWarnings(False)
            warnings_logger.removeHandler(handler)
        logger.removeHandler(handler)
        logger.setLevel(before)
