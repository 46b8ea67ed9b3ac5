"""The progress of a fetch for people: a line that is redrawn on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from typing import IO

from ckpt_async.core.units import in_units

BAR_WIDTH = 30
BAR_EVERY_S, LINE_EVERY_S = 0.1, 5.0


class ProgressBar:
    """Pass it as `on_progress`; it may be called from another thread. `clear` it in the end."""

    def __init__(self, stream: IO[str], name: str = "") -> None:
        self._stream, self._name = stream, f"{name}: " if name else ""
        self._is_redrawn = stream.isatty()
        self._began_s = time.monotonic()
        self._drawn_s = 0.0 if self._is_redrawn else self._began_s

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        is_last = done_bytes >= total_bytes and not self._is_redrawn
        if not is_last and now - self._drawn_s < (BAR_EVERY_S if self._is_redrawn else LINE_EVERY_S):
            return
        self._drawn_s = now
        share = done_bytes / max(total_bytes, 1)
        rate = done_bytes / max(now - self._began_s, 1e-9)
        text = f"{share:4.0%} of {in_units(total_bytes)}, {in_units(rate)}/s"
        if self._is_redrawn:
            left_s = (total_bytes - done_bytes) / max(rate, 1.0)
            text = (
                f"\r\x1b[K{self._name}{'#' * int(share * BAR_WIDTH):<{BAR_WIDTH}} {text}, {left_s:.0f} s left"
            )
        else:
            text = f"{self._name}{text.lstrip()}\n"
        self._stream.write(text)
        self._stream.flush()

    def clear(self) -> None:
        if self._is_redrawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
