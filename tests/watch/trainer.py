"""A script that saves as transformers does: into place, `trainer_state.json` last; rotates; resumes, sometimes a save
further back than it could. It says what it does, and what every checkpoint is to be before its marker is there.
"""

import hashlib
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

KEPT = 100


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def save(out: Path, step: int) -> None:
    here = out / f"checkpoint-{step}"
    here.mkdir(exist_ok=True)
    sums = {}
    for name in ("model.bin", "optimizer.bin", "rng.bin"):
        content = os.urandom(random.choice([10, 100_000, 300_000]))
        with (here / name).open("wb") as file:
            for start in range(0, len(content), 50_000):
                file.write(content[start : start + 50_000])
                file.flush()
                say("writing", step, name)
                time.sleep(0.03)  # real ones take time too
        sums[name] = hashlib.sha256(content).hexdigest()
    state = json.dumps({"global_step": step, "random": random.random()})
    sums["trainer_state.json"] = hashlib.sha256(state.encode()).hexdigest()
    say("intends", step, json.dumps(sums))
    (here / "trainer_state.json").write_text(state)
    say("saved", step)


def main(out: Path, first: int, last: int) -> None:
    for step in range(first, last + 1, 10):
        save(out, step)
        for old in sorted(out.iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))[:-KEPT]:
            shutil.rmtree(old)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
