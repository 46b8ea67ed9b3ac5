"""When a wrong answer of the store counts as the store's own: a byte may also be corrupted on its way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# Each over connections that share nothing with those of the others.
MAX_READINGS = 3


def is_proven(wrong: Sequence[Hashable]) -> bool:
    """Return whether two of these wrong readings are the same."""
    return len(set(wrong)) < len(wrong)
