"""Resuming from what OLMo, OLMo-core and ML Flashpoint wrote, with the same calls as for our own checkpoints."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

import ckpt_async.torch as ckpt
from ckpt_async import Uploader, restore
from ckpt_async.errors import FormatError, InvalidNameError, StateMismatchError
from ckpt_async.torch.formats import flashpoint_tensor
from tests.torch_side import foreign_files
from tests.torch_side.foreign_files import flashpoint_header

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"w": torch.randn(30, 7, generator=generator), "b": torch.randn(7, generator=generator)},
        "optim": {"w.exp_avg": torch.randn(30, 7, generator=generator), "lr": 0.1},
    }


def zeros() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(30, 7), "b": torch.zeros(7)},
        "optim": {"w.exp_avg": torch.zeros(30, 7), "lr": 0.0},
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        torch.equal(a[part][name], each) if isinstance(each, torch.Tensor) else a[part][name] == each
        for part in b
        for name, each in b[part].items()
    )


def test_an_olmo_core_run_is_resumed_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest finished checkpoint is loaded from `model_and_optim`, with the trainer state
    of this rank or else of rank 0.
    """
    train = {0: {"global_step": 20, "of": 0}, 1: {"global_step": 20, "of": 1}}
    foreign_files.olmo_core(tmp_path / "run" / "step10", trained(10), {0: {"global_step": 10}})
    foreign_files.olmo_core(tmp_path / "run" / "step20", trained(20), train)
    foreign_files.olmo_core(tmp_path / "run" / "step30", trained(30), train, has_mark=False)
    state = zeros()
    found = ckpt.load_latest(state, f"file://{tmp_path}/run")
    assert found is not None
    assert (found.format, found.step, found.dcp_folders) == ("olmo-core", 20, ("model_and_optim",))
    assert same(state, trained(20))
    for rank, of in ((1, 1), (7, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert ckpt.load_remote(found, "train/rank{rank}.pt", fallback="train/rank0.pt") == train[of]
        assert ckpt.load_remote(found, "train/rank{rank}.pt", fallback=0) == train[of]
    with pytest.raises(InvalidNameError, match=r"train/rank7\.pt"):
        ckpt.load_remote(found, "train/rank{rank}.pt")
    with pytest.raises(InvalidNameError, match=r"train/rank9\.pt"):
        ckpt.load_remote(found, "train/rank{rank}.pt", fallback=9)


def test_an_olmo_run_is_resumed_in_one_call(tmp_path: Path) -> None:
    """`torch_new` of OLMo 0.6 puts DCP below `model_and_optim` and writes `config.yaml` last. A folder that still has
    its temporary name is not a checkpoint.
    """
    for step, name in ((10, "step10"), (20, "step20"), (30, "step30-tmp")):
        folder = tmp_path / "run" / name
        foreign_files.dcp(folder / "model_and_optim", trained(step))
        (folder / "config.yaml").write_text("model: {}")
    state = zeros()
    found = ckpt.load_latest(state, f"file://{tmp_path}/run")
    assert found is not None
    assert (found.format, found.step) == ("olmo", 20)
    assert same(state, trained(20))


def test_our_own_upload_of_such_a_folder_is_loaded_too(tmp_path: Path) -> None:
    foreign_files.olmo_core(tmp_path / "ckpts" / "step20", trained(20), {0: {}})
    with Uploader(tmp_path / "ckpts", f"file://{tmp_path}/remote") as uploader:
        uploader.enqueue(tmp_path / "ckpts" / "step20", step=20)
        uploader.seal(step=20)
        uploader.wait(step=20, timeout_s=60)
    state = zeros()
    assert ckpt.load_latest(state, f"file://{tmp_path}/remote") is not None
    assert same(state, trained(20))


def test_of_two_parts_one_is_chosen(tmp_path: Path) -> None:
    """transformers with FSDP and OLMo's `olmo_core` format leave two such parts, and
    picking one silently could be wrong.
    """
    folder = tmp_path / "run" / "step20"
    foreign_files.dcp(folder / "model", trained(20)["model"])
    foreign_files.dcp(folder / "optim", trained(20)["optim"])
    (folder / "config.yaml").write_text("model: {}")
    state = zeros()
    with pytest.raises(InvalidNameError, match=r"step20 has a \.metadata in model and in optim .*subfolder="):
        ckpt.load_latest(state["model"], f"file://{tmp_path}/run")
    for part in ("model", "optim"):
        assert ckpt.load_latest(state[part], f"file://{tmp_path}/run", subfolder=part) is not None
    assert same(state, trained(20))


def test_metadata_of_torch_before_2_3_is_read(tmp_path: Path) -> None:
    """`TensorProperties` was in another module then; torch still has it there, for ShardedTensor."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    folder = tmp_path / "run" / "step20"
    foreign_files.dcp(folder, trained(20))
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for each in metadata.state_dict_metadata.values():
        if hasattr(each, "properties"):
            each.properties = TensorProperties(each.properties.dtype)
    data = pickle.dumps(metadata)
    assert b"MEM_FORMAT_ENCODING" in data
    assert b"torch.distributed._shard" in data
    path.write_bytes(data)
    state = zeros()
    assert ckpt.load_latest(state, f"file://{tmp_path}/run") is not None
    assert same(state, trained(20))


def test_a_damaged_size_in_an_archives_directory_is_damage(tmp_path: Path) -> None:
    """The record's CRC-32 is correct: of everything that is read, only its two sizes disagree."""
    for step in (10, 20):
        foreign_files.dcp(tmp_path / f"run/step{step}", trained(step))
    path = tmp_path / "run/step20/__0_0.distcp"
    good = path.read_bytes()
    entries = [each.start() for each in re.finditer(rb"PK\x01\x02.{42}[a-z_0-9]+/byteorder", good, re.DOTALL)]
    assert len(entries) == 4
    for entry in entries:
        damaged = bytearray(good)
        damaged[entry + 26] ^= 1  # the third byte of the record's uncompressed size
        path.write_bytes(damaged)
        state = zeros()
        found = ckpt.load_latest(state, f"file://{tmp_path}/run")
        assert found is not None
        assert found.step == 10
        assert same(state, trained(10))


# --- ML Flashpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "pickle", "torch"])
def test_ml_flashpoint_objects_are_loaded(tmp_path: Path, form: str) -> None:
    """Each object has a block before the bytes that `.metadata` counts, and tensors are in its old
    form, its new form or torch's.
    """
    foreign_files.flashpoint(tmp_path / "c" / "step-20_ckpt", trained(20), form=form)
    foreign_files.flashpoint(tmp_path / "c" / "step-30_ckpt", trained(30), form=form)
    (tmp_path / "c" / "step-30_ckpt__0__unfinished").touch()
    state = zeros()
    found = ckpt.load_latest(state, f"file://{tmp_path}/c")
    assert found is not None
    assert (found.format, found.step) == ("ml-flashpoint", 20)
    assert same(state, trained(20))
    assert ckpt.load_remote(found, "common.pt") == {"iteration": 7}


@pytest.mark.parametrize("form", ["json", "pickle"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(5),
        torch.zeros(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
    ],
)
def test_an_optimised_tensor_is_read(form: str, tensor: torch.Tensor) -> None:
    header = flashpoint_header(tensor, is_pickled=form == "pickle")
    elements = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    found = flashpoint_tensor(header + elements)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    for end in range(len(header) + len(elements)):
        with pytest.raises(FormatError):
            flashpoint_tensor((header + elements)[:end])


class Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_header_that_runs_code_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps(Touch(tmp_path / "touched"))
    with pytest.raises(FormatError, match=r"posix\.mkdir.*nothing was run"):
        flashpoint_tensor(len(data).to_bytes(4, "little") + data + bytes(8))
    assert not (tmp_path / "touched").exists()


def test_each_rank_fetches_its_own_files_of_ml_flashpoint_and_the_common_ones(tmp_path: Path) -> None:
    folder = tmp_path / "c" / "step-20_ckpt"
    foreign_files.flashpoint(folder, trained(20), form="json", rank=2)
    (folder / "__1_0_src5.distcp").write_bytes(b"another rank's")
    found = restore.find(f"file://{tmp_path}/c")
    assert found is not None
    assert found.world_size == 6
    assert sorted(restore.fetch(found, tmp_path / "5", ranks=[5]).paths) == [
        ".metadata",
        "__1_0_src5.distcp",
        "common.pt",
    ]
    data = (folder / "__0_0_src2.distcp").read_bytes()
    (folder / "__0_0_src2.distcp").write_bytes(data[:-1])
    with pytest.raises(
        restore.NoUsableCheckpointError, match=rf"{len(data)} bytes .* has only {len(data) - 1}"
    ):
        restore.find(f"file://{tmp_path}/c")
    (folder / "common.pt").unlink()
    with pytest.raises(restore.NoUsableCheckpointError, match=r"it has no common\.pt"):
        restore.find(f"file://{tmp_path}/c")


# --- a copy on this node -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_itself", [False, True])
def test_a_local_cache_of_another_tools_checkpoint_is_read_first(tmp_path: Path, is_itself: bool) -> None:
    foreign_files.olmo_core(tmp_path / "run" / "step20", trained(20), {0: {"global_step": 20}})
    restore.fetch(restore.find(f"file://{tmp_path}/run"), tmp_path / "cache" / "step20")  # type: ignore[arg-type]
    remote = tmp_path / "run" / "step20" / "model_and_optim" / "__0_0.distcp"
    remote.write_bytes(bytes(remote.stat().st_size))  # useless from now on
    cache = tmp_path / "cache" / "step20" if is_itself else tmp_path / "cache"
    state = zeros()
    assert ckpt.load_latest(state, f"file://{tmp_path}/run", local_cache=cache) is not None
    assert same(state, trained(20))
    found = restore.find(f"file://{tmp_path}/run")
    assert found is not None
    report = restore.fetch(found, tmp_path / "there", local_cache=cache)
    assert report.bytes_from.keys() == {"local"}
    together = ckpt.fetch_together(f"file://{tmp_path}/run", tmp_path / "here", local_cache=cache)
    assert together is not None
    assert together[1].bytes_from.keys() == {"local"}
    assert ckpt.load_remote(found, "train/rank0.pt", local_cache=cache) == {"global_step": 20}


def test_a_spoilt_copy_in_the_cache_is_read_from_the_store_instead(tmp_path: Path) -> None:
    """Damage is found by each piece's CRC-32. The cached copy of another step, under its own name, is not used."""
    foreign_files.olmo_core(tmp_path / "run" / "step20", trained(20), {0: {}})
    found = restore.find(f"file://{tmp_path}/run")
    assert found is not None
    restore.fetch(found, tmp_path / "cache" / "step20")
    copy = tmp_path / "cache" / "step20" / "model_and_optim" / "__0_0.distcp"
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    state = zeros()
    assert ckpt.load_latest(state, f"file://{tmp_path}/run", local_cache=tmp_path / "cache") is not None
    assert same(state, trained(20))
    (tmp_path / "cache" / "step20").rename(tmp_path / "cache" / "step10")
    for cache in (tmp_path / "cache", tmp_path / "cache" / "step10"):
        with ckpt.CkptAsyncReader(found, local_cache=cache) as reader:
            reader.open()
            assert reader.bytes_from.keys() == {"remote"}


# --- NaN ---------------------------------------------------------------------------------------------------


def test_nan_in_a_checkpoint_is_refused_if_asked(tmp_path: Path) -> None:
    spoilt = trained(20)
    spoilt["model"]["w"][3, 3] = torch.nan
    foreign_files.dcp(tmp_path / "run" / "step-20", spoilt)
    assert ckpt.load_latest(zeros(), f"file://{tmp_path}/run") is not None
    with pytest.raises(CheckpointException, match=r"'model\.w' has NaN") as caught:
        ckpt.load_latest(zeros(), f"file://{tmp_path}/run", check_nan=True)
    assert isinstance(caught.value.failures[0][0], StateMismatchError)
    state = zeros()
    assert ckpt.load_latest(state, f"file://{tmp_path}/run", ignore_keys=["model/w"], check_nan=True)
    assert not state["model"]["w"].any()  # what is ignored is not even filled with NaN


def test_a_part_that_nobody_saved_shows_as_nan(tmp_path: Path) -> None:
    """torch itself would silently leave in the tensor whatever was there before."""
    foreign_files.dcp(tmp_path / "run" / "step-20", trained(20))
    path = tmp_path / "run" / "step-20" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    chunk = metadata.state_dict_metadata["model.w"].chunks[0]
    chunk.sizes = torch.Size([29, 7])
    path.write_bytes(pickle.dumps(metadata))
    state = zeros()
    assert ckpt.load_latest(state, f"file://{tmp_path}/run") is not None
    assert not state["model"]["w"][29].any()
    with pytest.raises(CheckpointException, match=r"'model\.w' has NaN"):
        ckpt.load_latest(zeros(), f"file://{tmp_path}/run", check_nan=True)
