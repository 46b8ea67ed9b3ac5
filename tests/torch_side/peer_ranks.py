"""The ranks of test_peer_networks: one rank on each of two nodes, which are network namespaces joined by a cable."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_async.torch.resume import fetch_together

IPV4 = ("10.77.0.1", "10.77.0.2")


def prepare(name: str, rank: int) -> dict[str, Any]:
    """Set up the network as the scenario requires; return the arguments for `fetch_together`."""
    for variable in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        os.environ.pop(variable, None)
    match name:
        case "ipv6":
            os.environ["MASTER_ADDR"] = "fd77::1"
        case "loopback":  # the first node's /etc/hosts maps the name to 127.0.1.1
            ip("addr", "add", f"{IPV4[rank]}/24", "dev", "cable")
            os.environ["MASTER_ADDR"] = "the-master"
        case "no-name":
            os.environ["MASTER_ADDR"] = "nobody.invalid"
        case "interface":
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            os.environ["GLOO_SOCKET_IFNAME"] = "cable"
        case "dead":
            return {"peer_host": "10.77.0.99"} if rank == 0 else {}
    return {}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    rank, remote, base, names = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{base}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for name in names:
        options = prepare(name, rank)
        lines = Lines()
        logging.getLogger("ckpt_async").addHandler(lines)
        found = fetch_together(remote, base / f"node-{rank}" / name, **options)
        logging.getLogger("ckpt_async").removeHandler(lines)
        assert found is not None
        told = {"bytes_from": dict(found[1].bytes_from), "lines": lines.lines}
        (base / f"{name}-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
