"""How long until a restarted rank has its tensors back: from its own disk, from another node, from the store?

A checkpoint of torch.distributed.checkpoint is committed once, and loaded into a state dict. Each run is a whole
process, and they take turns; where a client has to search for the newest checkpoint, the time includes that:

  local, peer, store   ours, `restore.find` and CkptAsyncReader; the peer is a PeerServer in another process
  FsspecReader         torch's own, with s3fs; it is told which checkpoint
  FileSystemReader     torch's own from the local disk: the bound for "local", without verifying checksums
  store, 10 %          and FsspecReader, 10 %: a tenth of the tensors, chosen at random

Below, the same file is read as bytes into one buffer of a tensor's size, by `restore.open` and by clients that know
nothing of torch. "moved" is the number of bytes the server sent for each byte that was needed, everything included.

The sink keeps this checkpoint in memory (`keep`), so that what is loaded is what was saved; one element of every
tensor is compared.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
from _child import MIB, Measured, Work, child_main
from _compare import BUCKET, Clients, Server, compared, key_of, parser_of, report, scratch, turns

RUN = "run"
FILE = "__0_0.distcp"
# Roughly the layer of a transformer: two matrices, a bias, a norm.
LAYER = (("w", 2 << 20), ("o", 512 << 10), ("b", 2048), ("n", 1024))
LAYER_MIB = 10


def shapes(mib: int) -> dict[str, int]:
    """Return the number of elements of every tensor, all of float32."""
    return {f"layer{i:03d}.{name}": count for i in range(mib // LAYER_MIB) for name, count in LAYER}


def tenth(mib: int) -> dict[str, int]:
    """Return a tenth of the tensors of each kind."""
    num_layers, lot = mib // LAYER_MIB, random.Random(1)
    drawn = ((each, lot.sample(range(num_layers), max(1, num_layers // 10))) for each in LAYER)
    return {f"layer{i:03d}.{name}": count for (name, count), layers in drawn for i in layers}


def empty_state(wanted: dict[str, int]) -> dict[str, Any]:
    import torch

    return {name: torch.empty(count) for name, count in wanted.items()}


def mark(number: int) -> float:
    return float(number + 1)


def check(state: dict[str, Any], mib: int) -> None:
    for number, name in enumerate(shapes(mib)):
        if name in state and state[name][-1].item() != mark(number):
            raise RuntimeError(f"{name} is not what was saved")


# --- ours --------------------------------------------------------------------------------------------------


def load_ours(work: Work, *, is_partial: bool = False, **places: Any) -> Callable[[], None]:
    from torch.distributed.checkpoint.state_dict_loader import load

    import ckpt_async.stores.s3.client  # noqa: F401  imported now, not at first use
    from ckpt_async import restore
    from ckpt_async.stores import StoreOptions
    from ckpt_async.torch import CkptAsyncReader

    mib = work.size_bytes // MIB
    state = empty_state(tenth(mib) if is_partial else shapes(mib))

    def run() -> None:
        options = StoreOptions(endpoint_url=work.endpoint_url)
        checkpoint = restore.find(f"s3://{BUCKET}/{RUN}", store_options=options)
        assert checkpoint is not None
        with CkptAsyncReader(checkpoint, num_concurrent_reads=work.concurrency, **places) as reader:
            load(state, storage_reader=reader)
        check(state, mib)

    return run


def load_local(work: Work) -> Callable[[], None]:
    return load_ours(work, folder=work.path)


def load_from_peer(work: Work) -> Callable[[], None]:
    from ckpt_async import restore

    keys = frozenset(f"{work.key.removeprefix(f'{RUN}/')}/{name}" for name in (FILE, ".metadata"))
    url, secret = work.path.split()
    return load_ours(work, peers=[restore.Peer(url, keys, "peer", secret=secret)])


def load_partly(work: Work) -> Callable[[], None]:
    return load_ours(work, is_partial=True)


def read_ours(work: Work) -> Callable[[], None]:
    from ckpt_async import restore
    from ckpt_async.stores import StoreOptions

    buffer = memoryview(bytearray(work.size_bytes))
    options = StoreOptions(endpoint_url=work.endpoint_url)
    checkpoint = restore.find(f"s3://{BUCKET}/{RUN}", store_options=options)
    assert checkpoint is not None

    def run() -> None:
        with restore.open(checkpoint, num_concurrent_reads=work.concurrency) as reader:
            reader.read_into([restore.ReadInto(FILE, 0, buffer)])

    return run


# --- torch's ----------------------------------------------------------------------------------------------


def load_fsspec(work: Work, *, is_partial: bool = False) -> Callable[[], None]:
    import s3fs  # noqa: F401  imported now, not at first use
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.state_dict_loader import load

    mib = work.size_bytes // MIB
    state = empty_state(tenth(mib) if is_partial else shapes(mib))

    def run() -> None:
        load(state, storage_reader=FsspecReader(f"s3://{work.bucket}/{work.key}"))
        check(state, mib)

    return run


def load_fsspec_partly(work: Work) -> Callable[[], None]:
    return load_fsspec(work, is_partial=True)


def load_files(work: Work) -> Callable[[], None]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = empty_state(shapes(work.size_bytes // MIB))

    def run() -> None:
        load(state, storage_reader=FileSystemReader(Path(work.path, "step-1")))
        check(state, work.size_bytes // MIB)

    return run


LOADS = {
    "local": load_local,
    "peer": load_from_peer,
    "store": load_ours,
    "store, 10 %": load_partly,
    "FsspecReader": load_fsspec,
    "FsspecReader, 10 %": load_fsspec_partly,
    "FileSystemReader": load_files,
}
NEARER = ("local", "FileSystemReader", "peer")  # these do not read from the store
OURS = {**LOADS, "ours, bytes": read_ours}


def save(folder: Path, mib: int, url: str) -> str:
    """Commit the checkpoint; return the prefix of its keys within the run."""
    import torch

    from ckpt_async import Uploader
    from ckpt_async.stores import StoreOptions
    from ckpt_async.torch import save as save_dcp

    state = {name: torch.rand(count) for name, count in shapes(mib).items()}
    for number, tensor in enumerate(state.values()):
        tensor[-1] = mark(number)
    options = StoreOptions(endpoint_url=url)
    with Uploader(folder, f"s3://{BUCKET}/{RUN}", rank=0, world_size=1, store_options=options) as uploader:
        save_dcp(state, 1, uploader)
        uploader.wait(1, timeout_s=300)
        return f"ckpt/step-1.g{uploader.generation}"


@contextlib.contextmanager
def peer(folder: Path, prefix: str) -> Iterator[str]:
    """Serve the checkpoint's files from this process; yield the address and the secret."""
    from ckpt_async import restore

    files = {f"{prefix}/{path.name}": path for path in folder.iterdir()}
    with restore.PeerServer(files, "127.0.0.1") as server:
        assert server.peer is not None
        yield f"{server.peer.url} {server.peer.secret}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1020, help="size of the state, in steps of 10")
    parser.add_argument(
        "--part-mib", type=int, default=16, help="range size of the others; ours uses up to 32 MiB"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="ranges in flight")
    parser.add_argument("--clients", nargs="+", choices=[*OURS, *peers.READS], default=[*OURS, *peers.READS])
    parser.add_argument("--server", choices=("sink", "tls", "seaweed"), default="sink")
    arguments = parser.parse_args()
    mib = arguments.mib // LAYER_MIB * LAYER_MIB
    wanted = [
        name for name in arguments.clients if arguments.server != "tls" or name != "s3torchconnector"
    ]  # s3torchconnector does not trust our certificate
    if any(name.startswith("FsspecReader") for name in wanted) and (python := peers.install("fsspec")):
        fsspec = {"PYTHONPATH": peers.site_packages(python)}
    else:
        wanted, fsspec = [name for name in wanted if not name.startswith("FsspecReader")], {}
    clients = Clients(wanted, peers.READS)
    runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
    moved: dict[str, float | None] = {}
    keep = {} if arguments.server == "seaweed" else {"keep_mib": mib + 64}
    with (
        scratch() as folder,
        scratch("/dev/shm") as memory,
        Server(arguments.server, folder, **keep) as server,
        contextlib.ExitStack() as stack,
    ):
        prefix = save(folder / "run", mib, server.url)
        peer_url = stack.enter_context(peer(folder / "run" / "step-1", prefix))
        prefix = f"{RUN}/{prefix}"
        file_bytes = server.sizes(prefix)[f"{prefix}/{FILE}"]
        for number, client in turns(clients.names, arguments.rounds):
            is_load = client in LOADS
            target = memory / key_of(number, client)
            path = dict(zip(NEARER, (folder / "run", folder / "run", peer_url), strict=True))
            work = Work(
                str(path.get(client, target)),
                mib * MIB if is_load else file_bytes,
                server.url,
                BUCKET,
                prefix if is_load else f"{prefix}/{FILE}",
                arguments.part_mib * MIB,
                arguments.concurrency,
            )
            before = server.stats()
            environment = fsspec if client.startswith("FsspecReader") else {}
            runs[client].append(clients.run(client, __file__, work, environment))
            target.unlink(missing_ok=True)
            needed = sum(tenth(mib).values()) * 4 if "10 %" in client else work.size_bytes
            times = moved[client] = (server.stats() - before).bytes_out / needed if server.is_sink else None
            if times is not None and client not in NEARER and times < 1:
                raise RuntimeError(f"{client}: {times:.2f} bytes left for each byte that was needed")
    report(arguments, title_of(arguments, mib), rows_of(runs, moved, mib))


def title_of(arguments: Any, mib: int) -> str:
    return (
        f"{mib} MiB of tensors from {arguments.server}, {arguments.concurrency} in flight,"
        f" {arguments.rounds} rounds"
    )


def rows_of(
    runs: dict[str, list[Measured]], moved: dict[str, float | None], mib: int
) -> dict[str, dict[str, Any]]:
    loads = {name: each for name, each in runs.items() if name in LOADS and "10 %" not in name}
    partial = {name: each for name, each in runs.items() if "10 %" in name}
    reads = {name: each for name, each in runs.items() if name not in LOADS}
    rows = {
        **compared(loads, mib, "store"),
        **compared(partial, sum(tenth(mib).values()) * 4 / MIB, "store, 10 %"),
        **compared(reads, mib, "ours, bytes"),
    }
    seconds = {name: sorted(each.wall_s for each in measured) for name, measured in runs.items()}
    return {
        name: {"s": seconds[name][len(seconds[name]) // 2], **row, "moved": moved[name]}
        for name, row in rows.items()
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if sys.argv[1:2] == ["--child"]:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        child_main(OURS)
    else:
        main()
