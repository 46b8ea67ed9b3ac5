"""How rank, world size and launch key are derived from the environment that launchers set."""

import pytest

from ckpt_async.core import launch
from ckpt_async.errors import SettingsError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
ONE_NODE = {**TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
TWO_NODES = {**TORCHRUN, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}


def key(environment: dict[str, str], parent: str = "p") -> str | None:
    return launch.launch_key(environment, parent=parent)


def test_all_ranks_of_a_start_derive_the_same_launch_key() -> None:
    """If the keys differed, the ranks would join different generations and no checkpoint would ever be complete."""
    for environment in (ONE_NODE, TWO_NODES, SLURM):
        ranks = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(8)]
        assert len({key(each) for each in ranks}) == 1
    assert key(TWO_NODES, "here") == key(TWO_NODES, "there"), "each node has its own launcher"
    agents = [{**TWO_NODES, "TORCHELASTIC_RESTART_COUNT": count} for count in "01"]
    assert key(agents[0]) == key(agents[1]), "agents disagree about the restart count"
    assert key(SLURM, "here") == key(SLURM, "there")


def test_two_starts_derive_different_launch_keys() -> None:
    """If the keys were equal, receipts of two incarnations could be mistaken for one (R5)."""
    assert key(ONE_NODE, "first") != key(ONE_NODE, "second")
    assert key(ONE_NODE) != key({**ONE_NODE, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert key(SLURM) != key({**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert key(SLURM) != key({**SLURM, "SLURM_STEP_ID": "1"})
    assert key(TWO_NODES) != key({**TWO_NODES, "MASTER_PORT": "29501"})


def test_explicit_launch_id_takes_precedence_and_no_launcher_gives_none() -> None:
    """The operator knows best; and where no launcher identifies the start, guessing would mix two launches."""
    assert key({**ONE_NODE, **SLURM, "CKPT_ASYNC_LAUNCH_ID": "x"}) == "id=x"
    assert key({}) is None
    assert key({"WORLD_SIZE": "8", "RANK": "0"}) is None


def test_a_parent_that_restarts_ranks_itself_does_not_identify_a_start() -> None:
    """Ray's raylet is the parent process of every launch of a gang, so every launch used to get the same key.
    torchrun's agent says which restart it is, even if it was given no id.
    """
    assert key({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) is None
    plain = {**ONE_NODE, "TORCHELASTIC_RUN_ID": "none"}
    assert key(plain, "first") != key(plain, "second")
    assert key({**TWO_NODES, "TORCHELASTIC_RUN_ID": "none"}) == "torchelastic=none master=n0:29500"


@pytest.mark.parametrize(
    ("environment", "rank", "world_size"),
    [
        ({"RANK": "x"}, None, None),
        ({}, 1, 1),
        ({}, -1, 2),
        ({}, 0, 0),
        ({"RANK": "3", "WORLD_SIZE": "2"}, None, None),
        ({"RANK": "", "WORLD_SIZE": "2"}, None, None),
        ({}, True, 2),
        ({}, 0, True),
        ({}, 0, -1),
        ({}, 0.0, 2),
        ({}, "0", "2"),
        ({}, 0, float("nan")),
    ],
)
def test_impossible_rank_is_refused(
    environment: dict[str, str], rank: int | None, world_size: int | None
) -> None:
    """Two processes that both believe they are rank 0 would each commit half a checkpoint."""
    with pytest.raises(SettingsError):
        launch.rank_and_world_size(environment, rank, world_size)


@pytest.mark.fault("F34")
@pytest.mark.parametrize(
    ("environment", "rank", "world_size", "message"),
    [
        ({"RANK": "0"}, None, None, "RANK=0 is given, but not WORLD_SIZE"),
        ({"RANK": "3"}, None, None, "RANK=3 is given, but not WORLD_SIZE"),
        ({}, 0, None, "rank=0 is given, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, None, None, "WORLD_SIZE=2 is given, but not RANK"),
        ({}, None, 2, "world_size=2 is given, but not RANK"),
        ({"LOCAL_RANK": "0"}, None, None, "LOCAL_RANK=0 is given, but not RANK and WORLD_SIZE"),
        (
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            None,
            None,
            "LOCAL_WORLD_SIZE=2 is given, but not RANK and",
        ),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "4"},
            None,
            None,
            "SLURM_STEP_NUM_TASKS=4 is given, but not RANK and",
        ),
        ({**SLURM, "SLURM_PROCID": "1"}, None, None, "SLURM_PROCID=1 is given, but not RANK and"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, None, None, "SLURM_PROCID=1 is given, but not RANK and"),
        (
            {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            None,
            None,
            "SLURM_NTASKS=2 is given, but not RANK and",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None, None, "OMPI_COMM_WORLD_SIZE=4 is given, but not RANK and"),
        ({"PMI_SIZE": "4"}, None, None, "PMI_SIZE=4 is given, but not RANK and"),
    ],
)
def test_incomplete_launcher_variables_are_rejected(
    environment: dict[str, str], rank: int | None, world_size: int | None, message: str
) -> None:
    """Each of the N processes would believe it is the only one, and commit its part as the whole checkpoint."""
    with pytest.raises(SettingsError, match=message):
        launch.rank_and_world_size(environment, rank, world_size)


SRUN = {**SLURM, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "environment",
    [
        {**SRUN, "SLURM_PROCID": "2"},
        MPIRUN,
        {"PMI_RANK": "2", "PMI_SIZE": "4", "OMPI_COMM_WORLD_RANK": ""},
        {**SRUN, "SLURM_PROCID": "2", "PMI_RANK": "2", "PMI_SIZE": "4"},  # srun --mpi=pmi2
        {**MPIRUN, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # mpirun in a batch script
    ],
)
def test_rank_and_world_size_come_from_srun_and_mpirun(environment: dict[str, str]) -> None:
    """These launchers do not set RANK and WORLD_SIZE."""
    assert launch.rank_and_world_size(environment, None, None) == (2, 4)
    torchrun = {**environment, "RANK": "5", "WORLD_SIZE": "8"}  # one torchrun per task
    assert launch.rank_and_world_size(torchrun, None, None) == (5, 8)


def test_contradicting_launcher_variables_are_rejected() -> None:
    """mpirun uses srun to start one daemon per node, and those start the ranks: the step's numbers are the daemons'."""
    with pytest.raises(SettingsError, match=r"OMPI_COMM_WORLD_RANK=2 of .*=4 and SLURM_PROCID=1 of .*=4"):
        launch.rank_and_world_size({**SRUN, **MPIRUN, "SLURM_PROCID": "1"}, None, None)


@pytest.mark.fault("F34")
@pytest.mark.parametrize(
    "environment", [{"RANK": "1", "WORLD_SIZE": "2"}, {**SRUN, "SLURM_PROCID": "1"}, MPIRUN]
)
def test_a_rank_above_0_in_a_world_of_one_is_rejected(environment: dict[str, str]) -> None:
    """With accelerate on CPU under torchrun, every process is 0 of 1 and starts its own run at the same remote."""
    with pytest.raises(SettingsError, match=r"world_size=1 was given, but .* that this is rank \d of \d"):
        launch.rank_and_world_size(environment, 0, 1)
    first = {name: "0" if name in ("RANK", "SLURM_PROCID") else each for name, each in environment.items()}
    if first != environment:  # where rank 0 saves for all ranks, it alone uploads
        assert launch.rank_and_world_size(first, 0, 1) == (0, 1)


def test_arguments_take_precedence_over_the_launcher() -> None:
    """A pipeline stage may number its ranks differently from the launcher."""
    assert launch.rank_and_world_size({"RANK": "0", "WORLD_SIZE": "2"}, 1, 4) == (1, 4)
    assert launch.rank_and_world_size({"RANK": "1"}, None, 4) == (1, 4)
    assert launch.rank_and_world_size({"LOCAL_RANK": "1", "PMI_SIZE": "4"}, 0, 1) == (0, 1)


@pytest.mark.parametrize("environment", [{"LOCAL_RANK": "-1"}, {"LOCAL_RANK": ""}, {"LOCAL_WORLD_SIZE": ""}])
def test_an_environment_without_launcher_variables_is_a_single_process(environment: dict[str, str]) -> None:
    """transformers and old versions of torch use -1 for "not distributed"."""
    assert launch.rank_and_world_size(environment, None, None) == (0, 1)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
        {"PMI_SIZE": "1"},
    ],
)
def test_a_single_process_needs_no_rank_or_world_size(environment: dict[str, str]) -> None:
    """Examples are a notebook, and a single process in an allocation for more."""
    assert launch.rank_and_world_size(environment, None, None) == (0, 1)


@pytest.mark.parametrize("launch_id", ["", " "])
def test_a_blank_launch_id_is_rejected(launch_id: str) -> None:
    """A blank id may come from an unset variable; silently using the launcher's key is not what the user meant."""
    with pytest.raises(SettingsError, match="CKPT_ASYNC_LAUNCH_ID"):
        key({**ONE_NODE, "CKPT_ASYNC_LAUNCH_ID": launch_id})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        (
            {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "4"},
            (1, 2),
        ),
        ({"PET_NODE_RANK": "3", "PET_NNODES": "4"}, (3, 4)),
        (
            {"PET_NODE_RANK": "3", "PET_NNODES": "1:4", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"},
            (1, 2),
        ),
        ({"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2"}, (0, 1)),  # a batch script
    ],
)
def test_the_node_is_what_the_launcher_says(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert launch.node(environment) == expected


def test_a_node_that_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="NODE_RANK=2 in the environment is not below NNODES=2"):
        launch.node({"NODE_RANK": "2", "NNODES": "2"})


def test_a_process_that_is_no_rank_has_none_of_their_variables() -> None:
    """`Uploader(rank=0, world_size=1)` is refused where the launcher says otherwise, so these variables must be
    removed.
    """
    environment = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "SLURM_PROCID": "1", "HOME": "/x"}
    assert launch.without_rank(environment) == {"HOME": "/x"}
