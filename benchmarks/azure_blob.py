"""How fast, and with how much CPU, does one file go to Azure Blob Storage and come back, compared with other clients?

Never run against Azure: the server is a sink on loopback that speaks its API (the tests' own peer, which computes the
CRC64 of what arrives, as Azure does, and drops it; it answers zeros), or Azurite. Either takes its share of the cores,
the same for every client, so read the ratios. As in `upload` and `download`, each run is a whole process, clients take
turns, and a run counts only if every byte of the file has passed once (Azurite: if the blob has the file's size).
`ours` has each block compared by the service (CRC64; MD5 by Azurite); the others send no checksum and compare none.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import peers
from _cloud import Cloud, sink_of


def serve() -> None:
    from tests.stores.azure_peer import AzurePeer

    with AzurePeer(is_kept=False) as peer:
        print(peer.url, peer.environment()["AZURE_STORAGE_CONNECTION_STRING"], flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def sink(_: Path) -> Iterator[str]:
    with sink_of(__file__) as (url, os.environ["AZURE_STORAGE_CONNECTION_STRING"]):
        yield url


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    from tests.azurite import AzuriteServer

    with AzuriteServer(folder / "azurite") as server:
        os.environ |= server.environment()
        yield server.url


if __name__ == "__main__":
    Cloud(
        name="Azure Blob Storage",
        remote="az://ckpt",
        program=__file__,
        servers={"sink": sink, "azurite": azurite},
        stats="/stats",
        uploads=peers.AZURE_UPLOADS,
        downloads=peers.AZURE_DOWNLOADS,
        serve=serve,
    ).main(__doc__)
