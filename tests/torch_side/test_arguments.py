"""Step arguments of every number type that training libraries use, and values that only look like numbers."""

from typing import Any

import numpy as np
import pytest
import torch

from ckpt_async import restore
from ckpt_async.core import arguments
from ckpt_async.errors import InvalidNameError, SettingsError


@pytest.mark.fault("F52")
@pytest.mark.parametrize(
    "step", [True, np.True_, torch.tensor(True), torch.tensor(7.0), "3", -1, 10**5000, None], ids=range(8)
)
def test_a_value_that_is_not_an_integer_is_rejected(step: Any) -> None:
    with pytest.raises(InvalidNameError, match=r"^step=.{1,100} must be a whole number from 0 to 9$"):
        arguments.whole(step, "step", 0, 9)
    for number in (7, np.int64(7), torch.tensor(7)):
        assert type(arguments.whole(number, "step", 0, 9)) is int


@pytest.mark.fault("F52")
@pytest.mark.parametrize("timeout_s", ["3", b"3", True, float("nan"), None, 1j, [1]])
def test_a_value_that_is_not_a_duration_is_rejected(timeout_s: Any) -> None:
    with pytest.raises(SettingsError, match=r"^timeout_s=.{1,100} must be a number of seconds$"):
        arguments.seconds(timeout_s, "timeout_s")
    assert arguments.seconds(np.float32(0.5), "timeout_s") == 0.5
    assert arguments.seconds(10**5000, "timeout_s") == float("inf")


@pytest.mark.fault("F52")
@pytest.mark.parametrize("step", ["3", -1, True])
def test_an_impossible_step_is_rejected(step: Any) -> None:
    """If such a step were accepted, finding nothing for it would look like a fresh start."""
    with pytest.raises(InvalidNameError, match="must be a whole number"):
        restore.find("memory://nowhere", step=step)
    with pytest.raises(InvalidNameError, match="must be a whole number"):
        restore.find("memory://nowhere", generation=step)
