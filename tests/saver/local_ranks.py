"""Launches of a job of two ranks that saves without a remote, in one scenario after the other, each in a folder of its
own: `python local_ranks.py FOLDER`. Writes `told.json`: from which batch each rank has resumed in each launch, or the
error.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt_async.errors import CkptAsyncError
from ckpt_async.saver import CheckpointSaver

WORLD_SIZE = 2
Told = list[str]


def train(
    rank: int,
    root: Path,
    until: int,
    *,
    folder: str = "local",
    writer: int | None = None,
    dies: tuple[int, int] | None = None,
    initialized: str = "first",
    loads: bool = True,
    world_size: int = WORLD_SIZE,
    has_remote: bool = False,
    keep: int = 3,
    **options: Any,
) -> str:
    """One rank of a launch. Rank `dies[0]` ends while it saves at batch `dies[1]`. `writer`: None if all write.
    torch.distributed is initialized `first`, `late` (after the saver was created) or `never`.
    """
    logging.basicConfig(filename=root / "log", format="%(message)s", force=True)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}

    def initialize() -> None:
        dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)

    if initialized == "first":
        initialize()
    saver = CheckpointSaver(
        root / folder,
        f"file://{root}/remote" if has_remote else None,
        save_interval="10ba",
        blocking=True,
        num_checkpoints_to_keep=keep,
        is_writer=writer is None or rank == writer,
        **{"overwrite": True, **options},
    )
    if initialized == "late":
        initialize()
    try:
        state = saver.load_latest() if loads else None
    except CkptAsyncError as error:
        return f"{type(error).__name__}: {error}"
    if state is not None:
        assert torch.equal(state["weight"], torch.full((1000,), float(state["batch"])))
        assert state["rank"] == (rank if writer is None else writer)
    told = "fresh" if state is None else str(state["batch"])
    (root / f"told-{rank}").write_text(told)  # now, as it may die

    def build() -> dict[str, Any]:
        if (rank, batch) == dies:
            os._exit(0)  # as after SIGKILL, nothing of the process runs any more
        return {"batch": batch, "rank": rank, "weight": torch.full((1000,), float(batch))}

    for batch in range(1 if state is None else state["batch"] + 1, until + 1):
        saver.step(build, batch)
    if has_remote and until:
        saver.wait()
    return told


def launch(root: Path, until: int = 0, **plan: Any) -> Told:
    (root / "store").unlink(missing_ok=True)
    pids = []
    ranks = range(plan.get("world_size", WORLD_SIZE))
    for rank in ranks:
        if (pid := os.fork()) == 0:
            try:
                (root / f"told-{rank}").write_text(train(rank, root, until, **plan))
            except BaseException as error:
                (root / f"told-{rank}").write_text(repr(error))
            if dist.is_initialized() and "dies" not in plan:
                with contextlib.suppress(RuntimeError):
                    dist.barrier()  # the other one may still be reading
            os._exit(0)  # without a last save
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return [(root / f"told-{rank}").read_text() for rank in ranks]


def flip_a_bit(path: Path, value: float) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(bytes(torch.full((4,), value).numpy().data))] ^= 1
    path.write_bytes(data)


def killed_in_a_save(root: Path) -> list[Told]:
    return [launch(root, 40, dies=(1, 30)), launch(root, 30, dies=(0, 30)), launch(root)]


def killed_in_the_first_save(root: Path) -> list[Told]:
    """Three launches, one after the other; then one saves. In the end, the files that are left, and the warnings."""
    more: dict[str, Any] = {"overwrite": False}
    launches = [launch(root, 20, dies=dies, **more) for dies in ((1, 10), (0, 10), (1, 10))]
    launches += [launch(root, 50, **more), launch(root, **more)]
    log = (root / "log").read_text().replace(str(root), "").splitlines()
    told = [line for line in log if line.startswith("starts_from_scratch")]
    return [*launches, sorted(each.name for each in (root / "local").glob("ep*.pt")), sorted(told)]


def killed_in_the_first_save_before_a_remote(root: Path) -> list[Told]:
    """Two launches without it, one after the other; then two with it. In the end, the warnings."""
    launches = [launch(root, 20, dies=dies, overwrite=False) for dies in ((1, 10), (0, 10))]
    launches += [launch(root, until, has_remote=True, overwrite=False) for until in (30, 0)]
    log = (root / "log").read_text().replace(str(root), "").splitlines()
    told = [line for line in log if line.startswith("starts_from_scratch")]
    return [*launches, sorted(told)]


def pruned_before_a_remote(root: Path) -> list[Told]:
    """A complete checkpoint was there before: what is left looks like a first save in which one rank was killed."""
    launches = [launch(root, 10, keep=1), launch(root, 20, keep=1, dies=(1, 20))]
    return [*launches, launch(root, keep=1, has_remote=True)]


def the_other_rank_has_lost_what_it_had(root: Path) -> list[Told]:
    """Its node came back empty. Then it is killed in its first save there, when the other rank has pruned."""
    more: dict[str, Any] = {"folder": "node-{rank}", "keep": 1}
    first = launch(root, 10, **more)
    (root / "node-1").rename(root / "lost")
    launches = [launch(root, **more), launch(root, 20, loads=False, resume_from=10, dies=(1, 10), **more)]
    return [first, *launches, launch(root, **more)]


def pruned_on_one_rank(root: Path) -> list[Told]:
    """A complete checkpoint was there before."""
    launches = [launch(root, 10, keep=1), launch(root, 20, keep=1, dies=(1, 20))]
    return [*launches, launch(root, keep=1)]


def fewer_ranks_in_between(root: Path) -> list[Told]:
    """Rank 0 has a file of batch 30 from the third launch, rank 1 from the second."""
    launches = [launch(root, 20), launch(root, 30, dies=(0, 30))]
    return [*launches, launch(root, 30, world_size=1), launch(root)]


def initialized_late(root: Path) -> list[Told]:
    plans: list[dict[str, Any]] = [{"loads": False}, {"dies": (1, 30)}, {"dies": (0, 30)}]
    launches = [
        launch(root, until, initialized="late", **plan)
        for until, plan in zip((20, 30, 30), plans, strict=True)
    ]
    return [*launches, launch(root, 50, initialized="late"), launch(root)]


def noted_by_an_earlier_version(root: Path) -> list[Told]:
    launch(root, 20)
    for note in root.glob("local/.ckpt-async/sealed/*/rank-*/*.json"):
        fields = json.loads(note.read_bytes())
        del fields["launch"]
        note.write_text(json.dumps(fields))
    return [launch(root, 40), launch(root)]


def damaged_on_one_rank(root: Path) -> list[Told]:
    launch(root, 20)
    flip_a_bit(root / "local/ep0-ba20-rank1.pt", 20.0)
    passed_over = launch(root)
    (root / "local/ep0-ba10-rank0.pt").write_bytes(b"")
    return [passed_over, launch(root)]


def touched(root: Path) -> list[Told]:
    launch(root, 20)
    os.utime(root / "local/ep0-ba20-rank1.pt")
    return [launch(root)]


def one_node_is_lost(root: Path) -> list[Told]:
    (root / "node-1").mkdir()
    first = launch(root, 10, folder="node-{rank}")
    (root / "node-1").rename(root / "lost")
    return [first, launch(root, folder="node-{rank}")]


def one_writer(root: Path) -> list[Told]:
    return [launch(root, until, folder="node-{rank}", writer=1) for until in (20, 0)]


def swapped_nodes(root: Path) -> list[Told]:
    launch(root, 10, folder="node-{rank}", writer=0)
    (root / "node-0").rename(root / "other")
    (root / "node-1").rename(root / "node-0")
    (root / "other").rename(root / "node-1")
    return [launch(root, folder="node-{rank}", writer=0)]


def not_initialized(root: Path) -> list[Told]:
    return [launch(root, initialized="never")]


def only_here(root: Path) -> list[Told]:
    """Then with a remote: nothing is there, another run's file is here, or this launch does not load."""
    launch(root, 20, writer=0)
    more: dict[str, Any] = {"writer": 0, "has_remote": True, "overwrite": False}
    (root / "local/ep0-ba50-rank0.pt").write_bytes(b"")
    conflict = launch(root, **more)
    (root / "local/ep0-ba50-rank0.pt").unlink()
    return [conflict, launch(root, **more), launch(root, 1, **more, loads=False)]


def saved_later_by_one_rank(root: Path) -> list[Told]:
    """Then with the remote again, where 20 is the newest."""
    launch(root, 20, has_remote=True, latest_filename=None)
    launch(root, 40, dies=(1, 30), latest_filename=None)
    return [launch(root, 30, has_remote=True, overwrite=False, latest_filename=None)]


SCENARIOS: tuple[Callable[[Path], list[Told]], ...] = (
    killed_in_a_save,
    killed_in_the_first_save,
    killed_in_the_first_save_before_a_remote,
    pruned_before_a_remote,
    the_other_rank_has_lost_what_it_had,
    pruned_on_one_rank,
    fewer_ranks_in_between,
    initialized_late,
    noted_by_an_earlier_version,
    damaged_on_one_rank,
    touched,
    one_node_is_lost,
    one_writer,
    swapped_nodes,
    not_initialized,
    only_here,
    saved_later_by_one_rank,
)

if __name__ == "__main__":
    base = Path(sys.argv[2])
    all_told = {}
    for scenario in SCENARIOS:
        (base / scenario.__name__).mkdir()
        all_told[scenario.__name__] = scenario(base / scenario.__name__)
    (base / "told.json").write_text(json.dumps(all_told))
