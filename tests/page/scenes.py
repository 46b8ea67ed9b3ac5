"""Runs to look at: real uploaders of four ranks on two nodes, and a real S3 server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_async import StoreOptions, Uploader
from ckpt_async.errors import CkptAsyncError
from tests.seaweed import SeaweedServer

MIB = 1 << 20
# A name that an attacker might give to a file, a checkpoint or a run.
HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1<script>"


class Run:
    """Four ranks, two on each node. Only the first serves its page."""

    def __init__(self, server: SeaweedServer, folder: Path, name: str, **settings: Any) -> None:
        usual: dict[str, Any] = {"world_size": 4, "launch_id": name, "on_error": "warn", "close_grace_s": 0}
        usual |= {"decision_poll_s": 0.05, "decision_poll_max_s": 0.1, "part_size_bytes": 5 * MIB}
        usual |= {"retry_initial_s": 0.1, "retry_max_s": 0.5, "num_concurrent_uploads": 2}
        key, secret = (server.environment()[f"AWS_{each}"] for each in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        os.environ.update(AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret)
        options = StoreOptions(endpoint_url=server.url, region="us-east-1")
        self.remote = f"s3://{server.bucket}/{name}"
        self.ranks = [
            Uploader(
                folder / f"node-{rank // 2}",
                self.remote,
                rank=rank,
                store_options=options,
                metrics_port=0 if rank == 0 else -1,
                **(usual | settings),
            )
            for rank in range(4)
        ]
        assert self.ranks[0].page_url
        self.url: str = self.ranks[0].page_url

    def save(self, step: int, *ranks: int, size_bytes: int = MIB, name: str = "model.pt") -> None:
        """Save on these ranks, or on all."""
        for rank in ranks or range(4):
            uploader = self.ranks[rank]
            path = uploader.folder / f"step-{step}" / f"rank-{rank}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(size_bytes))
            uploader.enqueue(path.parent.parent, step, files=[f"rank-{rank}/{name}"])
            uploader.seal(step)

    def wait(self, step: int, *ranks: int) -> None:
        """Wait until these ranks, or all, see that the step is committed."""
        for rank in ranks or range(4):
            self.ranks[rank].wait(step, 60)

    def close(self) -> None:
        for each in self.ranks:
            with contextlib.suppress(CkptAsyncError):
                each.close(timeout_s=0)


@contextlib.contextmanager
def going_on(server: SeaweedServer, folder: Path, name: str, **settings: Any) -> Iterator[Run]:
    """A run in progress: two checkpoints are committed, one waits for rank 3, one is being uploaded and one is
    queued.
    """
    run = Run(server, folder, name, max_bytes_per_s=4 * MIB, **settings)
    try:
        for step in (1000, 1100):
            run.save(step)
        run.wait(1100)
        run.save(1200, 0, 1, 2)
        run.save(1300, 0, 1, size_bytes=60 * MIB)
        run.save(1400, 0, 1, size_bytes=60 * MIB)
        yield run
    finally:
        run.close()
