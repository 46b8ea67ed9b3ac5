"""The options of a watcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_async.formats import Rules
from ckpt_async.stores import StoreOptions


@dataclass(frozen=True, slots=True)
class Options:
    """What a watcher is to do.

    `state` is the folder for its links and journal, on a local disk.
    """

    folder: Path
    remote: str
    state: Path
    lock: Path
    rules: Rules = field(default_factory=Rules)
    kind: str | None = None
    node: int = 0
    num_nodes: int = 1
    launch_id: str | None = None
    interval_s: float = 5.0
    keep_local: int | None = None  # None: the trainer's files are left alone
    is_once: bool = False
    drain_timeout_s: float = 3600.0
    store_options: StoreOptions | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    settings_file: str | None = None
