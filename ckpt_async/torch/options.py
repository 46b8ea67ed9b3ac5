"""The options of everything that loads a checkpoint with torch, each described once; see `restore.options`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from ckpt_async.restore.options import ChoiceOptions, ReadOptions, TransferOptions

if TYPE_CHECKING:
    import torch.distributed as dist

    from ckpt_async.torch.plain import Allow
    from ckpt_async.torch.states import IgnoreKeys
    from ckpt_async.torch.torchfile import MapLocation
    from ckpt_async.torch.validation import ValidationFunction


class DecodeOptions(TypedDict, total=False):
    """What may be in a file."""

    weights_only: bool
    """With False, torch's own unrestricted reader is used, which runs whatever the file says: for files that you wrote
    yourself. Default: True, which runs nothing."""

    allow: Allow
    """Classes that a file may have besides tensors and plain data (dataclasses, enums, …), as classes or as
    `'my.module.Class'`: their own code then runs, with what the file says."""

    validate: ValidationFunction | None
    """Asked about each file before it is decoded. Default: the function that CHECKPOINT_VALIDATION_FUNCTION names. See
    `ckpt_async.torch.validation`."""


class LoadOptions(DecodeOptions, total=False):
    """How `load` and `load_remote` load one file."""

    map_location: MapLocation
    """Where tensors go, as in `torch.load`. Default: "cpu"."""

    ignore_keys: IgnoreKeys
    """What to leave out: globs over the '/'-joined keys of nested dicts and positions in lists, as in Composer (`*`
    crosses '/', `state/optimizers/*`), or a function that changes what was loaded. A glob that matches nothing is
    logged as a warning."""

    run_name: str
    """What `{run_name}` in the name stands for."""

    mmap: bool
    """Map the file instead of reading it. This takes less memory, but if the file is truncated later, this process is
    killed. Default: False; copies that nobody else uses are always mapped."""

    max_size_bytes: int | None
    """How much unpacking may write to the temporary folder ($TMPDIR). Default: nine tenths of what is free there."""


class LoadRemoteOptions(LoadOptions, TransferOptions, total=False):
    """The options of `load_remote`."""

    fallback: str | int | None
    """The file that is loaded if the checkpoint does not have the one that was asked for, or the rank whose file is."""

    destination: str | os.PathLike[str] | None
    """The folder to fetch to. Default: a temporary one, which is removed on return."""


class DcpOptions(DecodeOptions, ReadOptions, total=False):
    """The options of `CkptAsyncReader`."""

    subfolder: str | None
    """The folder within the checkpoint that has `.metadata` and its files, if there are several. By default
    `checkpoint.dcp_folders` determines it (`model_and_optim` of OLMo and OLMo-core)."""

    replicas: dist.ProcessGroup | None
    """The ranks that load the same as this one, as a process group that can move CPU tensors: all ranks under DDP,
    `mesh["replicate"].get_group()` under HSDP. The first of them reads and sends to the others, in chunks."""

    ignore_keys: Sequence[str]
    """What keeps its value in the state: globs over the '/'-joined keys, as in `load`."""

    check_nan: bool
    """Fill the targets with NaN before loading, and raise StateMismatchError if any is left afterwards. This finds
    parts that no rank saved, and also NaN in the checkpoint."""


class LoadLatestOptions(ChoiceOptions, DcpOptions, total=False):
    """The options of `load_latest`: which checkpoint, and how to read it."""
