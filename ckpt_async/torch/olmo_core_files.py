"""What OLMo-core 0.1, and thus OLMo's `olmo_core` checkpointer, wrote (olmo_core/distributed/checkpoint.py).

For each of `model` and `optim` there are `rank_<N>.safetensors` with each rank's parts, flattened, and `metadata.json`,
which says what they are parts of. Values in the optimizer's state that are not tensors are pickles, stored as tensors
of bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import IO, Any, cast

import torch

from ckpt_async.core.pickled import ILL_FORMED, interpret
from ckpt_async.errors import DamagedCheckpointError, FormatError, UnsafePickleError
from ckpt_async.restore import Reader
from ckpt_async.torch.assembly import CheckpointFile, Part, Whole
from ckpt_async.torch.plain import PlainRules
from ckpt_async.torch.planned import Plan
from ckpt_async.torch.tensors import DTYPES, safetensors_places

MARK = "model/metadata.json"
_MAX_JSON_BYTES = 256 << 20
_MAX_PICKLE_BYTES = 64 << 20

Allow = Mapping[tuple[str, str], type]
Places = dict[str, tuple[torch.dtype, tuple[int, ...], int]]


class OlmoCoreFiles:
    """Reads such a checkpoint.

    `read` puts stand-ins for the tensors into `plan`. `allow` is what `plain.allowed` returns.
    """

    def __init__(self, reader: Reader, plan: Plan, allow: Allow) -> None:
        self._reader, self._plan, self._allow = reader, plan, allow
        self._places: dict[str, Places] = {}  # of each file, read once

    def read(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": {name: whole.stand_in for name, whole in self._wholes("model").items()}
        }
        if "optim/metadata.json" in self._reader.files:
            try:
                state["optim"] = self._optim(self._wholes("optim"))
            except (UnsafePickleError, FormatError) as error:
                raise type(error)(f"optim: {error.without_hint}", hint=error.hint) from None
            except ILL_FORMED as error:
                raise FormatError(f"optim is not what OLMo-core 0.1 writes: {error!r:.500}") from error
        return state

    def _wholes(self, folder: str) -> dict[str, Whole]:
        name = f"{folder}/metadata.json"
        size_bytes = self._reader.files[name].size_bytes
        if size_bytes > _MAX_JSON_BYTES:
            raise FormatError(f"{name} has more than {_MAX_JSON_BYTES} bytes")
        try:
            tensors = json.loads(self._reader.read(name, 0, size_bytes))["tensors"]
            return {key: self._whole(folder, key, told) for key, told in tensors.items()}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{name} is not what OLMo-core 0.1 writes: {error!r:.500}") from error

    def _whole(self, folder: str, key: str, told: Mapping[str, Any]) -> Whole:
        shape, dtype = tuple(told["shape"]), DTYPES[told["dtype"]]
        specs = {
            f"{folder}/{file}": spec
            for file, spec in told["shard_spec_per_file"].items()
            if _num_elements(spec)
        }
        is_flat = all(spec["flattened_offsets"] is not None for spec in specs.values())
        whole = self._plan.whole(f"{folder}/{key}", shape, dtype, (math.prod(shape),) if is_flat else shape)
        for file, spec in specs.items():
            offset = self._offset(file, key, dtype, _num_elements(spec))
            if not is_flat:
                starts, sizes = tuple(spec["global_offset"]), tuple(spec["local_shape"])
                whole.parts.append(Part(starts, sizes, file, offset))
                continue
            for start, end in spec["flattened_offsets"]:
                if end > start:
                    whole.parts.append(Part((start,), (end - start,), file, offset))
                    offset += (end - start) * dtype.itemsize
        return whole

    def _offset(self, file: str, key: str, dtype: torch.dtype, num_elements: int) -> int:
        """Return where a rank's part of a tensor begins in its file."""
        if file not in self._reader.files:
            raise DamagedCheckpointError(f"metadata.json names {file!r}, which does not exist")
        if file not in self._places:
            opened = cast(IO[bytes], CheckpointFile(self._reader, file))
            self._places[file] = safetensors_places(opened, file)
        if key not in self._places[file]:
            raise DamagedCheckpointError(f"{file} has no {key!r}, although metadata.json lists it there")
        found, shape, offset = self._places[file][key]
        if (found, math.prod(shape)) != (dtype, num_elements):
            raise DamagedCheckpointError(f"{file} has a different {key!r} from the one in metadata.json")
        return offset

    # --- the optimizer's state: flat, by names ---------------------------------------------------------------

    def _optim(self, wholes: Mapping[str, Whole]) -> dict[str, Any]:
        groups = [
            self._plain(wholes[f"param_group{number}"])
            for number in range(int.from_bytes(self._content(wholes["num_param_groups"]), "little"))
        ]
        keys = self._plain(wholes["state_keys"])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for group in groups:
            if "param_names" in group:  # OLMo's names, with FSDP's prefix
                group["param_names"] = [
                    name.replace("_fsdp_wrapped_module.", "") for name in group["param_names"]
                ]
            for name, number in zip(group.pop("_param_names"), group["params"], strict=True):
                told = {key: wholes.get(f"state.{name}.__{key}") for key in keys}
                state[number] = {key: each.stand_in for key, each in told.items() if each is not None}
        return {"state": state, "param_groups": groups}

    def _plain(self, whole: Whole) -> Any:
        data = self._content(whole)
        rules = PlainRules(self._allow)
        found = interpret(data, rules)
        rules.check_data((found,))
        return found

    def _content(self, whole: Whole) -> bytes:
        """Return the bytes of a tensor that one rank has written."""
        (part,) = whole.parts
        if whole.size_bytes > _MAX_PICKLE_BYTES:
            raise FormatError(f"{whole.name} has more than {_MAX_PICKLE_BYTES} bytes")
        return bytes(self._reader.read(part.file, part.offset, whole.size_bytes))


def _num_elements(spec: Mapping[str, Any]) -> int:
    if spec["flattened_offsets"] is None:
        return math.prod(spec["local_shape"])
    return sum(end - start for start, end in spec["flattened_offsets"])
