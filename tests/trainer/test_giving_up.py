"""What a trainer is told about checkpoints that are given up, and which mistakes must not end training."""

import asyncio
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from ckpt_async import CheckpointAbortedError, InvalidShardError, Uploader, UploadFailedError
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Failed
from ckpt_async.core.records import decode_decision
from ckpt_async.errors import FailureReason, InvalidNameError, StoreError
from ckpt_async.local import folder as folder_module
from ckpt_async.transfer import ahead
from tests.stores.misbehaving import Meddled
from tests.trainer.uploads import Open, decisions, save, wait_until, write


@pytest.mark.fault("F51")
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_contradicting_ranks_raise_on_all_ranks(opened: Open, tmp_path: Path, on_error: str) -> None:
    """If nobody calls `wait`, every checkpoint could be given up while training still ends successfully."""
    store = Meddled()
    more = {"world_size": 2, "generation": 1, "on_error": on_error}
    with (
        opened(store, tmp_path / "0", rank=0, **more) as first,
        opened(store, tmp_path / "1", rank=1, **more) as second,
    ):
        for rank, uploader in enumerate((first, second)):
            uploader.enqueue(write(uploader, f"step-1/rank-{rank}/model.pt", b"x" * (1000 + rank)), 1)
            uploader.seal(1)
        for uploader in (first, second):
            wait_until(lambda uploader=uploader: bool(uploader._engine.view().failures), uploader)
            if on_error == "raise":
                with pytest.raises(UploadFailedError, match=r"both wrote") as caught:
                    uploader.raise_failures()
                assert str(caught.value).count("(") == 1, "one hint"
                assert caught.value.hint.endswith("later checkpoints are not affected")
            uploader.raise_failures()  # raised once
            with pytest.raises(CheckpointAbortedError, match="both wrote"):
                uploader.wait(1, timeout_s=10)


@pytest.mark.fault("F51")
def test_an_error_raised_by_wait_is_not_raised_again(opened: Open) -> None:
    """A trainer that handles the error and continues must not be stopped by the next save."""
    with opened(Meddled()) as uploader:
        uploader.seal(1)
        with pytest.raises(CheckpointAbortedError, match="no rank enqueued a shard"):
            uploader.wait(1, timeout_s=10)
        wait_until(lambda: bool(uploader._engine.view().failures), uploader)
        uploader.raise_failures()


def test_a_checkpoint_without_shards_is_never_committed(opened: Open) -> None:
    """If `enqueue` raises and the trainer still calls `seal`, retention would otherwise remove the last good
    checkpoint.
    """
    store = Meddled()
    with opened(store, on_error="warn") as uploader:
        uploader.enqueue(write(uploader, "step-1/a.pt", b"x"), 1)
        uploader.seal(1)
        uploader.seal(2)
        uploader.wait(1, timeout_s=10)
        with pytest.raises(CheckpointAbortedError, match="no rank enqueued a shard"):
            uploader.wait(2, timeout_s=10)
    assert {id_.step: outcome for id_, outcome in decisions(store).items()} == {1: "commit", 2: "abort"}


def test_a_checkpoint_that_lacks_what_is_expected_is_never_committed(opened: Open) -> None:
    """The rank that knows which files make up the checkpoint does not know which rank has them."""
    store = Meddled()
    with opened(store, on_error="warn") as uploader:
        for step in (1, 2):
            uploader.enqueue(write(uploader, f"step-{step}/a.pt", b"x"), step)
        uploader.seal(1, expected=["a.pt"])
        uploader.seal(2, expected=["b.pt", "a.pt"])
        uploader.wait(1, timeout_s=10)
        with pytest.raises(CheckpointAbortedError, match=r"rank 0 expects b\.pt, which no rank has"):
            uploader.wait(2, timeout_s=10)
        with pytest.raises(InvalidNameError, match="must be a collection of names"):
            uploader.seal(3, expected="a.pt")
    assert {id_.step: outcome for id_, outcome in decisions(store).items()} == {1: "commit", 2: "abort"}


def test_numbers_of_other_libraries_are_accepted_and_non_finite_metrics_rejected(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss of NaN must not end the training that has to be told about it."""
    store = Meddled()
    with opened(store) as uploader, caplog.at_level(logging.WARNING, "ckpt_async"):
        step = np.int64(3)
        uploader.enqueue(write(uploader, "step-3/a.pt", b"x"), step)
        losses = {
            "loss": np.float32(0.5),
            "zero_d": np.array(2.0),
            "worst": float("inf"),
            "bad": float("nan"),
        }
        uploader.seal(step, metrics=losses)
        uploader.wait(step, timeout_s=10)
    (id_,) = decisions(store)
    decided = decode_decision(store.bucket.objects[keys.decision_key(id_)].data, id_)
    assert decided.metrics == (("loss", 0.5), ("zero_d", 2.0))
    left_out = {each.args[1] for each in caplog.records if "metric_left_out" in each.msg and each.args}
    assert left_out == {"worst", "bad"}


@pytest.mark.parametrize(
    "value",
    [
        "0.5",
        b"1",
        True,
        None,
        [1, 2],
        {},
        pytest.param(10**400, id="huge"),
        pytest.param(10**5000, id="more"),
    ],
)
def test_a_metric_that_is_not_a_number_is_rejected(opened: Open, value: Any) -> None:
    with opened(Meddled()) as uploader, pytest.raises(InvalidNameError, match="is not a name with a number"):
        uploader.seal(1, metrics={"loss": value})


@pytest.mark.parametrize("step", [True, 1.0, "1", -1, None])
def test_an_invalid_step_is_rejected(opened: Open, step: Any) -> None:
    with opened(Meddled()) as uploader, pytest.raises(InvalidNameError, match="must be a whole number"):
        uploader.seal(step)


def counter(uploader: Uploader, name: str) -> float:
    lines = generate_latest(uploader.metrics.registry).decode().splitlines()
    return sum(float(each.split()[-1]) for each in lines if each.startswith(f"ckpt_async_{name}_total"))


def test_a_checkpoint_that_was_given_up_does_not_come_back_with_the_next_enqueue(opened: Open) -> None:
    """Its trainer may not know yet, and enqueue the rest, which would be uploaded for nothing and counted twice."""

    class Changing(Meddled):
        async def before(self, operation: str, key: str) -> None:
            if key.endswith("a.pt"):
                path.write_bytes(b"changed in place")

    store = Changing()
    with opened(store, on_error="warn") as uploader:
        path = write(uploader, "step-1/a.pt", b"first")
        uploader.enqueue(path, 1)
        view = uploader._engine.view()
        wait_until(lambda: bool(view.outcomes) and view.num_due == 0, uploader)
        uploader.enqueue(write(uploader, "step-1/b.pt"), 1)
        uploader.seal(1)
        wait_until(lambda: CheckpointId(1, 1) not in uploader._engine.view().local.checkpoints, uploader)
        with pytest.raises(CheckpointAbortedError, match="changed"):
            uploader.wait(1, timeout_s=10)
        save(uploader, 2, "c.pt")
        uploader.wait(2, timeout_s=10)
        assert counter(uploader, "checkpoints_aborted") == 1
        spool = uploader.folder / ".ckpt-async/spool"
        assert not [name for _, _, names in os.walk(spool) for name in names if name == "b.pt"]
    assert decisions(store) == {CheckpointId(1, 1): "abort", CheckpointId(1, 2): "commit"}
    assert not [
        key for _, key in store.asked if key.endswith(("step-1.g1/b.pt", "000001-000000000001/00000.json"))
    ]


def test_a_file_that_is_given_up_while_a_part_is_on_its_way_leaves_nothing(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time the part has arrived, the checkpoint is settled and forgotten."""
    part_bytes = 5 << 20
    monkeypatch.setattr(ahead, "PART_BYTES", part_bytes)

    class Slow(Meddled):
        def __init__(self) -> None:
            super().__init__()
            self.may_arrive = asyncio.Event()

        async def before(self, operation: str, key: str) -> None:
            if operation == "put_part":
                await self.may_arrive.wait()

    store = Slow()
    with opened(store, on_error="warn", part_size_bytes=part_bytes) as uploader:
        file = uploader.open(1, "big.bin")
        file.write(b"x" * 2 * part_bytes)
        file.flush()
        wait_until(lambda: ("put_part", "ckpt/step-1.g1/big.bin") in store.asked, uploader)
        file.abandon()
        uploader.seal(1)  # with no shard, so it is given up
        wait_until(lambda: CheckpointId(1, 1) not in uploader._engine.view().local.checkpoints, uploader)
        uploader._engine.runner.engine.state.loop.call_soon_threadsafe(store.may_arrive.set)
        wait_until(lambda: ("abort_multipart", "ckpt/step-1.g1/big.bin") in store.asked, uploader)
        save(uploader, 2)
        uploader.wait(2, timeout_s=10)
        assert counter(uploader, "engine_restarts") == 0
    assert not store.bucket.uploads


@pytest.mark.parametrize("names", [("x", "x/y"), ("x/y", "x"), ("x/y/z", "x/y")])
def test_a_shard_is_not_the_folder_of_another(opened: Open, names: tuple[str, str]) -> None:
    with opened(Meddled()) as uploader:
        for number, name in enumerate(names):
            folder = uploader.folder / str(number)
            write(uploader, f"{number}/{name}")
            if number:
                with pytest.raises(
                    InvalidShardError, match=r"'x(/y)?' .* cannot also be the folder of other"
                ):
                    uploader.enqueue(folder, 1)
            else:
                uploader.enqueue(folder, 1)


@pytest.mark.parametrize("failing", [keys.BOUNDARY, keys.GENERATIONS])
def test_a_commit_whose_last_requests_fail_still_moves_latest(opened: Open, failing: str) -> None:
    """The decision is in the store by then. The next attempt must not take it for another process's."""

    class Late(Meddled):
        num_failures = 0

        async def before(self, operation: str, key: str) -> None:
            is_late = CheckpointId(1, 2) in decisions(self) and self.num_failures < 3
            if is_late and key.startswith(failing):
                self.num_failures += 1
                raise StoreError("503", reason=FailureReason.OTHER, operation=operation, key=key)

    store = Late()
    with opened(store) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        save(uploader, 2)
        uploader.wait(2, timeout_s=10)
    assert store.num_failures == 3
    assert json.loads(store.bucket.objects[keys.LATEST].data)["step"] == 2


def test_a_link_is_made_again_if_the_engine_has_just_removed_the_spool_s_folder(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there, so the trainer must not be told that it does not exist."""
    link, num_removed = folder_module._link, 0

    def removed(name: str, parent: int, target: str) -> bool:
        nonlocal num_removed
        if num_removed < 3:
            num_removed += 1
            shutil.rmtree(Path(target).parent)
        return link(name, parent, target)

    monkeypatch.setattr(folder_module, "_link", removed)
    store = Meddled()
    with opened(store) as uploader:
        save(uploader, 1, "a.pt")
        with pytest.raises(InvalidShardError, match="does not exist"):
            uploader.enqueue(uploader.folder / "missing.pt", 2)
    assert (num_removed, decisions(store)) == (3, {CheckpointId(1, 1): "commit"})


class LateAnswer(Meddled):
    """A store in which a request for a decision is answered only once there is one, if that `is_late`."""

    is_late, is_held, num_answered = False, False, 0

    async def before(self, operation: str, key: str) -> None:
        if operation == "get" and key.startswith(keys.DECISIONS) and self.is_late:
            self.is_held = True
            while not self.keys(keys.DECISIONS):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)  # until the engine knows it

    async def after(self, operation: str, key: str) -> None:
        self.num_answered += operation == "get" and key.startswith(keys.DECISIONS)


def test_a_checkpoint_that_is_given_up_while_the_engine_looks_for_its_decision_is_told_once(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = LateAnswer()
    with opened(store, rank=0, world_size=2, generation=1, on_error="warn") as uploader:
        store.is_late = True
        save(uploader, 1)
        wait_until(lambda: store.is_held, uploader)
        id_ = CheckpointId(1, 1)
        uploader._engine.record(Failed(id_, "", FailureReason.SOURCE_MISSING, "by the test"))
        with pytest.raises(CheckpointAbortedError, match="by the test"):
            uploader.wait(1, timeout_s=10)
        wait_until(lambda: store.num_answered == store.asked["get", keys.decision_key(id_)], uploader)
        save(uploader, 2)  # the engine goes on
        wait_until(lambda: bool(store.keys(keys.receipts_prefix(CheckpointId(1, 2)))), uploader)
    told = [each.getMessage() for each in caplog.records if "checkpoint_aborted" in each.getMessage()]
    assert len(told) == 1
    assert uploader.metrics.total("ckpt_async_checkpoints_aborted_total") == {store.url: 1}
