"""The unit of sizes, and human-readable sizes, durations and lists of ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 1 << 20

MAX_SHOWN = 8


def in_units(size_bytes: float) -> str:
    """Format a size: 900 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def age(duration_s: float) -> str:
    """Format a duration: 40 s, 9 min, 3 h, 2 days. A negative one, from a clock that was set back, gives 0 s."""
    seconds = max(0, int(duration_s))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h" if seconds < 172_800 else f"{seconds // 86_400} days"


def one_line(text: str) -> str:
    """Escape foreign text so that it can neither begin a line of its own nor control a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: 1 file; 2 files."""
    return f"{count} {noun}{'s' * (count != 1)}"


def named(what: str, numbers: Sequence[int]) -> str:
    """Format a noun with the numbers it refers to: rank 3; ranks 3, 4."""
    return f"{what}{'s' * (len(numbers) > 1)} {few(numbers)}"


def few(numbers: Sequence[object]) -> str:
    """Format the first MAX_SHOWN items: 3, 4, 5 …"""
    return ", ".join(map(str, numbers[:MAX_SHOWN])) + (" …" if numbers[MAX_SHOWN:] else "")
