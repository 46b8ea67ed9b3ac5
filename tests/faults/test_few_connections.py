"""A proxy that takes only a few connections from one address, and resets the others or lets them wait."""

from pathlib import Path

import pytest

from ckpt_async import StoreOptions, Uploader, restore
from tests.faults.processes import Nursery
from tests.restore.relay import Relay
from tests.restore.runs import content
from tests.seaweed import SeaweedServer

NUM_CONNECTIONS = 4


def test_a_proxy_that_takes_few_connections_is_served_by_few(
    s3_server: SeaweedServer, s3_url: str, tmp_path: Path
) -> None:
    """Idle connections of small objects must not keep others from being made."""
    shards = {f"{number}.bin": content(1, str(number), 20_000) for number in range(100)}
    shards["large.bin"] = content(1, "large", 40 << 20)
    folder = tmp_path / "folder"
    with Relay(s3_server.url, NUM_CONNECTIONS) as relay:
        options = StoreOptions(endpoint_url=relay.url)
        with Uploader(folder, s3_url, rank=0, world_size=1, store_options=options, upload_timeout_s=60) as up:
            for name, data in shards.items():
                (folder / name).write_bytes(data)
                up.enqueue(folder / name, step=1)
            up.seal(step=1)
        up_reset, relay.num_reset = relay.num_reset, 0
        checkpoint = restore.find(s3_url, store_options=options)
        assert checkpoint is not None
        report = restore.fetch(checkpoint, tmp_path / "there")
    assert {name: path.read_bytes() for name, path in report.paths.items()} == shards
    assert up_reset, "the proxy had nothing to refuse"
    assert relay.num_reset, "the proxy had nothing to refuse"


def save_by_ranks(
    nursery: Nursery,
    relay: Relay,
    remote: str,
    folder: Path,
    num_ranks: int,
    steps: list[int],
    timeout_s: int,
) -> None:
    ranks = [
        nursery.start(
            "saves",
            {"AWS_ENDPOINT_URL_S3": relay.url, "CKPT_ASYNC_LAUNCH_ID": "one"},
            folder=str(folder / str(rank)),
            remote=remote,
            rank=rank,
            world_size=num_ranks,
            steps=steps,
        )
        for rank in range(num_ranks)
    ]
    for each in ranks:
        each.expect("opened")
        for step in steps:
            each.tell(f"wait {step} {timeout_s}")
        each.tell("stop")
    for each in ranks:
        for step in steps:
            each.expect(f"done wait {step}", timeout_s + 10)
        each.expect("closed")
        assert each.finish() == 0


def test_ranks_whose_connections_wait_in_a_queue_take_turns(
    nursery: Nursery, s3_server: SeaweedServer, s3_url: str, tmp_path: Path
) -> None:
    """Who polls for the others must not keep them out: its connections are used, and never idle for long."""
    num_ranks, steps = 4, [1, 2, 3]
    with Relay(s3_server.url, 2, lets_wait=True) as relay:
        save_by_ranks(nursery, relay, s3_url, tmp_path, num_ranks, steps, 60)
    assert relay.num_waited, "nobody had to wait"
    checkpoint = restore.find(s3_url, store_options=StoreOptions(endpoint_url=s3_server.url))
    assert checkpoint is not None
    assert (checkpoint.step, len(checkpoint.files)) == (3, 2 * num_ranks)


@pytest.mark.parametrize(("most", "steps"), [(4, []), (8, [1])])
def test_ranks_that_share_few_connections_give_way_to_each_other(
    nursery: Nursery, s3_server: SeaweedServer, s3_url: str, tmp_path: Path, most: int, steps: list[int]
) -> None:
    num_ranks = 4
    with Relay(s3_server.url, most) as relay:
        save_by_ranks(nursery, relay, s3_url, tmp_path, num_ranks, steps, 150)
    assert relay.num_reset, "the proxy had nothing to refuse"
    checkpoint = restore.find(s3_url, store_options=StoreOptions(endpoint_url=s3_server.url))
    found = [] if checkpoint is None else [(checkpoint.step, len(checkpoint.files))]
    assert found == [(step, 2 * num_ranks) for step in steps]
