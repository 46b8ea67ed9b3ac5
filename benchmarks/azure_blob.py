"""How fast, and with how much CPU, does one file go to Azure Blob Storage and come back, compared with other clients?

This never runs against Azure: the server is either Azurite, or a sink on loopback that speaks Azure's API
(the tests' own peer, which, like Azure, computes the CRC64 of what arrives, then drops it; it answers with
zeros). Either uses some of the cores, equally for every client, so read the ratios. As in `upload` and
`download`, each run is a whole process, the clients take turns, and a run counts only if every byte of the
file was transferred once (Azurite: if the blob has the file's size). `ours` has the service verify each block
(CRC64; MD5 with Azurite); the other clients send no checksum and verify none.
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
