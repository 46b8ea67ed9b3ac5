"""Snapshots of a GPU's tensors: the bytes of that moment, in page-locked memory of exactly their size."""

import os
from typing import Any

import pytest
import torch

from ckpt_async.torch import SnapshotBuffers, capture_rng, restore_rng, snapshot

GPU = torch.device("cuda")


def state_on_gpu() -> dict[str, Any]:
    base = torch.randn(3 << 18, device=GPU)
    model = torch.nn.Linear(1200, 1000, device=GPU, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(8, 1200, device=GPU, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameters": list(model.parameters()),
        "shared": [base, base[7:9000], base.view(3, 1 << 18).t()],
        "conj": torch.randn(300, device=GPU, dtype=torch.complex64).conj(),
        "fp8": torch.randn(5000, device=GPU).to(torch.float8_e4m3fn),
        "channels_last": torch.randn(8, 16, 50, 50, device=GPU).contiguous(memory_format=torch.channels_last),
        "strided": torch.randn(2000, 900, device=GPU)[::2, 3:700],
        "empty": torch.empty(0, device=GPU),
        "scalar": torch.tensor(3.5, device=GPU),
        "cpu": torch.randn(1 << 19),
        "rng": capture_rng(),
        "number": 5,
    }


def flat(value: Any, key: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, list | tuple):
        value = list(enumerate(value))
    else:
        return {key: value} if isinstance(value, torch.Tensor) else {}
    return {place: each for name, part in value for place, each in flat(part, f"{key}/{name}").items()}


def words(tensor: torch.Tensor) -> bytes:
    found = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return bytes(found.cpu().numpy().tobytes())


@pytest.mark.parametrize("keeps_sharing", [True, False])
def test_a_snapshot_has_the_bytes_of_its_moment(keeps_sharing: bool) -> None:
    buffers, state = SnapshotBuffers(), state_on_gpu()
    for _ in range(3):  # the first allocates, and the others reuse
        slow = torch.randn(4096, 4096, device=GPU)
        for _ in range(50):
            slow = slow @ slow.softmax(0)
        with torch.no_grad():  # queued behind all that: a copy that does not wait for it has other bytes
            for each in flat(state).values():
                if each.is_floating_point() and each.dtype is not torch.float8_e4m3fn:
                    each.add_(1)
        taken = buffers.take(state, keeps_sharing=keeps_sharing)
        found = {key: words(each) for key, each in flat(taken).items()}
        assert found == {key: words(each) for key, each in flat(state).items()}
        assert all(each.device.type == "cpu" for each in flat(taken).values())
        with torch.no_grad():
            for each in flat(state).values():
                each.zero_() if not each.is_conj() else each.imag.fill_(0)
        torch.cuda.synchronize()
        assert {key: words(each) for key, each in flat(taken).items()} == found
        state = state_on_gpu()


def test_large_tensors_are_copied_into_page_locked_memory_of_their_size() -> None:
    buffers = SnapshotBuffers()
    tensor = torch.randn((snapshot.MAPPED_BYTES * 33 // 32) // 4, device=GPU)
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    taken = buffers.take({"a": tensor, "cpu": torch.randn(1 << 20)})
    assert taken["a"].is_pinned()
    assert not taken["cpu"].is_pinned()
    assert buffers.size_bytes == tensor.nbytes + (4 << 20)
    # torch would have rounded it up to a power of two.
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    place = taken["a"].data_ptr()
    del taken
    assert buffers.take({"a": tensor})["a"].data_ptr() == place
    buffers.take({})
    assert buffers.size_bytes == 0


def test_memory_that_cannot_be_page_locked_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = snapshot._is_page_locked_now

    def lock_twice(tensor: torch.Tensor) -> bool:
        assert lock(tensor)
        return lock(tensor)  # CUDA refuses: it is locked already

    monkeypatch.setattr(snapshot, "_is_page_locked_now", lock_twice)
    tensor = torch.randn(1 << 20, device=GPU)
    buffers = SnapshotBuffers()
    taken = buffers.take([tensor])[0]
    (tensor * 2).sum().item()  # CUDA's error is not left for training
    assert torch.equal(taken, tensor.cpu())
    torch.cuda.cudart().cudaHostUnregister(taken.data_ptr())  # type: ignore[no-untyped-call]


def test_a_forked_child_does_not_copy_page_locked_memory() -> None:
    buffers = SnapshotBuffers()
    taken = buffers.take([torch.ones(1 << 26, device=GPU)])[0]
    place = taken.data_ptr()
    if (pid := os.fork()) == 0:
        with open("/proc/self/maps") as maps:
            ranges = [[int(each, 16) for each in line.split()[0].split("-")] for line in maps]
        os._exit(any(first <= place < last for first, last in ranges))
    assert os.waitpid(pid, 0)[1] == 0
    assert int(taken.sum()) == 1 << 26


def test_random_numbers_of_the_gpu_go_on_where_they_were_captured() -> None:
    torch.cuda.manual_seed(5)
    torch.randn(3, device=GPU)
    state = capture_rng()
    expected = torch.randn(100, device=GPU)
    torch.cuda.manual_seed(6)
    assert restore_rng(state)
    assert torch.equal(torch.randn(100, device=GPU), expected)
