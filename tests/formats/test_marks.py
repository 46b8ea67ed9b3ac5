"""What the marks of formats say beyond the table: what is unknown, missing or of somebody else."""

import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckpt_async.formats import Found, Rules, find
from ckpt_async.watch.disk import Disk
from tests.formats.trees import SECOND, START, safetensors, torch_zip, tree_of

TABLE = Rules()


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """What `dcp.save` writes."""
    folder = tmp_path_factory.mktemp("dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({"w": torch.ones(100)}, checkpoint_id=folder, no_dist=True)
    return {name: (folder / name).read_bytes() for name in ("__0_0.distcp", ".metadata")}


def transformers(step: int) -> dict[str, bytes]:
    here = f"checkpoint-{step}"
    return {
        f"{here}/model.safetensors": safetensors(),
        f"{here}/optimizer.pt": torch_zip(lr=1),
        f"{here}/rng_state.pth": torch_zip(x=1),
        f"{here}/trainer_state.json": json.dumps({"global_step": step}).encode(),
    }


def deepspeed(step: int, ranks: int = 2) -> dict[str, bytes]:
    here = f"global_step{step}"
    optims = {
        f"{here}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": torch_zip(x=rank) for rank in range(ranks)
    }
    model = {f"{here}/mp_rank_00_model_states.pt": torch_zip(module={}, dp_world_size=ranks, mp_world_size=1)}
    return {**model, **optims, "latest": here.encode()}


def complete(written: Mapping[str, bytes], **more: Any) -> list[Found]:
    return [each for each in find(tree_of(written, **more)) if not each.reason and not each.missing]


def reasons(written: Mapping[str, bytes], rules: Rules = TABLE, **more: Any) -> str:
    found = find(tree_of(written, **more), rules)
    return "; ".join(
        each.reason or f"missing {', '.join(each.missing)}" for each in found if each.reason or each.missing
    )


def test_dcp_right_in_the_folder_is_named_after_it_and_numbered_by_its_time(
    metadata: Mapping[str, bytes],
) -> None:
    (found,) = complete(metadata, root="last")
    assert (found.path, found.name, found.step) == ("", "last", START // SECOND + 2)


def test_dcp_of_several_nodes_says_what_is_elsewhere(metadata: Mapping[str, bytes]) -> None:
    (found,) = find(tree_of({"step-70/.metadata": metadata[".metadata"]}))
    assert (found.missing, found.inner) == (("__0_0.distcp",), (".metadata",))


def test_transformers_state_is_of_this_step_and_its_tensors_have_their_end() -> None:
    written = transformers(40)
    assert "belongs to another step" in reasons(
        written | {"checkpoint-40/trainer_state.json": b'{"global_step": 30}'}
    )
    cut = {"checkpoint-40/model.safetensors": safetensors()[:-1]}
    assert "model.safetensors is truncated or still being written" in reasons(written | cut)


def test_transformers_ranks_without_their_random_state_are_missed() -> None:
    written = {path: data for path, data in transformers(40).items() if "rng" not in path}
    written = {"checkpoint-40/rng_state_1.pth": torch_zip(x=1), **written}
    assert reasons(written) == "missing rng_state_0.pth"
    one = {path: data for path, data in transformers(40).items() if "rng" not in path}
    one = {"checkpoint-40/rng_state_0.pth": torch_zip(x=1), **one}
    assert reasons(one, now_s=60) == "missing rng_state_1.pth", "one process alone has no number"
    written = {"checkpoint-40/rng_state_0.pth": torch_zip(x=1), **written}
    assert "more may be written to it" in reasons(written)
    assert find(tree_of(written))[0].is_waiting
    assert complete(written, now_s=31)
    assert not reasons(written, Rules(ranks=2))
    assert reasons(written, Rules(ranks=3)) == "missing rng_state_2.pth"
    late = dict(written)
    late["checkpoint-40/rng_state_1.pth"] = late.pop("checkpoint-40/rng_state_1.pth")
    assert complete(late, now_s=31), "another rank may be done after rank 0"


def test_transformers_arguments_say_how_many_ranks_there_were() -> None:
    """Pickled by torch.save; nothing of it is run."""
    written = {f"checkpoint-40/rng_state_{rank}.pth": torch_zip(x=1) for rank in range(2)}
    written = {"checkpoint-40/training_args.bin": torch_zip(state={"num_processes": 3}), **written}
    written["checkpoint-40/trainer_state.json"] = b'{"global_step": 40}'
    for rules in (TABLE, Rules(num_nodes=2)):
        assert reasons(written, rules) == "missing rng_state_2.pth"
        assert not reasons({"checkpoint-40/rng_state_2.pth": torch_zip(x=1), **written}, rules)
    more = {f"checkpoint-40/rng_state_{rank}.pth": torch_zip(x=1) for rank in (2, 3)}
    beyond = reasons({**more, **written})
    assert "rng_state_3.pth belongs to more than its 3 ranks: give --ranks, or delete the file" in beyond


def test_a_mark_that_is_older_than_a_file_is_of_an_earlier_save() -> None:
    written = transformers(40)
    written["checkpoint-40/model.safetensors"] = written.pop("checkpoint-40/model.safetensors")
    assert "is newer than its marker checkpoint-40/trainer_state.json" in reasons(written)
    assert not reasons(written, Rules(ignores_times=True), now_s=31)


def test_files_that_an_archive_gave_no_time_are_examined() -> None:
    """Every time was 0, and the checkpoint was refused with `KeyError('transformers')`."""
    tree = tree_of(transformers(40))
    timeless = replace(tree, files={path: each._replace(mtime_ns=0) for path, each in tree.files.items()})
    (found,) = find(timeless, TABLE)
    assert (found.format, found.step, found.reason, found.missing) == ("transformers", 40, "", ())


def test_if_times_are_ignored_what_somebody_may_be_writing_is_not_complete() -> None:
    """The mark is then that of any save to the same place."""
    written, rules = transformers(40), Rules(ignores_times=True)
    for path in list(written):
        written[path] = written.pop(path)
        assert "it changed within the last 30 s" in reasons(written, rules, now_s=29)
        assert find(tree_of(written, now_s=29), rules)[0].is_waiting
        assert not reasons(written, rules, now_s=31)
    renamed = Rules(pattern="checkpoint-40", ignores_times=True)
    assert not reasons(written, renamed), "it was whole then"


def test_what_a_rotation_has_left_is_not_taken_for_a_checkpoint() -> None:
    written = transformers(40)
    del written["checkpoint-40/model.safetensors"]
    assert complete(written), "the test would show nothing"
    later = {"checkpoint-40": START + 60 * SECOND}
    assert "something was removed from checkpoint-40" in reasons(written, changed_ns=later)


def test_a_rotation_that_begins_right_after_the_mark_is_seen_and_a_mark_that_is_renamed_is_none() -> None:
    written = {"save_1/a.bin": b"x", "save_1/OK": b"x"}
    late_ns = START + 2 * SECOND + SECOND // 3
    late = {"save_1": late_ns}
    assert "something was removed" in reasons(written, Rules(done="OK"), changed_ns=late)
    assert not reasons(written, Rules(done="OK"), changed_ns=late, ctime_ns={"save_1/OK": late_ns})
    now = len(transformers(40)) * SECOND + SECOND // 3
    late = {"checkpoint-40": START + now}
    everywhere = dict.fromkeys(transformers(40), START + now)
    assert "something was removed" in reasons(transformers(40), changed_ns=late, ctime_ns=everywhere)
    uncounted = transformers(40) | {f"checkpoint-40/rng_state_{rank}.pth": torch_zip(x=1) for rank in (0, 1)}
    late = {"checkpoint-40": START + 9 * SECOND}
    assert not find(tree_of(uncounted, changed_ns=late))[0].is_waiting, "its links would hold what was left"


def test_a_rotation_while_a_folder_is_listed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c", "OK"):
        (tmp_path / "save_1").mkdir(exist_ok=True)
        (tmp_path / f"save_1/{name}").write_text("x")
    for path in [*tmp_path.rglob("*"), tmp_path]:
        os.utime(path, (1e9, 1e9))
    scandir, doomed = os.scandir, ["b", "a"]

    def rotated(path: Path) -> object:
        """Something is removed each time that the checkpoint's folder is about to be read."""
        if path.name == "save_1" and doomed:
            (tmp_path / "save_1" / doomed.pop(0)).unlink()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", rotated)
    disk = Disk(tmp_path)
    for _ in range(3):
        assert "something was removed" in find(disk.scan(), Rules(done="OK"))[0].reason


@pytest.mark.parametrize("changed", ["save_1/sub", "save_1/sub/emptied"])
def test_what_was_removed_at_any_depth_after_the_mark_is_missed(changed: str) -> None:
    written = {"save_1/sub/b/3.bin": b"x", "save_1/OK": b"x"}
    assert not reasons(written, Rules(done="OK"), changed_ns={changed: START})
    later = {changed: START + 60 * SECOND}
    assert f"something was removed from {changed}" in reasons(written, Rules(done="OK"), changed_ns=later)


@pytest.mark.parametrize(
    "late",
    [
        "layer_01-model_00-model_states.pt",
        "layer_0_expert_1_mp_rank_00_model_states.pt",
        "expp_rank_1_mp_rank_00_optim_states.pt",
    ],
)
def test_deepspeed_s_stages_and_experts_may_come_after_latest_and_are_waited_for(late: str) -> None:
    here = "global_step30"
    written = {f"{here}/{late.replace('1', '0', 1)}": torch_zip(x=1), **deepspeed(30)}
    assert "more may be written to it" in reasons(written)
    assert complete(written, now_s=31)
    written[f"{here}/{late}"] = torch_zip(x=1)
    assert not complete(written)
    assert complete(written, now_s=31)


def test_dcp_s_files_that_its_mark_does_not_name_are_left_out(metadata: Mapping[str, bytes]) -> None:
    """Left by an earlier save to the same place on more ranks."""
    written = {"step-5/__7_0.distcp": b"x", **{f"step-5/{name}": data for name, data in metadata.items()}}
    (found,) = complete(written)
    assert (found.of_other_ranks, {*found.inner}) == (("step-5/__7_0.distcp",), {*metadata})


@pytest.mark.parametrize(
    ("rules", "beyond"),
    [
        (Rules(ranks=2), "checkpoint-40/rng_state_2.pth"),
        (TABLE, "global_step30/zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        (Rules(ranks=2), "checkpoint_3/random_states_2.pkl"),
    ],
)
def test_a_file_of_a_rank_that_a_save_does_not_have_is_named(rules: Rules, beyond: str) -> None:
    written = transformers(40) | {f"checkpoint-40/rng_state_{rank}.pth": torch_zip(x=1) for rank in (0, 1)}
    del written["checkpoint-40/rng_state.pth"]
    written["checkpoint-40/trainer_state.json"] = written.pop("checkpoint-40/trainer_state.json")
    written |= {f"checkpoint_3/random_states_{rank}.pkl": b"x" for rank in (0, 1)} | deepspeed(30)
    everything = find(tree_of(written, now_s=99), rules)
    assert [each.is_complete for each in everything] == [True] * 3, [each.reason for each in everything]
    found = find(tree_of({beyond: torch_zip(x=1), **written}, now_s=99), rules)
    (named,) = (each.reason for each in found if not each.is_complete)
    assert beyond.rpartition("/")[2] in named
    assert "delete" in named


def test_what_is_added_after_the_mark_belongs_to_it_if_the_format_writes_no_such_file() -> None:
    added = {"checkpoint-40/adapter/notes.json": b"{}", "checkpoint-40/eval_results.json": b"{}"}
    (found,) = complete({**transformers(40), **added})
    assert {*found.files} > {*added}
    assert {*found.state_files}.isdisjoint(added)
    assert "is newer than its marker" in reasons(
        {**transformers(40), "checkpoint-40/adapter_model.safetensors": safetensors()}
    )
    done = {"s-1/a": b"x", "s-1/DONE": b"x"}
    assert "is newer than its marker" in reasons({**done, "s-1/b": b"x"}, Rules(done="DONE"))


def test_what_is_uncounted_is_not_quiet_while_its_folder_changes() -> None:
    late_ns = START + 100 * SECOND
    uncounted = deepspeed(30) | {"global_step30/layer_00-model_states.pt": torch_zip(x=1)}
    for now_s, is_waiting in ((120, True), (130, False)):
        (found,) = find(
            tree_of(uncounted, changed_ns={"global_step30": late_ns}, now_s=now_s), Rules(ignores_times=True)
        )
        assert found.is_waiting is is_waiting


def test_transformers_shards_that_the_index_names_are_missed() -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    written = {
        "checkpoint-40/model-00001-of-00002.safetensors": safetensors(),
        "checkpoint-40/model.safetensors.index.json": json.dumps(index).encode(),
        "checkpoint-40/trainer_state.json": b'{"global_step": 40}',
    }
    assert reasons(written) == "missing model-00002-of-00002.safetensors"


def test_nemo_half_deleted_is_not_complete(metadata: Mapping[str, bytes]) -> None:
    """By NeMo itself it has an `…-unfinished` beside it then, by others not. Its context is not always saved."""
    core = {
        "common.pt": torch_zip(global_step=5),
        **metadata,
        "metadata.json": b'{"sharded_backend":"torch_dist"}',
    }
    written = {f"m-step=5/weights/{name}": data for name, data in core.items()}
    saved = {**written, "m-step=5/context/io.json": b"{}", "m-step=5/context/model.yaml": b"x: 1"}
    begun = {"m-step=5": START + SECOND, "m-step=5/weights": START + 4 * SECOND}
    made = begun | {"m-step=5": START + 5 * SECOND, "m-step=5/context": START + 6 * SECOND}
    for here, changed_ns in ((written, begun), (saved, made)):
        (found,) = complete(here, changed_ns=changed_ns)
        assert (found.format, found.step) == ("nemo", 5)
    without = {path: data for path, data in saved.items() if not path.endswith("common.pt")}
    assert reasons(without) == "missing weights/common.pt"
    without = {path: data for path, data in saved.items() if not path.endswith("io.json")}
    assert reasons(without) == "missing context/io.json"
    at = START + 60 * SECOND
    assert "something was removed from m-step=5 after" in reasons(
        written, changed_ns=begun | {"m-step=5": at}
    )
    assert "something was removed from m-step=5/context after" in reasons(written, changed_ns=made), "emptied"
    assert "removed from m-step=5/weights" in reasons(saved, changed_ns=made | {"m-step=5/weights": at})
    assert not reasons(saved, Rules(ignores_times=True), changed_ns={"m-step=5": at}, now_s=99)


def test_a_symbolic_link_in_a_checkpoint_is_refused_and_named(tmp_path: Path) -> None:
    written = {"1/x": b"1", "1/DONE": b""}
    (found,) = find(tree_of(written, links=("1/sub/y",)), Rules(done="DONE"))
    assert "1/sub/y is a symbolic link" in found.reason
    assert found.is_refused
    assert not reasons(written, Rules(done="DONE"), links=("latest", "10/y"))
    (tmp_path / "link").symlink_to("elsewhere")
    assert Disk(tmp_path).scan().links == ("link",)


def test_deepspeed_that_does_not_say_its_ranks_wants_to_be_told() -> None:
    written = deepspeed(30) | {"global_step30/mp_rank_00_model_states.pt": torch_zip(module={})}
    written["latest"] = written.pop("latest")
    assert "give --ranks" in reasons(written)
    assert not reasons(written, Rules(ranks=2))


def test_megatron_is_complete_when_the_tracker_names_it(metadata: Mapping[str, bytes]) -> None:
    here = {"iter_0000100/mp_rank_00/model_optim_rng.pt": torch_zip(x=1)}
    assert "there is no latest_checkpointed_iteration.txt" in reasons(here)
    (found,) = complete({**here, "latest_checkpointed_iteration.txt": b"100\n"})
    assert (found.format, found.step, found.name) == ("megatron", 100, "iter_0000100")
    assert "says 50" in reasons({**here, "latest_checkpointed_iteration.txt": b"50"})
    assert "it is unknown whether this one was completed" in reasons(
        {**here, "latest_checkpointed_iteration.txt": b"200"}
    )
    sharded = {f"iter_0000100/{name}": data for name, data in metadata.items()}
    assert complete({**sharded, "latest_checkpointed_iteration.txt": b"200"}), (
        "DCP's mark speaks for an older one"
    )
    core = {"iter_0000100/common.pt": torch_zip(x=1), **sharded}
    tracker = {"latest_checkpointed_iteration.txt": b"200"}
    assert "has no metadata.json" in reasons({**core, **tracker})
    assert complete({**core, "iter_0000100/metadata.json": b"{}", **tracker}), "which comes after .metadata"


@pytest.mark.parametrize("here", ["iter_0000100", "step-100"])
def test_megatron_core_that_is_saved_anew_is_no_mixture(metadata: Mapping[str, bytes], here: str) -> None:
    """A later iteration was saved before training went back. `common.pt` is the first file of a save."""
    core = {"common.pt": torch_zip(x=1), **metadata, "metadata.json": b"{}"}
    written = {f"{here}/{name}": data for name, data in core.items()}
    written |= {"latest_checkpointed_iteration.txt": b"200"} if here.startswith("iter") else {}
    assert complete(written)
    began = {path: data for path, data in written.items() if not path.endswith("common.pt")}
    began[f"{here}/common.pt"] = torch_zip(x=2)
    assert not complete(began)
    for name in core:  # until the tracker, where there is one, names it
        began[f"{here}/{name}"] = began.pop(f"{here}/{name}")
    assert bool(complete(began)) is here.startswith("step")
    if here.startswith("iter"):
        assert complete(began | {"latest_checkpointed_iteration.txt": b"100"}, now_s=9) == []
        del began["latest_checkpointed_iteration.txt"]
        assert complete({**began, "latest_checkpointed_iteration.txt": b"100"})


def test_deepspeed_s_ranks_are_as_many_as_the_last_save_says() -> None:
    """What an earlier save to the same place left says another number."""

    def of_rank(rank: int, count: int) -> dict[str, bytes]:
        model, optim = torch_zip(module={}, dp_world_size=count, mp_world_size=1), torch_zip(x=rank)
        of_rank = f"global_step30/zero_pp_rank_{rank}_mp_rank_00"
        return {f"{of_rank}_model_states.pt": model, f"{of_rank}_optim_states.pt": optim}

    latest = {"latest": b"global_step30"}
    assert complete({**of_rank(0, 2), **of_rank(1, 2), **latest})
    fewer = {**of_rank(2, 4), **of_rank(3, 4), **of_rank(0, 2), **of_rank(1, 2), **latest}
    assert "belongs to more than its 2 ranks" in reasons(fewer)
    more = reasons({**of_rank(1, 2), **of_rank(0, 4), **latest})
    assert all(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in more for rank in (2, 3))


def test_megatron_core_keeps_the_plans_of_all_ranks_in_its_metadata(metadata: Mapping[str, bytes]) -> None:
    told = pickle.loads(metadata[".metadata"])
    item = WriteItem(next(iter(told.storage_data)), WriteItemType.SHARD)
    told.all_local_plans = [SavePlan([item])]
    written = {"step-5/common.pt": torch_zip(x=1), "step-5/__0_0.distcp": metadata["__0_0.distcp"]}
    written |= {"step-5/.metadata": pickle.dumps(told), "step-5/metadata.json": b"{}"}
    assert complete(written)[0].step == 5


def test_megatron_core_without_its_common_state_is_half_deleted(metadata: Mapping[str, bytes]) -> None:
    left = {f"step-5/{name}": data for name, data in metadata.items()}
    assert complete({"step-5/metadata.json": b'{"mine": 1}', **left}), "somebody's own file"
    left["step-5/metadata.json"] = b'{"sharded_backend": "torch_dist", "common_backend": "torch"}'
    tracker = {"latest_checkpointed_iteration.txt": b"200"}
    of_lm = {path.replace("step-5", "iter_0000100"): data for path, data in left.items()} | tracker
    assert reasons(left) == reasons(of_lm) == "missing common.pt"


def test_a_file_without_a_step_in_its_name_says_it_within() -> None:
    (found,) = complete({"last.ckpt": torch_zip(epoch=1, global_step=1234, state_dict={})})
    assert found.step == 1234
    (found,) = complete({"epoch=0-step=12-v1.ckpt": torch_zip(x=1)})
    assert found.step == 12


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("ckpt-7", 7),
        ("epoch1-loss0.9512", 1),
        ("model.500", 500),
        ("ckpt-20261120235959", START // SECOND + 1),  # when it was written
    ],
)
def test_a_step_is_no_part_of_a_date_or_of_a_fraction(name: str, step: int) -> None:
    (found,) = find(tree_of({f"{name}/DONE": b""}), Rules(done="DONE"))
    assert found.step == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=02-val_loss=0.29.ckpt", 1234),
        ("epoch=02-train_loss_step=0.29.ckpt", 1234),
        ("last-v1.ckpt", 1234),
        ("epoch=02-global_step=70-val_loss=0.29-v2.ckpt", 70),
    ],
)
def test_a_metric_or_version_in_lightning_s_name_is_no_step(
    name: str, step: int, metadata: Mapping[str, bytes]
) -> None:
    assert [each.step for each in complete({name: torch_zip(global_step=1234)})] == [step]
    folder = {f"{name}/{each}": data for each, data in metadata.items()}
    folder[f"{name}/meta.pt"] = torch_zip(global_step=1234)
    assert [each.step for each in complete(folder)] == [step]


def olmo_core(metadata: Mapping[str, bytes]) -> dict[str, bytes]:
    """As its Checkpointer writes it, without what callbacks add."""
    sharded = {f"step50/model_and_optim/{name}": data for name, data in metadata.items()}
    return {"step50/train/rank0.pt": torch_zip(x=1), **sharded, "step50/.metadata.json": b"{}"}


def test_olmo_core_s_callbacks_write_a_configuration_after_its_mark(metadata: Mapping[str, bytes]) -> None:
    begun = olmo_core(metadata)
    assert "more may be written" in reasons(begun, now_s=29)
    assert find(tree_of(begun))[0].is_waiting
    assert complete(begun, now_s=30)[0].format == "olmo-core", "not all have such a callback"
    configured = {**begun, "step50/config.json": b"{}"}
    (found,) = complete(configured, now_s=2)
    assert (found.format, found.step, "config.json" in found.inner) == ("olmo-core", 50, True)
    assert "more may be written" in reasons({**configured, "step50/tmp0a_b1c2d": b""}, now_s=2)
    (found,) = complete({**configured, "step50/tmp0a_b1c2d": b""}, now_s=30)
    assert "tmp0a_b1c2d" not in found.inner, "its writer was killed"
    paths = {**configured, "step50/data_paths.txt": b"a"}
    assert "data_paths.txt" in complete(paths, now_s=2)[0].inner
    late = {"step50": START + 40 * SECOND}
    renamed = {"step50/config.json": START + 40 * SECOND}
    assert complete(configured, now_s=60, changed_ns=late, ctime_ns=renamed), (
        "renamed when it was on the disk"
    )
    assert "something was removed" in reasons(configured, now_s=60, changed_ns=late)


def test_a_configuration_that_comes_first_is_no_mark_of_olmo(metadata: Mapping[str, bytes]) -> None:
    """Of any trainer that calls its folders so."""
    begun = {"step50/config.yaml": b"a"}
    assert not complete(begun)
    (found,) = complete({**begun, **{f"step50/{name}": data for name, data in metadata.items()}})
    assert (found.format, found.inner[0]) == ("dcp", ".metadata")
    assert "config.yaml" in found.inner


def test_olmo_and_temporary_folders() -> None:
    assert "renamed" in reasons({"step50-tmp/model.pt": torch_zip(x=1), "step50-tmp/config.yaml": b"a"})


def test_orbax_is_complete_when_it_was_renamed_or_has_commit_success() -> None:
    begun, committed = (
        json.dumps({"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": each}).encode() for each in (None, 2)
    )
    data = {"50/default/d/0": b"x"}
    # In place, as on object stores: `_CHECKPOINT_METADATA` is there from the beginning, and then written anew.
    assert "no commit time" in reasons({"50/_CHECKPOINT_METADATA": begun, **data})
    assert "is truncated" in reasons({**data, "50/_CHECKPOINT_METADATA": committed[:9]})
    written = {**data, "50/_CHECKPOINT_METADATA": committed}
    assert complete(written)[0].step == 50, "before 0.12.8 a folder that was renamed has no more"
    (found,) = complete({**written, "50/commit_success.txt": b"y"})
    assert (found.format, "commit_success.txt" in found.inner) == ("orbax", True)
    later = {"50/default": START + 60 * SECOND}
    assert "something was removed from 50/default" in reasons(written, now_s=99, changed_ns=later)
    assert complete({**data, "50/_CHECKPOINT_METADATA": b"{}"}, now_s=2)
    assert "renamed" in reasons({"50.orbax-checkpoint-tmp-1/_CHECKPOINT_METADATA": committed})


def test_ml_flashpoint_has_its_metadata_and_no_unfinished_beside_it(metadata: Mapping[str, bytes]) -> None:
    # As 0.0.10 writes it: common.pt, the mark of each rank, data, `.metadata`; then the marks are removed.
    begun = {"step-5_ckpt/common.pt": torch_zip(x=1)}
    assert "no .metadata" in reasons(begun), "before the first mark"
    written = {**begun, **{f"step-5_ckpt/{name}": data for name, data in metadata.items()}}
    marked = {"step-5_ckpt__0__unfinished": b""}
    assert "unfinished" in reasons({**begun, **marked})
    assert "unfinished" in reasons({**written, **marked})
    (found,) = complete({**written, "step-50_ckpt__0__unfinished": b""})
    assert (found.format, found.step) == ("ml-flashpoint", 5)
    assert "missing __0_0.distcp" in reasons({**begun, "step-5_ckpt/.metadata": metadata[".metadata"]})


def test_nemo_has_no_unfinished_beside_it(metadata: Mapping[str, bytes]) -> None:
    written = {f"m--step=5-last/weights/{name}": data for name, data in metadata.items()}
    assert (complete(written)[0].format, complete(written)[0].step) == ("nemo", 5)
    unfinished = {"m--step=5-last-unfinished": b""}
    assert "unfinished" in reasons({**written, **unfinished})
    averaged = {path.replace("last", "last-EMA"): data for path, data in written.items()}
    assert "unfinished" in reasons({**averaged, **unfinished}), "one mark for both"
    assert "no weights/.metadata" in reasons({"m--step=5-last/weights/__0_0.distcp": b"x"})


def shards(folder: Path, *names: str) -> None:
    """Of two minutes ago."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (written_s := time.time() - 120, written_s))


def tick(folder: Path) -> None:
    """Files' times come in ticks of 10 ms at most."""
    was, probe = folder.stat().st_ctime_ns, folder.parent / "probe"
    probe.touch()
    while probe.stat().st_mtime_ns <= was + 20_000_000:
        probe.touch()
    probe.unlink()


@pytest.mark.parametrize("removed", ["b", "deep/d", "deep"])
def test_what_was_renamed_into_place_and_half_deleted_later_is_not_complete(
    removed: str, tmp_path: Path
) -> None:
    new, out = tmp_path / "new", tmp_path / "out"
    out.mkdir()
    shards(new, "a", "b", "lock", "deep/c", "deep/d")
    (new / "lock").unlink()  # its writer tidies up
    tick(new)
    new.rename(out / "step-1")

    def reason(**more: Any) -> str:
        (found,) = find(Disk(out).scan(), Rules(pattern="step-*", **more))
        return found.reason

    assert not reason()
    tick(out / "step-1")
    path = out / "step-1" / removed
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "something was removed from step-1" in reason()
    assert not reason(ignores_times=True)


@pytest.mark.parametrize("made", ["c", "deep/d", "other/e"])
def test_what_is_made_in_a_folder_that_was_renamed_into_place_is_no_removal(
    made: str, tmp_path: Path
) -> None:
    shards(tmp_path / "new", "a", "deep/b")
    (tmp_path / "new").rename(tmp_path / "step-1")
    tick(tmp_path / "step-1")
    (tmp_path / "step-1" / made).parent.mkdir(exist_ok=True)
    (tmp_path / "step-1" / made).write_bytes(b"x")
    (found,) = find(Disk(tmp_path).scan(), Rules(pattern="step-*"))
    assert not found.reason


def test_ones_own_rules_replace_the_table() -> None:
    written = {"a-1/x": b"1", "a-1/DONE": b"", "a-2/x": b"1", **transformers(40)}
    assert [each.path for each in find(tree_of(written), Rules(done="DONE"))] == ["a-1"]
    assert [each.path for each in find(tree_of(written), Rules(pattern="a-*"))] == ["a-1", "a-2"]
    assert [each.path for each in find(tree_of({"m-7.pt": torch_zip(x=1)}), Rules(pattern="m-*.pt"))] == [
        "m-7.pt"
    ]


def test_a_mark_of_ones_own_alone_is_no_checkpoint() -> None:
    for bare in ({"s-7/DONE": b"x"}, {"s-7/DONE": b"x", "s-7/model.tmp": b"x"}, {"DONE": b"x"}):
        assert reasons(bare, Rules(done="DONE")) == "it contains nothing but DONE yet"
        assert not reasons(bare, Rules(done="DONE", num_nodes=2)), (
            "another node has the rest, or it is given up"
        )
    for written in ({"s-7/model": b"", "s-7/DONE": b"x"}, {"s-7/sub/model": b"", "s-7/DONE": b"x"}):
        assert not reasons(written, Rules(done="DONE"))


def test_only_the_formats_that_are_asked_for() -> None:
    written = {**transformers(40), "x.ckpt": torch_zip(global_step=4)}
    assert [each.format for each in find(tree_of(written), Rules(formats=("transformers",)))] == [
        "transformers"
    ]
    for format_ in ("torch-file", "lightning"):
        assert [each.path for each in find(tree_of(written), Rules(formats=(format_,)))] == ["x.ckpt"]


def test_a_mark_is_read_once_for_each_version_of_it(metadata: Mapping[str, bytes], tmp_path: Path) -> None:
    """It may have a gigabyte, and the folder is looked at every few seconds."""
    for name, data in metadata.items():
        (tmp_path / name).write_bytes(data)
    disk = Disk(tmp_path)
    first = disk.scan()
    assert not find(first)[0].missing
    again = disk.scan()
    (_, named) = next((key, each) for key, each in again.memo.items() if key[0] == "named")
    assert named == {"__0_0.distcp": len(metadata["__0_0.distcp"])}
    named["another"] = 1
    assert find(again)[0].missing == ("another",), "what was found is used again"
    (tmp_path / ".metadata").write_bytes(metadata[".metadata"] + b" ")
    assert not find(disk.scan())[0].missing


def verl(step: int, told: str) -> dict[str, bytes]:
    here = f"run/global_step_{step}"
    states = {f"{here}/{part}/model_world_size_1_rank_0.pt": torch_zip(x=1) for part in ("actor", "critic")}
    return {
        **states,
        f"{here}/data.pt": torch_zip(x=1),
        "run/latest_checkpointed_iteration.txt": told.encode(),
    }


def test_verl_s_step_without_its_actor_was_rotated() -> None:
    """It keeps actors and critics by their own numbers, and deletes an actor before it saves the next one."""
    written = verl(20, "20")
    assert complete(written)
    gone = {path: data for path, data in written.items() if "/actor/" not in path}
    assert "it has no actor" in reasons(gone)
    only = {path: data for path, data in written.items() if "/critic/" not in path}
    later = {"run/global_step_20": START + 60 * SECOND}
    for told in ("20", "30"):
        assert "something was removed" in reasons({**only, **verl(30, told)}, changed_ns=later)
    assert "says 1" in reasons(verl(12, "1")), "it is not renamed into place"


def test_verl_s_late_ranks_of_data_are_waited_for() -> None:
    here = "global_step_20"
    states = {f"{here}/model_world_size_4_rank_{rank}.pt": torch_zip(x=1) for rank in range(4)}
    begun = {**states, f"{here}/data_0.pt": torch_zip(x=1), "latest_checkpointed_iteration.txt": b"20"}
    assert "more may be written to it" in reasons(begun)
    assert complete(begun, now_s=31)
    assert complete({**begun, **{f"{here}/data_{rank}.pt": torch_zip(x=1) for rank in (1, 2, 3)}})


@pytest.mark.parametrize("name", ["tmp_step_5", "old_step_5"])
def test_nemo_rl_s_folder_that_is_not_renamed_is_no_checkpoint(
    name: str, metadata: Mapping[str, bytes]
) -> None:
    rest = {f"policy/weights/{each}": data for each, data in metadata.items()}
    files = {"training_info.json": b"{}", **rest, "train_dataloader.pt": torch_zip(x=1)}
    written = {f"step_5/{each}": data for each, data in files.items()}
    (found,) = complete(written)
    assert (found.format, found.step) == ("nemo-rl", 5)
    assert "never renamed" in reasons({f"{name}/{each}": data for each, data in files.items()})
    several = {path: data for path, data in written.items() if "dataloader" not in path}
    assert complete({**several, "step_5/train_dataloader_math.pt": torch_zip(x=1)})
    later = {"step_5/policy": START + 60 * SECOND}
    assert "something was removed" in reasons(written, changed_ns=later)


def test_automodel_s_mark_of_a_save_and_what_is_written_after_its_end(metadata: Mapping[str, bytes]) -> None:
    here = "epoch_0_step_100"
    parts = {f"{here}/{part}/{each}": data for part in ("model", "optim") for each, data in metadata.items()}
    written = {f"{here}/losses.json": b"{}", **parts, f"{here}/config.yaml": b"a"}
    published = {here: START + (len(written) * SECOND) + SECOND // 2}
    assert complete(written, changed_ns=published)[0].format == "automodel"
    assert ".incomplete is still there" in reasons({f"{here}/.incomplete": b"", **written})
    rotated = {here: START + 60 * SECOND}
    assert "something was removed" in reasons(written, changed_ns=rotated)
    late = {f"{here}/optim/.metadata": written.pop(f"{here}/optim/.metadata")}
    (found,) = find(tree_of({**written, **late}))
    assert found.is_refused
    assert "is_async: false" in found.reason


def test_lightning_s_deepspeed_tells_the_step() -> None:
    written = {
        "last.ckpt/checkpoint/mp_rank_00_model_states.pt": torch_zip(dp_world_size=1, global_step=70),
        "last.ckpt/latest": b"checkpoint",
    }
    assert [(each.path, each.step) for each in complete(written)] == [("last.ckpt", 70)]
    assert "`latest` names nothing yet" in reasons(written | {"last.ckpt/latest": b""})
