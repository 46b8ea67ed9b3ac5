"""What a checkpoint is, and of which step: the folders of steps, parts of a checkpoint, and plain files."""

from collections.abc import Mapping

import pytest

from ckpt_async.formats import Found, Rules, find, not_taken
from ckpt_async.formats.found import number_in, step_named
from tests.dcp_metadata import metadata_of
from tests.formats.trees import safetensors, torch_zip, tree_of

ZIP = torch_zip(x=1)
TABLE = Rules()


def dcp(*folders: str) -> dict[str, bytes]:
    data = {"__0_0.distcp": b"x" * 50, ".metadata": metadata_of({"__0_0.distcp": 50})}
    return {f"{folder}/{name}": each for folder in folders for name, each in data.items()}


def found_in(written: Mapping[str, bytes], rules: Rules = TABLE, now_s: float = 99) -> list[Found]:
    return find(tree_of(written, now_s=now_s), rules)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("100", 100), ("0000100", 100), ("step100", 100), ("step-100", 100), ("global_step100", 100)),
        *(("iter_0000100", 100), ("iteration-100", 100), ("checkpoint-100", 100), ("checkpoint_100", 100)),
        *(("ckpt100", 100), ("ep1-ba100", 100), ("epoch_0_step_100", 100), ("epoch=1-step=100-v2", 100)),
        *(("step-100_ckpt", 100), ("checkpoint_epoch1_step100", 100), ("Step_100", 100)),
        *(
            ("20261124", None),
            ("20261124_101500", None),
            ("1764000000", None),
            ("v2", None),
            ("version_3", None),
        ),
        *(("rank_0", None), ("mp_rank_00", None), ("trial_7", None), ("resnet50", None), ("epoch_3", None)),
        *(("checkpoints", None), ("step=0.5", None), ("loss_0.25", None), ("model", None)),
    ],
)
def test_a_step_s_folder_is_a_number_or_has_a_word_for_it(name: str, step: int | None) -> None:
    assert step_named(name) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("model_1000", 1000), ("m-7", 7), ("epoch_3", 3), ("model.500", 500), ("epoch1-loss0.9512", 1)),
        *(
            ("best-20261124", None),
            ("resnet50", None),
            ("llama-7b", None),
            ("run_3", None),
            ("model-v2", None),
        ),
    ],
)
def test_a_number_that_stands_alone_is_a_step_unless_it_says_otherwise(name: str, step: int | None) -> None:
    assert number_in(name) == step


@pytest.mark.parametrize(
    "layout",
    [
        "step_{}/model",
        "step-{}/dcp",
        "{}/checkpoint",
        "global_step{}/sharded/ckpt",
        "run/epoch_0_step_{}/model",
    ],
)
def test_one_marked_folder_below_a_step_s_is_its_checkpoint(layout: str) -> None:
    """They were all of step 0, or of the time in seconds."""
    written = {**dcp(layout.format(100), layout.format(1000)), f"{layout.format(100)}/more.json": b"{}"}
    found = found_in(written)
    place = layout.partition("{}")[0] + "{}"
    assert [(each.step, each.path, each.reason) for each in found] == [
        (step, place.format(step), "") for step in (100, 1000)
    ]
    (first, _) = found_in(written, now_s=0)
    assert first.is_waiting, "its trainer may write more beside it"


def test_a_part_whose_siblings_have_more_is_never_a_checkpoint() -> None:
    """Its trainer was killed between the parts."""
    whole = dcp("step_1/model", "step_1/optim")
    found = {each.path: each for each in found_in({**whole, **dcp("step_2/model")}, now_s=9_999)}
    assert found["step_1"].is_refused
    assert found["step_2"].reason == "it has no optim, which other steps beside it have"
    begun = {**dcp("step_3/model"), "step_3/optim/__0_0.distcp": b"x"}
    (unfinished,) = found_in(begun)
    assert not unfinished.is_complete


@pytest.mark.parametrize(
    "written",
    [
        dcp("step_3/actor", "step_3/critic"),
        dcp("step_3/policy/weights", "step_3/policy/optimizer"),
        {**dcp("epoch_1_step_3/model"), "epoch_1_step_3/dataloader.pt": ZIP},
        {**dcp("step_3/model"), "step_3/rank_0/state.pt": ZIP},
    ],
)
def test_parts_that_nobody_knows_are_refused_with_what_to_type(written: dict[str, bytes]) -> None:
    """They were committed one by one: the newest was half a checkpoint, of step 0."""
    (found,) = found_in(written)
    folder = next(iter(written)).partition("/")[0]
    assert (found.path, found.step, found.is_refused, {*found.files}) == (folder, 3, True, {*written})
    assert "--done DONE" in found.reason
    (own,) = found_in({**written, f"{folder}/DONE": b""}, Rules(done="DONE"))
    assert (own.path, own.step, own.is_complete) == (folder, 3, True)


def test_steps_within_the_folder_of_a_number_are_no_parts_of_it() -> None:
    assert [each.path for each in found_in(dcp("3/step_1", "3/step_2"))] == ["3/step_1", "3/step_2"]


def test_an_accelerate_save_is_one_checkpoint_at_every_moment() -> None:
    """3 saves were 6 checkpoints of step 0, and the newest an optimizer."""
    here = "checkpoints/checkpoint_2"
    parts = dcp(f"{here}/pytorch_model_fsdp_0", f"{here}/optimizer_0")
    written = {**parts, f"{here}/scheduler.bin": b"s", f"{here}/random_states_0.pkl": b"r"}
    for count in range(1, len(written)):
        assert [each.is_complete for each in found_in(dict([*written.items()][:count]), now_s=9_999)] == [
            False
        ]
    (found,) = found_in(written)
    assert (found.path, found.step, found.name, found.is_complete) == (here, 2, "checkpoint_2", True)
    (again,) = found_in({f"{here}/random_states_0.pkl": b"r", **parts})
    assert "is newer than its marker" in again.reason, "an earlier save's"


PLAIN = {
    "ckpt/step{}.pt": "torch-file",
    "{}.pth": "torch-file",
    "out/model_{}.safetensors": "safetensors-file",
    "epoch_{}.pt": "torch-file",
    "20261124/step{}-loss0.52.pt": "torch-file",
    "5/step{}.pt": "torch-file",
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_file_with_a_number_is_a_checkpoint(name: str) -> None:
    data = safetensors() if PLAIN[name] == "safetensors-file" else ZIP
    found = found_in({name.format(50): data, name.format(100): data})
    assert [(each.format, each.step, each.is_plain, each.is_complete) for each in found] == [
        (PLAIN[name], step, True, True) for step in (50, 100)
    ]
    assert not any(each.is_complete for each in found_in({name.format(50): data[:-9]}))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("resnet50.pt", "--pattern 'resnet*.pt'"),
        ("out/model.pt", "--pattern 'out/model.pt'"),
        ("out/pytorch_model.bin", "--pattern 'out/pytorch_model.bin'"),
        ("out/step_100.bin", "--pattern 'out/step_*.bin'"),
        ("step100/model.pt", "--done DONE"),
        ("step100/model_0.pt", "--done DONE"),
        ("model-00001-of-00002.safetensors", "--done DONE"),
        ("step_5/actor/model_world_size_8_rank_0.pt", "--done DONE"),
    ],
)
def test_a_file_that_is_not_taken_is_named_with_what_to_type(name: str, command: str) -> None:
    tree = tree_of({name: ZIP, "config.json": b"{}", **dcp("other/step_1")})
    candidates = [each for each in find(tree) if each.path != "other/step_1"]
    assert candidates == []
    ((folder, (path, advice)),) = not_taken(tree, find(tree)).items()
    assert (folder, path) == (name.rpartition("/")[0], name)
    assert command in advice


@pytest.mark.parametrize(
    ("names", "commands"),
    [
        (["G_1000.pth", "D_1000.pth"], ["--pattern 'D_*.pth'", "--pattern 'G_*.pth'"]),
        (["out/step_5.pt", "out/best_3.pt"], ["--pattern 'out/step_*.pt'", "--pattern 'out/best_*.pt'"]),
        (
            ["m/model_5.pt", "m/optim_5.pt", "m/model_6.pt"],
            ["--pattern 'm/model_*.pt'", "--pattern 'm/optim_*.pt'"],
        ),
    ],
)
def test_files_of_several_kinds_in_a_folder_are_refused(names: list[str], commands: list[str]) -> None:
    (found,) = found_in(dict.fromkeys(names, ZIP))
    assert (found.is_refused, found.is_plain, {*found.files}) == (True, True, {*names})
    for command in commands:
        assert command in found.reason


@pytest.mark.parametrize(
    "names", [["mp_rank_0{}/step=10.ckpt"], ["ckpt/step10_rank{}.pt"], ["a/ep1-ba10-rank{}.pt"]]
)
def test_one_rank_s_file_is_never_a_checkpoint(names: list[str]) -> None:
    """Of Megatron's `mp_rank_00/…`, rank 0's part was committed."""
    written = {name.format(rank): ZIP for name in names for rank in (0, 1)}
    (found,) = found_in(written)
    assert found.is_refused
    assert "give --ranks" in found.reason
    (whole,) = found_in(written, Rules(ranks=2))
    assert (whole.step, whole.is_complete, {*whole.files}) == (10, True, {*written})
    (lacking,) = found_in(written, Rules(ranks=3))
    assert "no file of rank 2" in lacking.reason
    (beyond,) = found_in(written, Rules(ranks=1))
    assert not beyond.is_complete


def test_weights_in_parts_with_a_state_beside_are_refused() -> None:
    index = b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    written = {
        "step_5/model-00001-of-00001.safetensors": safetensors(),
        "step_5/model.safetensors.index.json": index,
    }
    (found,) = found_in(written)
    assert (found.format, found.step, found.is_plain, found.is_complete) == (
        "safetensors-file",
        5,
        True,
        True,
    )
    for beside in ("step_5/optimizer.pt", "step_5/optimizer/rank0.pt"):
        (refused,) = found_in({**written, beside: ZIP})
        assert refused.is_refused
    last_model = {path.replace("step_5", "final"): data for path, data in written.items()}
    assert found_in({**last_model, **written}) == [found], "nothing tells its step"


def test_links_into_a_buffer_pool_are_named_as_such() -> None:
    tree = tree_of(dcp("c/step-5_ckpt"), links=("c/step-5_ckpt/src0.distcp",))
    (found,) = find(tree)
    assert found.is_refused
    assert "buffer pool" in found.reason
