"""What a watcher does not take of what it has found, and why: for metrics and events."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Refusal(enum.Enum):
    """`docs/events.md` says what each means."""

    CHANGED = "changed"  # written in place, so nothing tells when it is whole; or a part of it was too late
    UNREADABLE = "unreadable"
    INCOMPLETE = "incomplete"  # finished by its trainer, and never seen complete
    UNSUPPORTED = "unsupported"  # a symbolic link, a name that not every store takes, a second file of a step
    UNKNOWN = "unknown"  # of no known format
    OUTDATED = "outdated"  # it would become the newest, and is not
    NO_SPACE = "no_space"  # for a copy; or for links of what its trainer has deleted
    GIVEN_UP = "given_up"  # handed in, and then given up by the run


@dataclass(frozen=True, slots=True)
class Refused:
    """One thing, at `path` of the watched folder. `version` tells apart what was there one after the other; `step` is
    None where it may be no checkpoint.
    """

    path: str
    cause: Refusal
    reason: str
    step: int | None = None
    name: str = ""
    version: int = 0
