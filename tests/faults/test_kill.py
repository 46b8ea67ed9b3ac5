"""SIGKILL at random times, again and again. The parent outlives the trainers and knows what was promised to them."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import NoJournalError
from ckpt_async.local import journals
from tests.faults.oracle import Oracle, heard
from tests.faults.processes import SOAK, Nursery, Trainer
from tests.faults.proxy import FaultProxy

pytestmark = pytest.mark.fault("F1")

WORLD_SIZE = 2
SETTINGS = {"decision_poll_s": 0.05, "close_grace_s": 0.0, "retry_initial_s": 0.01, "retry_max_s": 0.1}


class Run:
    """One folder and one remote; every round is a launch of the run that ends with a SIGKILL of each rank."""

    def __init__(
        self, nursery: Nursery, folder: Path, remote: str, seed: int, num_local: int, longest_s: float
    ) -> None:
        self.nursery, self.folder, self.remote = nursery, folder, remote
        self.random = random.Random(seed)
        self.settings = SETTINGS | {"num_checkpoints_to_keep": num_local}
        self.longest_s = longest_s
        self.oracle = Oracle(remote, WORLD_SIZE)
        self.sealed: list[set[CheckpointId]] = [set() for _ in range(WORLD_SIZE)]
        self.begun: list[set[CheckpointId]] = [set() for _ in range(WORLD_SIZE)]
        self.verified: dict[str, object] = {}  # key → what the store has there, which must never change again
        self.num_kills = self.num_starts = 0

    def start(self, steps: list[int]) -> list[Trainer]:
        self.num_starts += 1
        launch = {"CKPT_ASYNC_LAUNCH_ID": f"start-{self.num_starts}"}
        return [
            self.nursery.start(
                "saves",
                launch,
                folder=str(self.folder),
                remote=self.remote,
                rank=rank,
                world_size=WORLD_SIZE,
                steps=steps,
                train_s=self.longest_s / 10,
                settings=self.settings,
            )
            for rank in range(WORLD_SIZE)
        ]

    @property
    def had_something_to_lose(self) -> bool:
        return bool(self.verified and self.sealed[0] & self.sealed[1])

    def round(self) -> None:
        trainers = self.start([1, 2, 3])
        for rank in self.random.sample(range(WORLD_SIZE), WORLD_SIZE):
            if self.random.random() < 0.5:  # otherwise it may be killed while it opens and recovers
                trainers[rank].expect("opened")
            trainers[rank].listen(self.random.uniform(0.0, self.longest_s))
            assert trainers[rank].exit_code is None
            trainers[rank].kill()
            self.num_kills += 1
        self.check(trainers)

    def check(self, trainers: list[Trainer]) -> None:
        for rank, trainer in enumerate(trainers):
            self.begun[rank] |= heard(trainer.said, "enqueueing")
            self.sealed[rank] |= heard(trainer.said, "sealed")
        self.oracle.look()
        now = self.stored()
        changed = {key for key, before in self.verified.items() if now.get(key) != before}
        assert not changed, f"sent again although the journal had them as verified: {changed}"
        with_rows = self.keys_in_journal() & set(now)
        self.verified |= {key: now[key] for key in with_rows}

    def keys_in_journal(self) -> set[str]:
        try:
            readings = journals.read(self.folder)
        except NoJournalError:  # killed before they had made one
            return set()
        return {
            each.stored.key
            for reading in readings.values()
            for checkpoint in reading.local().checkpoints.values()
            for each in checkpoint.shards.values()
            if each.stored is not None
        }

    def stored(self) -> dict[str, object]:
        """Return every object under `ckpt/`, with the attributes of its file that change if it is written again."""
        root = Path(self.remote.removeprefix("file://"))
        facts = {path: path.stat() for path in (root / keys.DATA).rglob("*.pt")}
        return {str(path.relative_to(root)): (each.st_ino, each.st_mtime_ns) for path, each in facts.items()}

    def finish(self) -> None:
        """Start once more without a kill: everything that both ranks had sealed must be committed now."""
        trainers = self.start([])
        for trainer in trainers:
            trainer.expect("saved")
        wanted = self.sealed[0] & self.sealed[1]
        for _ in range(600):
            if wanted <= self.oracle.look() | self.oracle.aborted:
                break
            trainers[0].listen(0.1)
        for trainer in trainers:
            trainer.tell("stop")
            assert trainer.finish() == 0, trainer.log.read_text()
        self.check(trainers)
        assert not wanted - self.oracle.committed, "sealed by all ranks, yet lost"
        # A checkpoint sealed by a rank that was killed before it could say so may be committed, or not.
        assert self.oracle.committed <= self.begun[0] & self.begun[1], (
            "committed, though a rank never saved it"
        )
        assert self.oracle.latest == max(self.oracle.committed, default=None)


class S3Run(Run):
    """The same against a real S3 server, with a proxy that counts what is sent."""

    proxy: FaultProxy

    def stored(self) -> dict[str, object]:
        root = "/" + self.remote.removeprefix("s3://") + "/"
        return {key.removeprefix(root): count for (key, _), count in self.proxy.sent(r"/ckpt/").items()}


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("num_rounds", "num_s3_rounds"), [(10, 6), pytest.param(22, 15, marks=SOAK)])
def test_sigkills_at_random_times_lose_nothing_and_send_nothing_twice(
    nursery: Nursery,
    tmp_path: Path,
    proxy: FaultProxy,
    s3_url: str,
    seed: int,
    num_rounds: int,
    num_s3_rounds: int,
) -> None:
    """This is the promise: what was enqueued and sealed is committed after the restart, and no
    partial checkpoint is visible.
    """
    runs: list[Run] = []
    for number, num_local in enumerate((-1, 0, 1, 2)):
        remote = tmp_path / f"remote-{number}"
        folder = tmp_path / f"folder-{number}"
        runs.append(Run(nursery, folder, f"file://{remote}", seed + number, num_local, 0.35))
    on_s3 = S3Run(nursery, tmp_path / "folder-s3", f"{s3_url}/run", seed + 9, 1, 0.6)
    on_s3.proxy = proxy
    is_over = threading.Event()

    def play(run: Run, rounds: int) -> None:
        while run.num_starts < rounds or (not run.had_something_to_lose and run.num_starts < 3 * rounds):
            if is_over.is_set():
                return
            run.round()
        run.finish()

    with ThreadPoolExecutor(len(runs) + 1) as pool:
        futures = [pool.submit(play, run, num_rounds) for run in runs]
        futures.append(pool.submit(play, on_s3, num_s3_rounds))
        try:
            for future in futures:
                future.result()
        finally:
            is_over.set()
    everyone = [*runs, on_s3]
    print(
        f"kills={sum(run.num_kills for run in everyone)} on_s3={on_s3.num_kills}"
        f" sealed={sum(len(run.sealed[0] & run.sealed[1]) for run in everyone)}"
        f" committed={sum(len(run.oracle.committed) for run in everyone)}"
        f" aborted={sum(len(run.oracle.aborted) for run in everyone)}"
        f" verified={sum(len(run.verified) for run in everyone)}"
    )
    assert sum(run.num_kills for run in everyone) >= WORLD_SIZE * (4 * num_rounds + num_s3_rounds)
    assert all(run.had_something_to_lose for run in everyone), "the kills came too early"
