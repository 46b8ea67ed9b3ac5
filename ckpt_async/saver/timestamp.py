"""The position of a training run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Self

from ckpt_async.core import arguments, keys
from ckpt_async.errors import SettingsError

_SECONDS = frozenset({"total_wct", "epoch_wct", "batch_wct"})


class Event(Enum):
    """The place in the training loop from which `CheckpointSaver.step` was called."""

    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_CHECKPOINT = "epoch_checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """Progress of a run, with Composer's names: how many epochs, batches, … are *finished*.

    Only `batch` is required; anything left out is 0. `batch` is the checkpoint's step: it only grows, and no two saves
    have the same. Wall-clock times are in seconds.
    """

    batch: int
    epoch: int = 0
    batch_in_epoch: int = 0
    sample: int = 0
    sample_in_epoch: int = 0
    token: int = 0
    token_in_epoch: int = 0
    iteration: int = 0
    total_wct: float = 0.0
    epoch_wct: float = 0.0
    batch_wct: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            what = f"Timestamp: {each.name}"
            if each.name in _SECONDS:
                seconds = value.total_seconds() if hasattr(value, "total_seconds") else value
                checked: float = arguments.seconds(seconds, what)
                if not 0 <= checked < math.inf:
                    raise SettingsError(f"{what}={value!r} must be a time in seconds, 0 or more")
            else:
                checked = arguments.whole(value, what, 0, keys.MAX_STEP if each.name == "batch" else 10**18)
            object.__setattr__(self, each.name, checked)

    @property
    def step(self) -> int:
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint's state."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a timestamp from what `state_dict` returned; fields of other versions are ignored."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in known})

    @classmethod
    def of(cls, given: Timestamp | int) -> Timestamp:
        """Return `given` itself, or a timestamp if it is a bare number, which is the step."""
        return given if isinstance(given, Timestamp) else cls(batch=given)
