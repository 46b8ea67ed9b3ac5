"""Checkpoints as OLMo, OLMo-core and ML Flashpoint write them. Where their code calls torch, so does this module;
everything else is written byte by byte, following their sources. The frameworks are not imported: those of their
classes that end up in files are defined here under the frameworks' names.
"""

import dataclasses
import io
import json
import pickle
import struct
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

OLMO_CORE_FILESYSTEM = "olmo_core.distributed.checkpoint.filesystem"
FLASHPOINT_HEADER = "ml_flashpoint.core.tensor_header"


@contextmanager
def class_named(module: str, made: type) -> Iterator[type]:
    """Make `made` importable by pickle under its name in `module` for the duration of the block."""
    made.__module__, made.__qualname__ = module, made.__name__
    parts = module.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[module], made.__name__, made)
    try:
        yield made
    finally:
        for name, was in before.items():
            if was is None:
                del sys.modules[name]
            else:
                sys.modules[name] = was


def storage_info() -> type:
    @dataclasses.dataclass
    class _StorageInfo:  # as in olmo_core/distributed/checkpoint/filesystem.py
        relative_path: str
        offset: int
        length: int

    return _StorageInfo


def dcp(folder: Path, state: dict[str, Any], **options: Any) -> None:
    state_dict_saver.save(state, storage_writer=FileSystemWriter(folder, **options))


def olmo_core(folder: Path, state: dict[str, Any], train: dict[int, Any], *, has_mark: bool = True) -> None:
    """Write a `step<N>` folder of OLMo-core 3.0, whose writer differs from torch's only in the
    class that records where a part is.
    """
    dcp(folder / "model_and_optim", state)
    path = folder / "model_and_optim" / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    with class_named(OLMO_CORE_FILESYSTEM, storage_info()) as info:
        metadata.storage_data = {
            index: info(each.relative_path, each.offset, each.length)
            for index, each in metadata.storage_data.items()
        }
        path.write_bytes(pickle.dumps(metadata))
    (folder / "train").mkdir()
    for rank, told in train.items():
        torch.save(told, folder / "train" / f"rank{rank}.pt")
    if has_mark:
        (folder / ".metadata.json").write_text(json.dumps({"ephemeral": False, "version": "3.0.0"}))


def flashpoint_header(tensor: torch.Tensor, *, is_pickled: bool) -> bytes:
    if not is_pickled:  # as on ML Flashpoint's main branch
        text = json.dumps({"dtype": str(tensor.dtype), "shape": list(tensor.shape)}).encode()
        return struct.pack("<I", len(text)) + text

    @dataclasses.dataclass
    class TensorHeader:  # as in ml_flashpoint/core/tensor_header.py of 0.0.10
        dtype: torch.dtype
        shape: torch.Size

    with class_named(FLASHPOINT_HEADER, TensorHeader):
        pickled = pickle.dumps(TensorHeader(tensor.dtype, tensor.shape))
    return struct.pack("<I", len(pickled)) + pickled


def flashpoint(folder: Path, state: dict[str, Any], *, form: str, rank: int = 0) -> None:
    """Write a `step-<N>_ckpt` folder of ML Flashpoint, following core/checkpoint_saver.py and
    checkpoint_object_manager/buffer_metadata.py: torch's plan and `.metadata`, and each tensor behind 4096 bytes,
    either in ML Flashpoint's own `form` ("json", "pickle") or written by torch.save ("torch").
    """
    dcp(folder, state)
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    data = (folder / "__0_0.distcp").read_bytes()
    name, body = f"__0_0_src{rank}.distcp", io.BytesIO()
    places: dict[MetadataIndex, Any] = {}
    for index, place in metadata.storage_data.items():
        saved = data[place.offset : place.offset + place.length]
        start = body.tell()
        found = torch.load(io.BytesIO(saved), weights_only=True)
        if isinstance(found, torch.Tensor) and form != "torch":
            body.write(flashpoint_header(found, is_pickled=form == "pickle"))
            body.write(
                found.contiguous().view(torch.uint8).numpy().tobytes() if found.ndim else found.numpy()
            )
        else:
            body.write(saved)
        places[index] = dataclasses.replace(
            place, relative_path=name, offset=start, length=body.tell() - start
        )
    metadata.storage_data = places
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").unlink()
    signature = b"TORCH___" if form == "torch" else b"MLF_TENS"
    block = struct.pack("<Q8s", body.tell(), signature).ljust(4096, b"\0")
    (folder / name).write_bytes(block + body.getvalue())
    torch.save({"iteration": 7}, folder / "common.pt")
