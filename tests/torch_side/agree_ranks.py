"""The ranks of test_agree: play all scenarios in one process group and write what each rank saw as JSON.

python agree_ranks.py WORLD_SIZE FOLDER
"""

import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ckpt_async.errors import RankFailedError, RanksDisagreeError
from ckpt_async.torch import (
    agree,
    capture,
    capture_rng,
    launch_id,
    load_rng_state,
    restore,
    restore_rng,
    run_on_one,
    save_rng_state,
)
from tests.ranks import become_ranks

world_size, folder = int(sys.argv[1]), Path(sys.argv[2])
rank = become_ranks(world_size)
found: dict[str, object] = {}
calls: list[str] = []


class UnsendableError(Exception):
    """An error that cannot be unpickled, because pickle does not pass its constructor's keyword-only argument."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def called(name: str, result: object) -> object:
    calls.append(name)
    return result


def fails(error: BaseException) -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise error from inner
    finally:
        calls.append("failed")


def failure_of(fn: object, on: int) -> dict[str, str]:
    try:
        run_on_one(fn, rank=on)
    except RankFailedError as error:
        notes = "".join(error.__notes__)
        return {"text": str(error), "cause": repr(error.__cause__), "notes": notes}
    except BaseException as error:
        return {"raised": type(error).__name__}
    return {}


dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/rendezvous",
    rank=rank,
    world_size=world_size,
    timeout=timedelta(seconds=60),
)
agree(300, what="the resumed step")
try:
    agree(300 if rank != 1 else 200, what="the resumed step")
except RanksDisagreeError as error:
    found["disagree"] = str(error)
pair = dist.new_group([1, 2])
if rank in (1, 2):
    try:
        agree(f"ckpt-{rank}", what="the checkpoint", group=pair)
    except RanksDisagreeError as error:
        found["pair"] = str(error)
    found["pair launch"] = launch_id(pair)
    found["pair result"] = run_on_one(lambda: f"of rank {rank}", rank=2, group=pair)

found["launches"] = [launch_id(), launch_id()]
found["result"] = run_on_one(lambda: called("result", {"from": rank}), rank=1)
found["plain"] = failure_of(lambda: fails(ValueError("broken here")), 1)
found["unsendable error"] = failure_of(lambda: fails(UnsendableError(reason="no")), 0)
found["unsendable result"] = failure_of(lambda: called("lambda", lambda: 0), 2)
found["exit"] = failure_of(lambda: fails(SystemExit(3)), 0)
found["afterwards"] = run_on_one(lambda: called("afterwards", "still in step"))
found["calls"] = calls

random.seed(rank)
np.random.seed(rank)
torch.manual_seed(rank)
save_rng_state(folder, rank)
states = capture_rng(all_ranks=True)
state = capture(rng="all", step=3)
expected = draw()
draw()
found["set from file"] = load_rng_state(folder, rank) and draw() == expected
draw()
restore_rng(states)
found["set from gathered"] = draw() == expected
restore_rng(states, rank=(rank + 1) % world_size)
found["another rank's differs"] = draw() != expected
found["fewer ranks then"] = restore_rng(states[:2])
found["rest"] = restore(state)
found["set from a whole state"] = draw() == expected
(folder / f"found-{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
