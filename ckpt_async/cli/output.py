"""What all commands share: exit codes, JSON, tables, sizes."""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_async.cli.stderr import say

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


def id_json(checkpoint: CheckpointId) -> Json:
    return {"generation": checkpoint.generation, "step": checkpoint.step}


def print_json(value: Json) -> None:
    print(json.dumps(value, indent=2))


def print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    is_number = [all(row[column][:1].isdigit() for row in rows) for column in range(len(titles))]
    for row in (titles, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        print("  ".join(cells).rstrip())
