"""What a watcher found but did not accept, and why: for metrics and events."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Refusal(enum.Enum):
    """Why a watcher refused something. `docs/events.md` explains each reason."""

    CHANGED = "changed"  # modified in place, so nobody knows when it is complete; or a part came too late
    UNREADABLE = "unreadable"
    INCOMPLETE = "incomplete"  # its trainer finished it, but it was never seen complete
    UNSUPPORTED = "unsupported"  # symbolic link, name that not every store accepts, second file of a step
    UNKNOWN = "unknown"  # of no known format
    OUTDATED = "outdated"  # it was committed before, or is older than what was, and would become the newest
    NO_SPACE = "no_space"  # for a copy, or for links to files that its trainer has deleted
    GIVEN_UP = "given_up"  # handed in, but then given up by the run


@dataclass(frozen=True, slots=True)
class Refused:
    """Something refused, at `path` in the watched folder.

    `version` distinguishes successive things at one path; `step` is None for something that may not be a checkpoint.
    """

    path: str
    cause: Refusal
    reason: str
    step: int | None = None
    name: str = ""
    version: int = 0
