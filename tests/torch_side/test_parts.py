"""A trainer's state is captured from its parts, and put back into other parts of the same kind."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async.errors import FormatError, SettingsError, StateMismatchError
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


def moved(optimizer: torch.optim.Optimizer) -> None:
    """Take one step, so that it has moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def with_moments_reshaped(state: dict[str, Any]) -> dict[str, Any]:
    for values in state["optimizer"]["state"].values():
        values["exp_avg"] = torch.ones(1)
    return state


def with_moments_reversed(state: dict[str, Any]) -> dict[str, Any]:
    values = state["optimizer"]["state"]
    state["optimizer"]["state"] = dict(zip(values, reversed(values.values()), strict=True))
    return state


def with_other_names(state: dict[str, Any]) -> dict[str, Any]:
    state["optimizer"]["param_groups"][0]["param_names"].reverse()
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state | {"optimizer": {"a": 1}}, "not an optimizer's"),
        (lambda state: state | {"optimizer": None}, "not an optimizer's"),
        (
            lambda state: state["optimizer"]["param_groups"].append({"params": []}) or state,
            "2 groups .* for 1",
        ),
        (
            lambda state: state["optimizer"]["param_groups"][0]["params"].pop() and state,
            "3 parameters .* for 4",
        ),
        (with_moments_reshaped, r"exp_avg \(1,\) for \(4, 4\)"),
        (with_moments_reversed, r"exp_avg \(4,\) for \(4, 4\)"),
        (with_other_names, "another order"),
    ],
)
def test_an_optimizer_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    model, _, _ = trained()
    optimizer = torch.optim.AdamW(model.named_parameters())
    moved(optimizer)
    state = change(copy.deepcopy(capture(model=model, optimizer=optimizer)))
    other, _, _ = trained()
    others = torch.optim.AdamW(other.named_parameters())
    before = copy.deepcopy((other.state_dict(), others.state_dict()))
    with pytest.raises(StateMismatchError, match=message):
        restore(state, model=other, optimizer=others)
    assert is_same((other.state_dict(), others.state_dict()), before)


def test_names_of_a_compiled_model_are_no_other_order() -> None:
    model, _, _ = trained()
    optimizers = [
        torch.optim.AdamW(each.named_parameters()) for each in (model, torch.compile(model, backend="eager"))
    ]
    moved(optimizers[0])
    restore(capture(optimizer=optimizers[0]), optimizer=optimizers[1])
    assert is_same(optimizers[1].state_dict()["state"], optimizers[0].state_dict()["state"])


def test_without_strict_an_optimizer_that_does_not_fit_is_left(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = trained()
    state = with_moments_reshaped(copy.deepcopy(capture(model=model, optimizer=optimizer)))
    other, others, _ = trained()
    before = copy.deepcopy(others.state_dict())
    with caplog.at_level(logging.WARNING):
        restore(state, strict=False, model=other, optimizer=others)
    assert is_same(dict(other.state_dict()), dict(model.state_dict()))
    assert is_same(others.state_dict(), before)
    assert any("state_does_not_fit part=optimizer" in each.getMessage() for each in caplog.records)


def test_moments_of_any_shape_are_the_optimizers_own_affair() -> None:
    """Of those that factor or quantize them, and of those that keep them once for all parameters."""
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop, torch.optim.SGD):
        parts = []
        for _ in range(2):
            model = torch.nn.Linear(3, 2)
            optimizer = kind(model.parameters())
            moved(optimizer) if kind is not torch.optim.LBFGS else optimizer.step(
                lambda model=model: model(torch.ones(1, 3)).sum()
            )
            parts.append((model, optimizer))
        restore(capture(optimizer=parts[0][1]), optimizer=parts[1][1])
        assert is_same(parts[1][1].state_dict()["state"], parts[0][1].state_dict()["state"])


@pytest.mark.parametrize("wrong", [None, {"position": 3}, [1]])
def test_another_part_that_takes_no_such_state_changes_no_model(wrong: Any) -> None:
    model, optimizer, _ = trained()
    state = capture(model=model, optimizer=optimizer) | {"loader": wrong}
    other, others, _ = trained()
    before = copy.deepcopy((other.state_dict(), others.state_dict()))
    with pytest.raises(StateMismatchError, match="loader does not take its state"):
        restore(state, model=other, optimizer=others, loader=Loader())
    with pytest.raises(StateMismatchError, match="loader has the parts"):
        restore(state | {"loader": 3}, model=other, loader=[Loader()])
    assert is_same((other.state_dict(), others.state_dict()), before)


def test_a_value_that_is_no_tensor_changes_no_model() -> None:
    model, _, _ = trained()
    state = capture(model=model)
    state["model"] = {**state["model"], "1.bias": 3}
    loader, before = Loader(1), copy.deepcopy(model.state_dict())
    with pytest.raises(StateMismatchError, match=r"1\.bias int for \(4,\)"):
        restore(state | {"loader": {"at": 2}}, loader=loader, model=model)
    assert (loader.at, is_same(model.state_dict(), before)) == (1, True)


def test_random_numbers_that_are_none_change_no_model() -> None:
    model, _, _ = trained()
    other, _, _ = trained()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(FormatError, match="random number generators"):
        restore(capture(model=model) | {"rng": {"torch": 3}}, model=other)
    assert is_same(other.state_dict(), before)


class Average:
    """An average of the weights, which keeps the tensors that it is given, as such classes do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = [each.detach().clone() for each in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


class Noted(torch.nn.Linear):
    """A model with a state beside its tensors."""

    notes: list[int]

    def get_extra_state(self) -> list[int]:
        return self.notes

    def set_extra_state(self, state: list[int]) -> None:
        self.notes = state


def test_training_does_not_change_the_state_that_was_restored() -> None:
    model = Noted(2, 2)
    model.notes = [1]
    optimizer, average = torch.optim.AdamW(model.parameters()), Average(model)
    moved(optimizer)
    state = capture(model=model, optimizer=optimizer, average=average)
    state = copy.deepcopy(state)
    before = copy.deepcopy(state)
    restore(state, model=model, optimizer=optimizer, average=average)
    moved(optimizer)
    model.notes.append(2)
    for weights in average.weights:
        weights.mul_(0.5)
    assert is_same(state, before)


def test_no_state_is_said_to_be_none() -> None:
    with pytest.raises(
        StateMismatchError, match=r"^state=None is not what `capture` returned.*a fresh start"
    ):
        restore(None, model=torch.nn.Linear(1, 1))  # what `load_latest` returns before the first save
