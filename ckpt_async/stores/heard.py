"""Whether stores answer this process at all, which tells one that is slow from one that is silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Heard:
    """The number of answers of all stores so far. Exact only while one thread makes requests, as in a command."""

    num_answers: int = 0


heard = Heard()
