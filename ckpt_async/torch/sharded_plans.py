"""Finds out what a checkpoint's whole state is and where the parts of its tensors are, without reading the tensors.

DCP                  described by `.metadata`: DCP's own, OLMo's `torch_new`, OLMo-core's, ML Flashpoint's
OLMo `torch_legacy`  rank<N>.pt: model and optimizer as ShardedTensors, and the trainer's state
OLMo `local`         model/rank<N>.pt and optim/rank<N>.pt: the ranks' parts of flat parameters; metadata.yaml
                     has the number of ranks (olmo/checkpoint.py, LocalShardedCheckpointer)
OLMo `olmo_core`     described in `olmo_core_files`
whole files          a state that one rank wrote for all; OLMo's model.pt, optim.pt and train.pt
"""

from __future__ import annotations

import io
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ckpt_async.errors import DamagedCheckpointError, FormatError
from ckpt_async.formats.dcp_files import METADATA
from ckpt_async.formats.olmo_files import METADATA_YAML, world_size
from ckpt_async.formats.table import is_of_deepspeed
from ckpt_async.restore import Reader, ReadInto
from ckpt_async.torch import olmo_keys
from ckpt_async.torch.assembly import CheckpointFile, Part, Whole, part_of
from ckpt_async.torch.codecs import SAFETENSORS_SUFFIX, TORCH_SUFFIXES
from ckpt_async.torch.dcp_metadata import Place, Places, read_metadata
from ckpt_async.torch.olmo_core_files import MARK, OlmoCoreFiles
from ckpt_async.torch.planned import Nested, Plan, Visits, nest, with_lists
from ckpt_async.torch.sharded_rules import CLASSES, ShardedRules, Shards
from ckpt_async.torch.tensors import safetensors_places
from ckpt_async.torch.torchfile import Layout, read_layout, read_state

_RANK_FILE = re.compile(r"rank([0-9]{1,6})\.pt")
_WRAPPED = "_fsdp_wrapped_module."
_MAX_SMALL_BYTES = 1 << 20

# Values that are not tensors are read together up to this many bytes, larger ones one by one.
_TOGETHER_BYTES = 4 << 20

Allow = Mapping[tuple[str, str], type]


class Planner:
    """Reads what describes a checkpoint. `allow` is what `plain.allowed` returns."""

    def __init__(self, reader: Reader, allow: Allow) -> None:
        self._reader, self._allow = reader, allow
        self._names = reader.files.keys()
        self.plan = Plan()

    def make(self, subfolder: str | None = None) -> Plan:
        """Return the plan. Raises FormatError for an unknown format, DamagedCheckpointError, UnsafePickleError."""
        names = self._names
        folders = self._reader.checkpoint.dcp_folders if subfolder is None else (subfolder.strip("/"),)
        if "" in folders or len(folders) == 1:
            self.plan.state = self._dcp("" if "" in folders else folders[0])
        elif folders:
            self.plan.state = {folder: self._dcp(folder) for folder in folders}
        elif METADATA_YAML in names and "model/rank0.pt" in names:
            self.plan.state = self._local()
        elif MARK in names:
            self.plan.state = OlmoCoreFiles(self._reader, self.plan, self._allow).read()
        elif any(_RANK_FILE.fullmatch(name) for name in names):
            return self._with(self._legacy())
        elif any(f"model{suffix}" in names for suffix in (SAFETENSORS_SUFFIX, ".pt")):
            parts = {
                part: self._first((f"{part}{SAFETENSORS_SUFFIX}", f"{part}.pt"))
                for part in ("model", "optim")
            }
            self.plan.state = {part: self._whole_file(name) for part, name in parts.items() if name}
            return self._with_train(self._first(("train.pt", "other.pt")))
        else:
            return self._with(self._whole_file(self._only()))
        return self._with_train(self._first(("train/rank0.pt",)))

    def _with(self, state: Any) -> Plan:
        self.plan.state = state
        return self.plan

    def _with_train(self, name: str) -> Plan:
        if name and isinstance(self.plan.state, dict) and "train" not in self.plan.state:
            self.plan.state["train"] = self._whole_file(name)
        return self.plan

    def _first(self, names: Iterable[str]) -> str:
        return next((name for name in names if name in self._names), "")

    def _only(self) -> str:
        known = [
            name
            for name in self._names
            if PurePosixPath(name).suffix in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX)
        ]
        if len(known) == 1:
            return known[0]
        told = ", ".join(sorted(known or self._names)[:10])
        hint = "name one file, or load them with ckpt_async.torch.load and write them with `dump`"
        if any(is_of_deepspeed(PurePosixPath(name).name) for name in known):
            hint = (
                "this is a checkpoint of DeepSpeed: fetch it, and merge it with DeepSpeed's own zero_to_fp32"
            )
        raise FormatError(
            f"{self._reader.checkpoint.name} has {len(known)} torch or safetensors files: {told}",
            hint=hint,
        )

    # --- DCP -----------------------------------------------------------------------------------------------

    def _dcp(self, folder: str) -> dict[str, Any]:
        prefix = f"{folder}/" if folder else ""
        metadata = read_metadata(self._reader, f"{prefix}{METADATA}")
        places = Places(self._reader.checkpoint, prefix, metadata, self._reader.read)
        others = {
            name: places.find(MetadataIndex(name))
            for name, told in metadata.state_dict_metadata.items()
            if not isinstance(told, TensorStorageMetadata)
        }
        values = dict(self._values(others))
        state = Nested()
        for name, told in metadata.state_dict_metadata.items():
            if isinstance(told, TensorStorageMetadata):
                whole = self.plan.whole(name, told.size, told.properties.dtype)
                for chunk in told.chunks:
                    place = places.find(MetadataIndex(name, chunk.offsets))
                    whole.parts.append(
                        Part(
                            tuple(chunk.offsets),
                            tuple(chunk.sizes),
                            place.file,
                            place.offset,
                            saved_bytes=place.size_bytes,
                            is_optimised=place.is_optimised,
                        )
                    )
                value: Any = whole.stand_in
            else:
                value = self.plan.planned(values.pop(name), name, self.plan.in_memory)
            nest(state, (metadata.planner_data or {}).get(name, (name,)), value)
        return cast(dict[str, Any], with_lists(state))

    def _values(self, places: Mapping[str, Place]) -> Iterator[tuple[str, Any]]:
        """Yield the values that are not tensors, by name; there may be many, and each is small."""
        left = deque(places.items())
        while left:
            reading: list[tuple[str, str, bytearray]] = []
            wants: list[ReadInto] = []
            size_bytes = 0
            while left and (not wants or size_bytes + left[0][1].size_bytes <= _TOGETHER_BYTES):
                name, place = left.popleft()
                size_bytes += place.size_bytes
                reading.append((name, place.file, data := bytearray(place.size_bytes)))
                wants.append(ReadInto(place.file, place.offset, memoryview(data)))
            self._reader.read_into(wants)
            for name, file, data in reading:
                what = f"{file}: {name[:200]!r}"
                yield name, read_state(io.BytesIO(data), what, allow=self._allow)

    # --- files of torch and safetensors --------------------------------------------------------------------

    def _layout(self, name: str) -> Layout:
        file = cast(IO[bytes], CheckpointFile(self._reader, name))
        is_zip = file.read(4) == b"PK\x03\x04"
        if not is_zip:
            raise FormatError(
                f"{name} is not in the form that torch has written since 1.6",
                hint="if you trust it, load it and save it again",
            )
        return read_layout(file, name, allow={**CLASSES, **self._allow}, rules=ShardedRules)

    def _whole_file(self, name: str) -> Any:
        if name.endswith(SAFETENSORS_SUFFIX):
            return self._safetensors(name)
        if PurePosixPath(name).suffix not in TORCH_SUFFIXES:
            raise FormatError(
                f"{name} is neither a torch file nor a safetensors file", hint="unpack it first"
            )
        layout = self._layout(name)
        seen: dict[tuple[object, ...], Whole] = {}

        def whole_of(tensor: torch.Tensor, key: str) -> Whole:
            if tensor.layout is not torch.strided:
                raise FormatError(
                    f"{name}: {key!r} is a sparse tensor", hint="leave it out, or use load and dump"
                )
            part = part_of(tensor, layout.record_of(tensor), name)
            same = (part.offset, part.sizes, part.strides, tensor.dtype)  # tied weights stay one tensor
            if same not in seen:
                seen[same] = self.plan.whole(key, tensor.shape, tensor.dtype)
                seen[same].parts.append(part)
            return seen[same]

        return self.plan.planned(layout.state, "", whole_of)

    def _safetensors(self, name: str) -> dict[str, Any]:
        state: dict[str, torch.Tensor] = {}
        file = cast(IO[bytes], CheckpointFile(self._reader, name))
        places = safetensors_places(file, name)
        for key, (dtype, shape, offset) in places.items():
            whole = self.plan.whole(key, shape, dtype)
            whole.parts.append(Part((0,) * len(shape), shape, name, offset))
            state[key] = whole.stand_in

        def bytes_of(key: str) -> bytes:
            dtype, shape, offset = places[key]
            return bytes(self._reader.read(name, offset, math.prod(shape) * dtype.itemsize))

        return olmo_keys.nested(state, bytes_of, name, self._allow)

    # --- OLMo's torch_legacy -------------------------------------------------------------------------------

    def _legacy(self) -> dict[str, Any]:
        ranks = sorted(int(match[1]) for name in self._names if (match := _RANK_FILE.fullmatch(name)))
        if ranks != list(range(len(ranks))):
            raise DamagedCheckpointError(
                f"there are files of {len(ranks)} ranks up to {ranks[-1]}: at least one is missing"
            )
        state: Any = None
        for rank in ranks:
            name = f"rank{rank}.pt"
            layout = self._layout(name)
            if not isinstance(layout.state, dict):
                raise FormatError(f"{name} is not what OLMo's ranks write")
            layout.state.pop("rng", None)  # differs between ranks
            state = _Merging(self.plan, layout, name, is_first=rank == 0).merged(state, layout.state, "")
        return cast(dict[str, Any], state)

    # --- OLMo's local --------------------------------------------------------------------------------------

    def _local(self) -> dict[str, Any]:
        size_bytes = min(_MAX_SMALL_BYTES, self._reader.files[METADATA_YAML].size_bytes)
        num_ranks = world_size(self._reader.read(METADATA_YAML, 0, size_bytes))
        if not num_ranks:
            raise FormatError(f"{METADATA_YAML} does not give the number of ranks (world_size)")
        model: dict[str, Whole] = {}
        optim: dict[str, Any] = {}
        for rank in range(num_ranks):
            stretches = self._add_flat(model, f"model/rank{rank}.pt")
            if f"optim/rank{rank}.pt" in self._names or optim:
                self._add_optim(optim, model, stretches, f"optim/rank{rank}.pt")
        for group in optim.get("param_groups", ()):
            group["param_names"] = [_clean(name) for name in group["param_names"]]
        state: dict[str, Any] = {"model": {name: whole.stand_in for name, whole in model.items()}}
        return {**state, "optim": optim} if optim else state

    def _ranks_file(self, name: str) -> Layout:
        if name not in self._names:
            raise DamagedCheckpointError(
                f"{name} is missing, although {METADATA_YAML} says that there was such a rank"
            )
        return self._layout(name)

    def _add_flat(self, model: dict[str, Whole], file: str) -> dict[str, tuple[int, int]]:
        """Add this rank's stretches of the parameters; return where each begins in its parameter, and its length."""
        layout = self._ranks_file(file)
        found: dict[str, tuple[int, int]] = {}
        try:
            handles = [
                (_clean(f"{module['name']}."), handle)
                for module in layout.state["modules"]
                for handle in module["handles"]
            ]
            for prefix, handle in handles:
                data = handle["flat_param.data"]
                record = layout.record_of(data)
                names = [f"{prefix.lstrip('.')}{_clean(name)}" for name in handle["flat_param._fqns"]]
                for name, shape in zip(names, handle["flat_param._shapes"], strict=True):
                    if name not in model:
                        model[name] = self.plan.whole(name, shape, data.dtype, (math.prod(shape),))
                for number, at, begin, count in _stretches(handle):
                    name = names[number]
                    part = part_of(data.narrow(0, at, count), record, file, (begin,))
                    model[name].parts.append(part)
                    found[name] = (begin, count)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FormatError(f"{file} is not what OLMo's local checkpointer writes: {error}") from error
        return found

    def _add_optim(
        self, optim: dict[str, Any], model: dict[str, Whole], stretches: dict[str, tuple[int, int]], file: str
    ) -> None:
        layout = self._ranks_file(file)
        try:
            groups = layout.state["param_groups"]
            if optim and not _is_equal(optim["param_groups"], groups):
                raise _differs(file, "param_groups")
            optim.setdefault("state", {})
            optim.setdefault("param_groups", groups)
            names = {
                number: _clean(name)
                for group in groups
                for number, name in zip(group["params"], group["param_names"], strict=True)
            }
            for number, told in layout.state["state"].items():
                state = optim["state"].setdefault(number, {})
                for key, tensor in told.items():
                    self._add_state(state, key, tensor, layout, file, model[names[number]], stretches)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FormatError(f"{file} is not what OLMo's local checkpointer writes: {error}") from error

    def _add_state(
        self,
        state: dict[str, Any],
        key: str,
        tensor: torch.Tensor,
        layout: Layout,
        file: str,
        parameter: Whole,
        stretches: dict[str, tuple[int, int]],
    ) -> None:
        """Add a value of a parameter's state: either one for the whole parameter, or this rank's stretch."""
        what = f"{parameter.name}/{key}"
        whole = self.plan.wholes.get(id(state.get(key)))
        if not tensor.shape:
            part = part_of(tensor, layout.record_of(tensor), file)
            if whole is None:
                whole = self.plan.whole(what, (), tensor.dtype)
                whole.parts.append(part)
            elif not _is_same_tensor(whole, tensor, part):
                raise _differs(file, what)
        elif tensor.numel():
            if whole is None:
                whole = self.plan.whole(what, parameter.stand_in.shape, tensor.dtype, parameter.box)
            begin, count = stretches[parameter.name]
            if tensor.numel() != count:
                raise _differs(file, what)
            whole.parts.append(part_of(tensor.reshape(-1), layout.record_of(tensor), file, (begin,)))
        if whole is not None:
            state[key] = whole.stand_in


class _Merging:
    """Merges one rank's file of `torch_legacy` into what is known from the files before."""

    def __init__(self, plan: Plan, layout: Layout, file: str, *, is_first: bool) -> None:
        self._plan, self._layout, self._file, self._is_first = plan, layout, file, is_first
        self._visits = Visits()

    def merged(self, base: Any, own: Any, key: str) -> Any:
        """Return the known value merged with what this file has of it. Anything that is not a part must be equal."""
        if isinstance(own, dict | list) or type(own) is tuple:
            return self._visits.once(own, key, lambda: self._merged_items(base, own, key))
        if isinstance(own, Shards):
            return self._add_shards(base, own, key)
        if isinstance(own, torch.Tensor):
            whole = None if self._is_first else self._plan.wholes.get(id(base))
            part = part_of(own, self._layout.record_of(own), self._file)
            if whole is None:
                whole = self._plan.whole(key, own.shape, own.dtype)
                whole.parts.append(part)
            elif not _is_same_tensor(whole, own, part):
                raise _differs(self._file, key)
            return whole.stand_in
        if not self._is_first and not _is_equal(base, own):
            raise _differs(self._file, key)
        return own if self._is_first else base

    def _merged_items(self, base: Any, own: Any, key: str) -> Any:
        if isinstance(own, tuple):
            return tuple(self._merged_items(list(base) if isinstance(base, tuple) else base, list(own), key))
        keys = own.keys() if isinstance(own, dict) else range(len(own))
        if self._is_first:
            base = own
        elif not _is_like(base, own):
            raise _differs(self._file, key)
        for name in keys:
            below: Any = base
            below[name] = self.merged(below[name], own[name], f"{key}/{name}")
        return base

    def _add_shards(self, base: Any, own: Shards, key: str) -> Any:
        whole = None if self._is_first else self._plan.wholes.get(id(base))
        if whole is None:
            dtype = own.parts[0][1].dtype if own.parts else None
            if dtype is None:
                raise FormatError(f"{self._file}: {key!r} has no part here, so its type is unknown")
            whole = self._plan.whole(key, own.size, dtype)
        if tuple(whole.stand_in.shape) != own.size:
            raise _differs(self._file, key)
        for starts, tensor in own.parts:
            if tensor.dtype != whole.dtype:
                raise _differs(self._file, key)
            whole.parts.append(part_of(tensor, self._layout.record_of(tensor), self._file, starts))
        return whole.stand_in


def _stretches(handle: Mapping[str, Any]) -> Iterable[tuple[int, int, int, int]]:
    """Yield this rank's stretch of each parameter that has one.

    A stretch is the parameter's number, the position in this rank's flat parameter, the position in the parameter
    itself, and the number of elements.
    """
    if "flat_param._shard_indices" in handle:  # torch 2.0
        first, at = handle["flat_param._shard_indices"][0], 0
        for number, (begin, last) in enumerate(handle["flat_param._shard_param_offsets"], first):
            yield number, at, begin, last - begin + 1
            at += last - begin + 1
        return
    for number, info in enumerate(handle["flat_param._shard_param_infos"]):
        if info.in_shard:
            yield number, info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard


def _clean(name: str) -> str:
    return name.replace(_WRAPPED, "")


def _differs(file: str, key: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{file} has a different {key.strip('/')!r} from the ranks before: they do not belong to one"
        " checkpoint"
    )


def _is_same_tensor(whole: Whole, tensor: torch.Tensor, part: Part) -> bool:
    """Return whether two tensors are equal, as far as the CRC-32 of their records shows it without reading them."""
    first = whole.parts[0].record
    is_alike = (tuple(tensor.shape), tensor.dtype) == (tuple(whole.stand_in.shape), whole.dtype)
    if not is_alike or first is None or part.record is None or 0 in (first.crc32, part.record.crc32):
        return is_alike
    return first.size_bytes != part.record.size_bytes or first.crc32 == part.record.crc32


def _is_like(a: Any, b: Any) -> bool:
    """Return whether both are dicts with the same keys, or lists of the same length."""
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys()
    return isinstance(a, list) and len(a) == len(b)


def _is_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    same = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)
