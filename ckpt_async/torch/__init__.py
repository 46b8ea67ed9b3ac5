"""Everything that needs torch: its file formats, sharded checkpoints (DCP), and resuming on many ranks.

    from ckpt_async.torch import agree, load, run_on_one

    checkpoint = run_on_one(lambda: restore.find("s3://bucket/prefix/run-a"))
    state = load("checkpoints/step-100/rank-{rank}.pt", ignore_keys=["optimizer/*"])
    agree(state["step"], what="the resumed step")

The rest of the package, except `integrations`, must not import torch. Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_async.torch.agreement import (
        agree,
        launch_id,
        on_all_ranks,
        run_on_one,
    )
    from ckpt_async.torch.dcp import async_save, load_latest, save
    from ckpt_async.torch.dcp_metadata import load_metadata
    from ckpt_async.torch.dcp_reader import CkptAsyncReader
    from ckpt_async.torch.dcp_writer import CkptAsyncWriter
    from ckpt_async.torch.dumping import check_writable, deepspeed_filename, dump, selected
    from ckpt_async.torch.formats import load, load_remote
    from ckpt_async.torch.options import DcpOptions, LoadLatestOptions, LoadOptions, LoadRemoteOptions
    from ckpt_async.torch.parts import capture, restore
    from ckpt_async.torch.places import fetch_file
    from ckpt_async.torch.resume import fetch_together
    from ckpt_async.torch.rng import capture_rng, load_rng_state, ranks_with_rng, restore_rng, save_rng_state
    from ckpt_async.torch.snapshot import SnapshotBuffers
    from ckpt_async.torch.states import KeyReport, load_into, model_state
    from ckpt_async.torch.unsharding import UnshardReport, unshard
    from ckpt_async.torch.vote import Vote, own_group, require_vote

_HOMES = {
    "CkptAsyncReader": "dcp_reader",
    "CkptAsyncWriter": "dcp_writer",
    "DcpOptions": "options",
    "KeyReport": "states",
    "LoadLatestOptions": "options",
    "LoadOptions": "options",
    "LoadRemoteOptions": "options",
    "SnapshotBuffers": "snapshot",
    "UnshardReport": "unsharding",
    "Vote": "vote",
    "agree": "agreement",
    "async_save": "dcp",
    "capture": "parts",
    "capture_rng": "rng",
    "check_writable": "dumping",
    "deepspeed_filename": "dumping",
    "dump": "dumping",
    "fetch_file": "places",
    "fetch_together": "resume",
    "launch_id": "agreement",
    "load": "formats",
    "load_into": "states",
    "load_latest": "dcp",
    "load_metadata": "dcp_metadata",
    "load_remote": "formats",
    "load_rng_state": "rng",
    "model_state": "states",
    "on_all_ranks": "agreement",
    "own_group": "vote",
    "ranks_with_rng": "rng",
    "require_vote": "vote",
    "restore": "parts",
    "restore_rng": "rng",
    "run_on_one": "agreement",
    "save": "dcp",
    "save_rng_state": "rng",
    "selected": "dumping",
    "unshard": "unsharding",
}

__all__ = [
    "CkptAsyncReader",
    "CkptAsyncWriter",
    "DcpOptions",
    "KeyReport",
    "LoadLatestOptions",
    "LoadOptions",
    "LoadRemoteOptions",
    "SnapshotBuffers",
    "UnshardReport",
    "Vote",
    "agree",
    "async_save",
    "capture",
    "capture_rng",
    "check_writable",
    "deepspeed_filename",
    "dump",
    "fetch_file",
    "fetch_together",
    "launch_id",
    "load",
    "load_into",
    "load_latest",
    "load_metadata",
    "load_remote",
    "load_rng_state",
    "model_state",
    "on_all_ranks",
    "own_group",
    "ranks_with_rng",
    "require_vote",
    "restore",
    "restore_rng",
    "run_on_one",
    "save",
    "save_rng_state",
    "selected",
    "unshard",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt_async.torch' has no attribute {name!r}")
    try:
        return getattr(import_module(f"ckpt_async.torch.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"ckpt_async.torch.{name} needs torch: run pip install '.[torch]' in the clone of ckpt_async",
            name="torch",
        ) from None
