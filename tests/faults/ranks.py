"""Ranks as processes of their own."""

from pathlib import Path

from tests.faults.processes import Nursery, Trainer

SETTINGS = {"decision_poll_s": 0.05, "decision_poll_max_s": 0.5, "close_grace_s": 0.0}


def start(
    nursery: Nursery, tmp_path: Path, remote: str, num_ranks: int, launch: str = "one"
) -> list[Trainer]:
    """Start the ranks, two to a folder, as on nodes with two GPUs."""
    return [
        nursery.start(
            "saves",
            {"CKPT_ASYNC_LAUNCH_ID": launch},
            folder=str(tmp_path / f"node-{rank // 2}"),
            remote=remote,
            rank=rank,
            world_size=num_ranks,
            steps=[],
            settings=SETTINGS,
        )
        for rank in range(num_ranks)
    ]
