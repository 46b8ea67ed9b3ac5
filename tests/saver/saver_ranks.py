"""One rank of a job that trains through `CheckpointSaver`, one scenario after the other, each in a folder of its own:
`python saver_ranks.py WORLD_SIZE FOLDER`. Writes `saved-RANK.json`: at which batches this rank saved, by scenario.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_async.errors import RanksDisagreeError
from ckpt_async.saver import CheckpointSaver
from tests.ranks import become_ranks

world_size, root = int(sys.argv[1]), Path(sys.argv[2])
rank = become_ranks(world_size)
os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
all_saved: dict[str, list[int]] = {}


def open_saver(scenario: str, **options: Any) -> CheckpointSaver:
    folder = root / scenario
    options = {"decision_poll_s": 0.02, "saves_last": False, **options}
    return CheckpointSaver(folder / "local", f"file://{folder}/remote", **options)


def ignore(_: int) -> None: ...


def train(
    saver: CheckpointSaver,
    scenario: str,
    until: Callable[[int], bool],
    before: Callable[[int], None] = ignore,
) -> None:
    saved = all_saved.setdefault(scenario, [])
    now = {"batch": 0, "rank": rank, "weight": torch.zeros(100)}
    while not until(now["batch"]):
        now["batch"] += 1
        now["weight"].fill_(now["batch"])
        before(now["batch"])
        dist.all_reduce(torch.ones(1))  # as data-parallel training does: ranks are at the same step
        if saver.step(lambda: now, now["batch"], metrics={f"loss{rank}": float(now["batch"])}):
            saved.append(now["batch"])


def first_rank_writes(name: str) -> None:
    with open_saver(name, save_interval="3ba") as saver:
        train(saver, name, lambda batch: batch == 7)


def all_write(name: str) -> None:
    with open_saver(name, save_interval="3ba", is_writer=True) as saver:
        train(saver, name, lambda batch: batch == 4)
        saver.wait(60)
        state = saver.load_latest()
        assert (state["batch"], state["rank"]) == (3, rank)


def sharded(name: str) -> None:
    with open_saver(name, save_interval="3ba", sharded=True) as saver:
        train(saver, name, lambda batch: batch == 7)


def on_all_ranks(is_so: bool) -> bool:
    """As rank 0 sees it."""
    told = torch.tensor([is_so])
    dist.broadcast(told, 0)
    return bool(told)


def clock(name: str) -> None:
    # Clocks of ranks differ: here the other ranks' would save all the time. Rank 0's counts.
    real = time.monotonic
    with open_saver(name, save_interval="0.2s") as saver:
        saver._requests._clock = lambda: real() * (1 if rank == 0 else 1000)
        train(saver, name, lambda _: on_all_ranks(len(all_saved[name]) >= 2), lambda _: time.sleep(0.005))


def asked(name: str) -> None:
    with open_saver(name, save_interval=None) as saver:

        def ask(batch: int) -> None:
            time.sleep(0.005)  # a training step
            if batch == 5 and rank == world_size - 1:
                saver.save_now()

        train(saver, name, lambda _: on_all_ranks(bool(all_saved[name])), ask)


def one_fails(name: str) -> None:
    with open_saver(name, save_interval="2ba", is_writer=True, on_error="warn", close_grace_s=1) as saver:
        if rank == 1:
            (root / name / "local/ep0-ba2-rank1.pt").mkdir(parents=True)  # in the way
        train(saver, name, lambda batch: batch == 4)


def told(name: str) -> None:
    failed: list[str] = []
    saver = open_saver(
        name, save_interval="2ba", on_error="warn", on_failed=lambda _, error: failed.append(str(error))
    )
    if rank == 0:
        (root / name / "local/ep0-ba2-rank0.pt").mkdir(parents=True)  # in the way
    train(saver, name, lambda batch: batch == 2)
    started = time.monotonic()
    saver.close()
    assert time.monotonic() - started < 20, "it waited for what never comes"
    assert len(failed) == 1
    assert "rank 0: checkpoint ep0-ba2 was not saved" in failed[0] or rank == 0, failed


def differ(name: str) -> None:
    all_saved[name] = []
    with pytest.raises(RanksDisagreeError, match=r"save_interval: .2 x batch. on rank"):
        open_saver(name, save_interval="2ba" if rank == 0 else "3ba")
    for what in ("filename", "checkpoint_name", "publish"):
        with pytest.raises(
            RanksDisagreeError, match=f"{what}: 'a{{batch}}' on rank 0; 'b{{batch}}' on rank 1"
        ):
            open_saver(name, **{what: "a{batch}" if rank == 0 else "b{batch}"})


for scenario in (first_rank_writes, all_write, sharded, clock, asked, one_fails, told, differ):
    dist.barrier()
    scenario(scenario.__name__)
(root / f"saved-{rank}.json").write_text(json.dumps(all_saved))
dist.destroy_process_group()
