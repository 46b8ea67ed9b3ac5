"""What a look does about candidates that come and go."""

import json
import shutil
from pathlib import Path

from ckpt_async.watch.entries import Entries
from ckpt_async.watch.holds import MAX_HELD, Holds
from ckpt_async.watch.lookout import Lookout
from ckpt_async.watch.options import Options
from ckpt_async.watch.telling import Teller
from ckpt_async.watch.wake import Waker


def test_what_waits_and_is_dropped_because_too_many_are_held_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    options = Options(folder, "memory://", tmp_path / "state", tmp_path / "lock")
    entries, holds = Entries(folder, tmp_path / "state", "memory://"), Holds(folder, tmp_path / "held")
    entries.load()
    holds.load()
    told: list[tuple[str, str]] = []
    teller, waker = Teller(lambda each: told.append((each.event, each.path))), Waker()
    lookout = Lookout(options, entries, holds, teller, waker)
    for step in range(1, MAX_HELD + 3):
        here = folder / f"checkpoint-{step}"
        here.mkdir()
        for name in ("rng_state_0.pth", "rng_state_1.pth"):
            (here / name).write_bytes(b"x" * step)
        (here / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        lookout.look()
        lookout.take()
        shutil.rmtree(here)
    assert list(teller.refused) == ["checkpoint-1", "checkpoint-2"]
    assert told == [("refused", "checkpoint-1"), ("refused", "checkpoint-2")]
    waker.close()
