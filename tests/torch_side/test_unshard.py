"""Whole files made from sharded checkpoints: exactly what torch itself would make of
them, in little memory, or nothing.
"""

import asyncio
import base64
import contextlib
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import ckpt_async.torch as ckpt
from ckpt_async import Uploader, restore
from ckpt_async.errors import (
    DamagedCheckpointError,
    DestinationError,
    FormatError,
    SettingsError,
    UnsafePickleError,
)
from ckpt_async.restore.objects import look
from ckpt_async.torch import unsharding
from ckpt_async.torch.assembly import Block, Part, blocks, first_element, overlap
from tests.restore.runs import Run, shard_key
from tests.torch_side import foreign_files
from tests.web_servers import serving_ranges

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks in all of OLMo's formats, written by torch under FSDP."""
    folder = tmp_path_factory.mktemp("olmo")
    command = [sys.executable, "-m", "tests.torch_side.fsdp_ranks", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    return folder


def found(folder: Path) -> restore.Checkpoint:
    checkpoint = restore.find(f"file://{folder}")
    assert checkpoint is not None
    return checkpoint


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(-1), b.reshape(-1))
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def loaded(path: Path) -> Any:
    """Load a file with torch, in both of its ways of reading, and check that `load` agrees."""
    state = torch.load(path, weights_only=True)
    assert same(torch.load(path, weights_only=True, mmap=True), state)
    assert same(ckpt.load(path), state)
    return state


# --- OLMo's formats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_memory_bytes", [1 << 20, 256 << 20])
@pytest.mark.parametrize("kind", ["new", "legacy", "local", "olmo_core"])
def test_olmo_checkpoints_become_the_whole_that_torch_makes(
    olmo: Path, tmp_path: Path, kind: str, max_memory_bytes: int
) -> None:
    whole = torch.load(olmo / "whole.pt", weights_only=False)
    report = ckpt.unshard(found(olmo / kind), tmp_path / "whole.pt", max_memory_bytes=max_memory_bytes)
    state = loaded(tmp_path / "whole.pt")
    gathered = torch.load(olmo / "gathered.pt", weights_only=True)
    assert state["model"].keys() == gathered.keys()
    assert all(torch.equal(state["model"][name], gathered[name]) for name in gathered)
    numbered = ("local", "olmo_core")
    names = state["optim"]["param_groups"][0]["param_names"] if kind in numbered else list(whole["model"])
    assert sorted(names) == sorted(whole["model"])
    for number, name in enumerate(names):
        moments = state["optim"]["state"][number if kind in numbered else name]
        wanted = whole["optim"]["state"][name]
        assert moments.keys() == wanted.keys()
        assert all(torch.equal(moments[key], each) for key, each in wanted.items())
    train = state if kind == "legacy" else state["train"]
    assert (train["global_step"], train["world_size"]) == (5, 4)
    assert report.paths == (tmp_path / "whole.pt",)
    assert report.size_bytes == (tmp_path / "whole.pt").stat().st_size


@pytest.mark.parametrize("kind", ["new", "legacy", "local", "olmo_core"])
def test_a_safetensors_file_has_the_model_and_a_folder_everything(
    olmo: Path, tmp_path: Path, kind: str
) -> None:
    gathered = torch.load(olmo / "gathered.pt", weights_only=True)
    ckpt.unshard(found(olmo / kind), tmp_path / "model.safetensors")
    report = ckpt.unshard(found(olmo / kind), tmp_path / "step5-unsharded")
    names = ["model.pt", "optim.pt", "train.pt", "config.yaml"]
    assert [path.name for path in report.paths] == names
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "step5-unsharded"]
    for path in (tmp_path / "model.safetensors", tmp_path / "step5-unsharded" / "model.pt"):
        tensors = ckpt.load(path)
        assert tensors.keys() == gathered.keys()
        assert all(torch.equal(tensors[name], gathered[name]) for name in gathered)
    assert loaded(report.paths[1]).keys() == {"state", "param_groups"}
    assert loaded(report.paths[2])["global_step"] == 5
    assert report.paths[3].read_text() == "model: {}\n"
    with pytest.raises(DestinationError, match=r"already exists.*another folder"):
        ckpt.unshard(found(olmo / kind), tmp_path / "step5-unsharded", overwrite=True)


def test_an_unsharded_folder_is_found_and_converted_again(olmo: Path, tmp_path: Path) -> None:
    ckpt.unshard(found(olmo / "legacy"), tmp_path / "run" / "step5-unsharded")
    ckpt.unshard(found(tmp_path / "run"), tmp_path / "again.pt")
    ckpt.unshard(found(olmo / "legacy"), tmp_path / "first.pt")
    again, first = loaded(tmp_path / "again.pt"), loaded(tmp_path / "first.pt")
    assert same(again["optim"], first["optim"])
    assert all(torch.equal(again["model"][name], first["model"][name]) for name in first["model"])


def test_local_checkpoints_of_torch_2_0_are_read(olmo: Path, tmp_path: Path) -> None:
    """Flat parameters had no padding in between then, and stored the positions of their parts differently."""
    shutil.copytree(olmo / "local", tmp_path / "old")
    for path in (tmp_path / "old").glob("step5/model/rank*.pt"):
        state = torch.load(path, weights_only=False)
        for module in state["modules"]:
            (handle,) = module["handles"]
            infos = handle.pop("flat_param._shard_param_infos")
            there = [(number, info) for number, info in enumerate(infos) if info.in_shard]
            flat = handle["flat_param.data"]
            taken = [flat[info.offset_in_shard :][: info.numel_in_shard] for _, info in there]
            handle["flat_param.data"] = torch.cat(taken) if taken else flat[:0]
            numbers = [number for number, _ in there] or [0]
            handle["flat_param._shard_indices"] = (numbers[0], numbers[-1])
            handle["flat_param._shard_param_offsets"] = tuple(
                (info.intra_param_start_idx, info.intra_param_end_idx) for _, info in there
            )
        torch.save(state, path)
    ckpt.unshard(found(tmp_path / "old"), tmp_path / "old.safetensors")
    tensors, gathered = ckpt.load(tmp_path / "old.safetensors"), torch.load(olmo / "gathered.pt")
    assert all(torch.equal(tensors[name], gathered[name]) for name in gathered)


def test_parts_of_any_shape_are_put_together(olmo: Path, tmp_path: Path) -> None:
    """The tensors are DTensors on a 2 x 2 mesh, and no dimension is a multiple of the number of ranks."""
    ckpt.unshard(found(olmo / "grid"), tmp_path / "grid.safetensors")
    grid = torch.arange(7 * 11 * 3, dtype=torch.float32).reshape(7, 11, 3)
    tensors = ckpt.load(tmp_path / "grid.safetensors")
    assert tensors.keys() == {"rows", "both", "columns"}
    assert all(torch.equal(each, grid) for each in tensors.values())


boxes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@given(boxes, st.integers(1, 40), st.data())
@settings(max_examples=200)
def test_blocks_follow_each_other_and_parts_are_read_in_order(
    box: tuple[int, ...], max_elements: int, data: Any
) -> None:
    """Blocks must cover each element once, in C order, without exceeding the size limit; and the elements that a part
    contributes to a block must be contiguous in the part.
    """
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in box]
    parts = []
    for at in range(math.prod(len(each) - 1 for each in cuts)):
        starts, sizes = [], []
        for each in cuts:
            at, place = divmod(at, len(each) - 1)  # noqa: PLW2901
            starts.append(each[place])
            sizes.append(each[place + 1] - each[place])
        parts.append(Part(tuple(starts), tuple(sizes), "", 0))
    whole = torch.arange(math.prod(box)).reshape(box)
    positions = dict.fromkeys(parts, 0)
    seen: list[int] = []
    for block in blocks(box, max_elements):
        assert math.prod(block.sizes) <= max_elements
        target = torch.full(block.sizes, -1)
        for part in parts:
            if (inside := overlap(block, part)) is None:
                continue
            first, count = first_element(inside, part), math.prod(inside.sizes)
            assert first == positions[part]
            positions[part] += count
            stretch = _cut(whole, part.starts, part.sizes).reshape(-1)[first : first + count]
            _cut(target, _minus(inside, block), inside.sizes).copy_(stretch.reshape(inside.sizes))
        seen += target.reshape(-1).tolist()
    assert seen == list(range(math.prod(box)))


def _minus(inside: Block, block: Block) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(inside.starts, block.starts, strict=True))


def _cut(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dimension, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dimension, start, size)
    return tensor


# --- other formats -----------------------------------------------------------------------------------------

STATE = {
    "model": {
        "weight": torch.randn(5, 7),
        "turned": torch.randn(6, 4).t(),
        "half": torch.randn(9).to(torch.bfloat16),
        "small": torch.randn(8).to(torch.float8_e4m3fn),
        "wide": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
    },
    "betas": [0.9, {"eps": 1e-8, "of": torch.ones(2)}],
    "numbers": {"0": "a", "1": "b"},
    "step": 7,
}


def normal(state: Any) -> Any:
    return {**state, "model": {name: each.contiguous() for name, each in state["model"].items()}}


def equal(a: Any, b: Any) -> bool:
    """Compare bit by bit, because 8-bit floats have no equality operator."""
    if isinstance(b, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in b)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(b, list) else bool(a == b)


@pytest.mark.parametrize("form", ["dcp", "olmo-core", "json", "pickle", "torch", "file"])
def test_states_of_all_types_are_written_as_they_were(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "run"
    if form == "dcp":
        foreign_files.dcp(folder / "step-20", STATE)
    elif form == "olmo-core":
        foreign_files.olmo_core(folder / "step20", STATE, {0: {"global_step": 20}})
    elif form == "file":
        folder.mkdir()
        torch.save(STATE, folder / "ep0-ba20-rank0.pt")
    else:
        foreign_files.flashpoint(folder / "step-20_ckpt", STATE, form=form)
    ckpt.unshard(found(folder), tmp_path / "whole.pt")
    for options in ({}, {"mmap": True}):
        state = torch.load(tmp_path / "whole.pt", weights_only=True, **options)
        assert (state.pop("train", None) is not None) == (form == "olmo-core")
        assert equal(state, normal(STATE))
    ckpt.unshard(found(folder), tmp_path / "model.safetensors")
    assert equal(ckpt.load(tmp_path / "model.safetensors"), normal(STATE)["model"])
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        assert archive.testzip() is None


def test_tied_weights_stay_one_and_ignored_keys_are_left_out(tmp_path: Path) -> None:
    weight = torch.randn(300, 300)
    torch.save(
        {"model": {"in": weight, "out": weight}, "optim": {"m": weight * 2}}, tmp_path / "ba1-rank0.pt"
    )
    report = ckpt.unshard(found(tmp_path), tmp_path / "there" / "whole.pt", ignore_keys=["optim/*"])
    state = loaded(report.paths[0])
    assert state["optim"] == {}
    assert state["model"]["in"].data_ptr() == state["model"]["out"].data_ptr()
    assert report.size_bytes < 1.1 * weight.nbytes
    report = ckpt.unshard(found(tmp_path), tmp_path / "there" / "model.safetensors")
    assert all(torch.equal(each, weight) for each in ckpt.load(report.paths[0]).values())


def test_two_views_of_one_memory_stay_two(tmp_path: Path) -> None:
    """They begin at the same byte, and differ in strides or shape only."""
    memory = torch.randn(9, 9)
    views = [memory, memory.t(), memory.reshape(81), memory[:5]]
    state = {"model": {str(number): each for number, each in enumerate(views)}}
    torch.save(state, tmp_path / "ba1-rank0.pt")
    ckpt.unshard(found(tmp_path), tmp_path / "there" / "whole.pt")
    assert same(loaded(tmp_path / "there" / "whole.pt"), normal(state))
    ckpt.unshard(found(tmp_path), tmp_path / "there" / "model.safetensors")
    assert same(ckpt.load(tmp_path / "there" / "model.safetensors"), normal(state)["model"])


@pytest.mark.parametrize("name", ["ba1-rank0.pt", "step1/rank0.pt"])
def test_what_is_twice_in_a_state_is_twice_in_the_file(tmp_path: Path, name: str) -> None:
    """Both occurrences must be the same dict or list again, as torch.load reads them."""
    weights, both = {"w": torch.randn(3, 2)}, [torch.ones(2), (torch.zeros(1), 1)]
    state = {"model": weights, "ema": weights, "a": both, "b": {"c": both}}
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    (path.parent / "config.yaml").write_text("")
    ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")
    read = loaded(tmp_path / "whole.pt")
    assert same(read, state)
    assert read["model"] is read["ema"]
    ckpt.unshard(found(tmp_path / "run"), tmp_path / "there")
    assert loaded(tmp_path / "there" / "train.pt").keys() == {"ema", "a", "b"}


@pytest.mark.parametrize("is_deep", [False, True])
def test_a_state_that_holds_itself_or_has_no_end_is_refused(tmp_path: Path, is_deep: bool) -> None:
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}}
    if is_deep:
        for _ in range(150):
            state = {"below": state}
    else:
        state["model"]["again"] = state
    torch.save(state, tmp_path / "ba1-rank0.pt")
    with pytest.raises(
        FormatError, match="containers within" if is_deep else "contains itself at '/model/again'"
    ):
        ckpt.unshard(found(tmp_path), tmp_path / "whole.pt")


def test_a_list_that_lost_an_empty_dict_is_refused(tmp_path: Path) -> None:
    """DCP does not save the empty dict, so the elements behind it would silently move up."""
    foreign_files.dcp(tmp_path / "run" / "step-20", {"l": [{}, torch.ones(4), [], torch.ones(5)]})
    with pytest.raises(FormatError, match="list at 'l' has nothing at position 0"):
        ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")


def olmo_names(state: dict[str, Any], *above: Any) -> dict[str, torch.Tensor]:
    """Name tensors as olmo/safetensors_util.py does."""
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            tensors |= olmo_names(value, *above, key)
            continue
        is_pickled = not isinstance(value, torch.Tensor)
        name = base64.urlsafe_b64encode(pickle.dumps(((*above, key), is_pickled))).decode()
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if is_pickled else value
        tensors[name] = data
    return tensors


def test_olmo_s_safetensors_are_read_as_olmo_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step10-unsharded"
    folder.mkdir(parents=True)
    model = {"transformer.wte.weight": torch.randn(4, 3), "gAbout": torch.ones(2)}
    optim = {"state": {0: {"m": torch.randn(4, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    ckpt.dump(olmo_names(model), folder / "model.safetensors")
    ckpt.dump(olmo_names(optim), folder / "optim.safetensors")
    (folder / "config.yaml").write_text("a: 1\n")
    assert same(ckpt.load(folder / "model.safetensors"), dict(sorted(model.items())))
    assert equal(ckpt.load(folder / "optim.safetensors"), optim)
    ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")
    assert equal(loaded(tmp_path / "whole.pt"), {"model": model, "optim": optim})
    ckpt.unshard(found(tmp_path / "run"), tmp_path / "model.safetensors")
    assert equal(ckpt.load(tmp_path / "model.safetensors"), model)


def test_names_that_are_other_pickles_are_refused_and_names_alike_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step1-unsharded"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")

    def written(*told: Any) -> Path:
        names = [base64.urlsafe_b64encode(pickle.dumps(each)).decode() for each in told]
        ckpt.dump(dict.fromkeys(names, torch.ones(2)), folder / "model.safetensors", overwrite=True)
        return folder / "model.safetensors"

    for told in (
        Touch(tmp_path / "touched"),
        ({"a": 1}, False),
        ((), False),
        ((("a",),), False),
        (("a",), 1),
    ):
        with pytest.raises(UnsafePickleError, match="a tensor's name"):
            ckpt.load(written(told))
    written(Touch(tmp_path / "touched"))
    with pytest.raises(UnsafePickleError, match="a tensor's name"):
        ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")
    assert not (tmp_path / "touched").exists()
    for twice in ([(("a",), False), (("a", "b"), False)], [(("a", 1), False), (["a", 1], False)]):
        with pytest.raises((FormatError, UnsafePickleError)):
            ckpt.load(written(*twice))
    ckpt.dump({"gASVplain": torch.ones(2), "w": torch.ones(2)}, tmp_path / "plain.safetensors")
    assert ckpt.load(tmp_path / "plain.safetensors").keys() == {"gASVplain", "w"}


def test_a_model_with_more_than_tensors_goes_into_a_pt_file(tmp_path: Path) -> None:
    foreign_files.dcp(tmp_path / "run" / "step-20", {"model": {"w": torch.ones(3), "extra": b"x"}, "lr": 0.1})
    with pytest.raises(FormatError, match="'extra' is not a tensor"):
        ckpt.unshard(found(tmp_path / "run"), tmp_path / "model.safetensors")
    report = ckpt.unshard(found(tmp_path / "run"), tmp_path / "there")
    assert [path.name for path in report.paths] == ["model.pt", "train.pt"]
    assert loaded(report.paths[1]) == {"lr": 0.1}
    assert sorted(os.listdir(tmp_path)) == ["run", "there"]


# --- memory ------------------------------------------------------------------------------------------------

PEAK = """
import json, sys, threading
from pathlib import Path
import torch
from ckpt_async import restore
import ckpt_async.torch as ckpt
from ckpt_async.torch import unshard
source, target, most = sys.argv[1:]
checkpoint = restore.find(source)
def told(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10
unshard(checkpoint, target + ".first.pt", ignore_keys=["model/*"], max_memory_bytes=1 << 20)  # what code takes
before = told("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
unshard(checkpoint, target, max_memory_bytes=int(most))
print(json.dumps(told("VmHWM") - before))
"""


@pytest.mark.parametrize(("form", "name"), [("dcp", "model.safetensors"), ("file", "whole.pt")])
def test_memory_stays_within_the_bound_however_large_the_state(tmp_path: Path, form: str, name: str) -> None:
    """One tensor is six times the bound and the state is twelve times. Threads and buffers take some memory as well."""
    most = 16 << 20
    state = {"model": {"large": torch.ones(6 * most // 4)}, "optim": {"step": 3}}
    state["model"] |= {str(number): torch.full((most // 32,), float(number)) for number in range(48)}
    folder = tmp_path / "run"
    if form == "dcp":
        foreign_files.dcp(folder / "step-20", state)
    else:
        folder.mkdir()
        torch.save(state, folder / "ba20-rank0.pt")
    told = subprocess.run(
        [sys.executable, "-c", PEAK, f"file://{folder}", str(tmp_path / name), str(most)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert json.loads(told.stdout) < most + (12 << 20)  # with half a MiB for each read in progress
    tensors = ckpt.load(tmp_path / name, mmap=True)
    tensors = tensors.get("model", tensors)
    assert all(torch.equal(tensors[key], each) for key, each in state["model"].items())


def test_many_small_values_take_few_requests(tmp_path: Path) -> None:
    tensors = {f"bias{number}": torch.full((64,), float(number)) for number in range(300)}
    state = {"model": tensors, "optim": {f"group{number}": {"lr": number / 8} for number in range(300)}}
    foreign_files.dcp(tmp_path / "step-20", state)
    asked: list[str] = []
    with serving_ranges(tmp_path, asked=asked) as url:
        checkpoint = restore.find(f"{url}/step-20")
        assert checkpoint is not None
        ckpt.unshard(checkpoint, tmp_path / "whole.pt")
    assert same(loaded(tmp_path / "whole.pt"), state)
    assert sum(path.endswith(".distcp") for path in asked) < 20


# --- refused -----------------------------------------------------------------------------------------------


def spoil(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("max_memory_bytes", [1 << 20, 64 << 20])
@pytest.mark.parametrize("form", ["dcp", "file", "legacy"])
def test_a_flipped_bit_is_found_and_nothing_is_left(
    olmo: Path, tmp_path: Path, form: str, max_memory_bytes: int
) -> None:
    """This covers data that is read in one piece and data that is read in many."""
    folder = tmp_path / "run"
    state = {"model": {"large": torch.randn(1 << 20), "small": torch.randn(50)}}
    if form == "dcp":
        foreign_files.dcp(folder / "step-20", state)
        spoil(folder / "step-20" / "__0_0.distcp", 0.5)
    elif form == "file":
        folder.mkdir()
        torch.save(state, folder / "ba20-rank0.pt")
        spoil(folder / "ba20-rank0.pt", 0.5)
    else:
        shutil.copytree(olmo / "legacy", folder)
        path = folder / "step5" / "rank2.pt"
        with zipfile.ZipFile(path) as archive:
            weight = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
        spoil(path, (weight.header_offset + 150 + weight.file_size // 4) / path.stat().st_size)
    for name in ("whole.pt", "model.safetensors", "folder"):
        with pytest.raises(DamagedCheckpointError, match="a different CRC-32 from the one"):
            ckpt.unshard(found(folder), tmp_path / "out" / name, max_memory_bytes=max_memory_bytes)
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("at", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("name", ["whole.pt", "model.safetensors", "folder"])
def test_damage_beside_the_tensors_of_a_record_is_found(tmp_path: Path, name: str, at: float) -> None:
    """torch saves the whole memory of a view, with one CRC-32: only together can its bytes be compared."""
    memory = torch.randn(1 << 16)
    state = {"model": {"a": memory[10_000:20_000], "b": memory[40_000:50_000]}}
    path = tmp_path / "run" / "ba20-rank0.pt"
    path.parent.mkdir()
    torch.save(state, path)
    ckpt.unshard(found(path.parent), tmp_path / "intact.pt")
    assert same(loaded(tmp_path / "intact.pt"), state)
    with zipfile.ZipFile(path) as archive:
        record = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
    start = path.read_bytes().index(memory.numpy().tobytes()[:64])
    spoil(path, (start + int(at * record.file_size)) / path.stat().st_size)
    with pytest.raises(DamagedCheckpointError, match="a different CRC-32 from the one"):
        ckpt.unshard(found(path.parent), tmp_path / "out" / name)
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("form", ["json", "pickle", "torch", "dcp"])
def test_a_part_of_another_type_or_shape_is_damage(tmp_path: Path, form: str) -> None:
    """Bytes must not be read as another type of the same width, nor rows of a larger part be left out."""
    changes: list[Callable[[Any], None]] = [
        lambda told: setattr(told.properties, "dtype", torch.float16),
        lambda told: reshape(told, 20),
        lambda told: reshape(told, 40),
    ]
    for number, change in enumerate(changes):
        folder = tmp_path / f"{number}" / ("step-20" if form == "dcp" else "step-20_ckpt")
        state = {"model": {"w": torch.ones(30, 7, dtype=torch.bfloat16)}}
        if form == "dcp":
            foreign_files.dcp(folder, state)
        else:
            foreign_files.flashpoint(folder, state, form=form)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata.state_dict_metadata["model.w"])
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(
            DamagedCheckpointError, match=r"'model.w' .*(differs from what was saved|has the shape)"
        ):
            ckpt.unshard(found(folder.parent), tmp_path / "whole.pt")


def reshape(told: Any, rows: int) -> None:
    told.size = torch.Size([rows, 7])
    told.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 7]))]


def test_a_missing_rank_or_part_is_damage(olmo: Path, tmp_path: Path) -> None:
    for kind, name, complaint in (
        ("legacy", "rank1.pt", "files of 3 ranks up to 3: at least one is missing"),
        ("legacy", "rank3.pt", "are incomplete or overlap"),
        ("local", "model/rank3.pt", r"model/rank3\.pt is missing"),
        ("olmo_core", "model/rank_2.safetensors", "'model/rank_2.safetensors', which does not exist"),
    ):
        whole = found(olmo / kind)
        # `find` would notice most missing files itself.
        files = {each: file for each, file in whole.files.items() if each != name}
        with pytest.raises(DamagedCheckpointError, match=complaint):
            ckpt.unshard(replace(whole, files=files), tmp_path / "whole.pt")
    foreign_files.dcp(tmp_path / "run" / "step-20", {"w": torch.ones(30, 7)})
    path = tmp_path / "run" / "step-20" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    told = metadata.state_dict_metadata["w"]
    for rows, times in ((31, 1), (60, 2)):  # too few elements, or the first half twice
        told.size, told.chunks = torch.Size([rows, 7]), told.chunks * times
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(DamagedCheckpointError, match="the saved parts of 'w' are incomplete"):
            ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")


@pytest.mark.parametrize("shape", [(1 << 62,), ((1 << 63) - 1,), (2,) * 64, (0, 1 << 62, 1 << 62)])
def test_a_shape_that_no_tensor_has_is_damage(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with _metadata(tmp_path) as metadata:
        metadata.state_dict_metadata["model.w"].size = torch.Size(shape)
        metadata.state_dict_metadata["model.w"].chunks.clear()
    with pytest.raises(DamagedCheckpointError, match="shape that no tensor can have"):
        ckpt.unshard(found(tmp_path), tmp_path / "whole.pt")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (("a",) * 5000, "a path of 5000 keys"),
        ((), "a path of 0 keys"),
        (("model", "b"), "two values at 'model/b'"),
        (("model",), "two values at 'model'|below a value"),
    ],
)
def test_a_path_that_no_state_has_is_damage(tmp_path: Path, path: tuple[str, ...], complaint: str) -> None:
    with _metadata(tmp_path) as metadata:
        metadata.planner_data["model.w"] = path
    with pytest.raises(DamagedCheckpointError, match=complaint):
        ckpt.unshard(found(tmp_path), tmp_path / "whole.pt")


@contextlib.contextmanager
def _metadata(folder: Path) -> Iterator[Any]:
    """Yield the metadata of a checkpoint in this folder, and write it back after the caller has changed it."""
    foreign_files.dcp(folder / "step-20", {"model": {"w": torch.ones(30, 7), "b": torch.ones(7)}})
    path = folder / "step-20" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def test_ranks_of_different_checkpoints_are_not_mixed(olmo: Path, tmp_path: Path) -> None:
    shutil.copytree(olmo / "legacy", tmp_path / "run")
    path = tmp_path / "run" / "step5" / "rank2.pt"
    with zipfile.ZipFile(path) as archive:
        records = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            is_pickle = name.endswith("data.pkl")
            archive.writestr(name, data.replace(b"global_step", b"global_stop") if is_pickle else data)
    with pytest.raises(
        DamagedCheckpointError, match=r"rank2\.pt has a different '.*not belong to one checkpoint"
    ):
        ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")


def test_ranks_with_other_values_in_a_tensor_that_all_of_them_have_are_not_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step5"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    for rank in range(2):
        torch.save(
            {"model": {"w": torch.ones(3)}, "step": torch.tensor(5.0 + rank)}, folder / f"rank{rank}.pt"
        )
    with pytest.raises(DamagedCheckpointError, match=r"rank1\.pt has a different 'step'"):
        ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")


class Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("name", ["rank0.pt", "model/rank0.pt", "ba1-rank0.pt"])
def test_what_runs_code_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run" / ("step5" if "ba1" not in name else "")
    (folder / name).parent.mkdir(parents=True)
    torch.save({"model": {}, "modules": [Touch(tmp_path / "touched")]}, folder / name)
    (folder / "metadata.yaml").write_text("world_size: 1\n")
    (folder / "config.yaml").write_text("")
    with pytest.raises(UnsafePickleError, match=r"posix\.mkdir"):
        ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")
    assert not (tmp_path / "touched").exists()


def test_what_was_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk holds other bytes than it was given, no file may remain."""
    foreign_files.dcp(tmp_path / "run" / "step-20", {"model": {"w": torch.ones(300, 7)}})
    fsync = unsharding.fsync_descriptor

    def spoils(descriptor: int, path: Any) -> None:
        fsync(descriptor, path)
        os.pwrite(descriptor, b"\xff", 4000)

    monkeypatch.setattr(unsharding, "fsync_descriptor", spoils)
    for name in ("whole.pt", "model.safetensors", "folder"):
        with pytest.raises(DestinationError, match="did not contain the bytes that were written"):
            ckpt.unshard(found(tmp_path / "run"), tmp_path / "out" / name)
    assert os.listdir(tmp_path / "out") == []


def test_destinations_and_arguments_are_checked_first(tmp_path: Path) -> None:
    foreign_files.dcp(tmp_path / "run" / "step-20", {"model": {"w": torch.ones(3)}})
    checkpoint = found(tmp_path / "run")
    (tmp_path / "whole.pt").write_text("mine")
    with pytest.raises(DestinationError, match=r"whole\.pt' already exists"):
        ckpt.unshard(checkpoint, tmp_path / "whole.pt")
    assert (tmp_path / "whole.pt").read_text() == "mine"
    ckpt.unshard(checkpoint, tmp_path / "whole.pt", overwrite=True)
    assert loaded(tmp_path / "whole.pt").keys() == {"model"}
    with pytest.raises(FormatError, match=r"unknown format '\.zst'"):
        ckpt.unshard(checkpoint, tmp_path / "whole.pt.zst")
    with pytest.raises(SettingsError, match="max_memory_bytes=7"):
        ckpt.unshard(checkpoint, tmp_path / "other.pt", max_memory_bytes=7)
    (tmp_path / "several").mkdir()
    for rank in (0, 1):
        torch.save({}, tmp_path / "several" / f"ba1-ws2-rank{rank}.pt")
    with pytest.raises(FormatError, match=r"has 2 torch or safetensors files.*name one file"):
        ckpt.unshard(found(tmp_path / "several"), tmp_path / "other.pt")


def test_deepspeeds_files_are_left_to_deepspeed(tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    optimizers = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states" for rank in (0, 1)]
    for name in ("mp_rank_00_model_states", *optimizers):
        torch.save({}, folder / f"{name}.pt")
    with Uploader(folder.parent, f"file://{tmp_path}/run", rank=0, world_size=1) as uploader:
        uploader.enqueue(folder, 4)
        uploader.seal(4)
    with pytest.raises(FormatError, match=r"has 3 torch or safetensors files.*zero_to_fp32"):
        ckpt.unshard(found(tmp_path / "run"), tmp_path / "whole.pt")


def test_ctrl_c_ends_what_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may take long to answer, or never do."""
    state = {"weights": torch.arange(1000)}
    state_dict_saver.save(state, storage_writer=FileSystemWriter(tmp_path / "step-1"))
    checkpoint = found(tmp_path / "step-1")
    read_run = restore.Reader._read_run

    async def slow(reader: restore.Reader, file: restore.RemoteFile, run: Any) -> None:
        if file.name != ".metadata":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)
        await read_run(reader, file, run)

    monkeypatch.setattr(restore.Reader, "_read_run", slow)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ckpt.unshard(checkpoint, tmp_path / "whole.pt")
    assert time.monotonic() - began < 2.5
    assert not (tmp_path / "whole.pt").exists()


def test_shared_dicts_have_no_more_names_than_a_file_may_hold(tmp_path: Path) -> None:
    """A pickle of 2 KB can share one dict in so many ways that its tensors have a million names."""
    state: dict[str, Any] = {"w": torch.zeros(1)}
    for _ in range(60):
        state = {"a": state, "b": state}
    torch.save({"model": state}, tmp_path / "small.pt")
    looked = look(f"file://{tmp_path}/small.pt", None)
    assert looked.checkpoint is not None
    with pytest.raises(FormatError, match="names of its tensors"):
        ckpt.unshard(looked.checkpoint, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_metadata_that_differs_from_its_receipt_is_not_unsharded(tmp_path: Path, run_: Run) -> None:
    """A name with a wrong bit would be written as another key, and nothing else would tell."""
    state_dict_saver.save({"weights": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "saved"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    run_.commit(1, {0: files})
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    run_.flip(shard_key(1, ".metadata"), at=files[".metadata"].index(b"weights"))
    with pytest.raises(DamagedCheckpointError, match="metadata"):
        ckpt.unshard(checkpoint, tmp_path / "whole.pt")
    assert not (tmp_path / "whole.pt").exists()
