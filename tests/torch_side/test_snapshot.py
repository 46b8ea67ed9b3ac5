"""Snapshots of states are equal and independent, share what the original shares, and reuse their memory."""

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckpt_async.errors import FormatError, SettingsError
from ckpt_async.torch import SnapshotBuffers
from ckpt_async.torch.snapshot import MAPPED_BYTES


class Point(NamedTuple):
    x: Any
    y: int


def state_of_training() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameters": list(model.parameters()),
        "rng": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "when": (3, 0.5, timedelta(seconds=2), Path("a")),
        "others": [deque([1, 2]), Counter("aab"), defaultdict(list, {"a": [1]}), {1, 2}, None, True, b"x"],
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        is_like = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return type(a) is type(b) and is_like and a.requires_grad == b.requires_grad and bool((a == b).all())
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_a_snapshot_equals_the_state_and_does_not_follow_it() -> None:
    state = state_of_training()
    before = copy.deepcopy(state)
    taken = SnapshotBuffers().take(state)
    assert equal(taken, state)
    assert taken["model"]._metadata == state["model"]._metadata  # torch.save writes a module's state with it
    with torch.no_grad():
        for each in (*state["model"].values(), *state["parameters"]):
            each.fill_(7)
    state["rng"][2][1][:] = 0
    state["others"][2]["a"].append(2)
    state["optimizer"]["param_groups"][0]["lr"] = 9
    assert equal(taken, before)
    assert not equal(taken, state)


def test_what_shares_memory_shares_it_in_the_snapshot() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"a": base, "row": base[1], "turned": base.t(), "again": base, "list": [base[:, 1:3]]}
    taken = SnapshotBuffers().take(state)
    assert equal(taken, state)
    taken["row"][0] = -1
    assert taken["a"][1, 0] == taken["turned"][0, 1] == taken["again"][1, 0] == -1
    assert taken["again"] is taken["a"]
    assert base[1, 0] == 4


def test_containers_that_hold_themselves_are_copied() -> None:
    state: dict[str, Any] = {"list": [1]}
    state["self"], shared = state, state["list"]
    state["list"].append(shared)
    taken = SnapshotBuffers().take(state)
    assert taken["self"] is taken
    assert taken["list"][1] is taken["list"] is not shared


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(3, 0),
        torch.tensor(5),
        torch.arange(6, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj().imag,
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.arange(6.0).expand(3, 6),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{type(tensor).__name__}",
)
def test_tensors_of_all_sorts_are_copied(tensor: torch.Tensor) -> None:
    taken = SnapshotBuffers().take([tensor])[0]
    assert taken.dtype == tensor.dtype
    assert taken.shape == tensor.shape
    assert torch.equal(taken.detach().to(torch.complex64), tensor.detach().to(torch.complex64))
    assert taken.requires_grad == tensor.requires_grad
    assert type(taken) is type(tensor)


def test_attributes_of_tensors_are_copied() -> None:
    tensor = torch.ones(2)
    tensor.mark = ["decay", torch.ones(1)]  # type: ignore[attr-defined]
    taken = SnapshotBuffers().take([tensor])[0]
    assert taken.mark == tensor.mark  # type: ignore[attr-defined]
    assert taken.mark is not tensor.mark  # type: ignore[attr-defined]


def test_sparse_and_meta_tensors_are_copied_as_they_are() -> None:
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(3, device="meta")
    taken = SnapshotBuffers().take([sparse, meta])
    assert torch.equal(taken[0].to_dense(), torch.eye(3))
    assert taken[1].device.type == "meta"


def test_the_memory_of_one_snapshot_is_that_of_the_next() -> None:
    buffers = SnapshotBuffers()
    state = {"a": torch.ones(1000), "b": torch.ones(1000), "c": torch.ones(10)}
    first = buffers.take(state)
    places = {each.data_ptr() for each in first.values()}
    assert buffers.size_bytes == sum(each.untyped_storage().nbytes() for each in state.values())
    del first
    state["a"] += 1
    second = buffers.take(state)
    assert {each.data_ptr() for each in second.values()} == places
    assert equal(second, state)


def test_without_sharing_only_the_elements_of_each_tensor_are_copied() -> None:
    base = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    image = torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    state = {
        "row": base[1],
        "again": base[1],
        "columns": base[:, 2:5],
        "turned": base[:9].t(),
        "image": image,
    }
    buffers = SnapshotBuffers()
    for _ in range(2):
        taken = buffers.take(state, keeps_sharing=False)
        assert all(torch.equal(taken[key], each) for key, each in state.items())
        assert taken["image"].stride() == image.stride()
        assert taken["turned"].stride() == state["turned"].stride()
        assert taken["row"].data_ptr() == taken["again"].data_ptr() != base[1].data_ptr()
        num_elements = 1024 + 3 * 1024 + 9 * 1024 + image.numel()
        assert buffers.size_bytes == 4 * num_elements
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in taken.values())


@pytest.mark.parametrize("size_bytes", [0, 1, MAPPED_BYTES - 1, MAPPED_BYTES, 3 * MAPPED_BYTES + 5])
def test_memory_of_any_size_is_kept_and_let_go(size_bytes: int) -> None:
    buffers, tensor = SnapshotBuffers(), torch.randint(0, 255, (size_bytes,), dtype=torch.uint8)
    first = buffers.take([tensor])[0]
    assert torch.equal(first, tensor)
    place = first.data_ptr()
    assert buffers.take([tensor])[0].data_ptr() == place
    assert buffers.size_bytes == size_bytes
    last = buffers.take([tensor])[0]
    del buffers
    assert torch.equal(last, tensor)  # still mapped


class Marked(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:Lazy modules")
@pytest.mark.parametrize("keeps_sharing", [True, False])
def test_tensors_that_cannot_be_deep_copied_are_copied(keeps_sharing: bool) -> None:
    state = {
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "marked": torch.ones(2).as_subclass(Marked),
    }
    parts = {
        "csr": lambda each: each.to_dense(),
        "nested": lambda each: torch.cat(each.unbind()),
        "jagged": lambda each: torch.cat(each.unbind()),
        "marked": torch.Tensor.clone,
    }
    taken = SnapshotBuffers().take(state, keeps_sharing=keeps_sharing)
    before = {key: parts[key](each).clone() for key, each in state.items()}
    for each in state.values():
        each.mul_(2)
    for key, each in taken.items():
        assert type(each) is type(state[key])
        assert torch.equal(parts[key](each), before[key])
        assert not torch.equal(parts[key](each), parts[key](state[key]))
    lazy = torch.nn.LazyLinear(3).weight
    assert type(SnapshotBuffers().take([lazy])[0]) is type(lazy)


def test_keys_and_attributes_of_dicts_do_not_follow_the_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    ordered: Any = OrderedDict(x=torch.ones(2))
    ordered.extra = torch.ones(2)
    taken = SnapshotBuffers().take({"of": {weight: 1}, "weights": [weight], "ordered": ordered})
    with torch.no_grad():
        weight.fill_(2)
        ordered.extra.fill_(2)
    (key,) = taken["of"]
    assert key is taken["weights"][0]
    assert torch.equal(key, torch.ones(2))
    assert torch.equal(taken["ordered"].extra, torch.ones(2))
    assert torch.equal(ordered.extra, torch.full((2,), 2.0))


def test_what_makes_torch_fail_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda *_args, **_options: torch.ones(1).nothing)  # type: ignore[attr-defined]
    with pytest.raises(FormatError, match=r"'state/a/0' is a torch\.Tensor that cannot be copied"):
        SnapshotBuffers().take({"a": [torch.ones(2)]})


def test_buffers_that_are_still_read_are_not_overwritten() -> None:
    buffers = SnapshotBuffers()
    taken = buffers.take([torch.ones(2)])
    buffers.reader = Future()
    with pytest.raises(SettingsError, match="still reads"):
        buffers.take([torch.zeros(2)])
    assert torch.equal(taken[0], torch.ones(2))
    buffers.reader.set_result(None)
    assert torch.equal(buffers.take([torch.zeros(2)])[0], torch.zeros(2))


def test_memory_of_another_shape_is_let_go() -> None:
    buffers = SnapshotBuffers()
    buffers.take({"a": torch.ones(1 << 20)})
    buffers.take({"a": torch.ones(10)})
    assert buffers.size_bytes == 40


def test_objects_are_copied_and_what_cannot_be_is_named() -> None:
    taken = SnapshotBuffers().take(OrderedDict(p=Point(torch.ones(1), 2)))
    assert taken["p"].x == torch.ones(1)
    assert type(taken["p"]) is Point
    with pytest.raises(FormatError, match=r"'state/a/1' is a builtins\.generator") as caught:
        SnapshotBuffers().take({"a": [0, (each for each in ())]})
    assert "leave it out" in str(caught.value)
    assert "only if it can be pickled, blocking=True" in str(caught.value)  # which a generator cannot


@pytest.mark.parametrize("keeps_sharing", [True, False])
def test_tensors_that_are_conjugated_lazily_are_not_mixed(keeps_sharing: bool) -> None:
    """Each is computed into memory of its own, which the next one must not get while that is being copied."""
    state = [torch.full((1000,), complex(at, at)).conj() for at in range(8)]
    assert equal(SnapshotBuffers().take(state, keeps_sharing=keeps_sharing), state)


def test_two_views_that_begin_at_the_same_element_are_two() -> None:
    matrix = torch.arange(16).reshape(4, 4)
    state = [matrix[:2, :2], matrix.reshape(8, 2)[:2]]
    first, second = SnapshotBuffers().take(state, keeps_sharing=False)
    assert (first.tolist(), second.tolist()) == ([[0, 1], [4, 5]], [[0, 1], [2, 3]])
