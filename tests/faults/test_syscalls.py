"""SIGKILL before every single call that changes a file, in a trainer, in a sweep, and in what recovers from them.

The store is a folder here, so that upload, commit, latest and prune are local calls as well, not only enqueue and seal.
`shim.c` counts the calls and kills; each point is a run of its own from the beginning.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.local import host_mark, journals, reserve
from tests.faults import shim
from tests.faults.oracle import Oracle, heard, verified
from tests.faults.processes import SOAK, Nursery, Trainer

SETTINGS = {
    "num_checkpoints_to_keep": 1,
    "latest_filename": "latest",
    "decision_poll_s": 0.05,
    "close_grace_s": 0.0,
}
NUM_KEPT = 2
SWEEPS = {"remote_retention": f"last={NUM_KEPT}", "num_concurrent_uploads": 2}


@pytest.fixture(scope="module")
def nursery_under_shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("shim")
    with Nursery(folder, shim.build(folder)) as nursery:
        yield nursery


class Place:
    """The folder and remote of one point."""

    def __init__(self, nursery: Nursery, root: Path) -> None:
        self.nursery, self.folder, self.store = nursery, root / "folder", root / "remote"
        self.oracle = Oracle(f"file://{self.store}", 1)
        self.said: list[str] = []
        self.num_starts = self.num_kills = 0

    def play(self, play: str, *lines: str, kill_at: int = 0, **more: object) -> int:
        """Let one process play until it is killed or done; return the number of its calls, or 0 if it was killed."""
        self.num_starts += 1
        process = self.nursery.start(
            play,
            {"CKPT_ASYNC_LAUNCH_ID": f"start-{self.num_starts}"},
            kill_at=kill_at,
            folder=str(self.folder),
            remote=f"file://{self.store}",
            **more,
        )
        for line in lines:
            process.tell(line)
        return self._end(process)

    def train(self, *lines: str, steps: list[int], kill_at: int = 0, play: str = "saves") -> int:
        return self.play(
            play,
            *lines,
            "stop",
            kill_at=kill_at,
            rank=0,
            world_size=1,
            steps=steps,
            settings=SETTINGS,
        )

    def sweep(self, kill_at: int = 0) -> int:
        return self.play("sweeps", kill_at=kill_at, settings=SWEEPS)

    def _end(self, process: Trainer) -> int:
        code = process.finish()
        self.said += process.said
        assert code in (0, -9), process.log.read_text()
        if code:
            self.num_kills += 1
            return 0
        assert not [line for line in process.said if line.startswith(("error", "swept False"))], process.said
        return int(process.said[-1].removeprefix("calls "))

    @property
    def has_begun(self) -> bool:
        """Whether the run exists; before that there is nothing to sweep."""
        return any((self.store / keys.GENERATIONS).glob("*.json"))

    @property
    def sealed(self) -> set[CheckpointId]:
        return heard(self.said, "sealed")

    def check(self) -> None:
        """Check what must hold at any time: nothing partial is visible, and `latest` only moves forward and is true."""
        if self.store.exists():
            self.oracle.look()

    def check_nothing_is_lost(self) -> None:
        self.check()
        lost = self.sealed - self.oracle.committed
        assert not lost, f"sealed, yet not committed: {lost}"
        assert self.oracle.committed <= heard(self.said, "enqueueing")

    def check_nothing_is_left(self) -> None:
        """Check that after two more sweeps the remote holds only complete checkpoints that are to be kept, and the
        folder only what must be there.
        """
        temporary = (self.store / keys.PRIVATE / "tmp", self.folder / keys.PRIVATE)
        for path in itertools.chain.from_iterable(each.iterdir() for each in temporary):
            os.utime(path, (0, 0), follow_symlinks=False)  # pretend that a day has passed
        for _ in range(2):
            self.sweep()
        result = verified(f"file://{self.store}")
        assert result.findings == []
        assert result.num_committed == min(NUM_KEPT, len(self.oracle.committed))
        assert {each.name for each in (self.store / keys.PRIVATE / "tmp").iterdir()} == {"lock", "reserve"}
        known = journals.read(self.folder)[0].local().checkpoints
        assert all(each.decision is not None for each in known.values())
        manifests = {self.folder / keys.PRIVATE / keys.spool_manifest(id_, 0) for id_ in known}
        private = {each for each in (self.folder / keys.PRIVATE).rglob("*") if not each.is_dir()}
        names = {each.name for each in private - manifests if each.parent.name != reserve.NAME}
        ours = {keys.lock_name(0), host_mark.NAME}
        assert names <= {keys.journal_name(0)} | ours
        own = {each.name for each in self.folder.iterdir()} - {f"step-{step}" for step in range(9)}
        assert own <= {keys.PRIVATE, "latest", "writing-0"}


def kill_a_trainer(place: Place, kill_at: int) -> int:
    """Cover opening, enqueue, seal, upload, commit, latest, release, local retention and close."""
    return place.train("wait 2", "save 3", "wait 3", steps=[1, 2], kill_at=kill_at)


def kill_a_sweep(place: Place, kill_at: int) -> int:
    """Cover the adoption of what two launches left (upload, commit, give up), then prune and clean-up."""
    if not place.num_starts:
        place.train("wait 2", steps=[1, 2])
        place.train(steps=[3, 4], play="saves_and_dies")
        place.num_kills = 0
    return place.sweep(kill_at)


def kill_a_prune(place: Place, kill_at: int) -> int:
    """Sweep four committed checkpoints, two of which are too many; there is nothing to adopt."""
    if not place.num_starts:
        place.train("wait 4", steps=[1, 2, 3, 4])
    return place.sweep(kill_at)


Kill = Callable[[Place, int], int]


def survive(place: Place, kill: Kill, kill_at: int, rng: random.Random) -> None:
    """Kill at one point, and half of the time also kill what recovers, once or twice; then everything must be well."""
    kill(place, kill_at)
    place.check()
    for _ in range(rng.choice((0, 0, 1, 2))):
        if not place.has_begun or rng.random() < 0.5:
            place.train(steps=[], kill_at=rng.randint(1, 200))
        else:
            place.sweep(kill_at=rng.randint(1, 200))
        place.check()
    if not place.has_begun or rng.random() < 0.5:
        place.train(steps=[])
    else:
        place.sweep()
    place.check_nothing_is_lost()
    place.check_nothing_is_left()


@pytest.mark.fault("F1", "F2")
@pytest.mark.parametrize(
    "num_points",
    [pytest.param(16, id="some"), pytest.param(10_000, id="all", marks=SOAK)],
)
@pytest.mark.parametrize("kill", [kill_a_trainer, kill_a_sweep, kill_a_prune])
def test_a_kill_before_any_call_loses_nothing_and_leaves_nothing(
    nursery_under_shim: Nursery, tmp_path: Path, seed: int, kill: Kill, num_points: int
) -> None:
    """No sealed checkpoint may be lost, nothing partial may be visible, and nothing may be left after two sweeps."""
    total = kill(Place(nursery_under_shim, tmp_path / "whole"), 0)
    rng = random.Random(seed)
    num_points = min(num_points, total)
    stride = total / num_points
    points = sorted({1 + int(stride * (number + rng.random())) for number in range(num_points)})
    places = [Place(nursery_under_shim, tmp_path / f"point-{point}") for point in points]

    def play(number: int) -> None:
        try:
            survive(places[number], kill, points[number], random.Random(seed + points[number]))
        except BaseException as error:
            error.add_note(f"killed before call {points[number]} of about {total}; {places[number].said}")
            raise

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(play, number) for number in range(len(points))]:
            future.result()
    num_kills = sum(each.num_kills for each in places)
    num_sealed = sum(len(each.sealed) for each in places)
    print(f"calls={total} points={len(points)} kills={num_kills} sealed={num_sealed}")
    # The number of calls depends on how the threads take turns, so the last points may come too late.
    assert sum(each.num_kills > 0 for each in places) >= 0.9 * len(points)
    assert num_sealed
