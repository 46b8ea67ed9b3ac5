"""Retention: committed checkpoints in; the ones to keep, each with its reason, out. Pure.

Callers pass committed checkpoints only, found by listing (rule R8). `now` is not needed: ages are measured between
checkpoints, never against a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import SettingsError

Kept = dict[CheckpointId, str]

# A metric name. A checkpoint with this metric is kept only until a newer one is committed, and does not count towards
# any policy.
EPHEMERAL = "ephemeral"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint as a policy sees it. `committed_at` is by the store's clock if the store was listed."""

    id: CheckpointId
    name: str = ""
    committed_at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_pinned: bool = False


class RetentionPolicy(Protocol):
    """Chooses which checkpoints to keep. Policies are values, and are combined with `AnyOf`."""

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        """Return the checkpoints to keep, with reasons.

        `candidates` are in checkpoint order, oldest first, and none of them is ephemeral.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keeps everything."""

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        return {each.id: "all are kept" for each in candidates}


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the newest `count` checkpoints."""

    count: int

    def __post_init__(self) -> None:
        _require("last", self.count, 1)

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        return {each.id: f"one of the newest {self.count}" for each in candidates[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepEveryNSteps:
    """Keeps the checkpoints whose step is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _require("every-steps", self.steps, 1)

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        return {
            each.id: f"step is a multiple of {self.steps}"
            for each in candidates
            if each.id.step % self.steps == 0
        }


@dataclass(frozen=True, slots=True)
class KeepEverySeconds:
    """Keeps the oldest checkpoint, then each one that was committed at least `seconds` after the last one kept.

    Counting starts at the oldest checkpoint left, which this policy keeps, so the choice is the same every time.
    """

    seconds: float

    def __post_init__(self) -> None:
        _require("every-seconds", self.seconds, 1)

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        kept: Kept = {}
        due_at = float("-inf")
        for each in sorted(candidates, key=lambda each: (each.committed_at, each.id)):
            if each.committed_at >= due_at:
                kept[each.id] = f"one every {self.seconds:g} s"
                due_at = each.committed_at + self.seconds
        return kept


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keeps the best `count` checkpoints by a metric that was given at `seal`; those without it are not considered."""

    count: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        _require("best", self.count, 1)
        if self.mode not in ("min", "max"):
            raise SettingsError(f"retention: best: mode {self.mode!r} must be min or max")

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        sign = 1.0 if self.mode == "min" else -1.0
        measured = [each for each in candidates if self.metric in each.metrics]
        # Among equal ones, the newer is better.
        measured.sort(key=lambda each: (sign * each.metrics[self.metric], -each.id.generation, -each.id.step))
        return {each.id: f"best {self.count} by {self.mode} {self.metric}" for each in measured[: self.count]}


@dataclass(frozen=True, slots=True)
class KeepNamed:
    """Keeps the checkpoints with one of these names or steps."""

    names: frozenset[str]

    def __post_init__(self) -> None:
        if not self.names:
            raise SettingsError("retention: a policy must keep something")

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        return {each.id: "kept by name" for each in candidates if {each.name, str(each.id.step)} & self.names}


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Keeps what at least one of the policies keeps, with the reason of the first one that does."""

    policies: tuple[RetentionPolicy, ...]

    def __post_init__(self) -> None:
        if not self.policies:
            raise SettingsError("retention: a policy must keep something")

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        kept: Kept = {}
        for policy in self.policies:
            kept = {**policy.keep(candidates), **kept}
        return kept


def apply(policy: RetentionPolicy, candidates: Iterable[Candidate]) -> Kept:
    """Return what stays: the policy's choice and, under any policy, the newest checkpoint and the pinned ones (R8)."""
    ordered = sorted(candidates, key=lambda each: each.id)
    kept = policy.keep(lasting(ordered))
    for each in ordered:
        if each.is_pinned:
            kept[each.id] = "pinned"
    if ordered:
        kept.setdefault(ordered[-1].id, "the newest is never removed")
    return kept


def would_keep_nothing(policy: RetentionPolicy, candidates: Iterable[Candidate]) -> bool:
    """Return whether the policy picks none of the checkpoints, for example because a metric or name was mistyped.

    Remote retention then refuses the policy; otherwise `apply` would leave only the newest and the pinned checkpoints.
    """
    ordered = lasting(sorted(candidates, key=lambda each: each.id))
    return bool(ordered) and not policy.keep(ordered)


def metrics_of(policy: RetentionPolicy) -> list[str]:
    """Return the metrics by which the policy chooses."""
    if isinstance(policy, AnyOf):
        return [metric for each in policy.policies for metric in metrics_of(each)]
    return [policy.metric] if isinstance(policy, KeepBest) else []


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """How many of the checkpoints lack a metric by which the policy chooses."""

    metric: str
    count: int
    total: int

    @property
    def is_all(self) -> bool:
        return self.count == self.total

    def __str__(self) -> str:
        return f"{self.count} of {self.total} checkpoints have no metric {self.metric!r}"


def unmeasured(policy: RetentionPolicy, candidates: Sequence[Candidate]) -> list[Unmeasured]:
    """Return the metrics of the policy that some of the checkpoints lack. If all lack one, nothing may be pruned.

    Whatever was the best by it may have been saved without it, or the name was mistyped.
    """
    counted = lasting(candidates)
    found = [
        Unmeasured(metric, sum(metric not in each.metrics for each in counted), len(counted))
        for metric in dict.fromkeys(metrics_of(policy))
    ]
    return [each for each in found if each.count]


def lasting(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the candidates that are not ephemeral."""
    return [each for each in candidates if EPHEMERAL not in each.metrics]


def keeps_all(policy: RetentionPolicy) -> bool:
    """Return whether the policy would never remove anything but ephemeral checkpoints, however it was written."""
    if isinstance(policy, AnyOf):
        return any(keeps_all(each) for each in policy.policies)
    return isinstance(policy, KeepAll)


def parse(text: str) -> RetentionPolicy:
    """Return the policy for a comma-separated text; a checkpoint is kept if any of the items keeps it.

        last=3,every-steps=1000,every-seconds=3600,best=2:loss:min,named=ep1-ba100

    Empty text keeps all. Raises SettingsError. `last=0` is refused: no remote policy can mean 'delete all'.
    """
    if not text.strip():
        return KeepAll()
    return AnyOf(tuple(_parse_one(part.strip()) for part in text.split(",")))


def _parse_one(part: str) -> RetentionPolicy:
    kind, _, value = part.partition("=")
    try:
        match kind:
            case "all" if not value:
                return KeepAll()
            case "last":
                return KeepLast(int(value))
            case "every-steps":
                return KeepEveryNSteps(int(value))
            case "every-seconds":
                return KeepEverySeconds(float(value))
            case "best":
                count, metric, *mode = value.split(":")
                if metric and len(mode) <= 1:
                    return KeepBest(int(count), metric, *mode)
            case "named" if value:
                return KeepNamed(frozenset({value}))
            case _:
                pass
    except SettingsError:
        raise
    except ValueError:
        pass
    raise SettingsError(
        f"retention: {part!r} is not a policy",
        hint="use all, last=N, every-steps=N, every-seconds=T, best=K:metric:min|max, named=NAME",
    )


@dataclass(frozen=True, slots=True)
class KeepLocal:
    """What stays on the local disk: the newest `count` (Composer's meaning: -1 all, 0 none) and what `policy` keeps.

    If there is a policy, `count` -1 leaves the choice to it, and the newest checkpoint is kept too. `count` 0 removes
    even the newest one, once it is committed, unless the policy keeps it.
    """

    count: int = -1
    policy: RetentionPolicy | None = None

    @property
    def is_all(self) -> bool:
        return self.count < 0 if self.policy is None else keeps_all(self.policy)

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        if self.count < 0:
            return apply(self.policy or KeepAll(), candidates)
        last = lasting(candidates)
        newest = last[len(last) - min(self.count, len(last)) :]
        kept = {each.id: f"one of the newest {self.count}" for each in newest}
        if candidates and self.count:
            kept.setdefault(candidates[-1].id, "the newest")
        return kept if self.policy is None else {**self.policy.keep(last), **kept}

    def __str__(self) -> str:
        return f"num_checkpoints_to_keep={self.count}" + (" and local_retention" if self.policy else "")


def keep_local(count: int, text: str) -> KeepLocal:
    """Return the local retention for the settings `num_checkpoints_to_keep` and `local_retention`.

    If the latter is empty, only the number counts.
    """
    return KeepLocal(count, parse(text) if text.strip() else None)


def _require(what: str, value: float, low: float) -> None:
    if not value >= low:
        raise SettingsError(f"retention: {what}={value} must be at least {low}")
