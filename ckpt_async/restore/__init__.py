"""Restoring: find the newest good checkpoint, fetch it, or read parts of it.

    from ckpt_async import restore

    checkpoint = restore.find("s3://bucket/prefix/run-a")
    if checkpoint is not None:
        report = restore.fetch(checkpoint, "checkpoints/resume", folder="checkpoints")
        state = torch.load(report.paths["model.pt"], weights_only=True)

Nothing here needs torch or changes a checkpoint. `ckpt_async.torch` loads the fetched files on many ranks,
resharded if need be.
"""

from ckpt_async.errors import (
    CheckpointGoneError,
    DamagedCheckpointError,
    DestinationError,
    NoUsableCheckpointError,
    UnknownKindError,
    UnreliableReadError,
)
from ckpt_async.restore.checkpoint import Checkpoint, Peer, Rejected, RemoteFile
from ckpt_async.restore.discovery import drain_predecessor, find
from ckpt_async.restore.fetching import FetchReport, fetch, fetch_latest
from ckpt_async.restore.options import FetchLatestOptions, FetchOptions, FindOptions, ReadOptions
from ckpt_async.restore.peers import PeerServer
from ckpt_async.restore.reading import Reader, ReadInto
from ckpt_async.restore.reading import open_reader as open  # noqa: A004  read as restore.open

__all__ = [
    "Checkpoint",
    "CheckpointGoneError",
    "DamagedCheckpointError",
    "DestinationError",
    "FetchLatestOptions",
    "FetchOptions",
    "FetchReport",
    "FindOptions",
    "NoUsableCheckpointError",
    "Peer",
    "PeerServer",
    "ReadInto",
    "ReadOptions",
    "Reader",
    "Rejected",
    "RemoteFile",
    "UnknownKindError",
    "UnreliableReadError",
    "drain_predecessor",
    "fetch",
    "fetch_latest",
    "find",
    "open",
]
