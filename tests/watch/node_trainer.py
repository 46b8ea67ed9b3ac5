"""A script that saves to a folder on each of two nodes, as DCP does: each node its rank's file, the first, last,
`.metadata`. It rotates on both, and resumes, sometimes a save further back.
"""

import hashlib
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.dcp_metadata import metadata_of

SHARDS = ("__0_0.distcp", "__1_0.distcp")


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def save(nodes: list[Path], step: int) -> None:
    sums = {}
    for node, out in reversed([*enumerate(nodes)]):
        here = out / f"checkpoint-{step}"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        content = os.urandom(random.choice([10, 100_000, 300_000]))
        sums[SHARDS[node]] = hashlib.sha256(content).hexdigest()
        with (here / SHARDS[node]).open("wb") as file:
            for start in range(0, len(content), 100_000):
                file.write(content[start : start + 100_000])
                file.flush()
                say("writing", step)
                time.sleep(0.03)  # real ones take time too
    here = nodes[0] / f"checkpoint-{step}"
    data = metadata_of(
        {name: (nodes[node] / here.name / name).stat().st_size for node, name in enumerate(SHARDS)}
    )
    sums[".metadata"] = hashlib.sha256(data).hexdigest()
    say("intends", step, json.dumps(sums))
    (here / ".metadata.tmp").write_bytes(data)
    (here / ".metadata.tmp").rename(here / ".metadata")
    say("saved", step)


def main(nodes: list[Path], first: int, last: int, num_kept: int) -> None:
    # A save of a step within 1 s (nodes.CLOCKS_S) of an earlier one may be taken for that. Real trainers take longer.
    time.sleep(1.1)
    for step in range(first, last + 1, 10):
        time.sleep(0.3)  # of training: of a faster one, more would be rotated away than are held
        save(nodes, step)
        for out in reversed(nodes):
            for old in sorted(out.iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))[:-num_kept]:
                shutil.rmtree(old)


if __name__ == "__main__":
    main([Path(sys.argv[1]), Path(sys.argv[2])], *map(int, sys.argv[3:]))
