"""A trainer's state is captured from its parts, and put back into other parts of the same kind."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async.errors import SettingsError, StateMismatchError
from ckpt_async.torch import capture, dump, load, restore
from tests.torch_side.states import is_same, trained


class Loader:
    """A data loader that knows its position."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.rand(3, 4)).pow(2).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = capture(**parts, dataloader=Loader(7), step=42, name="run", timestamp={"epoch": 1})
    dump(state, tmp_path / "a.pt")
    expected = train(**parts)
    model, optimizer, scheduler = trained()
    loader = Loader()
    rest = restore(
        load(tmp_path / "a.pt"), model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader
    )
    assert rest == {"step": 42, "name": "run", "timestamp": {"epoch": 1}}
    assert loader.at == 7
    assert train(model, optimizer, scheduler) == expected


def test_random_numbers_are_captured_unless_they_are_not_wanted() -> None:
    assert capture(step=1).keys() == {"rng", "step"}
    assert capture(rng=False, step=1) == {"step": 1}
    state = capture(step=1)
    expected = torch.rand(1)
    assert restore(state) == {"step": 1}
    assert torch.rand(1) == expected
    assert restore(state, rng=False).keys() == {"step", "rng"}
    assert torch.rand(1) != expected


def test_several_parts_of_a_kind_go_together() -> None:
    loaders = {"train": Loader(1), "eval": [Loader(2), Loader(3)]}
    state = capture(loaders=loaders, losses=[0.5], nothing=None, empty=[])
    assert state["loaders"] == {"train": {"at": 1}, "eval": [{"at": 2}, {"at": 3}]}
    assert (state["losses"], state["nothing"], state["empty"]) == ([0.5], None, [])
    others = {"train": Loader(), "eval": (Loader(), Loader())}
    assert restore(state, loaders=others).keys() == {"losses", "nothing", "empty"}
    assert capture(rng=False, loaders=others) == {"loaders": state["loaders"]}
    with pytest.raises(StateMismatchError, match="loaders/eval has the parts"):
        restore(state, loaders={"train": Loader(), "eval": [Loader()]})
    with pytest.raises(SettingsError, match="losses has no load_state_dict"):
        restore(state, losses=[])


def test_wrapped_models_have_the_keys_of_the_model() -> None:
    model, _, _ = trained()
    wrapped = torch.compile(torch.nn.DataParallel(model), backend="eager")
    assert capture(model=wrapped)["model"].keys() == model.state_dict().keys()
    other, _, _ = trained()
    restore(capture(model=model), model=torch.nn.DataParallel(other))
    assert is_same(dict(other.state_dict()), dict(model.state_dict()))


def test_what_does_not_fit_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = trained()
    state = capture(model=torch.nn.Linear(4, 4), optimizer=optimizer, loader=Loader(3))
    loader, before = Loader(), {key: each.clone() for key, each in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=r"does not fit model: .*missing: 0\.bias.*strict=False"):
        restore(state, loader=loader, model=model)
    with pytest.raises(StateMismatchError, match=r"has no 'sampler': it has model, optimizer, loader, rng"):
        restore(state, loader=loader, sampler=Loader())
    with pytest.raises(StateMismatchError, match="a Tensor as 'model', not a model's"):
        restore({"model": torch.ones(1), "loader": {}}, loader=loader, model=model, strict=False)
    assert loader.at == 0
    assert is_same(dict(model.state_dict()), before)
    with caplog.at_level(logging.WARNING):
        restore(state, model=model, sampler=loader, strict=False)
    messages = [each.getMessage() for each in caplog.records]
    assert any(each.startswith("state_does_not_fit part=model") for each in messages)
    assert "part_not_in_state name=sampler; left as it is" in messages


def test_no_state_is_said_to_be_none() -> None:
    with pytest.raises(
        StateMismatchError, match=r"^state=None is not what `capture` returned.*a fresh start"
    ):
        restore(None, model=torch.nn.Linear(1, 1))  # what `load_latest` returns before the first save
