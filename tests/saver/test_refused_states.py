"""What a saver writes but `load_latest` refuses: the log says so when it is saved, and how to load it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_async.errors import UnsafePickleError
from ckpt_async.saver import CheckpointSaver
from tests.torch_side import states

Open = Callable[..., CheckpointSaver]


class Sub(torch.Tensor):
    pass


ALLOWED = {
    "a class": (states.Point(1, 2), "tests.torch_side.states.Point"),
    "an enum": (states.Stage.DECAY, "tests.torch_side.states.Stage"),
    "a class that is spelled as in Python 2": (slice(1, 2), "builtins.slice"),
    "a generator of torch": (torch.Generator(), "torch._C.Generator"),
    "a class as a key": ({states.Stage.DECAY: 1}, "tests.torch_side.states.Stage"),
}
REFUSED = {
    "a function": np.random.default_rng(1),
    "a constant": ...,
    "an array with fields": np.zeros(2, dtype=[("a", "i4")]),
    "an array of objects": np.array([None]),
    "a tensor without data": torch.empty(3, device="meta"),
    "a subclass of torch.Tensor": torch.ones(1).as_subclass(Sub),
    "a storage": torch.ones(4).untyped_storage(),
    "a parameter as a key": {torch.nn.Parameter(torch.ones(1)): 1},
    "a default of another kind": collections.defaultdict(states.trained),
}


@pytest.fixture
def open_saver(tmp_path: Path) -> Open:
    def open_(remote: str | None = f"file://{tmp_path}/remote", **options: Any) -> CheckpointSaver:
        return CheckpointSaver(tmp_path / "local", remote, **{"save_interval": "1ba", **options})

    return open_


def told(log: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in log.records if "refused_by_load" in each.getMessage()]


@pytest.mark.parametrize("case", ALLOWED)
def test_what_allow_would_load_is_told_when_it_is_saved(
    open_saver: Open, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    value, name = ALLOWED[case]
    with open_saver() as saver:
        for batch in (1, 2, 3):
            saver.step({"weights": torch.ones(1), "mine": [{"value": value}]}, batch)
        saver.wait()
        (message,) = told(caplog)
        assert "key=mine/0/value file=ep0-ba1-rank0.pt" in message
        assert f"allow=[{name!r}]" in message
        assert "ignore_keys=['mine/0/value']" in message
        with pytest.raises(UnsafePickleError) as refused:
            saver.load_latest()
        assert f"allow=[{name!r}]" in str(refused.value)
        assert "weights_only=False" in str(refused.value)
        assert saver.load_latest(allow=[name])["weights"] == 1


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("is_local", [False, True])
def test_what_only_an_unrestricted_reader_loads_is_told_when_it_is_saved(
    open_saver: Open, tmp_path: Path, case: str, is_local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    value = REFUSED[case]
    options = {"remote": None} if is_local else {}
    with open_saver(**options) as saver:
        saver.step({"weights": torch.ones(1)}, 1)
        saver.step({"weights": torch.ones(1), "value": value}, 2)
        saver.wait()
        (message,) = told(caplog)
        with pytest.raises(UnsafePickleError) as refused:
            saver.load_latest()
        for each in (message, str(refused.value)):
            assert "weights_only=False" in each
            assert "allow=" not in each
        assert "key=value file=ep0-ba2-rank0.pt" in message
        assert saver.load_latest(weights_only=False)["weights"] == 1
    with open_saver(**options, ignore_keys=["value"]) as saver:  # as the message says
        saver.step({"weights": torch.full((1,), 3.0), "value": value}, 3)
        saver.wait()
        assert saver.load_latest()["weights"] == 3


def test_of_what_loads_nothing_is_told(open_saver: Open, caplog: pytest.LogCaptureFixture) -> None:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    state = {
        "composer": states.composer_state(),
        "olmo": states.olmo_state(),
        "all": states.everything(),
        "list": holds_itself,
        "sparse": torch.eye(3).to_sparse(),
        "small": torch.ones(3, dtype=torch.uint16),
    }
    with open_saver() as saver:
        saver.step(state, 1)
        saver.wait()
        assert saver.load_latest().keys() == state.keys()
    assert told(caplog) == []


def test_a_file_of_tensors_alone_is_not_looked_at(open_saver: Open, caplog: pytest.LogCaptureFixture) -> None:
    with open_saver(filename="ba{batch}.safetensors") as saver:
        saver.step({"weights": torch.ones(1).as_subclass(Sub)}, 1)
        saver.wait()
        assert saver.load_latest()["weights"] == 1
    assert told(caplog) == []


class Pickled:
    """Counts how often it is pickled; from the `last`-th time on, that fails."""

    def __init__(self, last: int) -> None:
        self.count, self.last = 0, last

    def __reduce__(self) -> tuple[Any, ...]:
        self.count += 1
        if self.count > self.last:
            raise RuntimeError("once too often")
        return states.trained, ()


def test_a_kind_is_looked_at_once(open_saver: Open, caplog: pytest.LogCaptureFixture) -> None:
    value = Pickled(100)
    with open_saver(blocking=True) as saver:  # without the copy, which would pickle it, too
        for batch in (1, 2, 3):
            saver.step({"value": value, "again": [value]}, batch)
    assert value.count == 3 + 1
    assert len(told(caplog)) == 1


class Hostile(Pickled):
    @property
    def dtype(self) -> Any:
        raise RuntimeError("do not ask")


@pytest.mark.parametrize("kind", [Pickled, Hostile])
def test_what_cannot_be_looked_at_is_saved(open_saver: Open, kind: type[Pickled]) -> None:
    with open_saver(blocking=True) as saver:
        saver.step({"value": kind(1)}, 1)
        saver.wait()
        assert saver.load_latest(weights_only=False).keys() == {"value"}
