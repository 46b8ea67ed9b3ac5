"""For each entry of the table: one save, as its writer leaves it, judged at every moment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from ckpt_async.formats import FORMATS, Found, Rules, Tree, find, is_late
from ckpt_async.formats.found import UNCOUNTED_S
from tests.dcp_metadata import metadata_of
from tests.formats.trees import SECOND, START, safetensors, torch_zip, tree_of

ZIP, SIZE = torch_zip(x=1), 50
TABLE, RANKS = Rules(), Rules(ranks=2)


@dataclass(frozen=True)
class Save:
    """One save: its files in the order in which they are written, the last ones late, if their format has such.

    `free`: files that it may have without writing them anew. `names`: it tells all its files, given the number of ranks
    or not (None: only if it is given).
    """

    format: str
    step: int
    written: Mapping[str, bytes]
    free: tuple[str, ...] = ()
    names: bool | None = False
    rules: Rules = TABLE
    spare: int = 0  # how many of the last files it is complete without


def dcp(folder: str, *names: str, part: str = "") -> dict[str, bytes]:
    names = names or ("__0_0.distcp",)
    here = {f"{folder}/{name}": b"x" * SIZE for name in names}
    return {**here, f"{folder}/.metadata": metadata_of(dict.fromkeys(names, SIZE))}


def below(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def of_index() -> dict[str, bytes]:
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}).encode()
    return {**dict.fromkeys(shards, safetensors()), "model.safetensors.index.json": index}


STATE = b'{"global_step": 40}'
CORE = b'{"sharded_backend": "torch_dist", "common_backend": "torch"}'
MODEL_STATES = torch_zip(module={}, dp_world_size=2, mp_world_size=1)
DEEPSPEED = {
    "mp_rank_00_model_states.pt": MODEL_STATES,
    **{f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": ZIP for rank in (0, 1)},
}
ZERO_3 = {
    **{f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": MODEL_STATES for rank in (0, 1)},
    **{f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": ZIP for rank in (0, 1)},
}
COMMITTED = (
    b'{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2, "item_handlers": {"state": "x", "meta": "y"}}'
)

VERL_FREE = ("fsdp_config.json", "huggingface/config.json")


def verl_part() -> dict[str, bytes]:
    kinds = ("model", "optim", "extra_state")
    states = {f"{kind}_world_size_2_rank_{rank}.pt": ZIP for rank in (0, 1) for kind in kinds}
    return {**states, **dict.fromkeys(VERL_FREE, b"{}")}


SAVES = {
    "dcp": Save("dcp", 70, dcp("step-70", "__0_0.distcp", "__1_0.distcp"), names=True),
    "dcp with its files in subfolders": Save(
        "dcp", 5, dcp("run/step5", "a/__0_0.distcp", "b/__1_0.distcp"), names=True
    ),
    "dcp below the folder of its step": Save("dcp", 100, dcp("step_100/model"), names=True),
    "dcp with a configuration beside": Save(
        "dcp",
        100,
        {"global_step100/config.json": b"{}", **dcp("global_step100/a/ckpt")},
        ("config.json",),
        True,
    ),
    "megatron-core": Save(
        "dcp",
        5,
        {"step-5/common.pt": ZIP, **dcp("step-5"), "step-5/metadata.json": CORE},
        ("metadata.json",),
        True,
    ),
    "transformers": Save(
        "transformers",
        40,
        below(
            "checkpoint-40",
            {
                "config.json": b"{}",
                "model.safetensors": safetensors(),
                "optimizer.pt": ZIP,
                "rng_state.pth": ZIP,
                "trainer_state.json": STATE,
            },
        ),
        ("config.json", "trainer_state.json"),
        None,
    ),
    "transformers of two ranks": Save(
        "transformers",
        40,
        below(
            "out/checkpoint-40",
            {
                **of_index(),
                "config.json": b"{}",
                "training_args.bin": torch_zip(state={"num_processes": 2}),
                "rng_state_0.pth": ZIP,
                "trainer_state.json": STATE,
                "rng_state_1.pth": ZIP,
            },
        ),
        ("config.json", "trainer_state.json", "model.safetensors.index.json"),
        True,
    ),
    "transformers with FSDP": Save(
        "transformers",
        40,
        below(
            "checkpoint-40",
            {
                **dcp("pytorch_model_fsdp_0", "__0_0.distcp", "__1_0.distcp"),
                **dcp("optimizer_0", "__0_0.distcp", "__1_0.distcp"),
                "scheduler.pt": ZIP,
                "rng_state_0.pth": ZIP,
                "trainer_state.json": STATE,
                "rng_state_1.pth": ZIP,
            },
        ),
        ("trainer_state.json",),
        None,
    ),
    "transformers with DeepSpeed": Save(
        "transformers",
        40,
        below(
            "checkpoint-40",
            {
                **below("global_step40", DEEPSPEED),
                "latest": b"global_step40",
                "rng_state_0.pth": ZIP,
                "rng_state_1.pth": ZIP,
                "trainer_state.json": STATE,
            },
        ),
        ("trainer_state.json", "latest"),
        None,
    ),
    "accelerate with FSDP": Save(
        "accelerate",
        3,
        below(
            "checkpoints/checkpoint_3",
            {
                **dcp("pytorch_model_fsdp_0", "__0_0.distcp", "__1_0.distcp"),
                **dcp("optimizer_0", "__0_0.distcp", "__1_0.distcp"),
                "scheduler.bin": b"s",
                "random_states_0.pkl": b"r",
                "random_states_1.pkl": b"r",
            },
        ),
        (),
        None,
    ),
    "accelerate with DeepSpeed": Save(
        "accelerate",
        3,
        below(
            "checkpoint_3",
            {
                **below("pytorch_model", ZERO_3),
                "latest": b"pytorch_model",
                "scheduler.bin": b"s",
                "random_states_0.pkl": b"r",
                "random_states_1.pkl": b"r",
            },
        ),
        ("latest",),
        None,
        RANKS,
    ),
    "accelerate with DeepSpeed, of ranks that it counts": Save(
        "accelerate",
        3,
        below(
            "checkpoint_3",
            {
                **below("pytorch_model", DEEPSPEED),
                "latest": b"pytorch_model",
                "random_states_0.pkl": b"r",
                "random_states_1.pkl": b"r",
            },
        ),
        ("latest",),
        None,
    ),
    "verl": Save(
        "verl",
        20,
        {
            **below("global_step_20/actor", verl_part()),
            **below("global_step_20/critic", verl_part()),
            "global_step_20/data.pt": ZIP,
            "latest_checkpointed_iteration.txt": b"20",
        },
        tuple(f"{part}/{name}" for part in ("actor", "critic") for name in VERL_FREE),
    ),
    "verl, a step before the last": Save(
        "verl",
        20,
        {
            "latest_checkpointed_iteration.txt": b"30",
            **below("global_step_20/actor", verl_part()),
            "global_step_20/data.pt": ZIP,
        },
        tuple(f"actor/{name}" for name in VERL_FREE),
    ),
    "verl with Megatron": Save(
        "verl",
        20,
        {
            "global_step_20/actor/dist_ckpt/common.pt": ZIP,
            **dcp("global_step_20/actor/dist_ckpt", "__0_0.distcp", "__1_0.distcp"),
            "global_step_20/actor/dist_ckpt/metadata.json": CORE,
            "global_step_20/data.pt": ZIP,
            "latest_checkpointed_iteration.txt": b"20",
        },
        ("actor/dist_ckpt/metadata.json",),
    ),
    "verl, fine-tuning": Save(
        "verl",
        20,
        {
            **below("global_step_20", verl_part()),
            "global_step_20/data_0.pt": ZIP,
            "latest_checkpointed_iteration.txt": b"20",
            "global_step_20/data_1.pt": ZIP,
        },
        VERL_FREE,
        spare=1,  # of 2 ranks, one may have no data
    ),
    "nemo-rl": Save(
        "nemo-rl",
        5,
        below(
            "results/step_5",
            {
                "training_info.json": b"{}",
                "config.yaml": b"a",
                **dcp("policy/weights", "__0_0.distcp", "__1_0.distcp"),
                **dcp("policy/optimizer"),
                "policy/tokenizer/tokenizer.json": b"{}",
                **dcp("value/weights"),
                **dcp("value/optimizer"),
                "train_dataloader.pt": ZIP,
            },
        ),
        ("training_info.json", "config.yaml", "policy/tokenizer/tokenizer.json"),
    ),
    "automodel": Save(
        "automodel",
        100,
        below(
            "epoch_0_step_100",
            {
                "losses.json": b"{}",
                **{f"dataloader/dataloader_dp_rank_{rank}.pt": ZIP for rank in (0, 1)},
                **{f"rng/rng_global_rank_{rank}.pt": ZIP for rank in (0, 1)},
                "step_scheduler.pt": ZIP,
                "model/shard-00001-model-00001-of-00001.safetensors": safetensors(),
                "model/shard-00002-model-00001-of-00001.safetensors": safetensors(),
                **dcp("optim", "__0_0.distcp", "__1_0.distcp"),
                "config.yaml": b"a",
            },
        ),
        ("losses.json", "config.yaml"),
    ),
    "nemo by rank": Save(
        "lightning",
        900,
        {f"tp_rank_0{tp}_pp_rank_00{pp}/m--step=900-last.ckpt": ZIP for tp in (0, 1) for pp in (0, 1)},
        names=True,
        rules=Rules(ranks=4),
    ),
    "nemo with FSDP": Save(
        "lightning",
        900,
        {f"fsdp_shard_0000{rank}/m--step=900.ckpt": ZIP for rank in (0, 1)},
        names=True,
        rules=RANKS,
    ),
    "deepspeed": Save(
        "deepspeed", 30, {**below("global_step30", DEEPSPEED), "latest": b"global_step30"}, names=True
    ),
    "deepspeed with ZeRO 3": Save(
        "deepspeed", 30, {**below("global_step30", ZERO_3), "latest": b"global_step30"}, names=True
    ),
    "deepspeed of lightning": Save(
        "deepspeed",
        9,
        below(
            "e=0-step=9.ckpt",
            {**below("checkpoint", DEEPSPEED), "zero_to_fp32.py": b"x", "latest": b"checkpoint"},
        ),
        ("zero_to_fp32.py", "latest"),
        names=True,
    ),
    "megatron": Save(
        "megatron",
        100,
        {
            **{f"iter_0000100/mp_rank_0{rank}/model_optim_rng.pt": ZIP for rank in (0, 1)},
            "latest_checkpointed_iteration.txt": b"100",
        },
    ),
    "megatron with its core": Save(
        "megatron",
        100,
        {
            "iter_0000100/common.pt": ZIP,
            **dcp("iter_0000100"),
            "iter_0000100/metadata.json": CORE,
            "latest_checkpointed_iteration.txt": b"100",
        },
        ("metadata.json",),
        True,
        spare=1,  # it is DCP's without the tracker
    ),
    "lightning, a file": Save("lightning", 300, {"logs/epoch=1-step=300.ckpt": ZIP}, names=True),
    "lightning, a folder": Save(
        "lightning", 9, {**dcp("e=0-step=9.ckpt"), "e=0-step=9.ckpt/meta.pt": ZIP}, ("meta.pt",), True
    ),
    "composer": Save("composer", 20, {"ep0-ba20-rank0.pt": ZIP}, names=True),
    "composer, without a rank": Save("composer", 20, {"ep0-ba20.pt": ZIP}, names=True),
    "composer, a file per rank": Save(
        "composer", 20, {f"c/ep0-ba20-rank{rank}.pt": ZIP for rank in (0, 1)}, names=True, rules=RANKS
    ),
    "nemo": Save(
        "nemo",
        5,
        {
            "m-step=5/weights/common.pt": ZIP,
            **dcp("m-step=5/weights"),
            "m-step=5/weights/metadata.json": CORE,
        },
        ("weights/metadata.json",),
        True,
    ),
    "olmo": Save(
        "olmo",
        50,
        below("step50-unsharded", {"model.pt": ZIP, "optim.pt": ZIP, "config.yaml": b"a"}),
        ("config.yaml",),
    ),
    "olmo of two ranks": Save(
        "olmo",
        50,
        below(
            "step50",
            {
                **{f"{part}/rank{rank}.pt": ZIP for part in ("model", "optim") for rank in (0, 1)},
                "train/rank0.pt": ZIP,
                "metadata.yaml": b"world_size: 2\n",
                "config.yaml": b"a",
                "train/rank1.pt": ZIP,
            },
        ),
        ("config.yaml", "metadata.yaml"),
    ),
    "olmo-core": Save(
        "olmo-core",
        50,
        below(
            "step50",
            {
                **{f"train/rank{rank}.pt": ZIP for rank in (0, 1)},
                **dcp("model_and_optim", "__0_0.distcp", "__1_0.distcp"),
                ".metadata.json": b"{}",
            },
        ),
        (".metadata.json",),
        None,
    ),
    "orbax": Save(
        "orbax",
        50,
        below("50", {"state/d/0": b"x", "meta/y": b"x", "_CHECKPOINT_METADATA": COMMITTED}),
        ("state/d/0", "meta/y", "_CHECKPOINT_METADATA"),
    ),
    "orbax with a commit file": Save(
        "orbax", 50, below("run/50", {"d/0": b"x", "commit_success.txt": b"x"}), ("d/0", "commit_success.txt")
    ),
    "ml-flashpoint": Save(
        "ml-flashpoint",
        5,
        {"c/step-5_ckpt/common.pt": ZIP, **dcp("c/step-5_ckpt", "src0.distcp", "src1.distcp")},
        ("common.pt",),
        True,
    ),
    "torch-file": Save("torch-file", 50, {"ckpt/step50.pt": ZIP}, names=True),
    "torch-file of each rank": Save(
        "torch-file", 50, {f"ckpt/step50_rank{rank}.pt": ZIP for rank in (0, 1)}, names=True, rules=RANKS
    ),
    "torch-file in a folder of each rank": Save(
        "lightning", 10, {f"mp_rank_0{rank}/step=10.ckpt": ZIP for rank in (0, 1)}, names=True, rules=RANKS
    ),
    "safetensors-file": Save(
        "safetensors-file", 50, {"ckpt/model_50.safetensors": safetensors()}, names=True
    ),
    "safetensors-file of two parts": Save(
        "safetensors-file", 50, below("step-50", of_index()), ("model.safetensors.index.json",), True
    ),
}
every = pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
QUIET_S = UNCOUNTED_S + 1


def tree_after(save: Save, count: int, *, half: bytes | None = None) -> Tree:
    written = dict([*save.written.items()][:count])
    if half is not None:
        written[[*save.written][count]] = half
    return tree_of(written, now_s=QUIET_S)


def complete(tree: Tree, rules: Rules) -> list[Found]:
    return [each for each in find(tree, rules) if each.is_complete]


def one(save: Save, rules: Rules | None = None) -> Found:
    (found,) = find(tree_after(save, len(save.written)), rules or save.rules)
    return found


def state_names(save: Save) -> set[str]:
    found = one(save)
    return {found.shard(each) for each in found.state_files}


def test_every_format_has_a_table() -> None:
    assert {each.format for each in SAVES.values()} == {*FORMATS}


@pytest.mark.fault("F62")
@every
def test_only_the_whole_is_complete(save: Save) -> None:
    """At no moment of its save, and with no file half-written, is it complete; at the end it is."""
    paths = [*save.written]
    for count, path in enumerate(paths[: len(paths) - save.spare]):
        assert not complete(tree_after(save, count), save.rules), paths[:count]
        half = save.written[path][: len(save.written[path]) // 2]
        if len(save.written[path]) > 1:
            assert not complete(tree_after(save, count, half=half), save.rules), (paths[:count], path)
    found = one(save)
    assert (found.format, found.step, found.reason, found.missing) == (save.format, save.step, "", ())
    assert {*found.files} == {*paths} - {each for each in paths if "/" not in each and found.is_folder}


@pytest.mark.fault("F62")
@every
def test_a_listing_of_a_store_is_judged_alike(save: Save) -> None:
    """It has no times, and its objects are there as a whole."""
    rules = replace(save.rules, is_store=True)
    tree = tree_after(save, len(save.written))
    timeless = replace(tree, files={path: each._replace(mtime_ns=0) for path, each in tree.files.items()})
    (found,) = find(timeless, rules)
    assert (found.format, found.step, found.is_complete) == (save.format, save.step, True)
    for count in range(len(save.written) - save.spare):
        assert not complete(tree_after(save, count), rules)


@every
def test_every_save_writes_its_states_anew(save: Save) -> None:
    found = one(save)
    marks = {each for each in found.inner if each.endswith(".metadata")}
    assert {*found.inner} - state_names(save) - marks == {*save.free}


@every
def test_a_state_that_is_newer_than_the_marker_is_being_rewritten(save: Save) -> None:
    found = one(save)
    for path in found.state_files if found.mark else ():
        allowed_s = 60 if is_late(found.format, found.shard(path)) else 0
        if path == found.mark:
            continue
        for late_s in (allowed_s, allowed_s + 1):
            tree = tree_after(save, len(save.written))
            at_ns = tree.files[found.mark].mtime_ns + late_s * SECOND
            tree = replace(tree, files={**tree.files, path: tree.files[path]._replace(mtime_ns=at_ns)})
            (now,) = find(replace(tree, now_ns=tree.now_ns + 99 * SECOND), save.rules)
            assert now.is_complete is (late_s == allowed_s), (path, late_s)
            assert now.is_complete or path in now.reason


@every
def test_a_late_rank_of_an_earlier_save_is_no_part_of_this_one(save: Save) -> None:
    found = one(save)
    for path in found.files:
        if is_late(found.format, found.shard(path)):
            tree = tree_after(save, len(save.written))
            old = tree.files[path]._replace(mtime_ns=START - 700 * SECOND)
            (now,) = find(replace(tree, files={**tree.files, path: old}), save.rules)
            assert f"{path} belongs to an earlier save" in now.reason


@every
def test_a_faithful_copy_is_as_complete_as_its_original(save: Save) -> None:
    """All times of files and folders are kept, except ctimes."""
    tree = tree_after(save, len(save.written))
    changed_ns = {
        each: max(tree.files[path].mtime_ns for path in tree.below(each)) + SECOND // 2
        for each in tree.folders
    }
    everything = dict.fromkeys([*tree.files, *tree.folders], tree.now_ns)
    (found,) = find(replace(tree, changed_ns=changed_ns, ctime_ns=everything), save.rules)
    assert found.is_complete, found.reason


@every
def test_it_goes_with_several_nodes_if_all_its_files_are_told(save: Save) -> None:
    told, untold = one(save, RANKS), one(save, replace(save.rules, ranks=save.rules.ranks))
    if save.names is None:
        assert not untold.names_its_files or save.rules.ranks
        assert told.names_its_files or save.written.keys() & {"checkpoint-40/rng_state.pth"}
    else:
        assert untold.names_its_files is save.names
