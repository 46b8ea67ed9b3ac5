"""The twenty points of the documentation of Composer's CheckpointSaver, with its own examples: run
`awesome-training-run`, epoch 1, batch 42. Where this saver is meant to differ, the test says how.
"""

import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import restore
from ckpt_async import torch as ckpt
from ckpt_async.errors import CheckpointConflictError, InvalidNameError, SettingsError
from ckpt_async.saver import CheckpointSaver, Event, Timestamp

RUN = "awesome-training-run"
NOW = Timestamp(epoch=1, batch=42, batch_in_epoch=2, sample=336, token=43_008, total_wct=12.5)

Open = Callable[..., CheckpointSaver]


@pytest.fixture
def open_saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """In an empty working directory, with Composer's defaults."""
    monkeypatch.chdir(tmp_path)
    opened: list[CheckpointSaver] = []

    def open_(folder: str = "{run_name}/checkpoints", **options: Any) -> CheckpointSaver:
        options = {"run_name": RUN, "decision_poll_s": 0.02, "saves_last": False, **options}
        remote = options.pop("remote", f"file://{tmp_path}/bucket/{{run_name}}")
        opened.append(CheckpointSaver(folder, remote, **options))
        return opened[-1]

    yield open_
    for each in opened:
        each.uploader.close()


def composers_state() -> dict[str, Any]:
    layers = {f"layer{n}.{part}": torch.full((2,), float(n)) for n in (1, 2) for part in ("weights", "bias")}
    return {
        "state": {
            "model": layers,
            "optimizers": {"Adam": {"step": torch.tensor(42)}},
            "integrations": {},
            "metadata": {"composer_version": "0.32.1"},
            "rank_zero_seed": 17,
        },
        "rng": [{"python": (3, (1, 2), None)}],
    }


def save(saver: CheckpointSaver, now: Timestamp = NOW, state: Any = None) -> None:
    """Whatever the schedule."""
    saver.save_now()
    assert saver.step(state or composers_state(), now)
    saver.wait(30)


def test_01_the_defaults_are_composers(open_saver: Open, tmp_path: Path) -> None:
    first = open_saver()
    save(first)
    first.close()
    folder = tmp_path / RUN / "checkpoints"
    assert (folder / "ep1-ba42-rank0.pt").is_file()
    assert os.path.realpath(folder / "latest-rank0.pt") == str(folder / "ep1-ba42-rank0.pt")
    # In the store a checkpoint is a folder, so that it can be complete or not; a key never changes its content.
    assert (tmp_path / "bucket" / RUN / "ckpt/ep1-ba42.g1/ep1-ba42-rank0.pt").is_file()
    saver = open_saver(f"{tmp_path}/other")
    assert [batch for batch in range(1, 12) if saver.step({}, Timestamp(batch=batch, epoch=batch // 5))] == [
        5,
        10,
    ]


def test_02_all_but_folder_and_remote_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        CheckpointSaver("f", "file:///r", "ep{epoch}.pt")  # type: ignore[misc]


def test_03_several_savers_may_coexist(open_saver: Open, tmp_path: Path) -> None:
    full, weights = (
        open_saver(save_interval="2ba"),
        open_saver(kind="weights", save_interval="1ba", weights_only=True),
    )
    for batch in (1, 2):
        for each in (full, weights):
            each.step(composers_state(), batch)
    for each in (full, weights):
        each.wait(30)
    assert (tmp_path / RUN / "checkpoints/ep0-ba2-rank0.pt").is_file()
    assert len(list((tmp_path / RUN / "checkpoints/weights").iterdir())) == 2


def test_04_variables_of_the_folder(open_saver: Open, tmp_path: Path) -> None:
    names = "{run_name}-{rank}-{local_rank}-{world_size}-{local_world_size}-{node_rank}"
    save(open_saver(names))
    assert (tmp_path / f"{RUN}-0-0-1-1-0/ep1-ba42-rank0.pt").is_file()
    with pytest.raises(InvalidNameError, match="not a variable here"):
        open_saver("{epoch}")


def test_05_variables_of_the_filename(open_saver: Open, tmp_path: Path) -> None:
    counts = "{epoch}.{batch}.{batch_in_epoch}.{sample}.{sample_in_epoch}.{token}.{token_in_epoch}"
    save(open_saver("f", filename=f"{counts}.{{total_wct}}.{{epoch_wct}}.{{batch_wct}}-{{rank}}.pt"))
    assert (tmp_path / "f/1.42.2.336.0.43008.0.12.5.0.0.0.0-0.pt").is_file()


def test_06_the_rank_is_demanded_where_several_ranks_write(
    open_saver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidNameError, match=r"put \{rank\} into it"):
        open_saver(filename="ep{epoch}-ba{batch}.pt", is_writer=True)


def test_07_the_first_rank_saves_and_with_deepspeed_every_rank_an_archive(
    open_saver: Open, tmp_path: Path
) -> None:
    save(open_saver("f", filename="ep{epoch}-ba{batch}-rank{rank}", deepspeed=True))
    with tarfile.open(tmp_path / "f/ep1-ba42-rank0.tar") as archive:
        assert archive.getnames() == ["composer_states.pt"]


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.bz2", ".tar.lzma"])
def test_08_archives_may_be_compressed(open_saver: Open, tmp_path: Path, suffix: str) -> None:
    save(open_saver("f", filename=f"ba{{batch}}-rank{{rank}}{suffix}", deepspeed=True))
    loaded = ckpt.load(tmp_path / f"f/ba42-rank0{suffix}")
    assert loaded["state"]["rank_zero_seed"] == 17


@pytest.mark.parametrize("suffix", [".bz2", ".gz", ".lz4", ".lzma", ".xz", ".zst"])
def test_09_files_may_be_compressed(open_saver: Open, tmp_path: Path, suffix: str) -> None:
    save(
        open_saver("f", filename=f"ba{{batch}}.pt{suffix}")
    )  # beside training, and without a program where possible
    assert ckpt.load(tmp_path / f"f/ba42.pt{suffix}")["state"]["rank_zero_seed"] == 17


def test_10_the_example(open_saver: Open, tmp_path: Path) -> None:
    save(open_saver(filename="ep{epoch}-ba{batch}-rank{rank}"))
    loaded = ckpt.load(tmp_path / "awesome-training-run/checkpoints/ep1-ba42-rank0")
    assert loaded["state"]["metadata"] == {"composer_version": "0.32.1"}


def test_11_the_remote_is_filled_in(open_saver: Open, tmp_path: Path) -> None:
    save(open_saver(remote=f"file://{tmp_path}/bucket/{{run_name}}/x"))
    found = restore.find(f"file://{tmp_path}/bucket/{RUN}/x")
    assert found is not None
    assert (found.name, list(found.files)) == ("ep1-ba42", ["ep1-ba42-rank0.pt"])
    # The exact key is a copy inside the store, below the remote; a leading '/' is stripped.
    name = "/{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}"
    saver = open_saver("exact", remote=f"file://{tmp_path}/store", publish=name)
    save(saver)
    saver.close()
    written = (tmp_path / "exact/ep1-ba42-rank0.pt").read_bytes()
    assert (tmp_path / f"store/{RUN}/checkpoints/ep1-ba42-rank0").read_bytes() == written
    save(open_saver("local", remote=None))  # nothing is uploaded
    assert (tmp_path / "local/ep1-ba42-rank0.pt").is_file()


def test_12_the_link_is_to_the_newest_or_there_is_none(open_saver: Open, tmp_path: Path) -> None:
    saver = open_saver("f")
    for batch in (42, 43):
        save(saver, Timestamp(epoch=1, batch=batch))
    saver.close()
    assert os.readlink(tmp_path / "f/latest-rank0.pt") == "ep1-ba43-rank0.pt"
    without = open_saver("g", latest_filename=None, remote=f"file://{tmp_path}/other")
    save(without)
    without.close()
    assert not list((tmp_path / "g").glob("latest*"))


def test_13_the_remote_pointer_moves_with_each_checkpoint(open_saver: Open, tmp_path: Path) -> None:
    saver = open_saver(latest_remote_filename="/{run_name}/checkpoints/latest-rank{rank}.pt")
    for batch in (42, 43):
        save(saver, Timestamp(epoch=1, batch=batch))
    saver.close()
    pointer = tmp_path / "bucket" / RUN / RUN / "checkpoints/latest-rank0.pt.symlink"
    assert pointer.read_text().endswith("ckpt/ep1-ba43.g1/ep1-ba43-rank0.pt")
    latest = json.loads((tmp_path / "bucket" / RUN / ".ckpt-async/latest.json").read_text())
    assert (latest["name"], latest["step"]) == ("ep1-ba43", 43)


def test_14_without_overwrite_the_folder_holds_nothing_that_conflicts(
    open_saver: Open, tmp_path: Path
) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f/ep1-ba43-rank0.pt").write_bytes(b"")
    with pytest.raises(CheckpointConflictError, match=r"ep1-ba43-rank0\.pt exists"):
        open_saver("f", resume_from=NOW)
    open_saver("f", resume_from=Timestamp(epoch=1, batch=43))


def test_15_the_interval_is_a_time_a_text_a_number_or_a_function(open_saver: Open, tmp_path: Path) -> None:
    class Time:
        def to_timestring(self) -> str:
            return "2ep"

    def ask(now: Timestamp, event: Event) -> bool:
        return event is Event.EPOCH_CHECKPOINT

    for number, (interval, expected) in enumerate(
        [(Time(), [10]), ("5ba", [5, 10]), (1, [5, 10]), (ask, [5, 10])]
    ):
        saver = open_saver(f"{number}", remote=f"file://{tmp_path}/bucket/{number}", save_interval=interval)
        found = []
        for batch in range(1, 12):
            now = Timestamp(batch=batch, epoch=batch // 5)
            event = Event.BATCH_CHECKPOINT if batch % 5 else Event.EPOCH_CHECKPOINT
            found += [batch] * saver.step({}, now, event=event)
        assert found == expected


@pytest.mark.parametrize(("count", "left"), [(-1, [1, 2, 3]), (0, []), (2, [2, 3])])
def test_16_local_files_go_oldest_first_once_they_are_uploaded(
    open_saver: Open, tmp_path: Path, count: int, left: list[int]
) -> None:
    saver = open_saver("f", num_checkpoints_to_keep=count, save_interval="1ba")
    for batch in (1, 2, 3):
        save(saver, Timestamp(batch=batch))
    saver.close()
    assert sorted(int(each.name[6]) for each in (tmp_path / "f").glob("ep*")) == left
    assert len(list((tmp_path / "bucket" / RUN / "ckpt").iterdir())) == 3  # in the store all stay


def test_17_weights_only_is_the_model_and_not_for_deepspeed(open_saver: Open, tmp_path: Path) -> None:
    save(open_saver("f", weights_only=True))
    assert set(ckpt.load(tmp_path / "f/ep1-ba42-rank0.pt")["state"]) == {"model", "integrations", "metadata"}
    with pytest.raises(SettingsError, match="DeepSpeed"):
        open_saver("g", weights_only=True, deepspeed=True)


@pytest.mark.parametrize(
    ("ignore_keys", "gone"),
    [
        (["state/model/layer1.weights", "state/model/layer1.bias"], {"layer1.weights", "layer1.bias"}),
        (["state/model/*"], {"layer1.weights", "layer1.bias", "layer2.weights", "layer2.bias"}),
        (["state/model/layer*.weights"], {"layer1.weights", "layer2.weights"}),
        (["state/rank_zero_seed", "rng"], {"rank_zero_seed", "rng"}),
        (lambda state: state["state"].pop("rank_zero_seed"), {"rank_zero_seed"}),
    ],
)
def test_18_parts_are_left_out_by_globs_or_a_function(
    open_saver: Open, tmp_path: Path, ignore_keys: Any, gone: set[str]
) -> None:
    state = composers_state()
    save(open_saver("f", ignore_keys=ignore_keys), state=state)

    def keys(state: dict[str, Any]) -> set[str]:
        return {*state, *state["state"], *state["state"]["model"]}

    assert keys(composers_state()) - keys(ckpt.load(tmp_path / "f/ep1-ba42-rank0.pt")) == gone
    assert keys(state) == keys(composers_state())  # training's own state is as it was


def test_19_the_checkpoints_that_are_kept_are_known_newest_last(open_saver: Open, tmp_path: Path) -> None:
    saver = open_saver("f", num_checkpoints_to_keep=2)
    for batch in (41, 42, 43):
        save(saver, Timestamp(epoch=1, batch=batch))
    saver.close()
    assert [(each.timestamp.batch, each.paths) for each in saver.saved_checkpoints] == [
        (batch, (tmp_path / f"f/ep1-ba{batch}-rank0.pt",)) for batch in (42, 43)
    ]


def test_20_names_without_a_suffix_are_torchs_format(open_saver: Open, tmp_path: Path) -> None:
    """The documentation's prose has them without, its code with `.pt`: both work."""
    save(open_saver("f", filename="ep{epoch}-ba{batch}-rank{rank}"))
    assert torch.load(tmp_path / "f/ep1-ba42-rank0", weights_only=False)["state"]["rank_zero_seed"] == 17
