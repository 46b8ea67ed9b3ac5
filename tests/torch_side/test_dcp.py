"""What one rank reads and writes with torch.distributed.checkpoint, and what is refused. There is no process group."""

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckpt_async.torch
from ckpt_async import Uploader, errors, restore
from ckpt_async.errors import FailureReason, InvalidNameError, RankFailedError, SettingsError
from ckpt_async.restore import PeerServer
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.torch import CkptAsyncReader, CkptAsyncWriter, batches
from tests.restore.relay import Relay
from tests.restore.runs import Run, shard_key
from tests.torch_side.states import Progress, Stage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state_of(num_tensors: int, size: int = 50) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_tensors)
    tensors = {f"layer.{number}": torch.randn(size, 7, generator=generator) for number in range(num_tensors)}
    return {**tensors, "epoch": 3}


def empty(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else None
        for name, each in state.items()
    }


def is_equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name]
        for name in a
    )


def saved(state: dict[str, Any], folder: Path, **options: Any) -> dict[str, bytes]:
    """Save with plain torch; return the files it wrote."""
    state_dict_saver.save(state, storage_writer=FileSystemWriter(folder, **options))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(state: dict[str, Any], run: Run, **options: Any) -> dict[str, int]:
    """Load with torch's own `load`; return how many bytes came from each source."""
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    with CkptAsyncReader(checkpoint, **options) as reader:
        state_dict_loader.load(state, storage_reader=reader)
        return reader.bytes_from


def failure_of(error: CheckpointException) -> BaseException:
    ((failure, _),) = error.failures.values()
    return failure


# --- loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_bytes", [1, 5000, 1 << 20])
def test_a_state_loads_in_batches_of_any_size(
    tmp_path: Path, run_: Run, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", batch_bytes)
    state = state_of(12)
    run_.commit(1, {0: saved(state, tmp_path / "saved", thread_count=2)})
    loaded = empty(state)
    load(loaded, run_)
    assert is_equal(loaded, state)


def test_files_of_this_node_are_read_in_small_batches(
    tmp_path: Path, run_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local data should be used while it is still in the CPU cache; a remote store is
    faster with many ranges at once.
    """
    monkeypatch.setattr(batches, "LOCAL_BATCH_BYTES", 5000)
    state = state_of(12)
    run_.commit(1, {0: saved(state, tmp_path / "folder" / "step-1")})
    reads: dict[bool, int] = {}
    read_into = restore.Reader.read_into
    for is_local in (True, False):

        def counting(reader: restore.Reader, wants: Any, is_local: bool = is_local) -> None:
            reads[is_local] = reads.get(is_local, 0) + 1
            read_into(reader, wants)

        monkeypatch.setattr(restore.Reader, "read_into", counting)
        loaded = empty(state)
        load(loaded, run_, folder=tmp_path / "folder" if is_local else None)
        assert is_equal(loaded, state)
    assert reads[True] > reads[False]


def test_one_process_is_not_warned_that_it_is_alone(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/remote"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Uploader(tmp_path / "folder", remote) as uploader:
            ckpt_async.torch.save(state_of(2), 1, uploader)
        loaded = empty(state_of(2))
        assert ckpt_async.torch.load_latest(loaded, remote) is not None
    assert is_equal(loaded, state_of(2))


@pytest.mark.parametrize("while_it", ["decodes", "reads", "copies"])
def test_ctrl_c_ends_a_load_and_its_threads_at_once(
    tmp_path: Path, run_: Run, monkeypatch: pytest.MonkeyPatch, while_it: str
) -> None:
    """A load of 40,000 small tensors went on for half a minute, because it had read them ahead."""
    state = state_of(100)
    run_.commit(1, {0: saved(state, tmp_path / "saved")})
    decode, read_run, calls = CkptAsyncReader._tensor, restore.Reader._read_run, 0

    def slow(reader: CkptAsyncReader, *piece: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if while_it == "decodes" and calls == 1:
            os.kill(os.getpid(), signal.SIGINT)
        if while_it == "decodes" or threading.current_thread().name != "ckpt-async-load_0":
            time.sleep(1)
        return decode(reader, *piece)

    async def slow_read(reader: restore.Reader, file: restore.RemoteFile, run: Any) -> None:
        if while_it == "reads" and file.name != ".metadata":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)
        await read_run(reader, file, run)

    def copy(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batches, "BATCH_BYTES", 20_000)  # seven tensors
    monkeypatch.setattr(CkptAsyncReader, "_tensor", slow)
    monkeypatch.setattr(restore.Reader, "_read_run", slow_read)
    if while_it == "copies":
        monkeypatch.setattr(CkptAsyncReader, "_put", copy)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ckpt_async.torch.load_latest(empty(state), run_.url)
    assert time.monotonic() - began < 4
    assert not [each for each in threading.enumerate() if each.name.startswith("ckpt-async-load")]


def test_loading_a_tenth_of_the_tensors_reads_little_more(
    tmp_path: Path, counted_run: Run, relay: Relay
) -> None:
    state = state_of(20, size=40_000)
    counted_run.commit(1, {0: saved(state, tmp_path / "saved")})
    part = empty({name: state[name] for name in ("layer.7", "layer.13")})
    needed = sum(each.nbytes for each in part.values())
    before = relay.bytes_back
    bytes_from = load(part, counted_run)
    assert is_equal(part, {name: state[name] for name in part})
    assert needed < bytes_from["remote"] <= 1.1 * needed
    assert relay.bytes_back - before <= 1.1 * needed  # including all headers, listings and records


def test_files_in_the_trainers_folder_are_not_fetched(tmp_path: Path, run_: Run) -> None:
    state = state_of(5)
    files = saved(state, tmp_path / "folder" / "step-1")
    run_.commit(1, {0: files})
    loaded = empty(state)
    bytes_from = load(loaded, run_, folder=tmp_path / "folder")
    assert bytes_from.keys() == {"local"}
    assert is_equal(loaded, state)


def test_a_checkpoint_in_a_subfolder_is_read(tmp_path: Path, run_: Run) -> None:
    state = state_of(3)
    run_.commit(1, {0: {f"model/{name}": data for name, data in saved(state, tmp_path / "saved").items()}})
    loaded = empty(state)
    load(loaded, run_, subfolder="model")
    assert is_equal(loaded, state)


def test_the_lease_of_an_unclosed_reader_ends(tmp_path: Path, run_: Run) -> None:
    state = state_of(3)
    run_.commit(1, {0: saved(state, tmp_path / "saved")})
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    reader = CkptAsyncReader(checkpoint)
    state_dict_loader.load(empty(state), storage_reader=reader)
    assert len(run_.leases()) == 1
    del reader
    assert run_.leases() == []


def test_pieces_without_a_checksum_of_their_own_are_read(
    tmp_path: Path, run_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `torch.serialization.set_crc32_options(False)`, torch writes zeros instead of checksums."""
    state = state_of(3)
    torch.serialization.set_crc32_options(False)
    try:
        run_.commit(1, {0: saved(state, tmp_path / "saved")})
    finally:
        torch.serialization.set_crc32_options(True)
    loaded = empty(state)
    load(loaded, run_)
    assert is_equal(loaded, state)


def test_wrong_bytes_from_a_peer_are_not_used(tmp_path: Path, run_: Run) -> None:
    state = state_of(5)
    files = saved(state, tmp_path / "saved")
    run_.commit(1, {0: files})
    spoilt = bytearray(files["__0_0.distcp"])
    spoilt[len(spoilt) // 2] ^= 1
    (tmp_path / "spoilt").write_bytes(spoilt)
    with PeerServer({shard_key(1, "__0_0.distcp"): tmp_path / "spoilt"}, "127.0.0.1") as server:
        loaded = empty(state)
        bytes_from = load(loaded, run_, peers=[server.peer])
    assert bytes_from["peer"] > 0
    assert is_equal(loaded, state)
    assert run_.damages() == {}


KILLED_TRAINER = """
import os, sys, torch
import ckpt_async.torch as ckpt
from ckpt_async import Uploader

uploader = Uploader(sys.argv[1], sys.argv[2], rank=0, world_size=1, max_bytes_per_s=1.0)
ckpt.save({"w": torch.ones(3)}, 1, uploader)
os._exit(0)
"""


def test_load_latest_finishes_a_killed_trainers_uploads_first(tmp_path: Path) -> None:
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/run"
    command = [sys.executable, "-c", KILLED_TRAINER, str(folder), remote]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    state = {"w": torch.zeros(3)}
    assert ckpt_async.torch.load_latest(state, remote) is None
    found = ckpt_async.torch.load_latest(state, remote, folder=folder, drain_timeout_s=60)
    assert found is not None
    assert (found.step, state["w"].tolist()) == (1, [1.0, 1.0, 1.0])


# --- damaged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_in_the_store_is_marked_for_later_readers(tmp_path: Path, run_: Run, name: str) -> None:
    state = state_of(3)
    for step in (1, 2):
        files = saved(state, tmp_path / f"{step}")
        run_.commit(step, {0: files})
    run_.flip(shard_key(2, name), at=len(files[name]) // 2)
    loaded = empty(state)
    found = ckpt_async.torch.load_latest(loaded, run_.url)
    assert found is not None
    assert found.step == 1
    assert is_equal(loaded, state)
    assert [each.step for each in run_.damages()] == [2]
    again = restore.find(run_.url)
    assert again is not None
    assert again.step == 1
    assert name in str(again.rejected[0])


@pytest.mark.fault("F60")
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_corruption_in_transit_is_not_marked(
    tmp_path: Path, run_: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong bit differs on every read, so the test cannot tell what the store really
    holds: a mark would be a guess.
    """
    state = state_of(3)
    for step in (1, 2):
        files = saved(state, tmp_path / f"{step}")
        run_.commit(step, {0: files})
    get_range, chance = DirectoryStore.get_range, random.Random(2)

    async def spoilt(self: DirectoryStore, key: str, offset: int, size_bytes: int, sink: Any) -> Any:
        data = bytearray()
        found = await get_range(self, key, offset, size_bytes, data.extend)
        if key.endswith(name):
            for _ in range(3):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        sink(memoryview(data))
        return found

    monkeypatch.setattr(DirectoryStore, "get_range", spoilt)
    with pytest.raises((CheckpointException, restore.UnreliableReadError)) as caught:
        ckpt_async.torch.load_latest(empty(state), run_.url)
    failure = failure_of(caught.value) if isinstance(caught.value, CheckpointException) else caught.value
    assert isinstance(failure, restore.UnreliableReadError)
    assert name in str(failure)
    assert run_.damages() == {}


@pytest.mark.parametrize("shape", [(1,), (2, 2), (3,)])
def test_a_piece_of_another_shape_than_its_target_is_damage(
    tmp_path: Path, run_: Run, shape: tuple[int, ...]
) -> None:
    files = saved({"w": torch.ones(shape)}, tmp_path / "saved")
    metadata = pickle.loads(files[".metadata"])
    told = metadata.state_dict_metadata["w"]
    told.size, told.chunks = torch.Size([4]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
    metadata.storage_data = {
        MetadataIndex("w", torch.Size([0]), 0): place for place in metadata.storage_data.values()
    }
    run_.commit(1, {0: files | {".metadata": pickle.dumps(metadata)}})
    loaded = {"w": torch.zeros(4)}
    with pytest.raises(CheckpointException) as caught:
        load(loaded, run_)
    assert isinstance(failure_of(caught.value), errors.DamagedCheckpointError)
    assert not loaded["w"].any()


def test_one_value_is_not_repeated_over_a_larger_target(tmp_path: Path, run_: Run) -> None:
    """A planner decides where a piece goes, and may be wrong; torch copies one value to all places."""

    class Larger(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return target

    target = torch.zeros(4)
    run_.commit(1, {0: saved({"w": torch.ones(1)}, tmp_path / "saved")})
    with pytest.raises(CheckpointException) as caught:
        ckpt_async.torch.load_latest({"w": torch.zeros(1)}, run_.url, step=1, planner=Larger())
    assert isinstance(failure_of(caught.value), errors.DamagedCheckpointError)
    assert not target.any()


def test_two_checkpoints_are_never_mixed(tmp_path: Path, run_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values loaded from the newest checkpoint before it proved damaged must be replaced by those of the older one."""
    monkeypatch.setattr(batches, "BATCH_BYTES", 1)
    small, large = state_of(2), state_of(4)
    run_.commit(1, {0: saved(small, tmp_path / "one")})
    files = saved(large, tmp_path / "two")
    run_.commit(2, {0: files})
    # In the last shard that is read.
    run_.flip(shard_key(2, "__0_0.distcp"), at=len(files["__0_0.distcp"]) - 1500)
    loaded = empty(large)
    with pytest.raises(CheckpointException, match="would be a mixture of two") as caught:
        ckpt_async.torch.load_latest(loaded, run_.url, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert isinstance(failure_of(caught.value), errors.StateMismatchError)
    loaded = empty(large)  # a newly started process has loaded nothing yet
    found = ckpt_async.torch.load_latest(
        loaded, run_.url, planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    assert found is not None
    assert is_equal({name: loaded[name] for name in small}, small)
    assert not loaded["layer.3"].any()


# --- refused -----------------------------------------------------------------------------------------------


class Touch:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_an_object_that_runs_code_is_rejected_unless_weights_only_is_off(tmp_path: Path, run_: Run) -> None:
    touched = tmp_path / "touched"
    run_.commit(1, {0: saved({"layer": torch.ones(3), "extra": Touch(touched)}, tmp_path / "saved")})
    with pytest.raises(CheckpointException, match=r"posix\.mkdir.*\(if you wrote.*weights_only=False"):
        load({"layer": torch.zeros(3), "extra": None}, run_)
    assert not touched.exists()
    load({"layer": torch.zeros(3), "extra": None}, run_, weights_only=False)
    assert touched.exists()
    touched.rmdir()
    state = {"layer": torch.zeros(3), "extra": None}
    ckpt_async.torch.load_latest(state, run_.url, weights_only=False)
    assert touched.exists()


def test_plain_data_and_allowed_classes_beside_tensors_are_loaded(tmp_path: Path, run_: Run) -> None:
    """torch's planners unpickle such values without restriction, so they are decoded safely first and
    then saved again for the planner.
    """
    state = {
        "layer": torch.ones(3),
        "wct": timedelta(seconds=3),
        "rng": random.getstate(),
        "numpy": np.arange(3),
    }
    mine = Progress(3, Stage.DECAY)
    run_.commit(1, {0: saved({**state, "mine": mine}, tmp_path / "saved")})
    found: dict[str, Any] = dict.fromkeys((*state, "mine")) | {"layer": torch.zeros(3)}
    with pytest.raises(CheckpointException, match=r"states\.Progress.*allow=.*weights_only=False"):
        load(found, run_)
    load(found, run_, allow=[Progress, Stage])
    again: dict[str, Any] = dict.fromkeys(found) | {"layer": torch.zeros(3)}
    ckpt_async.torch.load_latest(again, run_.url, allow=[Progress, Stage])
    assert again["mine"] == mine
    assert found["numpy"].tolist() == [0, 1, 2]
    assert (found["wct"], found["rng"], found["mine"]) == (state["wct"], state["rng"], mine)


def test_ignored_keys_keep_their_values(tmp_path: Path, run_: Run, caplog: pytest.LogCaptureFixture) -> None:
    """`ignore_keys` names nested dict keys joined by '/'; it covers everything below a key,
    also values that are not tensors.
    """
    state = {
        "model": {"a": torch.ones(3), "b": torch.ones(3)},
        "optim": {"a": {"m": torch.ones(3)}},
        "step": 7,
    }
    run_.commit(1, {0: saved(state, tmp_path / "saved")})
    zeros = {
        "model": {"a": torch.zeros(3), "b": torch.zeros(3)},
        "optim": {"a": {"m": torch.zeros(3)}},
        "step": 0,
    }
    found = ckpt_async.torch.load_latest(zeros, run_.url, ignore_keys=["model/b", "optim", "st*p", "mode"])
    assert found is not None
    assert (zeros["model"]["a"].tolist(), zeros["model"]["b"].tolist()) == ([1] * 3, [0] * 3)
    assert (zeros["optim"]["a"]["m"].tolist(), zeros["step"]) == ([0] * 3, 0)
    assert "ignore_keys_unmatched glob=mode" in caplog.text
    with pytest.raises(InvalidNameError, match="ignore_keys"):
        ckpt_async.torch.load_latest(zeros, run_.url, ignore_keys="step")


def test_what_is_ignored_need_not_be_in_the_checkpoint(tmp_path: Path, run_: Run) -> None:
    run_.commit(1, {0: saved({"model": {"a": torch.ones(3)}}, tmp_path / "saved")})
    state = {"model": {"a": torch.zeros(3), "new": torch.zeros(3)}, "ema": {"decay": 0.5}}
    found = ckpt_async.torch.load_latest(state, run_.url, ignore_keys=["model/n*", "ema"])
    assert found is not None
    assert state["model"]["a"].tolist() == [1] * 3
    assert (state["model"]["new"].tolist(), state["ema"]) == ([0] * 3, {"decay": 0.5})
    with pytest.raises(CheckpointException, match=r"the checkpoint has no 'ema\.decay'"):
        ckpt_async.torch.load_latest(state, run_.url, ignore_keys=["model/n*"])


def change_metadata(files: dict[str, bytes], change: Callable[[Any], None]) -> None:
    metadata = pickle.loads(files[".metadata"])
    change(metadata)
    files[".metadata"] = pickle.dumps(metadata)


def names_a_file_that_nobody_saved(metadata: Any) -> None:
    for each in metadata.storage_data.values():
        each.relative_path = "__9_0.distcp"


def points_beyond_the_end(metadata: Any) -> None:
    for each in metadata.storage_data.values():
        each.length += 1 << 20


def points_elsewhere(metadata: Any) -> None:
    for each in metadata.storage_data.values():
        each.offset += 1
        each.length -= 2


def forgets_a_tensor(metadata: Any) -> None:
    for index in list(metadata.storage_data):
        if index.fqn == "layer.1":
            del metadata.storage_data[index]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (names_a_file_that_nobody_saved, r"it names '__9_0.distcp', which is not in the checkpoint"),
        (points_beyond_the_end, r"__0_0.distcp: bytes 0\+\d+ are beyond its \d+ bytes"),
        (points_elsewhere, r"__0_0.distcp: bytes 1\+\d+: not in the form that torch saves"),
        (forgets_a_tensor, r".metadata: it does not say where 'layer.1' is"),
    ],
)
def test_metadata_that_does_not_match_the_files_is_damage(
    tmp_path: Path, run_: Run, change: Callable[[Any], None], complaint: str
) -> None:
    state = state_of(3)
    run_.commit(1, {0: saved(state, tmp_path / "good")})
    files = saved(state_of(3), tmp_path / "bad")
    change_metadata(files, change)
    run_.commit(2, {0: files})
    with pytest.raises(CheckpointException, match=complaint):
        load(empty(state), run_)
    loaded = empty(state)
    found = ckpt_async.torch.load_latest(loaded, run_.url)  # falls back to the one before
    assert found is not None
    assert found.step == 1
    assert is_equal(loaded, state)


@pytest.mark.fault("F52")
def test_a_checkpoint_that_is_not_dcp_is_reported(run_: Run) -> None:
    run_.commit(1)
    with pytest.raises(InvalidNameError, match=r"^step-1 has no \.metadata: torch.* has not saved it"):
        ckpt_async.torch.load_latest({}, run_.url)


def test_a_shape_mismatch_is_not_damage(tmp_path: Path, run_: Run) -> None:
    run_.commit(1, {0: saved(state_of(3), tmp_path / "one")})
    run_.commit(2, {0: saved(state_of(3), tmp_path / "two")})
    with pytest.raises(CheckpointException, match="Size mismatch") as caught:
        ckpt_async.torch.load_latest({"layer.0": torch.zeros(51, 7)}, run_.url)
    assert not isinstance(failure_of(caught.value), errors.DamagedCheckpointError)


def test_a_state_that_does_not_fit_is_told_in_one_sentence(tmp_path: Path, run_: Run) -> None:
    """The error is one of this package's, and also a kind that callers who catch torch's errors catch."""
    run_.commit(1, {0: saved(state_of(3), tmp_path / "one")})
    for state, complaint in (
        ({"layer.0": torch.zeros(51, 7)}, r"\[51, 7\]\) for layer\.0"),
        ({"layer.9": torch.zeros(3)}, r"the checkpoint has no 'layer\.9' \(add it to ignore_keys"),
    ):
        with pytest.raises(errors.StateMismatchError, match=f"^step-1 does not fit.*{complaint}") as caught:
            ckpt_async.torch.load_latest(state, run_.url)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, CheckpointException)
        assert caught.value.failures.keys() == {0}
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- validation --------------------------------------------------------------------------------------------

asked: list[tuple[str, Any]] = []


def refuses_data(path: str, specs: Any) -> bool:
    asked.append((path, specs))
    return path.endswith(".metadata")


def test_the_variables_function_is_refused_for_sharded_checkpoints(
    tmp_path: Path, run_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its contract is a local path, and there is none."""
    run_.commit(1, {0: saved({"w": torch.ones(1)}, tmp_path / "saved")})
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", f"{__name__}.refuses_data")
    asked.clear()
    with pytest.raises(SettingsError, match=r"called with local paths.*validate="):
        ckpt_async.torch.load_latest({"w": torch.zeros(1)}, run_.url)
    assert asked == []


def test_the_validation_function_can_reject_a_checkpoint(tmp_path: Path, run_: Run) -> None:
    state = state_of(4)
    files = saved(state, tmp_path / "saved")
    run_.commit(1, {0: files})
    stored = pickle.loads(files[".metadata"]).storage_data
    wanted = {"layer.1", "layer.2"}
    asked.clear()
    loaded = empty({name: state[name] for name in wanted})
    with pytest.raises(CheckpointException, match=r"__0_0.distcp was refused by .*refuses_data"):
        ckpt_async.torch.load_latest(loaded, run_.url, validate=refuses_data)
    assert not any(each.any() for each in loaded.values())
    prefix = f"{run_.url}/ckpt/step-1.g1"
    specs = sorted((each.offset, each.length) for index, each in stored.items() if index.fqn in wanted)
    assert asked == [(f"{prefix}/.metadata", None), (f"{prefix}/__0_0.distcp", specs)]


@pytest.mark.parametrize("name", ["nosuchmodule.function", "os.nosuchfunction", "function", "os.sep", "."])
def test_a_missing_validation_function_is_an_error(
    tmp_path: Path, run_: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_.commit(1, {0: saved(state_of(1), tmp_path / "saved")})
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", name)
    with pytest.raises(SettingsError, match="CHECKPOINT_VALIDATION_FUNCTION"):
        ckpt_async.torch.load_latest(empty(state_of(1)), run_.url)


# --- saving ------------------------------------------------------------------------------------------------


def test_saving_a_step_again_leaves_the_files_that_are_still_uploading(tmp_path: Path, run_: Run) -> None:
    place = tmp_path / "folder" / "step-1"
    first, second = state_of(3), state_of(4)
    saved(first, place, thread_count=3)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    links = tmp_path / "links"
    links.mkdir()
    for path in place.iterdir():
        os.link(path, links / path.name)
    with Uploader(tmp_path / "folder", run_.url) as uploader:
        ckpt_async.torch.save(second, 1, uploader)
        uploader.wait(1, timeout_s=60)
    assert {path.name: path.read_bytes() for path in links.iterdir()} == before
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert sorted(checkpoint.files) == [".metadata", "__0_0.distcp"]  # nothing from the save before
    loaded = empty(second)
    load(loaded, run_)
    assert is_equal(loaded, second)


class FailingSavePlanner(DefaultSavePlanner):
    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def create_local_plan(self) -> Any:
        if self._step == "plan":
            raise OSError("no plan")
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        raise OSError("no data")


def test_a_save_that_fails_before_it_writes_leaves_what_an_earlier_start_saved(
    tmp_path: Path, run_: Run
) -> None:
    folder = tmp_path / "folder" / "step-1"
    before = saved(state_of(3), folder)
    with Uploader(tmp_path / "folder", run_.url) as uploader:
        for step, left in (("plan", before), ("data", {})):
            with pytest.raises(CheckpointException, match=f"no {step}"):
                ckpt_async.torch.save(state_of(3), 1, uploader, planner=FailingSavePlanner(step))
            assert {path.name: path.read_bytes() for path in folder.glob("*")} == left


def test_a_save_takes_a_name_and_metrics_and_its_future_cannot_be_cancelled(
    tmp_path: Path, run_: Run
) -> None:
    state = state_of(3)
    wanted = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in state.items()}
    with Uploader(tmp_path / "folder", run_.url) as uploader:
        future = ckpt_async.torch.async_save(state, 7, uploader, name="ep1-ba7", metrics={"loss": 0.5})
        assert not future.cancel()
        state["layer.0"].zero_()
        future.result(60)
        uploader.wait(7, timeout_s=60)
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.name, checkpoint.step, checkpoint.metrics) == ("ep1-ba7", 7, {"loss": 0.5})
    loaded = empty(wanted)
    load(loaded, run_)
    assert is_equal(loaded, wanted)


def test_a_sealed_step_is_rejected_before_its_files_are_touched(tmp_path: Path, run_: Run) -> None:
    with Uploader(tmp_path / "folder", run_.url) as uploader:
        ckpt_async.torch.save(state_of(1), 1, uploader)
        before = {path.name: path.read_bytes() for path in (tmp_path / "folder/step-1").iterdir()}
        with pytest.raises(errors.SealedError):
            ckpt_async.torch.save(state_of(2), 1, uploader)
        with pytest.raises(errors.SealedError):
            ckpt_async.torch.async_save(state_of(2), 1, uploader)
        with pytest.raises(CheckpointException, match="SealedError"):
            state_dict_saver.save(state_of(2), storage_writer=CkptAsyncWriter(uploader, 1))
        uploader.enqueue(tmp_path / "folder/step-1/.metadata", 2, "two")
        with pytest.raises(errors.InvalidNameError, match="is already named 'two-2'"):
            ckpt_async.torch.save(state_of(2), 2, uploader, name="zwei")
        after = {path.name: path.read_bytes() for path in (tmp_path / "folder/step-1").iterdir()}
    assert before.keys() == {".metadata", "__0_0.distcp"}
    assert after == before


def test_a_writer_is_bound_to_one_checkpoint(tmp_path: Path, run_: Run) -> None:
    with Uploader(tmp_path / "folder", run_.url) as uploader:
        writer = CkptAsyncWriter(uploader, 1)
        with pytest.raises(SettingsError, match="leave checkpoint_id out"):
            state_dict_saver.save(state_of(1), storage_writer=writer, checkpoint_id="elsewhere")
        with pytest.raises(SettingsError, match="use_collectives"):
            state_dict_saver.save(state_of(1), storage_writer=writer, use_collectives=False)


def test_every_public_name_exists() -> None:
    assert all(callable(getattr(ckpt_async.torch, name)) for name in ckpt_async.torch.__all__)
    assert set(ckpt_async.torch.__all__) == set(ckpt_async.torch._HOMES)


# --- errors sent between ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        errors.StoreError("slow", reason=FailureReason.THROTTLED, operation="get", key="a/b", hint="wait"),
        errors.ObjectNotFoundError(key="a/b"),
        errors.DamagedCheckpointError("a shard is missing"),
        errors.NoSpaceError("full", hint="make room"),
        errors.SourceError("changed", reason=FailureReason.SOURCE_CHANGED),
    ],
)
def test_errors_reach_other_ranks_unchanged(error: errors.CkptAsyncError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert (str(there), vars(there)) == (str(error), vars(error))


def test_kinds_of_one_step_are_saved_and_loaded_apart(tmp_path: Path) -> None:
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/run"
    states = {None: state_of(3), "weights": state_of(1)}
    for kind, state in states.items():
        with Uploader(folder, remote, kind=kind) as uploader:
            ckpt_async.torch.save(state, 1, uploader)
            uploader.wait(1, timeout_s=30)
    for kind, state in states.items():
        loaded = empty(state)
        checkpoint = ckpt_async.torch.load_latest(loaded, remote, kind=kind, folder=folder)
        assert checkpoint is not None
        assert is_equal(loaded, state)
        found = ckpt_async.torch.fetch_together(remote, tmp_path / f"of-{kind}", kind=kind, folder=folder)
        assert found is not None
        assert found[0] == checkpoint
        assert found[1].bytes_from.keys() == {"local"}


def test_a_pointers_address_is_loaded(tmp_path: Path) -> None:
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/remote"
    settings: dict[str, Any] = {"composer_symlink": "latest.symlink", "publish_copies": True}
    with Uploader(folder, remote, **settings) as uploader:
        ckpt_async.torch.save({"w": torch.ones(2)}, 1, uploader)
    state = {"w": torch.zeros(2)}
    found = ckpt_async.torch.load_latest(state, f"{remote}/latest.symlink")
    assert found is not None
    assert (found.remote, found.step) == (remote, 1)
    assert torch.equal(state["w"], torch.ones(2))
    with pytest.raises(FileNotFoundError):
        ckpt_async.torch.load_latest(state, f"{remote}/other.symlink")
    with pytest.raises(SettingsError, match="leave out step"):
        ckpt_async.torch.load_latest(state, f"{remote}/latest.symlink", step=1)


def test_a_pointer_to_a_published_folder_is_loaded(tmp_path: Path) -> None:
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/remote"
    settings: dict[str, Any] = {"composer_symlink": "latest.symlink", "publish_copies": True}
    with Uploader(folder, remote, **settings) as uploader:
        ckpt_async.torch.save({"w": torch.ones(2)}, 1, uploader, publish_as="exact/ba1")
    state = {"w": torch.zeros(2)}
    assert ckpt_async.torch.load_latest(state, f"{remote}/latest.symlink") is not None
    assert torch.equal(state["w"], torch.ones(2))


def test_a_failed_load_is_an_exception(run_: Run, tmp_path: Path) -> None:
    """torch's CheckpointException alone is a BaseException: `except Exception` would not see it."""
    run_.commit(1, {0: saved({"w": torch.ones(2)}, tmp_path / "saved")})
    with pytest.raises(RuntimeError, match="was refused by") as caught:
        ckpt_async.torch.load_latest(
            {"w": torch.zeros(2)}, run_.url, validate=lambda path, _: path.endswith(".metadata")
        )
    assert isinstance(caught.value, CheckpointException)
    assert isinstance(caught.value, RankFailedError)


class RefusesToPlan(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        raise OSError("no plan")


def test_a_failed_save_is_an_exception(tmp_path: Path) -> None:
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/remote") as uploader:
        with pytest.raises(RuntimeError, match="no plan") as caught:
            ckpt_async.torch.save({"w": torch.ones(2)}, 1, uploader, planner=RefusesToPlan())
        assert isinstance(caught.value, CheckpointException)
        ckpt_async.torch.save({"w": torch.ones(2)}, 1, uploader)


def test_no_thread_is_refused(tmp_path: Path) -> None:
    with (
        Uploader(tmp_path / "folder", f"file://{tmp_path}/remote") as uploader,
        pytest.raises(SettingsError, match="thread_count"),
    ):
        ckpt_async.torch.save({"w": torch.ones(2)}, 1, uploader, thread_count=0)
