"""How the tests of a broken S3 save checkpoints."""

from typing import Any

from ckpt_async import Uploader
from tests.faults.trainer import write_shards

QUICK: dict[str, Any] = {
    "decision_poll_s": 0.05,
    "retry_initial_s": 0.02,
    "retry_max_s": 0.2,
    "request_timeout_s": 2.0,
    "stall_timeout_s": 1.0,
    "minimum_rate_bytes_per_s": 100.0 * 2**20,
    "close_grace_s": 0.0,
}


SHARDS = r"/ckpt/step-"


def save(uploader: Uploader, step: int, num_shards: int = 2, size_bytes: int = 5000) -> None:
    place = write_shards(uploader.folder, uploader.generation, step, uploader.rank, num_shards, size_bytes)
    uploader.enqueue(place, step)
    uploader.seal(step)
