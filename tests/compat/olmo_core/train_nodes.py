"""OLMo-core's Trainer on two nodes of one rank, each with a folder of its own: `NODE/0` and
`NODE/1`, under one relative path.
"""

import os
import sys
from pathlib import Path

from tests.compat.olmo_core.train import train
from tests.compat.play import say_loss


def main(node: str, remote: str) -> None:
    own = Path(node, os.environ["RANK"])
    own.mkdir(exist_ok=True)
    os.chdir(own)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    train(".", remote, say_loss, has_node_folders=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
