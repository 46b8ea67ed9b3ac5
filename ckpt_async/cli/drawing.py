"""Lays out text for a terminal: to its width, in colour if wanted, redrawn in place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_async.core.units import one_line

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
    mood_column: int  # the coloured column
    spare: tuple[str, ...]


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
        if block.table is not None and block.table.rows:
            lines += ["", *_rows(block.table, on)]
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
