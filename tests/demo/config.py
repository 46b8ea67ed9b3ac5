"""What the demo's orchestrator tells its ranks, and where both log what they observed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Config:
    """One demo. Everything lies below `work`; only `folder` and `remote` belong to the system under test."""

    work: str
    remote: str
    steps: int
    save_every: int
    keep: int
    width: int
    depth: int
    max_bytes_per_s: float
    seed: int

    @property
    def folder(self) -> Path:
        return Path(self.work) / "checkpoints"

    def log(self, rank: int) -> Path:
        """Return the path of the rank's log, append-only, one JSON object per line: what it wrote and what it
        was told, kept outside the system under test.
        """
        return Path(self.work) / f"rank-{rank}.jsonl"

    def pid_file(self, rank: int) -> Path:
        return Path(self.work) / f"rank-{rank}.pid"

    def write(self) -> Path:
        path = Path(self.work) / "config.json"
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str) -> Self:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines; the last one may be torn by a SIGKILL."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
