"""What all commands share: exit codes, JSON, tables, and reports that a store is slow."""

from __future__ import annotations

import argparse
import contextlib
import enum
import errno
import itertools
import json
import logging
import os
import select
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO, cast

from ckpt_async import __version__
from ckpt_async.core.units import counted, one_line
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
    ObjectNotFoundError,
    SettingsError,
    StoreError,
    UnknownKindError,
    UnreliableReadError,
)

if TYPE_CHECKING:
    from ckpt_async.core.model import CheckpointId
    from ckpt_async.stores import StoreOptions


Json = dict[str, Any]

# Someone who waits at a terminal for a store is told so after this long.
SILENCE_S = 5.0


class Exit(enum.IntEnum):
    """The exit codes, on which scripts may branch."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    INCOMPLETE = 4
    TEMPORARY = 5
    NOT_DRAINED = 6
    UNRELIABLE = 7
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class UsageError(Exception):
    """The command line makes no sense."""

    def __init__(self, message: str, program: str, *, meant: str = "") -> None:
        super().__init__(message)
        self.hint = f"did you mean {meant}?" if meant else f"see `{program} --help`"


@dataclass(frozen=True, slots=True)
class Which:
    """A checkpoint as the user typed it: `100`, `100@g2`, or a name (then without a step)."""

    step: int | None
    generation: int | None
    text: str

    def is_of(self, checkpoint: CheckpointId) -> bool:
        return checkpoint.step == self.step and self.generation in (None, checkpoint.generation)


ANY = Which(None, None, "")


def store_options(options: argparse.Namespace) -> StoreOptions:
    """Return the options that `--endpoint-url`, `--region` and `--profile` give."""
    from ckpt_async.stores import StoreOptions

    return StoreOptions(endpoint_url=options.endpoint_url, region=options.region, profile=options.profile)


def telling_of_silence(
    url: str, *, patience_s: float
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Report on stderr, after SILENCE_S, that a store has not answered, or how slowly it answers.

    Nothing is printed if the block ends, or the yielded function is called, before that.
    """
    from ckpt_async.stores.heard import Heard, heard

    own = Heard()
    heard.set(own)

    def text() -> str:
        if own.num_answers:
            return f"{url} answers slowly: {counted(own.num_answers, 'answer')} in {SILENCE_S:g} s; still waiting"
        return f"no answer yet from {url}; retrying for up to {patience_s:.0f} s"

    return saying_later(text, "store_is_slow", url=url)


@contextlib.contextmanager
def saying_later(text: Callable[[], str], event: str, *, url: str) -> Iterator[Callable[[], None]]:
    """Explain on stderr, after SILENCE_S, why the command waits.

    Nothing is printed if the block ends, or the yielded function is called, before that.
    """
    timer = threading.Timer(SILENCE_S, lambda: say(f"ckpt-async: {text()}", event, url=url))
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


class OutputError(OSError):
    """The output cannot be written."""


class Output:
    """A stream that distinguishes its own failed writes from all other OSErrors of a command."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text. Raises OutputError, or BrokenPipeError if the reader has gone."""
        with _told_apart():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream. Raises the same errors as `write`."""
        with _told_apart():
            self._stream.flush()


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


class _Unread:
    """A stream that reports its first failed write and otherwise discards what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._has_said = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._telling():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._telling():
            self._stream.flush()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_said:
                self._has_said = True
                text = f"ckpt-async: the output cannot be written: {error.strerror}; continuing without it"
                say(text, "output_failed")


@contextlib.contextmanager
def going_on_unread() -> Iterator[None]:
    """Let a command work on, with the same exit code, even if nobody can read its output."""
    stream = sys.stdout
    with contextlib.redirect_stdout(cast(TextIO, _Unread(stream))):
        try:
            yield
        finally:
            let_go(stream)


def let_go(stream: TextIO) -> None:
    """Write what a stream still has buffered.

    If that fails, redirect the stream to /dev/null: otherwise Python would fail again when it flushes it at exit, and
    change the exit code.
    """
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def pause_for_reader(pause_s: float) -> None:
    """Sleep, but raise BrokenPipeError as soon as nobody can read our output any more.

    While nothing changes, nothing is written, so we would not notice otherwise.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        time.sleep(pause_s)
        return
    poll = select.poll()
    poll.register(descriptor, 0)  # poll always reports errors
    if poll.poll(pause_s * 1000):
        raise BrokenPipeError(errno.EPIPE, "the reader of the output has closed it")


def id_json(checkpoint: CheckpointId) -> Json:
    return {"generation": checkpoint.generation, "step": checkpoint.step}


def print_line(text: str) -> None:
    """Print a line with names of folders, keys or runs, which cannot control the terminal or forge another line."""
    print(one_line(text), flush=True)


def print_json(value: Json) -> None:
    print(json.dumps(value, indent=2))


def present(value: Json, lines: Iterable[str], *, is_json: bool) -> None:
    """Print a command's result: the value for programs, or the lines for people."""
    if is_json:
        print_json(value)
        return
    for line in lines:
        print_line(line)


def print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table as a whole, also on a narrow terminal: another command may read it."""
    print("\n".join(drawn([Block((), Table(titles, rows, [""] * len(rows)))], Terminal())))


_is_json = False  # one command runs in a process at a time


def set_form(arguments: Sequence[str]) -> None:
    """Choose text or JSON by the command line, even if that makes no sense otherwise."""
    global _is_json  # noqa: PLW0603
    pairs = itertools.pairwise(arguments)
    _is_json = "--log-format=json" in arguments or ("--log-format", "json") in pairs


def say(
    text: str,
    event: str,
    *,
    level: int = logging.WARNING,
    exception: BaseException | None = None,
    **fields: str | int,
) -> None:
    """Print one line at once, with the traceback of an `exception` before it, or in its field.

    If the line cannot be written (a log on a full disk, a reader that is gone), nothing fails.
    """
    if _is_json:
        from ckpt_async.core.json_log import FIELDS, JsonFormatter

        raised = (type(exception), exception, exception.__traceback__) if exception else None
        record = logging.LogRecord("ckpt_async.cli", level, "", 0, text, None, raised)
        setattr(record, FIELDS, (event, fields))
        text = JsonFormatter().format(record)
    elif exception is not None:
        text = f"{''.join(traceback.format_exception(exception))}{text}"
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


# Colour codes by the name of a state or mood.
COLOURS = {
    "good": "32", "committed": "32", "uploading": "34", "open": "34", "waiting": "33", "in_flight": "33", "warn": "33",
    "bad": "31", "lost": "31", "aborted": "31", "damaged": "31", "quiet": "2", "pruned": "2", "strong": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Rows, each with its mood and, last and without a title, a remark. `spare` are the columns that a narrow terminal
    may drop, in that order.
    """

    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    moods: Sequence[str]
    mood_column: int = -1  # the coloured column
    spare: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Lines, each with its mood, and perhaps a table below them."""

    lines: Sequence[tuple[str, str]]
    table: Table | None = None
    after: Sequence[tuple[str, str]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Terminal:
    """The output. `width` and `height` are None if it is not a terminal: then nothing is cut."""

    width: int | None = None
    height: int | None = None
    is_coloured: bool = False


def terminal(environment: Mapping[str, str]) -> Terminal:
    """Return the terminal that stdout is. NO_COLOR (no-color.org) and TERM=dumb turn colours off."""
    if not sys.stdout.isatty():
        return Terminal()
    size = shutil.get_terminal_size()
    is_coloured = not environment.get("NO_COLOR") and environment.get("TERM", "dumb") != "dumb"
    return Terminal(max(20, size.columns), max(5, size.lines), is_coloured)


def drawn(blocks: Sequence[Block], on: Terminal) -> list[str]:
    """Return the lines, none wider than the terminal, with control characters in names made harmless."""
    lines: list[str] = []
    for number, block in enumerate(map(_tamed, blocks)):
        if number:
            lines.append("")
        lines += [part for mood, text in block.lines for part in _wrapped(text, mood, on)]
        if block.table is not None and (block.table.rows or not block.lines):
            lines += [*([""] if block.lines else []), *_rows(block.table, on)]
        lines += [part for mood, text in block.after for part in _wrapped(text, mood, on)]
    return lines


class Screen:
    """A part of the terminal that is redrawn repeatedly."""

    def __init__(self) -> None:
        self._num_lines = 0

    def show(self, lines: Sequence[str], on: Terminal) -> None:
        """Replace what was shown before; lines that do not fit are only counted."""
        if on.height is not None and len(lines) >= on.height:
            left = len(lines) - on.height + 2
            lines = [*lines[: on.height - 2], f"… {left} more lines"]
        back = f"\x1b[{self._num_lines}F" if self._num_lines else ""
        sys.stdout.write(f"{back}\x1b[J" + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self._num_lines = len(lines)


# --- within ------------------------------------------------------------------------------------------------


def _tamed(block: Block) -> Block:
    def of(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(mood, one_line(text)) for mood, text in lines]

    table = block.table
    if table is not None:
        table = replace(table, rows=[tuple(map(one_line, row)) for row in table.rows])
    return Block(of(block.lines), table, of(block.after))


def _wrapped(text: str, mood: str, on: Terminal) -> list[str]:
    if on.width is None:
        return [text]
    parts, line = [], ""
    for word in text.split(" "):
        while len(word) > on.width:  # a path
            if line:
                parts.append(line)
                line = ""
            parts.append(word[: on.width])
            word = word[on.width :]  # noqa: PLW2901  what is left of it
        if line and len(line) + 1 + len(word) > on.width:
            parts.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [_coloured(part, mood, on) for part in [*parts, line]]


def _coloured(text: str, mood: str, on: Terminal) -> str:
    code = COLOURS.get(mood, "") if on.is_coloured else ""
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def _fitting(table: Table, on: Terminal) -> tuple[list[int], list[int]]:
    """Return the columns that there is room for, besides the remarks, and the widths of all columns."""
    widths = [max(map(len, column)) for column in zip(table.titles, *table.rows, strict=True)]
    shown = list(range(len(table.titles) - 1))
    if on.width is not None:
        for title in table.spare:
            if sum(widths[column] + 2 for column in shown) - 2 <= on.width:
                break
            shown.remove(table.titles.index(title))
    return shown, widths


def _rows(table: Table, on: Terminal) -> list[str]:
    """Return a table as lines: columns as wide as their widest cell, numbers aligned to the right. A remark that does
    not fit into its row's line is below it.
    """
    shown, widths = _fitting(table, on)
    is_number = [all(row[column][:1].isdigit() for row in table.rows) for column in range(len(widths))]
    lines = []
    for row, mood in zip((table.titles, *table.rows), ("", *table.moods), strict=True):
        line, left = "", on.width
        for column in shown:
            cell = (
                row[column].rjust(widths[column]) if is_number[column] else row[column].ljust(widths[column])
            )
            cell = cell if left is None else cell[: max(0, left)]
            line += _coloured(cell, mood, on) if column == table.mood_column else cell
            line += "  " if left is None or left > len(cell) + 2 else ""
            left = None if left is None else left - len(cell) - 2
        if left is None or len(row[-1]) <= max(0, left):
            lines.append((line + row[-1]).rstrip())
        else:
            lines.append(line.rstrip())
            assert on.width is not None
            lines += [f"  {part}" for part in _wrapped(row[-1], "", replace(on, width=on.width - 2))]
    return lines


def tell(error: Exception, *, is_json: bool) -> Exit:
    """Print one line to stderr, with --json also an object to stdout; a traceback only if asked for."""
    code, message, hint = _explain(error)
    name = type(error).__name__
    shown = error if os.environ.get("CKPT_ASYNC_DEBUG") == "1" else None
    say(
        f"ckpt-async: {_one_line(message, hint)}",
        "command_failed",
        level=logging.ERROR,
        exception=shown,
        error=name,
        exit_code=int(code),
    )
    if is_json:
        value = {"kind": name, "message": message, "hint": hint or None, "exit_code": int(code)}
        print(json.dumps({"error": value}))  # in one line: `watch` prints one object per line
    return code


def told(error: Exception) -> str:
    """Return an error in one line, with what to do."""
    _, message, hint = _explain(error)
    return _one_line(message, hint)


def _one_line(message: str, hint: str) -> str:
    return " ".join(f"{message} ({hint})".split() if hint else message.split())


def code_of(error: Exception) -> Exit:
    """Return the exit code of a command that ends with this error."""
    return _explain(error)[0]


def _explain(error: Exception) -> tuple[Exit, str, str]:
    """Return exit code, message and hint."""
    if isinstance(error, UsageError):
        return Exit.USAGE, str(error), error.hint
    if isinstance(error, CkptAsyncError):
        return _code(error), error.without_hint, error.hint
    if isinstance(error, PermissionError) and error.filename:
        what = f"{os.fsdecode(error.filename)!r} cannot be used: {error.strerror}"
        return Exit.ERROR, what, "run this as the user whose trainer created it"
    hint = "CKPT_ASYNC_DEBUG=1 shows the traceback"
    if isinstance(error, OSError):
        return Exit.ERROR, str(error), hint
    return Exit.ERROR, f"this is a bug: {error!r}", hint


def _code(error: CkptAsyncError) -> Exit:
    match error:
        case SettingsError() | InvalidNameError() | UnknownKindError():
            return Exit.USAGE
        case ObjectNotFoundError() if (
            error.operation
        ):  # gone in the middle: a script may start from scratch after 3
            return Exit.ERROR
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


def version_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def version(options: argparse.Namespace) -> Exit:
    """Print the version, with --json also that of Python."""
    if options.json:
        print_json({"version": __version__, "python": ".".join(map(str, sys.version_info[:3]))})
    else:
        print(f"ckpt-async {__version__}")
    return Exit.OK
