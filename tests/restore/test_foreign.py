"""Checkpoints of other tools are found by the markers those tools write last; unfinished ones are not."""

import os
import pickle
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async import restore
from ckpt_async.errors import InvalidNameError, UnsafePickleError
from ckpt_async.formats import Found, Identity, Rules, Tree, recognise
from ckpt_async.formats.dcp_files import named_files
from tests.dcp_metadata import metadata_of
from tests.formats.trees import torch_zip
from tests.restore.runs import Run, left_in


def _put(run: Run, *names: str, **contents: bytes) -> None:
    root = Path(run.url.removeprefix("file://"))
    for name, data in ({name: _data(name, names) for name in names} | contents).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _data(name: str, names: Collection[str]) -> bytes:
    """Return a file's content: its name or, for a `.metadata`, metadata that names the files beside it; for a marker of
    Orbax, that all was committed.
    """
    folder, _, last = name.rpartition("/")
    if last == "_CHECKPOINT_METADATA":
        return b'{"commit_timestamp_nsecs": %s}' % (b"null" if folder == "30" else b"2")
    if last == ".metadata.json":
        return b"{}"
    if last != ".metadata":
        return name.encode()
    return metadata_of(
        {each.rpartition("/")[2]: 5 for each in names if each.rpartition("/")[0] == folder != each}
    )


LAYOUTS = {
    "dcp": (
        ["r/step-20/.metadata", "r/step-20/__0_0.distcp", "r/step-30/__0_0.distcp"],
        ("dcp", 20, "r/step-20"),
    ),
    "olmo": (
        ["step20/config.yaml", "step20/model.pt", "step30/model.pt"],
        ("olmo", 20, "step20"),
    ),
    "olmo unsharded": (
        ["step20-unsharded/config.yaml", "step20-unsharded/model.pt"],
        ("olmo", 20, "step20-unsharded"),
    ),
    "olmo both": (
        [
            "step20-unsharded/config.yaml",
            "step20-unsharded/model.pt",
            "step20/config.yaml",
            "step20/rank0.pt",
        ],
        ("olmo", 20, "step20"),
    ),
    "olmo-core": (
        ["step20/.metadata.json", "step20/model_and_optim/.metadata", "step20/train/rank0.pt"],
        ("olmo-core", 20, "step20"),
    ),
    "olmo-core, the next one not renamed": (
        [
            *("step20/.metadata.json", "step20/model_and_optim/.metadata", "step20/train/rank0.pt"),
            *("step30-tmp/.metadata.json", "step30-tmp/model_and_optim/.metadata"),
        ],
        ("olmo-core", 20, "step20"),
    ),
    "olmo-core, the next one unfinished": (
        [
            *("step20/.metadata.json", "step20/model_and_optim/.metadata", "step20/train/rank0.pt"),
            *(
                "step30/model_and_optim/.metadata",
                "step30/model_and_optim/__0_0.distcp",
                "step30/train/rank0.pt",
            ),
        ],
        ("olmo-core", 20, "step20"),
    ),
    "olmo, what was never renamed": (
        [
            *("step20/config.yaml", "step20/model.pt", "step30-tmp/config.yaml", "step30-tmp/model.pt"),
            *("step40-tmp/model_and_optim/.metadata", "step40-unsharded-tmp/config.yaml"),
        ],
        ("olmo", 20, "step20"),
    ),
    "transformers with FSDP beside": (
        [
            "checkpoint-30/pytorch_model_fsdp_0/.metadata",
            "checkpoint-30/optimizer_0/.metadata",
            "20/.metadata",
        ],
        ("dcp", 20, "20"),
    ),
    "lightning with FSDP": (
        ["e=1-step=20-v1.ckpt/.metadata", "e=1-step=20-v1.ckpt/meta.pt", "e=2-step=30.ckpt/.metadata"],
        ("lightning", 20, "e=1-step=20-v1.ckpt"),
    ),
    "composer file": (
        ["ckpts/ep1-ba20-rank0.pt", "ckpts/ep1-ba9-rank0.pt"],
        ("composer", 20, "ckpts/ep1-ba20-rank0.pt"),
    ),
    "ml-flashpoint": (
        [
            *("c/step-20_ckpt/.metadata", "c/step-20_ckpt/src0.distcp", "c/step-20_ckpt/common.pt"),
            *("c/step-30_ckpt/data.pt", "c/step-30_ckpt__0__unfinished"),
        ],
        ("ml-flashpoint", 20, "c/step-20_ckpt"),
    ),
    "ml-flashpoint, marks with something in them": (
        [
            *("c/step-20_ckpt/.metadata", "c/step-20_ckpt/src0.distcp", "c/step-20_ckpt/common.pt"),
            "c/step-25_ckpt__0__unfinished/step-25/.metadata",
        ],
        ("ml-flashpoint", 20, "c/step-20_ckpt"),
    ),
    "orbax commit file": (
        [
            "20/commit_success.txt",
            "20/_CHECKPOINT_METADATA",
            "20/state/d/1",
            "30/_CHECKPOINT_METADATA",
            "30/state/d/1",
        ],
        ("orbax", 20, "20"),
    ),
    "orbax renamed": (
        ["20/_CHECKPOINT_METADATA", "20/default/d/x", "30.orbax-checkpoint-tmp-17/_CHECKPOINT_METADATA"],
        ("orbax", 20, "20"),
    ),
    "orbax prefix": (["step_20/_CHECKPOINT_METADATA", "step_20/d/x"], ("orbax", 20, "step_20")),
}


@pytest.mark.fault("F62")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_found_and_fetched(run_: Run, tmp_path: Path, layout: str) -> None:
    names, (tool, step, path) = LAYOUTS[layout]
    _put(run_, *names)
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.step, checkpoint.generation) == (tool, step, 0)
    report = restore.fetch(checkpoint, tmp_path / "there")
    wanted = [name for name in names if name == path or name.startswith(f"{path}/")]
    prefix = path.rpartition("/")[0] if path in names else path
    assert left_in(tmp_path / "there") == sorted(name.removeprefix(prefix).lstrip("/") for name in wanted)
    for name, at in report.paths.items():
        assert at.read_bytes() == _data(f"{prefix}/{name}" if prefix else name, names)
    assert left_in(Path(run_.url.removeprefix("file://"))) == sorted(names)  # nothing was written there
    assert restore.find(run_.url, step=step) is not None
    assert restore.find(run_.url, step=999) is None


@pytest.mark.parametrize("what", ["a file", "a folder", "nothing", "itself", "nonsense", "out of the remote"])
def test_composer_pointers_are_followed(run_: Run, what: str) -> None:
    """The pointer holds an object name without the bucket, so it is relative to a place that we do not know."""
    root = run_.url.removeprefix("file:///")
    _put(run_, "ep1-ba20/__0_0.distcp", "ep1-ba20/.metadata", "batch30-rank0.pt")
    target = {
        "a file": f"{root}/batch30-rank0.pt",
        "a folder": "ep1-ba20",
        "nothing": f"{root}/ep1-ba99-rank0.pt",
        "itself": "latest-rank0.pt.symlink/x",
        "nonsense": "\udcff",
        "out of the remote": "../../etc",
    }[what]
    _put(run_, **{"latest-rank0.pt.symlink": target.encode("utf-8", "surrogateescape")})
    checkpoint = restore.find(run_.url)
    found = (checkpoint.format, checkpoint.step, checkpoint.name) if checkpoint else None
    assert found == {
        "a file": ("composer", 30, "batch30-rank0.pt"),
    }.get(what, ("dcp", 20, "ep1-ba20"))


def _of_ranks(stem: str, count: int, suffix: str) -> list[str]:
    return [f"{stem}-rank{rank}{suffix}" for rank in range(count)]


SUFFIXES = ["", ".pt", ".safetensors", ".tar", ".tar.gz", ".tgz", ".pt.zst", ".lz4"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_set_of_one_file_per_rank_is_whole_with_a_file_of_every_rank(
    run_: Run, tmp_path: Path, suffix: str
) -> None:
    """Two-digit ranks show that files are ordered by rank, not by name. The next save was cut short."""
    names, newer = _of_ranks("c/ep1-ba42", 12, suffix), _of_ranks("c/ep1-ba50", 11, suffix)
    _put(run_, *names, *newer)
    checkpoint = restore.find(run_.url, world_size=12)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.step, checkpoint.name) == ("composer", 42, "ep1-ba42")
    assert checkpoint.world_size == 12
    (rejected,) = checkpoint.rejected
    assert (rejected.id.step, rejected.name) == (50, "ep1-ba50")
    assert "no file of rank 11, expected 12 ranks" in rejected.reason
    found = restore.fetch_latest(run_.url, tmp_path / "all", world_size=12)
    assert found is not None
    assert left_in(tmp_path / "all") == sorted(f"ep1-ba42-rank{rank}{suffix}" for rank in range(12))
    report = restore.fetch(checkpoint, tmp_path / "there", ranks=[10])
    assert {name: path.read_bytes() for name, path in report.paths.items()} == {
        f"ep1-ba42-rank10{suffix}": names[10].encode()
    }


@pytest.mark.parametrize(
    "name", ["ep1-ba42-ws3-rank{}.pt", "ba42-world_size3-rank{}", "ba42-rank{}-of-3.tar"]
)
def test_a_name_says_of_how_many_ranks_a_set_is(run_: Run, name: str) -> None:
    """The name takes precedence over the caller's `world_size`."""
    _put(run_, *(name.format(rank) for rank in range(3)))
    for world_size in (None, 3, 2, 1, 4):
        checkpoint = restore.find(run_.url, world_size=world_size)
        assert checkpoint is not None
        assert (checkpoint.step, checkpoint.world_size, len(checkpoint.files)) == (42, 3, 3)
    (Path(run_.url.removeprefix("file://")) / name.format(2)).unlink()
    for world_size in (None, 2, 3):
        with pytest.raises(restore.NoUsableCheckpointError, match="no file of rank 2, expected 3 ranks"):
            restore.find(run_.url, world_size=world_size)


@pytest.mark.parametrize(
    ("names", "world_size", "reason"),
    [
        (_of_ranks("ba42", 2, ".pt"), None, "the number of ranks is unknown: pass world_size"),
        (_of_ranks("ba42", 1, ".tar"), None, "the number of ranks is unknown: pass world_size"),
        (_of_ranks("ba42", 1, ""), None, "the number of ranks is unknown: pass world_size"),
        (_of_ranks("ba42", 2, ".pt"), 3, "no file of rank 2"),
        (_of_ranks("ba42", 3, ".pt"), 2, "has 3 files, up to rank 2, expected 2"),
        (_of_ranks("ba42", 3, ".pt"), 1, "has 3 files, up to rank 2, expected 1"),
        (_of_ranks("ba42", 1, ".pt"), 2, "no file of rank 1"),
        (_of_ranks("ba42", 3, ".pt")[1:], None, "the number of ranks is unknown"),
        (_of_ranks("ba42", 3, ".pt")[1:], 3, "no file of rank 0"),
        (["ba42-rank0.pt", "ba42-rank2.pt"], 3, "no file of rank 1"),
        (["ba42-rank0.pt", "ba42-rank1.tar"], 2, "no file of rank"),
        ([*_of_ranks("ba42", 2, ".pt"), "ba42-rank01.pt"], 2, "has 3 files"),
        (_of_ranks("news2-ba42", 2, ".pt"), None, "the number of ranks is unknown"),
    ],
)
def test_a_set_that_may_lack_a_rank_is_refused_and_is_no_fresh_start(
    run_: Run, names: list[str], world_size: int | None, reason: str
) -> None:
    _put(run_, *names)
    with pytest.raises(restore.NoUsableCheckpointError, match=reason):
        restore.find(run_.url, world_size=world_size)
    with pytest.raises(restore.NoUsableCheckpointError, match=reason):
        restore.find(run_.url, world_size=world_size, step=42)
    assert restore.find(run_.url, world_size=world_size, step=43) is None


def test_what_rank_0_wrote_for_all_is_whole_by_itself(run_: Run) -> None:
    _put(run_, "a/ep1-ba42-rank0.pt", "b/ep1-ba41-rank0.tar")
    for world_size in (None, 1):
        checkpoint = restore.find(run_.url, world_size=world_size)
        assert checkpoint is not None
        assert (checkpoint.step, checkpoint.name, checkpoint.world_size) == (42, "ep1-ba42-rank0.pt", 1)


def test_a_lone_file_whose_name_tells_of_several_ranks_is_whole_only_if_the_caller_says_so(run_: Run) -> None:
    _put(run_, "ep1-ba42-ws8-rank0.pt", "ep1-ba41-ws1-rank0.tar")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.step, [each.id.step for each in checkpoint.rejected]) == (41, [42])
    alone = restore.find(run_.url, world_size=1)
    assert alone is not None
    assert (alone.step, alone.rejected) == (42, ())


@pytest.mark.parametrize("is_pointed", [False, True])
def test_a_file_of_rank_0_beside_sets_is_the_beginning_of_one(run_: Run, is_pointed: bool) -> None:
    """The job may have been killed right after rank 0's upload. Each rank has a pointer of its
    own, so rank 0's proves nothing.
    """
    _put(run_, *_of_ranks("c/ep1-ba42", 2, ".pt"), "c/ep1-ba50-rank0.pt")
    if is_pointed:
        _put(run_, **{"c/latest-rank0.pt.symlink": b"c/ep1-ba50-rank0.pt"})
    with pytest.raises(restore.NoUsableCheckpointError, match=r"step 50 \(ep1-ba50"):
        restore.find(run_.url)
    checkpoint = restore.find(run_.url, world_size=2)
    assert checkpoint is not None
    assert (checkpoint.step, [each.id.step for each in checkpoint.rejected]) == (42, [50])
    alone = restore.find(run_.url, world_size=1)  # a caller who knows better may say so
    assert alone is not None
    assert (alone.step, alone.name) == (50, "ep1-ba50-rank0.pt")


def test_a_pointer_to_one_file_of_a_set_finds_the_set(run_: Run) -> None:
    _put(run_, *_of_ranks("c/final", 2, ".pt"), **{"c/latest-rank1.symlink": b"c/final-rank1.pt"})
    with pytest.raises(restore.NoUsableCheckpointError, match="pass world_size"):
        restore.find(run_.url)
    checkpoint = restore.find(run_.url, world_size=2)
    assert checkpoint is not None
    assert sorted(checkpoint.files) == ["final-rank0.pt", "final-rank1.pt"]


def test_a_pointer_to_an_archive_of_rank_0_is_enough_and_is_no_checkpoint_itself(run_: Run) -> None:
    """Composer also packs files that rank 0 writes for all ranks."""
    _put(run_, "ep1-ba42-rank0.tar", **{"ep1-ba50-rank0.pt.symlink": b"ep1-ba42-rank0.tar"})
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.name, checkpoint.rejected) == (42, "ep1-ba42-rank0.tar", ())


@pytest.mark.parametrize("world_size", [0, -1, 100_001, "2", 2.0, True])
def test_a_world_size_that_is_none_is_refused(run_: Run, world_size: Any) -> None:
    with pytest.raises(InvalidNameError, match="world_size="):
        restore.find(run_.url, world_size=world_size)


@pytest.mark.parametrize("name", ["a b", "a\\b", "\u00e9", "x" * 201, "new\nline"])
def test_hostile_names_are_refused(run_: Run, name: str) -> None:
    """An older checkpoint is used and the reason reported; if there is none, it is not a fresh start."""
    _put(run_, "step20/config.yaml", "step20/model.pt", f"step20/{name}")
    with pytest.raises(restore.NoUsableCheckpointError, match="step20"):
        restore.find(run_.url)
    _put(run_, "step10/config.yaml", "step10/model.pt")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert [each.id.step for each in checkpoint.rejected] == [20]


def test_an_unreadable_foreign_checkpoint_falls_back(run_: Run, tmp_path: Path) -> None:
    """The unreadable checkpoint must not be tried again forever."""
    _put(run_, "step20/config.yaml", "step20/model.pt", "step10/config.yaml", "step10/model.pt")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    gone = Path(run_.url.removeprefix("file://")) / "step20" / "model.pt"
    gone.unlink()
    with pytest.raises(restore.DamagedCheckpointError):
        restore.fetch(checkpoint, tmp_path / "there")
    second = restore.find(run_.url, passing_over={checkpoint.id: "it has no model.pt"})
    assert second is not None
    assert (second.step, [each.reason for each in second.rejected]) == (10, ["it has no model.pt"])
    assert not (gone.parent.parent / ".ckpt-async" / "damaged").exists()


def test_the_last_one_that_cannot_be_read_says_why(run_: Run, tmp_path: Path) -> None:
    """The reason must be more than that its caller, which is `fetch_latest` itself, could not use it."""
    _put(run_, "step20/config.yaml", "step20/model.pt")

    def lose(_: object) -> Path:
        (Path(run_.url.removeprefix("file://")) / "step20" / "model.pt").unlink(missing_ok=True)
        return tmp_path / "there"

    with pytest.raises(restore.NoUsableCheckpointError, match=r"model\.pt"):
        restore.fetch_latest(run_.url, lose)


def test_a_local_file_of_the_same_size_is_not_used(run_: Run, tmp_path: Path) -> None:
    """Without a checksum, the file cannot be told from another step's."""
    _put(run_, "step20/config.yaml", **{"step20/model.pt": b"right"})
    (tmp_path / "model.pt").write_bytes(b"wrong")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    report = restore.fetch(checkpoint, tmp_path / "there", folder=tmp_path)
    assert report.paths["model.pt"].read_bytes() == b"right"


BROKEN = {
    "dcp, a file is missing": (["step-20/.metadata", "step-20/__0_0.distcp"], "step-20/__0_0.distcp", None),
    "dcp, a file is cut short": (
        ["step-20/.metadata", "step-20/__0_0.distcp"],
        "step-20/__0_0.distcp",
        b"half",
    ),
    "dcp, nonsense": (["step-20/.metadata"], "step-20/.metadata", b"nonsense"),
    "dcp, empty": (["step-20/.metadata"], "step-20/.metadata", b""),
    "olmo": (["step20/config.yaml", "step20/model.pt"], "step20/model.pt", None),
    "olmo sharded": (
        ["step20/config.yaml", "step20/model_and_optim/.metadata", "step20/model_and_optim/__0_0.distcp"],
        "step20/model_and_optim/__0_0.distcp",
        None,
    ),
    "olmo-core": (
        ["step20/.metadata.json", "step20/model_and_optim/.metadata", "step20/model_and_optim/__0_0.distcp"],
        "step20/model_and_optim/__0_0.distcp",
        None,
    ),
    "olmo-core, none of its parts": (
        ["step20/.metadata.json", "step20/model_and_optim/.metadata", "step20/train/rank0.pt"],
        "step20/model_and_optim/.metadata",
        None,
    ),
    "olmo-core, an empty mark": (
        ["step20/.metadata.json", "step20/model_and_optim/.metadata", "step20/model_and_optim/__0_0.distcp"],
        "step20/.metadata.json",
        b"",
    ),
    "composer": (
        ["ep1-ba20/.metadata", "ep1-ba20/__0_0.distcp", "latest-rank0.pt.symlink"],
        "ep1-ba20/__0_0.distcp",
        None,
    ),
    "ml-flashpoint": (
        ["step-20_ckpt/.metadata", "step-20_ckpt/src0.distcp", "step-20_ckpt/common.pt"],
        "step-20_ckpt/src0.distcp",
        None,
    ),
    "ml-flashpoint, what is for all": (
        ["step-20_ckpt/.metadata", "step-20_ckpt/src0.distcp", "step-20_ckpt/common.pt"],
        "step-20_ckpt/common.pt",
        None,
    ),
    "olmo unsharded, no model": (
        [f"step20-unsharded/{name}" for name in ("config.yaml", "model.safetensors", "optim.pt", "train.pt")],
        "step20-unsharded/model.safetensors",
        None,
    ),
    "olmo, a rank in the middle": (
        ["step20/config.yaml", *(f"step20/rank{rank}.pt" for rank in range(4))],
        "step20/rank1.pt",
        None,
    ),
    "olmo, the trainer's state of rank 0": (
        [
            "step20/config.yaml",
            "step20/model_and_optim/.metadata",
            *(f"step20/train/rank{n}.pt" for n in (0, 1)),
        ],
        "step20/train/rank0.pt",
        None,
    ),
    "olmo local, the last rank": (
        [
            *("step20/config.yaml", "step20/metadata.yaml"),
            *(f"step20/{part}/rank{rank}.pt" for part in ("model", "optim", "train") for rank in range(4)),
        ],
        "step20/train/rank3.pt",
        None,
    ),
    "olmo local, all of the last rank": (
        [
            *("step20/config.yaml", "step20/metadata.yaml"),
            *(f"step20/{part}/rank{rank}.pt" for part in ("model", "optim", "train") for rank in range(2)),
        ],
        "step20/metadata.yaml",
        b"flat_param: true\nworld_size: 4\n",
    ),
    "orbax": (["20/_CHECKPOINT_METADATA", "20/state/d/x", "20/meta/y"], "20/state/d/x", None),
    "orbax, nothing": (["20/commit_success.txt", "20/d/x"], "20/d/x", None),
}


@pytest.mark.fault("F62")
@pytest.mark.parametrize("broken", BROKEN)
def test_a_marker_without_all_its_files_is_damage(run_: Run, broken: str) -> None:
    """The files behind the marker are checked. If any is missing, an older checkpoint is used,
    and it is never a fresh start.
    """
    names, path, data = BROKEN[broken]
    _put(run_, *names)
    root = Path(run_.url.removeprefix("file://"))
    for symlink in root.glob("*.symlink"):
        symlink.write_text("ep1-ba20")
    for mark in root.glob("*/_CHECKPOINT_METADATA"):
        mark.write_text('{"item_handlers": {"state": "x", "meta": "y"}}')
    assert restore.find(run_.url) is not None
    (root / path).unlink()
    if data is not None:
        (root / path).write_bytes(data)
    with pytest.raises(restore.NoUsableCheckpointError, match=r"step 20 \("):
        restore.find(run_.url)
    _put(run_, "old/step-10/.metadata", "old/step-10/__0_0.distcp")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert [each.id.step for each in checkpoint.rejected] == [20]


@pytest.mark.fault("F62")
@pytest.mark.parametrize(
    "names",
    [
        ["step30/model_and_optim/.metadata", "step30/model_and_optim/__0_0.distcp"],
        ["step30/train/rank0.pt", "step30/model/.metadata"],
        ["step30/train/rank0.pt", "step30/.metadata"],
        ["step30/rank0.pt", "step30/rank1.pt"],
        ["step30-tmp/config.yaml", "step30-tmp/model_and_optim/.metadata"],
        ["final/model_and_optim/.metadata", "final/train/rank0.pt"],
        ["checkpoint-30/pytorch_model_fsdp_0/.metadata", "checkpoint-30/pytorch_model_fsdp_0/__0_0.distcp"],
    ],
)
def test_part_of_an_unfinished_checkpoint_is_not_a_checkpoint(
    run_: Run, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """That the part is valid DCP does not make it a checkpoint, of step 0."""
    _put(run_, *names)
    assert restore.find(run_.url) is None
    assert f"checkpoint_incomplete path={names[0].partition('/')[0]}" in caplog.text


def test_dcp_checkpoint_at_the_root_of_the_remote(tmp_path: Path) -> None:
    """The remote is the checkpoint's own folder, and unrelated folders below it do not belong to the checkpoint."""
    root = tmp_path / "lr=3#2?%41" / "step-20"
    run = Run(f"file://{root}")
    names = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    _put(run, *names, "tensorboard/events", "older/step-7/.metadata")
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.step, checkpoint.name) == ("dcp", 20, "step-20")
    report = restore.fetch(checkpoint, tmp_path / "there")
    assert left_in(tmp_path / "there") == sorted(names)
    assert report.paths["__1_0.distcp"].read_bytes() == b"__1_0.distcp"
    (root / "__1_0.distcp").unlink()
    older = restore.find(run.url)
    assert older is not None
    assert (older.step, [each.name for each in older.rejected]) == (7, ["step-20"])


def test_olmo_core_checkpoint_at_the_root_of_the_remote(tmp_path: Path) -> None:
    """Everything below the folder belongs to the checkpoint."""
    run = Run(f"file://{tmp_path}/step20")
    names = [".metadata.json", "model_and_optim/.metadata", "model_and_optim/__0_0.distcp", "train/rank0.pt"]
    _put(run, *names)
    checkpoint = restore.find(run.url)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.step, sorted(checkpoint.files)) == ("olmo-core", 20, sorted(names))


@pytest.mark.parametrize("layout", ["step_{}/model", "{}/checkpoint", "global_step{}/sharded/ckpt"])
def test_the_step_of_a_folder_above_is_its_step(run_: Run, layout: str) -> None:
    """All were of step 0, and the tie went to step 100 of 1000."""
    for step in (100, 300, 200, 900, 1000):
        folder = layout.format(step)
        _put(run_, f"{folder}/.metadata", f"{folder}/__0_0.distcp")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.step, len(checkpoint.dcp_folders)) == (1000, 1)
    at_200 = restore.find(run_.url, step=200)
    assert at_200 is not None
    assert at_200.name == layout.partition("/")[0].format(200)


@pytest.mark.fault("F62")
def test_two_checkpoints_of_one_step_are_an_error_that_names_them(run_: Run) -> None:
    for place in ("a/step_5", "b/step_5"):
        _put(
            run_,
            **{
                f"{place}/.metadata": metadata_of({"__0_0.distcp": 3}),
                f"{place}/__0_0.distcp": place.encode(),
            },
        )
    _put(run_, "step_4/.metadata", "step_4/__0_0.distcp")
    for step in (None, 5):
        with pytest.raises(
            restore.NoUsableCheckpointError, match=r"2 checkpoints of step 5.*b/step_5, a/step_5"
        ):
            restore.find(run_.url, step=step)
    older = restore.find(run_.url, step=4)
    assert older is not None
    named = restore.find(f"{run_.url}/a")
    assert named is not None
    assert named.step == 5


def test_a_copy_of_a_torch_file_is_no_other_checkpoint(run_: Run) -> None:
    """Lightning writes `last.ckpt` beside the file of the step, with the same tensors."""
    written = {"epoch=0-step=5.ckpt": torch_zip(global_step=5), "last.ckpt": torch_zip(global_step=5, more=1)}
    _put(run_, **written)
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.step) == ("lightning", 5)
    _put(run_, **{"last.ckpt": torch_zip(global_step=5, tensor=b"other")})
    with pytest.raises(restore.NoUsableCheckpointError, match="2 checkpoints of step 5"):
        restore.find(run_.url)


@pytest.mark.fault("F62")
def test_unknown_parts_are_refused_and_never_an_older_step(run_: Run) -> None:
    for folder in ("step_4", "step_5/actor", "step_5/critic"):
        _put(run_, f"{folder}/.metadata", f"{folder}/__0_0.distcp")
    with pytest.raises(
        restore.NoUsableCheckpointError, match=r"step 5 \(step_5.*step_5/actor/, .*step_5/critic/"
    ):
        restore.find(run_.url)
    part = restore.find(f"{run_.url}/step_5/actor")
    assert part is not None
    assert part.format == "dcp"


def test_an_accelerate_checkpoint_is_found_as_a_whole(run_: Run) -> None:
    folders = ("checkpoint_3/pytorch_model_fsdp_0", "checkpoint_3/optimizer_0")
    parts = [f"{folder}/{name}" for folder in folders for name in (".metadata", "__0_0.distcp")]
    _put(run_, *parts)
    assert restore.find(run_.url) is None
    _put(run_, "checkpoint_3/random_states_0.pkl")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.step, len(checkpoint.files)) == ("accelerate", 3, 5)


def test_a_checkpoint_with_its_files_in_subfolders_is_found_from_its_own_folder_too(tmp_path: Path) -> None:
    run = Run(f"file://{tmp_path}/step5")
    files = {"a/__0_0.distcp": b"12345", "b/__1_0.distcp": b"12345"}
    _put(run, **files, **{".metadata": metadata_of(dict.fromkeys(files, 5)), "c/d.txt": b"x"})
    for url in (run.url, f"file://{tmp_path}"):
        checkpoint = restore.find(url)
        assert checkpoint is not None
        assert {*checkpoint.files} >= {".metadata", *files}


def test_nothing_that_only_has_a_number_is_taken_from_a_bucket(run_: Run) -> None:
    """It may be anything: weights to begin with, a data set."""
    _put(run_, "model_100.pt", "data/shard_1.safetensors")
    assert restore.find(run_.url) is None


def test_file_names_are_read_without_torch() -> None:
    code = "import sys; from ckpt_async.restore import foreign; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fault("F62")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_file_names_of_real_metadata(tmp_path: Path) -> None:
    """The names must be those that torch itself reads, for tensors of many kinds. A file
    cut off at any byte is refused.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    state = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": {"c": [1, torch.zeros(2, 2)], "d": "text"},
        "e": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    data = (tmp_path / "x" / ".metadata").read_bytes()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "x").glob("*.distcp")}
    assert named_files(data) == sizes
    for end in range(0, len(data), 7):
        with pytest.raises(UnsafePickleError):
            named_files(data[:end])


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def test_malicious_metadata_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """This must hold wherever in the file the malicious object is."""
    ran: list[str] = []
    evil = pickle.dumps([_Evil()])
    monkeypatch.setattr(os, "system", ran.append)
    with pytest.raises(UnsafePickleError):
        named_files(evil)
    assert ran == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_real_dcp_checkpoint_is_found_and_fetched(run_: Run, tmp_path: Path) -> None:
    """torch itself saves it, and loads it from where it was fetched."""
    import torch
    import torch.distributed.checkpoint as dcp

    root = Path(run_.url.removeprefix("file://"))
    for step in (10, 20):
        dcp.save({"w": torch.full((100,), float(step))}, checkpoint_id=root / f"step-{step}", no_dist=True)
    (root / "step-30").mkdir()
    (root / "step-30" / "__0_0.distcp").write_bytes(b"half")
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.step) == ("dcp", 20)
    (root / "step-20" / "__0_0.distcp").rename(tmp_path / "aside")
    older = restore.find(run_.url)
    assert older is not None
    assert (older.step, len(older.rejected)) == (10, 1)
    (tmp_path / "aside").rename(root / "step-20" / "__0_0.distcp")
    restore.fetch(checkpoint, tmp_path / "there")
    state = {"w": torch.zeros(100)}
    dcp.load(state, checkpoint_id=tmp_path / "there", no_dist=True)
    assert torch.equal(state["w"], torch.full((100,), 20.0))
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


parts = st.sampled_from(
    "step20 step20-unsharded step-20_ckpt step-20_ckpt__0__unfinished 20 default_30 a config.yaml .metadata"
    " .metadata.json commit_success.txt _CHECKPOINT_METADATA ep1-ba20-rank0.pt ep1-ba20-rank1.pt x.symlink"
    " 20.orbax-checkpoint-tmp-1 mp_rank_00 step7.pt model.pt __0_0.distcp latest .. \u00e9".split()
)
listings = st.lists(st.lists(parts, min_size=1, max_size=4).map("/".join), max_size=20)


@given(listings, st.randoms())
def test_recognition_is_disjoint_and_independent_of_listing_order(names: list[str], chance: Any) -> None:
    """Every file found exists and is in one checkpoint only, and the order of the listing is irrelevant."""

    def recognised(names: list[str]) -> list[Found]:
        files = {name: Identity(0, 1, 0) for name in names}
        return recognise(Tree(files, lambda *_: b"x"), Rules(is_store=True))

    found = recognised(names)
    shuffled = names[:]
    chance.shuffle(shuffled)
    assert recognised(shuffled) == found
    files = [path for each in found for path in each.files]
    assert {*files} <= {*names}
    assert len(files) == len({*files})
