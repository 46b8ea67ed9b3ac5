"""Ranks as real processes: all ranks of a crew carry out the same command at once, until they are stopped or killed."""

import hashlib
import multiprocessing
import os
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch._dynamo  # optimizers import it at their first step, so import it before the ranks are forked
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckpt_async.stores.directory
import ckpt_async.stores.s3.client  # noqa: F401  imported before the ranks are forked
from ckpt_async import Uploader, restore
from ckpt_async.torch import batches, dcp, dcp_reader, load, model_state, run_on_one
from ckpt_async.torch.dcp_reader import CkptAsyncReader
from ckpt_async.torch.dcp_writer import CkptAsyncWriter

PATIENCE_S = 120.0
WIDTH = 37  # not a multiple of any number of ranks used here


def digests_of(state: Any, name: str = "") -> dict[str, str]:
    """Return a digest of every full tensor, bit by bit, and of every value that is not a tensor."""
    if isinstance(state, Mapping):
        return {
            key: value
            for part, each in state.items()
            for key, value in digests_of(each, f"{name}/{part}").items()
        }
    if isinstance(state, list):
        return digests_of(dict(enumerate(state)), name)
    if isinstance(state, torch.Tensor):
        whole = state.full_tensor() if isinstance(state, DTensor) else state
        return {name: hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()}
    return {name: repr(state)}


class FailingPlanner(DefaultSavePlanner):
    """A save planner that fails on one rank while that rank's data is written."""

    def __init__(self, failing_rank: int) -> None:
        super().__init__()
        self._failing_rank = failing_rank

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == self._failing_rank:
            raise OSError("the disk of this rank is broken")
        return super().resolve_data(write_item)


class FailingLoadPlanner(DefaultLoadPlanner):
    """A load planner that fails on one rank while that rank's data is copied into the state."""

    def __init__(self, failing_rank: int) -> None:
        super().__init__()
        self._failing_rank = failing_rank

    def resolve_tensor(self, read_item: Any) -> Any:
        if dist.get_rank() == self._failing_rank:
            raise OSError("the memory of this rank is broken")
        return super().resolve_tensor(read_item)


class Rank:
    """One rank of a training job. Its methods are the commands that a crew can send."""

    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        self.rank, self.world_size = rank, world_size
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        # Separate from the group of the training's collectives.
        self._saving_group = dist.new_group(backend="gloo")
        self._uploader: Uploader | None = None
        self._future: Any = None

    # --- training ------------------------------------------------------------------------------------------

    def train(self, seed: int, kind: str = "fsdp") -> None:
        """Make a new model, sharded or replicated, and train it for one step."""
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(
            nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 3)
        )
        self._replicas = dist.group.WORLD
        if kind == "fsdp":
            mesh = init_device_mesh("cpu", (self.world_size,))
            fully_shard(model, mesh=mesh)
        elif kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, self.world_size // 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(model, mesh=mesh)
            self._replicas = mesh["replicate"].get_group()
        else:
            model = DistributedDataParallel(model)
        self._model, self._optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.1)
        self._epoch = seed
        self.step()

    def step(self) -> None:
        self._model(torch.randn(4, 16)).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        model, optimizer = state_dicts.get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self._epoch}

    def digests(self) -> dict[str, str]:
        return digests_of(self._state())

    # --- saving --------------------------------------------------------------------------------------------

    def open(
        self, folder: str, remote: str, start: str, environment: Mapping[str, str], **settings: Any
    ) -> None:
        os.environ.update(environment)
        os.environ["CKPT_ASYNC_LAUNCH_ID"] = start
        self._uploader = Uploader(folder, remote, rank=self.rank, world_size=self.world_size, **settings)

    def close(self) -> None:
        assert self._uploader is not None
        self._uploader.close()
        self._uploader = None

    def seal_on(self, rank: int, step: int) -> None:
        assert self._uploader is not None
        if self.rank == rank:
            self._uploader.seal(step)

    def wait(self, step: int) -> None:
        assert self._uploader is not None
        self._uploader.wait(step, timeout_s=PATIENCE_S)

    def save(self, step: int, failing_rank: int | None = None) -> None:
        assert self._uploader is not None
        planner = None if failing_rank is None else FailingPlanner(failing_rank)
        dcp.save(self._state(), step, self._uploader, planner=planner, thread_count=2)

    def save_with_writer(self, step: int, failing_rank: int | None = None) -> None:
        """Save as a user of torch's own `save` does."""
        assert self._uploader is not None
        planner = None if failing_rank is None else FailingPlanner(failing_rank)
        writer = CkptAsyncWriter(self._uploader, step)
        state_dict_saver.save(self._state(), storage_writer=writer, planner=planner)

    def begin_save(self, step: int, mode: str, failing_rank: int | None = None) -> None:
        """Start an asynchronous save, so that training can continue during it."""
        assert self._uploader is not None
        planner = None if failing_rank is None else FailingPlanner(failing_rank)
        self._future = dcp.async_save(
            self._state(),
            step,
            self._uploader,
            mode=mode,
            planner=planner,
            process_group=self._saving_group if mode == "thread" else None,
        )
        for _ in range(3):
            self.step()

    def begin_save_with_writer(self, step: int, mode: str, failing_rank: int | None = None) -> None:
        """Start an asynchronous save as a user of torch's own `async_save` does."""
        assert self._uploader is not None
        planner = None if failing_rank is None else FailingPlanner(failing_rank)
        self._future = state_dict_saver.async_save(
            self._state(),
            storage_writer=CkptAsyncWriter(self._uploader, step, metrics={"loss": 0.5}),
            planner=planner,
            process_group=self._saving_group if mode == "thread" else None,
            async_checkpointer_type=state_dict_saver.AsyncCheckpointerType(mode),
        )
        for _ in range(3):
            self.step()

    def end_save(self) -> None:
        self._future.result(PATIENCE_S)

    # --- loading -------------------------------------------------------------------------------------------

    def load(
        self,
        remote: str,
        environment: Mapping[str, str] | None = None,
        failing_rank: int | None = None,
        by_replicas: bool = False,
        **options: Any,
    ) -> tuple[int, dict[str, str]] | None:
        """Return the step that was loaded, and digests of the state after loading."""
        os.environ.update(environment or {})
        state = self._state()
        if failing_rank is not None:
            options["planner"] = FailingLoadPlanner(failing_rank)
        if by_replicas:
            options["replicas"] = self._replicas
            # Small enough for many batches and chunks.
            batches.BATCH_BYTES, dcp_reader.CHUNK_BYTES = 4000, 1000
        checkpoint = dcp.load_latest(state, remote, **options)
        if checkpoint is None:
            return None
        state_dicts.set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._epoch = state["epoch"]
        return checkpoint.step, self.digests()

    def load_on_one(self, path: str) -> dict[str, str]:
        """Load a checkpoint that is a single file: one rank reads it, and torch sends each rank its shards."""
        loaded: dict[str, Any] = {}
        run_on_one(lambda: loaded.update(load(path)))
        state_dicts.set_model_state_dict(
            self._model,
            dict(model_state(loaded)) if loaded else {},
            options=state_dicts.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        return self.digests()

    def load_by_replicas(self, remote: str, is_wrong: bool = False) -> int:
        """Load as a user of torch's own `load` does; return how many bytes this rank has read."""
        checkpoint = restore.find(remote)
        assert checkpoint is not None
        replicas = dist.group.WORLD if is_wrong else self._replicas
        with CkptAsyncReader(checkpoint, replicas=replicas) as reader:
            state_dict_loader.load(self._state(), storage_reader=reader)
            return sum(reader.bytes_from.values()) - checkpoint.files[".metadata"].size_bytes


class Crew:
    """All ranks of one launch of the job."""

    def __init__(self, world_size: int, scratch: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # so torch is imported only once
        rendezvous = scratch / f"rendezvous-{os.urandom(4).hex()}"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_obey, args=(theirs, rank, world_size, str(rendezvous)))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, what: str, **arguments: Any) -> list[tuple[Any, str]]:
        """Send a command to all ranks at once. Return each rank's result, and its traceback if it raised."""
        for pipe in self._pipes:
            pipe.send((what, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE_S), f"rank {rank} does not answer to {what}"
            answers.append(pipe.recv())
        return answers

    def tell(self, what: str, **arguments: Any) -> list[Any]:
        """Send a command to all ranks as `ask` does, and fail if any of them raised."""
        answers = self.ask(what, **arguments)
        for rank, (_, trace) in enumerate(answers):
            assert not trace, f"rank {rank}: {trace}"
        return [value for value, _ in answers]

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _die_with_the_tests() -> None:
    """Exit when the test process ends, even in the middle of a collective, where the rank does not read its pipe."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)


def _obey(pipe: Connection, rank: int, world_size: int, rendezvous: str) -> None:
    threading.Thread(target=_die_with_the_tests, daemon=True).start()
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    played = Rank(rank, world_size, rendezvous)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(played, what)(**arguments), ""
        except BaseException:  # torch's CheckpointException is not an Exception
            answer = None, traceback.format_exc()
        pipe.send(answer)
