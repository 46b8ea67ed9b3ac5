"""What all commands share: exit codes, JSON, tables, sizes."""

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
from ckpt_async.core.units import one_line

if TYPE_CHECKING:
    from ckpt_async.core.model import CheckpointId
    from ckpt_async.stores import StoreOptions

Json = dict[str, Any]

# Whoever waits for a store at a terminal is told so after this long.
SILENCE_S = 5.0


class Exit(enum.IntEnum):
    """What a script may branch on."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    INCOMPLETE = 4
    TEMPORARY = 5
    NOT_DRAINED = 6
    UNRELIABLE = 7
    DIFFERENT = 8
    INTERRUPTED = 130
    BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Which:
    """A checkpoint as somebody typed it: `100`, `100@g2` or a name (then without a step)."""

    step: int | None
    generation: int | None
    text: str

    def is_of(self, checkpoint: CheckpointId) -> bool:
        return checkpoint.step == self.step and self.generation in (None, checkpoint.generation)


ANY = Which(None, None, "")


def store_options(options: argparse.Namespace) -> StoreOptions:
    """What `--endpoint-url`, `--region` and `--profile` say."""
    from ckpt_async.stores import StoreOptions

    return StoreOptions(endpoint_url=options.endpoint_url, region=options.region, profile=options.profile)


def telling_of_silence(
    url: str, *, patience_s: float
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Say on stderr that a store has not answered yet, unless the block ends, or what it yields is called, at once."""
    text = f"no answer yet from {url}; retrying for up to {patience_s:.0f} s"
    return saying_later(text, "no_answer_yet", url=url)


@contextlib.contextmanager
def saying_later(text: str, event: str, *, url: str) -> Iterator[Callable[[], None]]:
    """Say on stderr why somebody waits, unless the block ends, or what it yields is called, at once."""
    timer = threading.Timer(SILENCE_S, lambda: say(f"ckpt-async: {text}", event, url=url))
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


class OutputError(OSError):
    """What is printed cannot be written."""


class Output:
    """A stream in which a failed write is told from every other OSError of a command."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Raises OutputError; BrokenPipeError, if whoever read it has seen enough."""
        with _told_apart():
            return self._stream.write(text)

    def flush(self) -> None:
        """Raises what `write` raises."""
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
    """A stream whose failed writes are said once, and lose what was written."""

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
                text = f"ckpt-async: the output cannot be written: {error.strerror}; going on without it"
                say(text, "output_failed")


@contextlib.contextmanager
def going_on_unread() -> Iterator[None]:
    """For a command whose work must not end, nor its exit code change, because nobody can read what it prints."""
    stream = sys.stdout
    with contextlib.redirect_stdout(cast(TextIO, _Unread(stream))):
        try:
            yield
        finally:
            let_go(stream)


def let_go(stream: TextIO) -> None:
    """Write what a stream still has. What it cannot write must not fail again when Python flushes it at its end, which
    would change the exit code.
    """
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def pause_for_reader(pause_s: float) -> None:
    """Sleep, but raise BrokenPipeError as soon as nobody can read our output any more: where nothing changes nothing is
    written, which would be the other way to learn of that.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # no file
        time.sleep(pause_s)
        return
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are told always
    if poll.poll(pause_s * 1000):
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output any more")


def id_json(checkpoint: CheckpointId) -> Json:
    return {"generation": checkpoint.generation, "step": checkpoint.step}


def print_line(text: str) -> None:
    """With names of folders, keys and runs, none of which can speak to the terminal, or forge a line."""
    print(one_line(text), flush=True)


def print_json(value: Json) -> None:
    print(json.dumps(value, indent=2))


def print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell; numbers to the right."""
    rows = [tuple(map(one_line, row)) for row in rows]
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    is_number = [all(row[column][:1].isdigit() for row in rows) for column in range(len(titles))]
    for row in (titles, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        print("  ".join(cells).rstrip())
