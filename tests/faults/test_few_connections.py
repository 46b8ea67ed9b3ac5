"""A proxy that takes only a few connections from one address, and resets the others."""

from pathlib import Path

import pytest

from ckpt_async import StoreOptions, Uploader, restore
from tests.restore.relay import Relay
from tests.restore.runs import content
from tests.seaweed import SeaweedServer

NUM_CONNECTIONS = 4


@pytest.mark.fault("F99")
def test_a_proxy_that_resets_connections_only_delays_uploads(
    s3_server: SeaweedServer, s3_url: str, tmp_path: Path
) -> None:
    shards = {f"{number}.bin": content(1, str(number), 20_000) for number in range(100)}
    shards["large.bin"] = content(1, "large", 40 << 20)
    folder = tmp_path / "folder"
    with Relay(s3_server.url, NUM_CONNECTIONS) as relay:
        options = StoreOptions(endpoint_url=relay.url)
        with Uploader(
            folder, s3_url, rank=0, world_size=1, store_options=options, upload_timeout_s=300
        ) as up:
            for name, data in shards.items():
                (folder / name).write_bytes(data)
                up.enqueue(folder / name, step=1)
            up.seal(step=1)
    assert relay.num_reset, "the proxy had nothing to refuse"
    checkpoint = restore.find(s3_url, store_options=StoreOptions(endpoint_url=s3_server.url))
    assert checkpoint is not None
    report = restore.fetch(checkpoint, tmp_path / "there")
    assert {name: path.read_bytes() for name, path in report.paths.items()} == shards
