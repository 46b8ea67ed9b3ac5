"""Retention: committed checkpoints in; the ones to keep, each with its reason, out. Pure.

Whoever calls these passes committed checkpoints only, found by listing (rule R8). `now` is not needed: ages are
measured between checkpoints, never against a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import SettingsError

Kept = dict[CheckpointId, str]

# A metric: a checkpoint that has it is kept only until a newer one is committed, and takes no other's place.
EPHEMERAL = "ephemeral"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy may look at. `committed_at` is by the store's clock where the store was listed."""

    id: CheckpointId
    name: str = ""
    committed_at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_pinned: bool = False


class RetentionPolicy(Protocol):
    """Chooses what to keep. Policies are values, and compose with `AnyOf`."""

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        """The ones to keep, with the reason; `candidates` are in checkpoint order, oldest first. None is ephemeral."""
        ...


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Never removes anything."""

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        return {each.id: "all are kept" for each in candidates}


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest `count`."""

    count: int

    def __post_init__(self) -> None:
        _require("last", self.count, 1)

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        return {each.id: f"one of the newest {self.count}" for each in candidates[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepEveryNSteps:
    """Those whose step is a multiple of `steps`."""

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
    """The oldest, then each that was committed at least `seconds` after the one kept before it.

    Counted from the oldest that is left, which this policy keeps, so the choice is the same every time.
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
    """The best `count` by a metric that was given at `seal`; those without it are not considered."""

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
        # Of equal ones the newer is better.
        measured.sort(key=lambda each: (sign * each.metrics[self.metric], -each.id.generation, -each.id.step))
        return {each.id: f"best {self.count} by {self.mode} {self.metric}" for each in measured[: self.count]}


@dataclass(frozen=True, slots=True)
class KeepNamed:
    """Those with one of these names or steps."""

    names: frozenset[str]

    def __post_init__(self) -> None:
        if not self.names:
            raise SettingsError("retention: a policy that keeps nothing is refused")

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        return {
            each.id: "named to be kept" for each in candidates if {each.name, str(each.id.step)} & self.names
        }


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What at least one of the policies keeps, with the first one's reason."""

    policies: tuple[RetentionPolicy, ...]

    def __post_init__(self) -> None:
        if not self.policies:
            raise SettingsError("retention: a policy that keeps nothing is refused")

    def keep(self, candidates: Sequence[Candidate]) -> Kept:
        kept: Kept = {}
        for policy in self.policies:
            kept = {**policy.keep(candidates), **kept}
        return kept


def apply(policy: RetentionPolicy, candidates: Iterable[Candidate]) -> Kept:
    """What stays: the policy's choice, and whatever it says the newest one and those that are pinned (R8)."""
    ordered = sorted(candidates, key=lambda each: each.id)
    kept = policy.keep(lasting(ordered))
    for each in ordered:
        if each.is_pinned:
            kept[each.id] = "pinned"
    if ordered:
        kept.setdefault(ordered[-1].id, "the newest is never removed")
    return kept


def would_keep_nothing(policy: RetentionPolicy, candidates: Iterable[Candidate]) -> bool:
    """Whether the policy picks none of what is there: a metric or name that was mistyped, say. Remotely it is refused
    then; without this, `apply` would leave the newest and the pinned ones only.
    """
    ordered = lasting(sorted(candidates, key=lambda each: each.id))
    return bool(ordered) and not policy.keep(ordered)


def lasting(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that are not ephemeral."""
    return [each for each in candidates if EPHEMERAL not in each.metrics]


def keeps_all(policy: RetentionPolicy) -> bool:
    """Whether nothing but what is ephemeral would ever be removed, however that was written."""
    if isinstance(policy, AnyOf):
        return any(keeps_all(each) for each in policy.policies)
    return isinstance(policy, KeepAll)


def parse(text: str) -> RetentionPolicy:
    """A policy from text: comma-separated, each keeps what it says, all together keep any of it.

        last=3,every-steps=1000,every-seconds=3600,best=2:loss:min,named=ep1-ba100

    Empty text keeps all. Raises SettingsError; `last=0` is refused: remotely, nothing ever means 'delete all'.
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

    With both, `count` -1 leaves the choice to the policy, which then keeps the newest one too. `count` 0 takes even
    that, once it is committed, unless the policy keeps it.
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
    """From the settings `num_checkpoints_to_keep` and `local_retention` (empty: the number alone counts)."""
    return KeepLocal(count, parse(text) if text.strip() else None)


def _require(what: str, value: float, low: float) -> None:
    if not value >= low:
        raise SettingsError(f"retention: {what}={value} must be at least {low}")
