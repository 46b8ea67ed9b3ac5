"""Retention: committed checkpoints in; the ones to keep, each with its reason, out. Pure.

Whoever calls these passes committed checkpoints only, found by listing (rule R8).
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_async.model import CheckpointId


def keep_local(committed: Iterable[CheckpointId], num_checkpoints_to_keep: int) -> dict[CheckpointId, str]:
    """What stays on the local disk: -1 all, 0 none, N the newest N (Composer's meaning)."""
    newest_first = sorted(committed, reverse=True)
    if num_checkpoints_to_keep < 0:
        return dict.fromkeys(newest_first, "all are kept")
    return {
        checkpoint: f"one of the newest {num_checkpoints_to_keep}"
        for checkpoint in newest_first[:num_checkpoints_to_keep]
    }
