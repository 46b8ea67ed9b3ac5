"""Random number generators continue where they were, whichever trainer saved their state."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_async.errors import FormatError
from ckpt_async.torch import (
    capture_rng,
    dump,
    load,
    load_rng_state,
    ranks_with_rng,
    restore_rng,
    save_rng_state,
)
from tests.torch_side import states


def draw() -> list[Any]:
    normal = [random.gauss(0, 1), random.random(), float(np.random.randn()), float(np.random.rand())]
    return [*normal, torch.rand(3).tolist()]


def test_random_numbers_resume_where_they_were(tmp_path: Path) -> None:
    """This includes the second half of a pair of normal numbers, which generators keep for the next call. The file must
    be readable with weights_only.
    """
    random.gauss(0, 1)
    np.random.randn()
    path = save_rng_state(tmp_path, rank=3)
    expected = draw()
    assert torch.load(path, weights_only=True).keys() >= {"python", "numpy", "torch"}
    assert load_rng_state(tmp_path, rank=3)
    assert draw() == expected


@pytest.mark.parametrize("name", ["ours", "all ranks", "composer", "olmo", "whole composer", "whole olmo"])
def test_what_trainers_save_is_put_back(tmp_path: Path, name: str) -> None:
    """The state goes through a file."""
    np.random.randn()
    made: dict[str, Any] = {
        "ours": capture_rng,
        "all ranks": lambda: capture_rng(all_ranks=True),
        "composer": lambda: states.composer_state()["rng"],
        "olmo": lambda: states.olmo_state()["rng"],
        "whole composer": states.composer_state,
        "whole olmo": states.olmo_state,
    }
    state = made[name]()
    expected = draw()
    dump(state, tmp_path / "a.pt")
    assert restore_rng(load(tmp_path / "a.pt"))
    assert draw() == expected


def test_a_rank_without_a_saved_state_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_rng_state(tmp_path, rank=0)
    states = capture_rng(all_ranks=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert not load_rng_state(tmp_path, rank=1)
    assert not restore_rng(states, rank=1)
    assert not restore_rng([None, *states], rank=0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not restore_rng(states)
    assert torch.equal(before, torch.get_rng_state())
    assert restore_rng([None, *states])
    assert not torch.equal(before, torch.get_rng_state())


def test_missing_rng_devices_are_skipped() -> None:
    """A state may be saved with GPUs and restored without any, or saved without numpy."""
    state = capture_rng()
    del state["numpy"]
    if not torch.cuda.is_available():
        restore_rng(state | {"cuda": torch.zeros(16, dtype=torch.uint8)})
        restore_rng(state | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 8})
    assert torch.equal(state["torch"], capture_rng()["torch"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"rng_proj.weight": torch.ones(3)},
        {"rng": torch.ones(3)},
        {},
        3,
        "python",
        {"python": (3, (1, 2), None)},
        {"python": 3},
        {"numpy": ("MT19937", np.zeros(3), 1, 0, 0.0)},
        {"torch": torch.ones(3)},
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"torch": None},
        {"cuda": [3]},
    ],
)
def test_what_is_no_generator_changes_nothing(wrong: Any) -> None:
    good = capture_rng()
    both = good | wrong if isinstance(wrong, dict) and wrong.keys() & good.keys() else wrong
    random.random(), np.random.rand(), torch.rand(1)
    before = capture_rng()
    with pytest.raises(FormatError, match="random number generators"):
        restore_rng(both)
    after = capture_rng()
    assert states.is_same(after, before)


def test_only_exact_keys_count_as_saved_generators() -> None:
    """Composer's first rule matched any name containing 'rng', so a layer with such a name counted as a rank."""
    names = [
        "rng.0.torch",
        "rng.0.numpy.1",
        "rng.2.cuda",
        "state.model.rng_proj.weight",
        "rng.x.torch",
        "rng.3.w",
        "rng.4.torches",
    ]
    assert ranks_with_rng(names) == [0, 2]


def test_numpy_is_not_loaded_for_its_random_numbers() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch; from ckpt_async.torch import capture_rng, restore_rng\n"
        "state = capture_rng(); a = torch.rand(1); assert restore_rng(state) and torch.rand(1) == a\n"
        "assert 'numpy' not in state, state"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
