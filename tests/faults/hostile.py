"""Hostile input, handled in a watched process of its own: `python -m tests.faults.hostile names|bombs FOLDER`.

The report goes to stdout. `names` tries every text that could be a path, a checkpoint name or a key, in every place
that takes one. `bombs` reads remotes in each of which one record has been replaced by a bomb.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from ckpt_async import CkptAsyncError, Uploader
from ckpt_async.core.naming import MAX_KEY_LENGTH
from ckpt_async.core.settings import Settings
from ckpt_async.protocol.verify import verify
from ckpt_async.stores import open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.sweep.sweeper import Sweeper
from ckpt_async.transfer.patient import connect

# CPython's audit events of calls that take a path (docs: "Audit events table"), with the path's position.
PATHS = {
    "open": (0,),
    "os.chmod": (0,),
    "os.link": (0, 1),
    "os.listdir": (0,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.scandir": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
}
# What Python and the package themselves read: modules, time zones, and the kind of file system.
READ_ONLY = ("/proc/self/mountinfo", "/proc/sys/", "/dev/urandom", sys.prefix, sys.base_prefix)


class Watch:
    """Records every path that the process touches outside the roots."""

    def __init__(self, *roots: Path) -> None:
        self._roots = [os.path.realpath(each) for each in roots]
        self.num_calls = 0
        self.outside: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        for place in PATHS.get(event, ()):
            path = arguments[place]
            if isinstance(path, int) or path is None:
                continue  # a descriptor, whose opening was already seen
            if path == "/proc/self/mountinfo":
                continue  # what kind of disk it is
            self.num_calls += 1
            if not self._is_inside(event, os.fsdecode(path), arguments):  # type: ignore[arg-type]
                self.outside.append(f"{event} {path!r}")

    def _is_inside(self, event: str, path: str, arguments: tuple[object, ...]) -> bool:
        if not os.path.isabs(path):
            # Relative to a descriptor, so it must not leave that folder; a path relative to the working
            # directory would have been made absolute.
            return "/" not in path and path not in ("", ".", "..")
        flags = arguments[2] if event == "open" else os.O_NOFOLLOW
        assert isinstance(flags, int)
        if flags & os.O_NOFOLLOW:
            parent, name = os.path.split(path)
            real = os.path.join(os.path.realpath(parent), name)
        else:
            real = os.path.realpath(path)
        if (
            event == "open"
            and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            and real.startswith(READ_ONLY)
        ):
            return True
        return any(real == root or real.startswith(f"{root}/") for root in self._roots)


def names(root: Path) -> dict[str, object]:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from tests.core.hostile import HOSTILE

    folder, run = root / "inside" / "folder", f"file://{root}/inside/run"
    texts = (
        st.sampled_from(
            [
                *HOSTILE,
                str(root / "outside"),
                "../../outside/canary",
                "../run-2/ckpt/x",
                "link/canary",
                "leads-out/canary",
            ]
        )
        | st.text(max_size=30)
        | st.lists(
            st.sampled_from(["..", ".", "a", "link", "step-1", ".ckpt-async", "\0", "~"]), max_size=6
        ).map("/".join)
    )
    found: set[str] = set(HOSTILE)

    @settings(max_examples=1000, deadline=None, database=None)
    @given(text=texts)
    def collect(text: str) -> None:
        found.add(text)

    collect()
    counts: Counter[str] = Counter()
    store = open_store(f"file://{root}/inside/store")
    uploader = Uploader(folder, run, rank=0, world_size=1, on_error="warn")
    (folder / "link").symlink_to(root / "outside")
    (folder / "a").mkdir()
    (folder / "a" / "shard").write_bytes(b"fine")
    (folder / "b").symlink_to(root / "outside" / "canary")
    os.mkfifo(folder / "pipe")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(store.open())
    (root / "inside" / "store" / "leads-out").symlink_to(root / "outside")
    data = b"data"

    def attack(step: int, text: str) -> None:
        calls = {
            "enqueue path": lambda: uploader.enqueue(text, step),
            "enqueue joined": lambda: uploader.enqueue(f"{folder}/{text}", step),
            "enqueue name": lambda: uploader.enqueue(folder / "a", step, name=text),
            "seal name": lambda: uploader.seal(step, name=text),
        }
        for what, call in calls.items():
            try:
                call()
                counts[f"{what} taken"] += 1
            except CkptAsyncError:
                counts[f"{what} refused"] += 1
        if len(text) > MAX_KEY_LENGTH:
            return  # S3 and the uploader refuse it, and in a folder it would only make the path deep
        requests = {
            "put": lambda: store.put(text, BytesBody(data), checksum_of(data, "crc64nvme")),
            "get": lambda: store.get(text, max_size_bytes=100),
            "head": lambda: store.head(text),
            "list": lambda: store.list(text),
            "delete": lambda: store.delete([text]),
        }
        for what, request in requests.items():
            try:
                loop.run_until_complete(request())
                counts[f"{what} done"] += 1
            except CkptAsyncError:
                counts[f"{what} refused"] += 1

    watch = Watch(folder, root / "inside" / "run", root / "inside" / "store")
    for step, text in enumerate(sorted(found)):
        attack(step, text)
    return {"counts": counts, "num_calls": watch.num_calls, "outside": watch.outside[:20]}


def bombs(root: Path) -> dict[str, object]:
    """Return the CPU seconds per remote, and the peak memory before and after."""
    before_kib = most_memory_kib()
    took_s, unrefused = {}, []
    for remote in sorted(root.iterdir()):
        started = time.process_time()
        if not asyncio.run(_is_refused(f"file://{remote}")):
            unrefused.append(remote.name)
        took_s[remote.name] = time.process_time() - started
    return {
        "took_s": took_s,
        "unrefused": unrefused,
        "before_kib": before_kib,
        "max_rss_kib": most_memory_kib(),
    }


def most_memory_kib() -> int:
    """Return this program's peak memory. getrusage would report its parent's peak if that was larger."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


async def _is_refused(remote: str) -> bool:
    """Return whether `verify` finds something wrong; a sweep over the remote must also end, with a report."""
    store = connect(remote, None, Settings())
    await store.open(is_read_only=True)
    try:
        found = await verify(store)
        is_refused = bool(found.findings)
    except CkptAsyncError:
        is_refused = True
    finally:
        await store.close()
    await Sweeper([], [remote], settings=Settings(remote_retention="last=1")).sweep()
    return is_refused


if __name__ == "__main__":
    what, folder = sys.argv[1:]
    print(json.dumps({"names": names, "bombs": bombs}[what](Path(folder))), flush=True)
    os._exit(0)  # hundreds of checkpoints are still in flight
