"""How long does saving a torch state dict block training, and how long until it is durable in the store?

Ways to save; each run is a whole process, and they take turns:

  ours, async_save     ckpt_async.torch.async_save: copied in memory; written to disk and uploaded in the background
  ours, torch.save     torch.save to the local folder, `enqueue`, `seal`
  ours, open           torch.save into `Uploader.open`: uploaded while it is written
  torch, FsspecWriter  torch's own `async_save`, directly to the store with s3fs
  Lightning            AsyncCheckpointIO: copies, then torch.save with s3fs on a thread

"blocked" is how long the caller's thread was blocked. "durable" is the time until the store has everything. For ours
that means committed: every byte verified against its checksum, receipt and decision written; ours is then also
fsynced on the local disk. With the other two the store does not show whether a checkpoint is complete, so "durable"
is when they report success. Bytes are counted at the sink.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
from _child import MIB, Measured, Work, child_main
from _compare import BUCKET, Clients, Server, key_of, parser_of, report, scratch, spread, turns

# What a save may send besides the tensors: headers (a thousandth) and the records of a commit.
SMALL_CHANGE_BYTES = 4 * MIB
TENSOR_MIB = 16


def state_of(work: Work, device: str = "cpu") -> dict[str, Any]:
    import torch

    count = TENSOR_MIB * MIB // 4
    return {f"layer{i:03d}": torch.rand(count, device=device) for i in range(work.size_bytes // (4 * count))}


# Returns what to wait for before the step is sealed, if anything.
Save = Callable[[Any, Any, Path], Any]


def prepare_ours(work: Work, save: Save) -> Callable[[], float]:
    import ckpt_async.torch.dcp  # noqa: F401  imported now, not at first use
    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions

    state, folder = state_of(work), Path(work.path)
    uploader = Uploader(
        folder,
        f"s3://{work.bucket}/{work.key}",
        rank=0,
        world_size=1,
        store_options=StoreOptions(endpoint_url=work.endpoint_url),
        latest_filename="",
    )

    def run() -> float:
        began = time.perf_counter()
        future = save(uploader, state, folder)
        blocked_s = time.perf_counter() - began
        if future is not None:
            future.result()
        uploader.wait(1, timeout_s=300)
        return blocked_s

    return run


def prepare_async_save(work: Work) -> Callable[[], float]:
    from ckpt_async.torch import async_save

    return prepare_ours(work, lambda uploader, state, _: async_save(state, 1, uploader))


def prepare_torch_save(work: Work) -> Callable[[], float]:
    import torch

    def save(uploader: Any, state: dict[str, Any], folder: Path) -> None:
        path = folder / "step-1" / "rank-0.pt"
        path.parent.mkdir()
        torch.save(state, path)
        uploader.enqueue(path, step=1)
        uploader.seal(1)

    return prepare_ours(work, save)


def prepare_open(work: Work) -> Callable[[], float]:
    import torch

    def save(uploader: Any, state: dict[str, Any], _: Path) -> None:
        with uploader.open(1, "rank-0.pt") as file:
            torch.save(state, file)
        uploader.seal(1)

    return prepare_ours(work, save)


def prepare_fsspec(work: Work) -> Callable[[], float]:
    import s3fs  # noqa: F401  imported now, not at first use
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    state = state_of(work)

    def run() -> float:
        began = time.perf_counter()
        writer = FsspecWriter(f"s3://{work.bucket}/{work.key}")
        future: Any = async_save(state, storage_writer=writer)
        blocked_s = time.perf_counter() - began
        future.result()
        return blocked_s

    return run


def prepare_lightning(work: Work) -> Callable[[], float]:
    import s3fs  # noqa: F401  imported now, not at first use
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    state, plugin = state_of(work), AsyncCheckpointIO(TorchCheckpointIO())

    def run() -> float:
        began = time.perf_counter()
        plugin.save_checkpoint({"state_dict": state}, f"s3://{work.bucket}/{work.key}/last.ckpt")
        blocked_s = time.perf_counter() - began
        plugin.teardown()  # waits, and raises any error
        return blocked_s

    return run


OURS = {
    "ours, async_save": prepare_async_save,
    "ours, torch.save": prepare_torch_save,
    "ours, open": prepare_open,
    "torch, FsspecWriter": prepare_fsspec,
    "Lightning": prepare_lightning,
}
# All of them run in the project's own Python; these groups provide the packages it lacks.
GROUPS = {"torch, FsspecWriter": ("fsspec",), "Lightning": ("fsspec", "lightning")}


def environments(names: list[str]) -> dict[str, dict[str, str]]:
    """Return the additional environment variables for each way that is available here."""
    found = {}
    for name in names:
        pythons = [peers.install(group) for group in GROUPS.get(name, ())]
        paths = [peers.site_packages(python) for python in pythons if python is not None]
        if len(paths) == len(pythons):
            found[name] = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return found


def row_of(measured: list[Measured], mib: int) -> dict[str, Any]:
    return {
        "blocked s": spread(each.told for each in measured),
        "durable s": spread(each.wall_s for each in measured),
        "CPU s/GiB": spread(each.cpu_s * 1024 / mib for each in measured),
        "anon MiB": max(each.anonymous_bytes for each in measured) / MIB,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state, in steps of 16")
    parser.add_argument("--clients", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--server", choices=("sink", "tls", "seaweed"), default="sink")
    parser.add_argument("--folder", help="where ours writes (default: the system's temporary folder)")
    arguments = parser.parse_args()
    found = environments(arguments.clients)
    clients = Clients(list(found), {})
    runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
    size_bytes = arguments.mib // TENSOR_MIB * TENSOR_MIB * MIB
    with scratch(arguments.folder) as folder, Server(arguments.server, folder) as server:
        for number, client in turns(clients.names, arguments.rounds):
            key = key_of(number, client)
            (folder / key).mkdir()
            work = Work(str(folder / key), size_bytes, server.url, BUCKET, key, 0, 0)
            before = server.stats()
            runs[client].append(clients.run(client, __file__, work, found[client]))
            moved = (server.stats() - before).bytes_in
            if server.is_sink and not 0 <= moved - size_bytes < SMALL_CHANGE_BYTES:
                raise RuntimeError(f"{client}: {moved} bytes arrived of a state of {size_bytes}")
            stored = sum(server.sizes(key).values())
            if not 0 <= stored - size_bytes < SMALL_CHANGE_BYTES:
                raise RuntimeError(f"{client}: {stored} bytes are stored of a state of {size_bytes}")
            server.clear()
            for path in folder.glob(f"{key}/**/*"):
                if path.is_file():
                    path.unlink()
    title = f"one save of {arguments.mib} MiB, {arguments.rounds} rounds, to {arguments.server}"
    report(arguments, title, {name: row_of(each, arguments.mib) for name, each in runs.items()})


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if sys.argv[1:2] == ["--child"]:
        child_main(OURS)
    else:
        main()
