"""Which names are safe, and which launch of the run this is. Pure: values in, values or a clear error out."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ckpt_async.errors import InvalidNameError, SettingsError

T = TypeVar("T")

# What POSIX, S3, GCS, R2 and shells all take without quoting, plus '=+@,' for Lightning's
# 'epoch=1-step=100.ckpt'. No space, backslash, control or non-ASCII character: SeaweedFS accepts a newline
# and folds 'p//q' into 'p/q', so what is ambiguous must be refused here (table rows F25, F26).
_COMPONENT = re.compile(r"[A-Za-z0-9._=+@,-]{1,200}")
_NAME = rf"(?!\.\.?(?:/|\Z)){_COMPONENT.pattern}"
_RELATIVE = re.compile(rf"{_NAME}(?:/{_NAME})*")

_NUMBER = re.compile(r"\d+")

# S3 allows 1,024 bytes of key. What is left is for the run's prefix.
MAX_SHARD_NAME_LENGTH = 600
MAX_CHECKPOINT_NAME_LENGTH = 200
MAX_KEY_LENGTH = 1024

# By these a launcher says that it has started other processes too, and how many there are.
_NUM_PROCESSES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def several(given: Iterable[T], what: str) -> tuple[T, ...]:
    """The names that an argument `what` has. Raises InvalidNameError for a single one: it would be taken letter by
    letter.
    """
    if isinstance(given, str | bytes):
        raise InvalidNameError(
            f"{what}={given!r} is one name where a collection is wanted", hint=f"give {what}=[{given!r}]"
        )
    return tuple(given)


def is_whole(number: object) -> bool:
    """Whether it may be taken for a whole number: numpy's may, a bool is a mistake."""
    return not isinstance(number, bool) and hasattr(number, "__index__")


def check_component(component: str, what: str) -> str:
    """Return `component` if it is one safe path component, else raise InvalidNameError saying why not."""
    if not isinstance(component, str):
        raise InvalidNameError(f"{what} {component!r} is not text")
    if component in {"", ".", ".."}:
        raise InvalidNameError(f"{what} {component!r} is not a name")
    if not _COMPONENT.fullmatch(component):
        raise InvalidNameError(
            f"{what} {component!r} has a character or length that is not safe in every store",
            hint="use 1 to 200 of A-Z a-z 0-9 . _ - = + @ ,",
        )
    return component


def check_relative(path: str, what: str) -> str:
    """Return `path` if it is a relative '/'-joined path of safe components."""
    if not isinstance(path, str):
        raise InvalidNameError(f"{what} {path!r} is not text")
    if len(path) <= MAX_SHARD_NAME_LENGTH and _RELATIVE.fullmatch(path):
        return path
    if path.startswith("/"):
        raise InvalidNameError(f"{what} {path!r} must be relative")
    for component in path.split("/"):
        check_component(component, f"{what} {path!r}: component")
    if len(path) > MAX_SHARD_NAME_LENGTH:
        raise InvalidNameError(
            f"{what} {path[:80]!r}… has {len(path)} characters, more than {MAX_SHARD_NAME_LENGTH}"
        )
    return path


def check_key_length(root: str, key: str) -> None:
    """Refuse a key that S3 would refuse, before anything is enqueued."""
    length = len(root) + 1 + len(key)
    if length > MAX_KEY_LENGTH:
        raise InvalidNameError(
            f"object key {key[:80]!r}… would have {length} bytes with its prefix, more than {MAX_KEY_LENGTH}",
            hint="shorten the remote prefix, the checkpoint's name or the shard's path",
        )


def checkpoint_name(name: str | None, step: int) -> str:
    """The human name of a checkpoint, made unique in its generation: the last number in it is the step.

    `ep1-ba100` at step 100 stays; `best` becomes `best-100`; none becomes `step-100`. Without this, two
    steps called `last` would share keys, and the second would overwrite a committed checkpoint (rule R11).
    """
    if name is None:
        return f"step-{step}"
    check_component(name, "checkpoint name")
    numbers = _NUMBER.findall(name)
    # Twelve digits at most: `keys.parse_data_key` must find the step again, or nobody could clean up behind it.
    if not numbers or len(numbers[-1]) > 12 or int(numbers[-1]) != step:
        name = f"{name}-{step}"
    if len(name) > MAX_CHECKPOINT_NAME_LENGTH:
        raise InvalidNameError(
            f"checkpoint name {name!r} has more than {MAX_CHECKPOINT_NAME_LENGTH} characters"
        )
    return name


def launch_key(environment: Mapping[str, str], *, world_size: int, parent: str) -> str | None:
    """What all ranks of one start of the run share, and no other start has. None: the launcher says nothing.

    `parent` identifies the launching process on this machine. It serves only where every rank has the same
    one: a single node. TORCHELASTIC_RESTART_COUNT likewise: after a failure on one of several nodes the
    agents disagree about it (torch/distributed/elastic/agent/server/api.py counts only local failures down),
    so across nodes a reused key is told apart by the members' objects instead (see `generation`).
    """
    get = environment.get
    if (explicit := get("CKPT_ASYNC_LAUNCH_ID")) is not None:
        if not str(explicit).strip():
            raise SettingsError(
                f"launch_id, or CKPT_ASYNC_LAUNCH_ID in the environment, is {explicit!r}: it says nothing",
                hint="equal on all ranks and new at every start; leave it out if the launcher says which start it is",
            )
        return f"id={explicit}"
    is_one_node = get("LOCAL_WORLD_SIZE", get("WORLD_SIZE", "1")) == get("WORLD_SIZE", "1")
    run_id = get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        key = f"torchelastic={run_id}"
        if is_one_node:
            return f"{key} restart={get('TORCHELASTIC_RESTART_COUNT', '0')} parent={parent}"
        return f"{key} master={get('MASTER_ADDR', '')}:{get('MASTER_PORT', '')}"
    if job := get("SLURM_JOB_ID"):
        step, restart = get("SLURM_STEP_ID", ""), get("SLURM_RESTART_COUNT", "0")
        return f"slurm={job}.{step} restart={restart}"
    if world_size > 1 and "LOCAL_WORLD_SIZE" in environment and is_one_node:
        return f"parent={parent} restart={get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return None


def rank_and_world_size(
    environment: Mapping[str, str], rank: int | None, world_size: int | None
) -> tuple[int, int]:
    """Arguments over RANK / WORLD_SIZE of the launcher; 0 / 1 where nothing speaks of other processes.

    Raises SettingsError for what cannot be, and for one without the other: of processes that each take themselves for
    the only one, each would commit its part as the whole.
    """

    def number(name: str, given: int | None) -> int | None:
        if given is not None:
            if not is_whole(given):
                raise SettingsError(f"{name}={given!r} must be a whole number")
            return operator.index(given)
        if (text := environment.get(name.upper())) is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise SettingsError(f"{name.upper()}={text!r} in the environment is not a number") from None

    rank, world_size = number("rank", rank), number("world_size", world_size)
    if world_size is not None and not 1 <= world_size <= 100_000:
        raise SettingsError(f"world_size={world_size} must be from 1 to 100000")
    said = {name: each for name, each in (("RANK", rank), ("WORLD_SIZE", world_size)) if each is not None}
    known = ", ".join(f"{name}={each}" for name, each in said.items()) or _sign_of_others(environment)
    if known in ("", "WORLD_SIZE=1"):
        return 0, 1
    if rank is None or world_size is None:
        missing = " and ".join(name for name in ("RANK", "WORLD_SIZE") if name not in said)
        raise SettingsError(
            f"there is {known}, but no {missing}: which rank this is, and of how many, is not known",
            hint="set both on every rank, or pass rank= and world_size= (0 and 1 for a process that is alone)",
        )
    if not 0 <= rank < world_size:
        raise SettingsError(f"rank={rank} must be from 0 to world_size-1 = {world_size - 1}")
    return rank, world_size


def _sign_of_others(environment: Mapping[str, str]) -> str:
    """What says that this may be one of several processes, or ""."""
    for name in _NUM_PROCESSES:
        if environment.get(name, "") not in ("", "1"):
            return f"{name}={environment[name]}"
    local_rank = environment.get("LOCAL_RANK", "")
    return f"LOCAL_RANK={local_rank}" if local_rank not in ("", "-1") else ""  # -1: not distributed


def fill(template: str, *, rank: int) -> str:
    """Replace `{rank}` in a file-name template; any other variable is refused by name, and what would lead out of
    the folder too. Empty stays empty.
    """
    filled = substitute(template, {"rank": rank})
    return check_relative(filled, "template") if filled else filled


def substitute(template: str, values: Mapping[str, object]) -> str:
    """Replace `{name}` by `values[name]`, plain or with a format (`{rank:05d}`); any other name is refused."""
    try:
        return template.format(**values)
    except (AttributeError, KeyError, IndexError, ValueError) as error:
        allowed = ", ".join(f"{{{name}}}" for name in values)
        raise InvalidNameError(f"template {template!r}: only {allowed} can be used ({error})") from None
