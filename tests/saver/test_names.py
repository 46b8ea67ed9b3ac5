"""Names with variables: what is filled in, what is refused before training starts, and which files conflict."""

import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.launch import Placement
from ckpt_async.errors import InvalidNameError, SettingsError
from ckpt_async.saver import Timestamp, names
from ckpt_async.saver.files import Files, Templates, conflict, files_of

START = Timestamp(batch=0)
HERE = Placement(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1)
NOW = Timestamp(
    epoch=1,
    batch=42,
    batch_in_epoch=2,
    sample=336,
    sample_in_epoch=16,
    token=8192,
    token_in_epoch=512,
    iteration=3,
    total_wct=12.5,
    epoch_wct=2.0,
    batch_wct=0.25,
)


def files(
    folder: str | Path = "f", filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt", **others: object
) -> Files:
    templates = Templates.of(
        str(folder),
        str(others.get("remote", "file:///r")),
        filename,
        str(others.get("checkpoint_name", "ep{epoch}-ba{batch}")),
        str(others.get("latest_filename", "latest-rank{rank}.pt")),
        str(others.get("publish", "")),
        "",
    )
    return files_of(
        templates,
        HERE,
        others.get("run_name"),  # type: ignore[arg-type]
        None,
        has_several_writers=bool(others.get("has_several_writers")),
    )


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        *(("run_name", "llm-7b"), ("rank", "5"), ("local_rank", "1"), ("world_size", "8")),
        *(("local_world_size", "4"), ("node_rank", "1"), ("epoch", "1"), ("batch", "42")),
        *(("batch_in_epoch", "2"), ("sample", "336"), ("sample_in_epoch", "16"), ("token", "8192")),
        *(("token_in_epoch", "512"), ("total_wct", "12.5"), ("epoch_wct", "2.0"), ("batch_wct", "0.25")),
        *(("step", "42"), ("iteration", "3")),
    ],
)
def test_each_variable_is_filled_into_a_filename(variable: str, expected: str) -> None:
    found = files(filename=f"x-{{{variable}}}-ba{{batch}}.pt", run_name="llm-7b")
    assert found.path(NOW).name == f"x-{expected}-ba42.pt"


def test_composers_defaults_give_composers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = files("{run_name}/checkpoints", run_name="awesome-training-run")
    assert found.path(NOW) == tmp_path / "awesome-training-run/checkpoints/ep1-ba42-rank5.pt"
    assert (found.name(NOW), found.latest_filename) == ("ep1-ba42", "latest-rank5.pt")


def test_widths_are_taken_and_bounded() -> None:
    assert files(filename="{batch:06d}-{rank:03d}.pt").path(NOW).name == "000042-005.pt"
    before = time.monotonic()
    with pytest.raises(InvalidNameError, match="two digits"):
        files(filename="{rank:1000000000d}-{batch}.pt")
    assert time.monotonic() - before < 1


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ({"filename": "ba{bacth}-{rank}.pt"}, "did you mean {batch}"),
        ({"folder": "{epoch}/x"}, "known: {run_name}, {rank}"),
        ({"remote": "s3://b/{rank}"}, "known: {run_name}"),
        ({"checkpoint_name": "{rank}-{batch}"}, "not a variable here"),
        ({"latest_filename": "latest-{batch}"}, "not a variable here"),
        ({"filename": "{batch.__class__}.pt"}, "not a variable here"),
        ({"filename": "{0}.pt"}, "not a variable here"),
        ({"publish": "{run_nam}/x"}, "did you mean {run_name}"),
        ({"publish": "a//b"}, "not a name"),
        ({"filename": "{batch"}, "template"),
        ({"filename": "{run_name}-{batch}.pt"}, "needs run_name="),
        ({"filename": "{run_name}-{batch}.pt", "run_name": "a b"}, "not safe"),
        ({"filename": "../{batch}.pt"}, "not a name"),
        ({"filename": "{batch}-{rank!r}.pt"}, "template"),
        ({"filename": Path("a.pt")}, "filename=PosixPath('a.pt') must be text"),
    ],
)
def test_a_name_that_cannot_be_filled_is_refused_at_once(where: dict[str, Any], hint: str) -> None:
    with pytest.raises((InvalidNameError, SettingsError)) as caught:
        files(**where)
    assert hint in str(caught.value)


def test_several_writers_need_the_rank_in_the_name() -> None:
    with pytest.raises(InvalidNameError, match=r"put \{rank\} into it"):
        files(filename="ba{batch}.pt", has_several_writers=True)
    assert files(filename="ba{batch}.pt").path(NOW).name == "ba42.pt"
    assert files("at-{rank}", filename="ba{batch}.pt", has_several_writers=True)


@pytest.mark.parametrize(
    ("there", "resumed", "is_conflict"),
    [
        ("ep0-ba10-rank5.pt", START, True),
        ("ep0-ba10-rank5.pt", Timestamp(batch=9), True),
        ("ep0-ba10-rank5.pt", Timestamp(batch=10), False),
        ("ep0-ba10-rank4.pt", START, False),  # another rank's: that one looks itself
        ("ep0-ba10-rank5.pt.tmp", START, False),
        ("notes.txt", START, False),
    ],
)
def test_only_what_this_run_would_save_again_is_a_conflict(
    tmp_path: Path, there: str, resumed: Timestamp, is_conflict: bool
) -> None:
    (tmp_path / there).write_bytes(b"of another run")
    assert (there in conflict(files(tmp_path), resumed)) == is_conflict


def test_a_name_without_a_time_conflicts_always(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"of another run")
    assert "model.pt" in conflict(files(tmp_path, filename="model.pt"), Timestamp(batch=10**6))


@pytest.mark.parametrize(("epoch", "is_conflict"), [(2, True), (3, False)])
def test_a_name_that_tells_the_epoch_alone_is_compared_by_it(
    tmp_path: Path, epoch: int, is_conflict: bool
) -> None:
    (tmp_path / "ep3.pt").write_bytes(b"of another run")
    resumed = Timestamp(batch=10**6, epoch=epoch)
    assert bool(conflict(files(tmp_path, filename="ep{epoch}.pt"), resumed)) == is_conflict


def test_times_are_read_back_from_names() -> None:
    run = names.variables("r.n", HERE)
    assert names.times("ep1-ba42-rank5.pt", "ep{epoch}-ba{batch}-rank{rank}.pt", run) == {
        "epoch": 1,
        "batch": 42,
    }
    assert names.times("ep1-ba42-rank6.pt", "ep{epoch}-ba{batch}-rank{rank}.pt", run) is None
    assert names.times("rxn-1.pt", "{run_name}-{batch}.pt", run) is None  # a dot is a dot


@pytest.mark.parametrize(
    ("remote", "name", "key"),
    [
        ("s3://bucket/run-a", "run-a/checkpoints/ep1.pt", "checkpoints/ep1.pt"),
        ("s3://bucket/teams/x/run-a", "/x/run-a/ep1.pt", "ep1.pt"),
        ("s3://bucket/run-a", "other/ep1.pt", "other/ep1.pt"),
        ("s3://bucket/run-a", "run-a", "run-a"),  # a key is never empty
        ("s3://run-a", "run-a/ep1.pt", "run-a/ep1.pt"),  # the bucket is no part of a name
        ("file:///store/lr=1?b#2/run-a", "lr=1?b#2/run-a/ep1.pt", "ep1.pt"),
    ],
)
def test_a_name_in_the_bucket_becomes_a_key_below_the_run(remote: str, name: str, key: str) -> None:
    assert names.below(remote, name) == key
