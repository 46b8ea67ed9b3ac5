"""Whether stores answer at all, which tells one that is slow from one that is silent."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Heard:
    """The number of answers so far."""

    num_answers: int = 0


# Whose answers are counted together: all that a command's own context (its tasks too) has asked for.
heard: ContextVar[Heard] = ContextVar("heard")


def count_answer() -> None:
    """Count an answer of a store for whoever asked."""
    if (counted := heard.get(None)) is not None:
        counted.num_answers += 1
