"""What the launcher's environment variables say: the rank, the world size, and the launch of the run. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_async.core.arguments import is_whole
from ckpt_async.errors import SettingsError

Environment = Mapping[str, str]

# Variables in which a launcher gives a process its rank and the number of processes. SLURM_NTASKS is not among them:
# a batch script, which is a single process, sees the value for the whole allocation.
_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_PMI = ("PMI_RANK", "PMI_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_TORCH = ("RANK", "WORLD_SIZE")
# Variables that say which process of its node this is. Slurm's comes last: torchrun and mpirun may run inside a Slurm
# task, and then all their processes inherit that task's value.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

# Variables that say which node this is and how many there are: those that torchrun sets, those that Kubeflow and others
# set for torchrun, and Slurm's.
_NODES = (
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),
    ("PET_NODE_RANK", "PET_NNODES"),
    ("NODE_RANK", "NNODES"),
    # The nodes of the step, not of the job: a batch script, which is a single process, sees the job's number too.
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
)

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def launch_key(environment: Environment, *, parent: str) -> str | None:
    """Return a key that all ranks of one launch of the run share, or None if the launcher provides nothing to make it
    of.

    A later launch may have the same key (a gang that torchrun respawned on the same port, or an operator's own id). The
    two are distinguished by who is alive (see `generation`).

    `parent` identifies the launching process on this machine. It is used only where every rank of a launch, and of no
    other, has the same one: with torchrun on a single node. So is TORCHELASTIC_RESTART_COUNT: after a failure on one of
    several nodes, the agents disagree about it (torch/distributed/elastic/agent/server/api.py counts down for local
    failures only).
    """
    get = environment.get
    if (explicit := get("CKPT_ASYNC_LAUNCH_ID")) is not None:
        if not str(explicit).strip():
            raise SettingsError(
                f"launch_id, or CKPT_ASYNC_LAUNCH_ID in the environment, is {explicit!r}: it must not be blank",
                hint="use the same value on all ranks and a new one at every launch; leave it out if the"
                " launcher identifies the launch",
            )
        return f"id={explicit}"
    if (run_id := get("TORCHELASTIC_RUN_ID")) is not None:  # "none" where torchrun was given no --rdzv-id
        if get("LOCAL_WORLD_SIZE", get("WORLD_SIZE", "1")) == get("WORLD_SIZE", "1"):
            restart = get("TORCHELASTIC_RESTART_COUNT", "0")
            return f"torchelastic={run_id} restart={restart} parent={parent}"
        return f"torchelastic={run_id} master={get('MASTER_ADDR', '')}:{get('MASTER_PORT', '')}"
    if job := get("SLURM_JOB_ID"):
        step, restart = get("SLURM_STEP_ID", ""), get("SLURM_RESTART_COUNT", "0")
        return f"slurm={job}.{step} restart={restart}"
    return None


def rank_and_world_size(
    environment: Environment, rank: int | None, world_size: int | None
) -> tuple[int, int]:
    """Return rank and world size.

    They come from the arguments, else RANK and WORLD_SIZE, else MPI, PMI and Slurm if they agree; they are 0 and 1 if
    nothing hints at other processes.

    Raises SettingsError for impossible values, for one without the other, and for `world_size=1` in a process whose
    launcher says that it is a rank above 0 of several: if each process took itself for the only one, each would commit
    its part as the whole.
    """
    is_called_alone = world_size is not None and world_size == 1
    given = (rank, world_size)
    names = [name if each is None else name.lower() for name, each in zip(_TORCH, given, strict=True)]
    rank = _number(environment, "RANK", rank, "rank")
    world_size = _number(environment, "WORLD_SIZE", world_size, "world_size")
    if rank is None and world_size is None:
        rank, world_size = _launchers(environment) or (None, None)
    if world_size is not None and not 1 <= world_size <= 100_000:
        raise SettingsError(f"world_size={world_size} must be from 1 to 100000")
    if is_called_alone:
        _refuse_contradiction(environment)
    numbers = (rank, world_size)
    said = [f"{name}={each}" for name, each in zip(names, numbers, strict=True) if each is not None]
    known = ", ".join(said) or _sign_of_others(environment)
    if known.upper() in ("", "WORLD_SIZE=1"):
        return 0, 1
    if rank is None or world_size is None:
        missing = " and ".join(name for name, each in zip(_TORCH, numbers, strict=True) if each is None)
        raise SettingsError(
            f"{known} is given, but not {missing}: the rank and the world size are unknown",
            hint="set RANK and WORLD_SIZE on every rank, or pass rank= and world_size= (0 and 1 for a single"
            " process)",
        )
    if not 0 <= rank < world_size:
        raise SettingsError(f"rank={rank} must be from 0 to world_size-1 = {world_size - 1}")
    return rank, world_size


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank this is, of how many, and on which node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def placement(environment: Environment, rank: int, world_size: int) -> Placement:
    """Return where this rank runs, as torchrun or Slurm say; if they do not, this node is taken to have all ranks."""
    local = local_rank(environment)
    local_world_size = _first(environment, _LOCAL_SIZES) or world_size
    node_rank = _first(environment, ("GROUP_RANK", "SLURM_NODEID"))
    return Placement(
        rank,
        world_size,
        rank if local is None else local,
        local_world_size,
        rank // local_world_size if node_rank is None else node_rank,
    )


def local_rank(environment: Environment) -> int | None:
    """Return which process of its node this is; None if the environment does not say."""
    return _first(environment, _LOCAL_RANKS)


def node(environment: Environment) -> tuple[int, int]:
    """Return which node this is, and of how many; (0, 1) if no launcher gives both.

    Raises SettingsError for impossible values.
    """
    for names in _NODES:
        if all(environment.get(name, "").isdecimal() for name in names):
            index, count = (int(environment[name]) for name in names)
            if not 0 <= index < count:
                raise SettingsError(f"{names[0]}={index} in the environment is not below {names[1]}={count}")
            return index, count
    return 0, 1


def without_rank(environment: Environment) -> dict[str, str]:
    """Return the environment without its rank variables, for a process that a rank starts but that is not a rank."""
    ranks = {*_TORCH, *_MPI, *_PMI, *_SLURM, *_LOCAL_RANKS, *_LOCAL_SIZES}
    return {name: value for name, value in environment.items() if name not in ranks}


def _first(environment: Environment, variables: Iterable[str]) -> int | None:
    for each in variables:
        if environment.get(each):
            number = _number(environment, each, None)
            if number is not None and number >= 0:  # -1: not distributed
                return number
    return None


def _number(environment: Environment, variable: str, given: int | None, name: str = "") -> int | None:
    if given is not None:
        if not is_whole(given):
            raise SettingsError(f"{name}={given!r} must be a whole number")
        return operator.index(given)
    if (text := environment.get(variable)) is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{variable}={text!r} in the environment is not a number") from None


def _launchers(environment: Environment) -> tuple[int, int] | None:
    """Return rank and number of processes according to MPI, PMI and Slurm; None if none of them gives both."""
    found: dict[tuple[int, int], str] = {}
    for names in (_MPI, _PMI, _SLURM):
        if all(environment.get(name) for name in names):
            rank, size = (_number(environment, name, None) for name in names)
            assert rank is not None
            assert size is not None
            found.setdefault((rank, size), f"{names[0]}={rank} of {names[1]}={size}")
    if len(found) > 1:  # mpirun on the nodes of a Slurm step: each of the two numbers its own processes
        raise SettingsError(
            f"the launchers disagree about this process's rank: {' and '.join(found.values())}",
            hint="set RANK and WORLD_SIZE on every rank, or pass rank= and world_size=",
        )
    return next(iter(found), None)


def _refuse_contradiction(environment: Environment) -> None:
    """Raise SettingsError if `world_size=1` was given to a rank above 0.

    Its caller does not know of the other processes. Rank 0, however, may be the only one that saves.
    """
    rank, size = (_number(environment, name, None) for name in _TORCH)
    if rank is None or size is None:
        rank, size = _launchers(environment) or (0, 1)
    if rank > 0 and size > 1:
        raise SettingsError(
            f"world_size=1 was given, but the launcher says that this is rank {rank} of {size}: each process"
            " would upload its own run to the same remote",
            hint="the framework that passed it is not running distributed (accelerate on CPU needs"
            " Accelerator(cpu=True)); if each process really trains its own model, remove RANK and"
            " WORLD_SIZE from its environment",
        )


def _sign_of_others(environment: Environment) -> str:
    """Return the variable, with its value, that hints at other processes, or ""."""
    for name in ("LOCAL_WORLD_SIZE", _SLURM[1], _MPI[1], _PMI[1]):
        if environment.get(name, "") not in ("", "1"):
            return f"{name}={environment[name]}"
    local_rank = environment.get("LOCAL_RANK", "")
    if local_rank not in ("", "-1"):  # -1: not distributed
        return f"LOCAL_RANK={local_rank}"
    return _sign_of_a_slurm_step(environment)


def _sign_of_a_slurm_step(environment: Environment) -> str:
    """Return a hint that this is a task of a Slurm step, or "".

    Needed where the environment lost the number of tasks (a container, `srun --export`). The first task then looks like
    a batch script, except for its step id.
    """
    if environment.get(_SLURM[1], ""):
        return ""
    if environment.get("SLURM_PROCID", "0") not in ("", "0"):
        return f"SLURM_PROCID={environment['SLURM_PROCID']}"
    if environment.get("SLURM_STEP_ID", "") and environment.get("SLURM_NTASKS", "1") not in ("", "1"):
        return f"SLURM_NTASKS={environment['SLURM_NTASKS']}"
    return ""
