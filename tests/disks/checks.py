"""What is tried on a file system: as the remote of two nodes, and as a trainer's disk.

A check gets what is mounted and a folder on a local disk. It returns what it found, in a few words, or raises
NotForItError, or any other error if the file system does not do what is promised for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, ObjectNotFoundError, PreconditionFailedError, StoreError
from ckpt_async.protocol.cas import advance
from ckpt_async.stores import open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Condition, Create, Match, ObjectInfo, Store
from ckpt_async.transfer.patient import connect
from tests.disks.mounts import Mounted
from tests.faults.oracle import Oracle, heard
from tests.faults.processes import ROOT, Nursery, Trainer
from tests.faults.ranks import SETTINGS

NUM_OPENS, NUM_ROUNDS, NUM_STALE, NUM_STEPS, NUM_KILLS = 40, 200, 5, 6, 3
LIMIT_S = 120.0
# Longer than any of these remembers a name: sshfs does for 20 s.
STALE_S = 60.0


class NotForItError(Exception):
    """This is not promised for this file system; the text says what there is instead."""


# --- two nodes ---------------------------------------------------------------------------------------------

Play = Callable[[str, int, Barrier], Awaitable[Any]]


def on_both(play: Play, mounted: Mounted) -> list[Any]:
    """Have two processes do something in one folder, each through its own mount, and return what they return."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2, timeout=LIMIT_S), context.SimpleQueue()
    nodes = [
        context.Process(target=_node, args=(play, f"file://{place}", number, barrier, results))
        for number, place in enumerate(mounted.two)
    ]
    for each in nodes:
        each.start()
    try:
        for each in nodes:
            each.join(2 * LIMIT_S)
        found = sorted((results.get() for each in nodes if each.exitcode == 0), key=lambda pair: pair[0])
        assert len(found) == 2, f"the nodes ended with {[each.exitcode for each in nodes]}"
        return [result for _, result in found]
    finally:
        for each in nodes:
            each.kill()


def _node(play: Play, url: str, number: int, barrier: Barrier, results: Any) -> None:
    logging.disable(logging.WARNING)  # that rank 0 alone decides, for each of these many stores
    results.put((number, asyncio.run(play(url, number, barrier))))


async def opened(url: str) -> Store:
    store = open_store(url)
    await store.open()
    return store


async def put(store: Store, key: str, value: object, condition: Condition = None) -> ObjectInfo:
    data = json.dumps(value).encode().ljust(100)  # as a record's next version often has the same length
    checksum = checksum_of(data, store.capabilities.checksum_algorithm)
    return await store.put(key, BytesBody(data), checksum, condition=condition)


async def get(store: Store, key: str) -> tuple[Any, str]:
    data, info = await store.get(key, max_size_bytes=1 << 16)
    return json.loads(data), info.etag


async def decides_by_swap(mounted: Mounted) -> None:
    """Raise NotForItError where rank 0 alone decides."""
    if not (await opened(f"file://{mounted.nodes[0]}/run")).capabilities.conditional_put:
        raise NotForItError("rank 0 alone")


# --- as a remote -------------------------------------------------------------------------------------------


async def _open_at_once(url: str, _: int, barrier: Barrier) -> list[str]:
    errors = []
    for each in range(NUM_OPENS):
        barrier.wait()
        try:
            await opened(f"{url}/run-{each}")
        except StoreError as error:
            errors.append("".join(traceback.format_exception(error)))
    return errors


def opened_at_once(mounted: Mounted, _: Path) -> str:
    errors = [*itertools.chain(*on_both(_open_at_once, mounted))]
    assert not errors, f"{len(errors)} of {NUM_OPENS}: {errors[0]}"
    return f"{NUM_OPENS} times"


async def _create(url: str, number: int, barrier: Barrier) -> list[int]:
    store, won = await opened(f"{url}/run"), []
    for each in range(NUM_ROUNDS):
        barrier.wait()
        with contextlib.suppress(PreconditionFailedError):
            await put(store, f"created/{each}", number, Create())
            won.append(each)
    return won


def created_once(mounted: Mounted, _: Path) -> str:
    asyncio.run(decides_by_swap(mounted))
    one, two = map(set, on_both(_create, mounted))
    assert not one & two, f"two winners in {len(one & two)} of {NUM_ROUNDS}"
    assert len(one | two) == NUM_ROUNDS, f"no winner in {NUM_ROUNDS - len(one | two)} of {NUM_ROUNDS}"
    return f"{NUM_ROUNDS} of {NUM_ROUNDS}"


async def _swap(url: str, number: int, barrier: Barrier) -> None:
    """Add to a counter, as records are moved forward."""
    store = connect(f"{url}/run", None, Settings())
    await store.open()
    barrier.wait()
    for each in range(NUM_ROUNDS):

        def added(there: bytes | None, nonce: str = f"{number}-{each}") -> bytes:
            return json.dumps(
                {"count": json.loads(there)["count"] + 1 if there else 1, "nonce": nonce}
            ).encode()

        await asyncio.wait_for(advance(store, "swapped", added), LIMIT_S)


async def _versions(url: str) -> list[str]:
    store = await opened(url)
    etags = [(await put(store, "versions", 0)).etag]
    for each in range(20):
        etags.append((await put(store, "versions", each, Match(etags[-1]))).etag)
    return etags


def swapped(mounted: Mounted, _: Path) -> str:
    asyncio.run(decides_by_swap(mounted))
    etags = asyncio.run(_versions(f"file://{mounted.nodes[0]}/run"))
    assert len({*etags}) == len(etags), f"{len(etags)} versions have {len({*etags})} ETags"
    on_both(_swap, mounted)
    time.sleep(2.0)
    count = asyncio.run(_look(f"file://{mounted.nodes[0]}/run", "swapped"))[0]["count"]
    assert count == 2 * NUM_ROUNDS, f"{2 * NUM_ROUNDS - count} of {2 * NUM_ROUNDS} lost"
    return f"{count}, none lost"


async def _look(url: str, key: str) -> tuple[Any, str]:
    return await get(await opened(url), key)


async def _replace(url: str, number: int, barrier: Barrier) -> float:
    """One node replaces a name, the other looks until it sees that; return for how long it did not."""
    store, longest_s = await opened(f"{url}/run"), 0.0
    for version in range(2 * NUM_STALE):
        if number == 0:
            await put(store, "replaced", version)
        barrier.wait()
        began = time.monotonic()
        while number == 1 and not await _shows(store, "replaced", version):
            assert time.monotonic() < began + STALE_S, f"still stale after {STALE_S:.0f} s"
            await asyncio.sleep(0.01)
        longest_s = max(longest_s, time.monotonic() - began)
        barrier.wait()
    return longest_s


async def _shows(store: Store, key: str, value: object) -> bool:
    try:
        return bool((await get(store, key))[0] == value)
    except StoreError as error:
        if error.reason.is_retryable or error.reason is FailureReason.NOT_FOUND:
            return False
        raise


def replaced(mounted: Mounted, _: Path) -> str:
    longest_s = on_both(_replace, mounted)[1]
    return f"stale for {longest_s:.1f} s" if longest_s > 0.1 else "seen at once"


async def _spell(url: str, number: int, barrier: Barrier) -> bool:
    """Both put a name in a spelling of their own; return whether this one was refused."""
    store = await opened(f"{url}/run")
    barrier.wait()
    try:
        await put(store, f"ckpt/{'Model' if number else 'model'}.pt", number)
    except StoreError as error:
        if "ignores case" in str(error):
            return True
        raise
    return False


def spelt(mounted: Mounted, _: Path) -> str:
    refused = on_both(_spell, mounted).count(True)
    time.sleep(2.0)
    seen = []
    for name in ("model.pt", "Model.pt"):
        with contextlib.suppress(ObjectNotFoundError):
            seen.append(asyncio.run(_look(f"file://{mounted.nodes[0]}/run", f"ckpt/{name}"))[0])
    if refused:
        assert refused == 1, "both were refused"
        return "ignored: the second name is refused"
    assert seen == [0, 1], f"one has replaced the other: {seen}"
    return "told apart"


def life_cycle(mounted: Mounted, folder: Path) -> str:
    """Two ranks save; one is killed and the launch repeated; the older checkpoints are pruned by the other node."""
    remotes = [f"file://{place}/run" for place in mounted.two]
    with Nursery(folder) as nursery:
        ranks = start(nursery, folder, remotes, "one")
        for rank in ranks:
            rank.expect("saved")
        for rank in ranks:
            rank.tell(f"wait {NUM_STEPS} 100")
        for rank in ranks:
            rank.expect("done", 110)
        ranks[1].kill()
        ranks[0].kill()
        again = start(nursery, folder, remotes, "two")
        for rank in again:
            rank.expect("saved")
            rank.tell(f"wait {NUM_STEPS} 100")
            rank.expect("done", 110)
            rank.tell("stop")
        for rank in again:
            assert rank.finish() == 0, rank.said[-1]
    oracle = Oracle(remotes[1], 2)
    committed = oracle.look()
    assert len(committed) >= NUM_STEPS + 1, f"only {len(committed)} committed"
    cli("prune", remotes[1], "--keep", "last=2", "--yes")
    cli("sweep", "--remote", remotes[0], "--once", "--keep", "last=2")
    cli("verify", remotes[0], "--read-data", "100")
    listed = json.loads(cli("ls", remotes[1], "--json"))["checkpoints"]
    assert len(listed) == 2, f"{len(listed)} left"
    return f"{len(committed)} committed, pruned to 2"


def start(nursery: Nursery, folder: Path, remotes: list[str], launch: str) -> list[Trainer]:
    return [
        nursery.start(
            "saves",
            {"CKPT_ASYNC_LAUNCH_ID": launch},
            folder=str(folder / f"node-{rank}"),
            remote=remote,
            rank=rank,
            world_size=2,
            steps=[*range(1, NUM_STEPS + 1)],
            settings=SETTINGS,
        )
        for rank, remote in enumerate(remotes)
    ]


def cli(*args: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_async", *args], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{args[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
    return done.stdout


# --- as a trainer's disk -----------------------------------------------------------------------------------


def killed(mounted: Mounted, folder: Path) -> str:
    """A trainer is killed at random moments; what it had sealed is committed by `drain`, byte for byte."""
    place, remote = mounted.nodes[0] / "folder", f"file://{folder}/remote"
    sealed = set()
    with Nursery(folder) as nursery:
        for _ in range(NUM_KILLS):
            trainer = nursery.start(
                "saves",
                folder=str(place),
                remote=remote,
                rank=0,
                world_size=1,
                steps=[*range(1, 100)],
                train_s=0.02,
                settings={"num_checkpoints_to_keep": 100},
            )
            refuse_if_unknown(trainer)
            trainer.listen(random.uniform(0.1, 1.0))
            trainer.kill()
            sealed |= heard(trainer.said, "sealed")
    cli("drain", place)
    assert sealed, "nothing was sealed"
    lost = sealed - Oracle(remote, 1).look()
    assert not lost, f"{len(lost)} of {len(sealed)} lost"
    return f"{NUM_KILLS}, none of {len(sealed)} lost"


def refuse_if_unknown(trainer: Trainer) -> None:
    with contextlib.suppress(AssertionError):
        trainer.expect("opened")
        return
    log = trainer.log.read_text()
    if "not known to be local" in log:
        raise NotForItError("refused")
    raise AssertionError(log[-300:])


# A trainer that goes on whatever its saves say.
_STUBBORN = """
import os, sys, time
from pathlib import Path
from ckpt_async import CkptAsyncError, Uploader
folder, until = Path(sys.argv[1]), time.monotonic() + 8
with Uploader(folder, sys.argv[2], on_error="warn", on_disk_low="raise", num_checkpoints_to_keep=2) as uploader:
    os.write(1, b"opened 0\\n")
    for step in range(1, 10_000):
        try:
            shard = folder / f"step-{step}" / "x.pt"
            shard.parent.mkdir(parents=True)
            shard.write_bytes(step.to_bytes(4, "big") * 50_000)
            uploader.enqueue(shard, step)
            uploader.seal(step)
            os.write(1, f"sealed {step}\\n".encode())
        except (OSError, CkptAsyncError):
            try:
                uploader.give_up(step, "no space")
            except CkptAsyncError:
                pass
        time.sleep(0.02)
        if time.monotonic() > until:
            break
"""


def full(mounted: Mounted, folder: Path) -> str:
    """Somebody fills the disk while a trainer saves, and frees it again; what was sealed is committed."""
    disk, remote = mounted.nodes[0], f"file://{folder}/remote"
    arguments = [sys.executable, "-c", _STUBBORN, str(disk / "folder"), remote]
    with (folder / "said").open("w+b") as said, (folder / "trainer-log").open("w+b") as log:
        trainer = subprocess.Popen(arguments, cwd=ROOT, stdout=said, stderr=log)
        try:
            until = time.monotonic() + LIMIT_S
            while (
                not (folder / "said").stat().st_size and trainer.poll() is None and time.monotonic() < until
            ):
                time.sleep(0.1)
            until = time.monotonic() + 5
            while time.monotonic() < until and trainer.poll() is None:
                fill(disk / "ballast")
                time.sleep(0.1)
            (disk / "ballast").unlink(missing_ok=True)
            code = trainer.wait(LIMIT_S)
        finally:
            trainer.kill()
    text = (folder / "trainer-log").read_text()
    if "not known to be local" in text:
        raise NotForItError("refused")
    assert code == 0, f"the trainer ended with {code}: {text[-300:]}"
    cli("drain", disk / "folder")
    lines = (line.split() for line in (folder / "said").read_text().splitlines())
    steps = {int(step) for what, step in lines if what == "sealed"}
    listed = json.loads(cli("ls", remote, "--json", "--all"))["checkpoints"]
    committed = {each["step"] for each in listed if each["state"] == "committed"}
    assert steps, "nothing was sealed"
    assert steps <= committed, f"{len(steps - committed)} of {len(steps)} lost"
    for step in committed:
        data = (folder / f"remote/ckpt/step-{step}.g1/x.pt").read_bytes()
        assert data == step.to_bytes(4, "big") * 50_000, f"step {step} is damaged"
    return f"none of {len(steps)} lost"


def fill(ballast: Path) -> None:
    """Write until there is no space left, also for small files."""
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(random.randbytes(size))


# --- a remote that is full, or away ---------------------------------------------------------------------------

_SAVES = """
import sys, time
from pathlib import Path
from ckpt_async import Uploader
folder, num_steps, pause_s = Path(sys.argv[1]), int(sys.argv[3]), float(sys.argv[4])
with Uploader(folder, sys.argv[2], retry_max_s=1.0) as uploader:
    for step in range(1, num_steps + 1):
        shard = folder / f"step-{step}" / "x.pt"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(step.to_bytes(4, "big") * 50_000)
        uploader.enqueue(shard, step)
        uploader.seal(step)
        time.sleep(pause_s)
"""


def saves(folder: Path, remote: str, num_steps: int, pause_s: float = 0.0) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", _SAVES, str(folder), remote, str(num_steps), str(pause_s)]
    return subprocess.Popen(arguments, cwd=ROOT)


def full_remote(mounted: Mounted, folder: Path) -> str:
    """Nothing but pruning frees it."""
    if mounted.name in ("gluster", "rclone"):
        raise NotForItError(
            "not tried"
        )  # a full brick takes no record; what rclone has cached is not there yet
    remote = f"file://{mounted.nodes[0]}/run"
    assert saves(folder / "node", remote, 8).wait(LIMIT_S) == 0
    fill(mounted.nodes[0] / "ballast")
    cli("prune", remote, "--keep", "last=2", "--yes")
    listed = json.loads(cli("ls", remote, "--json"))["checkpoints"]
    assert len(listed) == 2, f"{len(listed)} left"
    return "pruned to 2"


def away(mounted: Mounted, folder: Path) -> str:
    """The client of one node's mount dies, and is started again while its trainer saves."""
    if mounted.again is None:
        raise NotForItError("not tried")
    remote = f"file://{mounted.nodes[0]}/run"
    trainer = saves(folder / "node", remote, 40, 0.2)
    try:
        time.sleep(3)
        mounted.again()
        code = trainer.wait(LIMIT_S)
    finally:
        trainer.kill()
    assert code == 0, f"the trainer ended with {code}"
    listed = json.loads(cli("ls", f"file://{mounted.nodes[-1]}/run", "--json"))["checkpoints"]
    assert len(listed) == 40, f"{len(listed)} of 40 committed"
    return "40 of 40"


CHECKS: Mapping[str, Callable[[Mounted, Path], str]] = {
    "Opened at once": opened_at_once,
    "Created once": created_once,
    "Swaps": swapped,
    "A replaced name": replaced,
    "Case": spelt,
    "A life": life_cycle,
    "Trainer's disk: kills": killed,
    "Trainer's disk: full": full,
    "Remote: full": full_remote,
    "Remote: away": away,
}
