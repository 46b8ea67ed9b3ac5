"""What follows from the names of OLMo's and OLMo-core's checkpoints, without either of them installed."""

from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.errors import SettingsError
from ckpt_async.integrations.olmo_names import UNSHARDED, core_step, fetch_of, later, newest_name, run_of

RUN = "s3://bucket/prefix/run"


@pytest.mark.parametrize("name", ["step100", "step100-unsharded", "step0"])
@pytest.mark.parametrize("end", ["", "/"])
def test_the_run_of_an_upload_is_above_the_checkpoint(name: str, end: str) -> None:
    assert run_of(f"{RUN}/{name}{end}", Path("/data") / name) == RUN


@pytest.mark.parametrize(
    ("upload_to", "folder"),
    [
        (f"{RUN}/step100", "step200"),
        (f"{RUN}/step100", "step100-unsharded"),
        (f"{RUN}/step100-tmp", "step100-tmp"),
        (f"{RUN}/latest", "latest"),
        (f"{RUN}/step\u0661", "step\u0661"),
        ("", "step100"),
    ],
)
def test_an_upload_under_another_name_is_refused(upload_to: str, folder: str) -> None:
    with pytest.raises(SettingsError, match=f"name of the folder .*{folder}"):
        run_of(upload_to, Path("/data") / folder)


@pytest.mark.parametrize(
    ("name", "step", "kind"), [("step100", 100, None), ("step100-unsharded", 100, UNSHARDED)]
)
def test_a_checkpoint_is_fetched_from_the_run_and_else_from_its_folder(
    name: str, step: int, kind: str | None
) -> None:
    for url in (f"{RUN}/{name}", f"{RUN}/{name}/"):
        how = fetch_of(url, "/data", f"{RUN}/")
        assert how is not None
        assert how.ways == ((RUN, {"step": step, "kind": kind}), (f"{RUN}/{name}", {}))
        assert (how.folder, how.is_own) == (Path("/data") / name, True)


@pytest.mark.parametrize("own", [None, "s3://bucket/prefix/run2", "s3://bucket/prefix"])
def test_another_run_s_checkpoint_is_kept_apart_from_ones_own(own: str | None) -> None:
    how = fetch_of(f"{RUN}/step100", "/data", own)
    assert how is not None
    assert (how.folder, how.is_own) == (Path("/data/loaded/step100"), False)


@pytest.mark.parametrize("url", [RUN, f"{RUN}/", f"{RUN}/step100-tmp", f"{RUN}/step100/model"])
def test_a_run_is_no_checkpoint(url: str) -> None:
    assert fetch_of(url, "/data", RUN) is None


def committed(folder: Path, steps: dict[str, int]) -> Any:
    folder.mkdir()
    found = {}
    for name, step in steps.items():
        kind = UNSHARDED if name.endswith("unsharded") else None
        (folder / name).mkdir()
        (folder / name / "model.pt").write_text(name)
        with Uploader(folder, f"file://{folder}-remote", rank=0, world_size=1, kind=kind) as uploader:
            uploader.enqueue(folder / name, step, name)
            uploader.seal(step, name=name)
            uploader.wait(step, 60)
        found[kind] = restore.find(f"file://{folder}-remote", kind=kind)
    return found.get(None), found.get(UNSHARDED)


@pytest.mark.parametrize(
    ("steps", "newest"),
    [
        ({"step100": 100, "step90-unsharded": 90}, "step100"),
        ({"step90": 90, "step100-unsharded": 100}, "step100-unsharded"),
        ({"step100": 100, "step100-unsharded": 100}, "step100"),
        ({"step9": 9, "step10-unsharded": 10}, "step10-unsharded"),
        ({"step0-unsharded": 0}, "step0-unsharded"),
        ({"step0": 0}, "step0"),
        ({}, None),
    ],
)
def test_the_newest_of_both_kinds_is_by_step(
    tmp_path: Path, steps: dict[str, int], newest: str | None
) -> None:
    assert newest_name(*committed(tmp_path / "run", steps)) == newest


def test_only_olmo_core_s_own_folders_count_by_step() -> None:
    names = [
        "step9",
        "step10",
        "step100",
        "step10-unsharded",
        "step20-tmp",
        "steps",
        "step-5",
        "xstep7",
        "step0",
    ]
    assert [name for name in names if core_step(name) is not None] == ["step9", "step10", "step100", "step0"]
    assert later(names, -1) == ["step0", "step9", "step10", "step100"]
    assert later(names, 9) == ["step10", "step100"], "after the newest commit"
    assert later(names, 9, until=10) == ["step10"], "of this training"
    assert later(names, 100) == []
