"""Remembers torch.save files whose records do not match their own checksums.

Such a file is half written over an earlier one, has its end before its middle, or is damaged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckpt_async.watch.tree import Identity

# When a file that looks unchanged is read again: the kernel's clock is coarse, so the last of several quick writes may
# leave the mtime as it was.
AGAIN_S = (4.0, 30.0, 300.0)
# After this long, we assume that nobody writes to the file any more.
GIVEN_UP_S = 30.0


@dataclass(frozen=True, slots=True)
class _Seen:
    version: Identity
    reason: str
    since: float
    num_tries: int
    next_at: float


class Unwhole:
    """Remembers which versions of files were found damaged, so that they are not copied and compared again at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def note(self, path: str, version: Identity, reason: str) -> None:
        now, before = self._clock(), self._of(path, version)
        seen = before or _Seen(version, reason, now, 0, now)
        again_s = AGAIN_S[min(seen.num_tries, len(AGAIN_S) - 1)]
        self._seen[path] = replace(seen, num_tries=seen.num_tries + 1, next_at=now + again_s)

    def waits(self, path: str, version: Identity) -> bool:
        """Return whether the file must not be tried again yet."""
        seen = self._of(path, version)
        return seen is not None and self._clock() < seen.next_at

    def refused(self, path: str, version: Identity) -> str:
        """Return why the file is refused, if it has not changed for long enough, else ""."""
        seen = self._of(path, version)
        return seen.reason if seen is not None and self._clock() - seen.since >= GIVEN_UP_S else ""

    def forget_all_but(self, files: Mapping[str, Identity]) -> None:
        self._seen = {path: each for path, each in self._seen.items() if files.get(path) == each.version}

    def _of(self, path: str, version: Identity) -> _Seen | None:
        seen = self._seen.get(path)
        return seen if seen is not None and seen.version == version else None
