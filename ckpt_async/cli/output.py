"""What all commands share: exit codes, JSON, tables, and reports that a store is slow."""

from __future__ import annotations

import argparse
import contextlib
import enum
import errno
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, cast

from ckpt_async.cli.stderr import say
from ckpt_async.core.units import counted, one_line

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


def print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns as wide as their widest cell, with numbers aligned to the right."""
    rows = [tuple(map(one_line, row)) for row in rows]
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    is_number = [all(row[column][:1].isdigit() for row in rows) for column in range(len(titles))]
    for row in (titles, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        print("  ".join(cells).rstrip())
