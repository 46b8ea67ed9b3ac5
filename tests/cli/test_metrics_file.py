"""`--metrics-file`: the file is readable by Prometheus' own parser, whatever the outcome of the command."""

import argparse
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckpt_async import Uploader
from ckpt_async.cli import main
from ckpt_async.cli.metrics_file import measuring
from tests.events.saves import QUICK, save
from tests.sweep.trainers import Trainers


def read(*paths: Path) -> dict[str, float]:
    """Return the value of each series, `name{label values}`; the collector would refuse a series found in two files."""
    found: dict[str, float] = {}
    for path in paths:
        for family in text_string_to_metric_families(path.read_text()):
            for each in family.samples:
                fate = [
                    each.labels[label] for label in ("command", "target", "result") if label in each.labels
                ]
                key = f"{each.name.removeprefix('ckpt_async_')}{fate}"
                assert key not in found
                found[key] = each.value
    return found


@pytest.fixture
def remote(tmp_path: Path) -> str:
    with Uploader(tmp_path / "saved", f"file://{tmp_path}/saved-run", **QUICK) as uploader:
        for step in (1, 2, 3):
            save(uploader, step)
            uploader.wait(step)
    return f"file://{tmp_path}/saved-run"


def test_each_command_says_what_it_did_and_how_it_ended(
    tmp_path: Path, trainers: Trainers, remote: str
) -> None:
    folder, out = tmp_path / "folder", tmp_path / "out"
    out.mkdir()
    for rank in range(2):
        trainers.die(folder, f"file://{tmp_path}/run", 1, 2, rank=rank, world_size=2)
    files = {name: out / f"{name}.prom" for name in ("drain", "verify", "pull", "prune", "sweep")}

    def run(name: str, *arguments: str) -> int:
        umask = os.umask(0o077)  # the collector runs as another user
        try:
            return main([name, *arguments, "--metrics-file", str(files[name])])
        finally:
            os.umask(umask)

    assert run("drain", str(folder)) == 0
    assert run("verify", remote) == 0
    assert run("pull", remote, str(tmp_path / "pulled")) == 0
    assert run("prune", remote, "--keep", "last=1", "--yes") == 0
    [shard] = (tmp_path / "saved-run" / "ckpt" / "step-3.g1").iterdir()
    shard.unlink()
    assert run("sweep", str(folder), "--remote", f"file://{tmp_path}/run", "--verify") == 0
    values = read(*files.values())
    assert values[f"command_checkpoints['drain', '{folder}', 'committed']"] == 2
    assert values[f"command_checkpoints['drain', '{folder}', 'left']"] == 0
    assert values[f"command_bytes['drain', '{folder}']"] > 0
    assert values[f"command_checkpoints['verify', '{remote}', 'checked']"] == 3
    assert values[f"command_violations['verify', '{remote}']"] == 0
    assert values[f"command_bytes['pull', '{remote}']"] == 100
    assert values[f"command_checkpoints['prune', '{remote}', 'pruned']"] == 2
    assert f"command_bytes['sweep', '{folder} file://{tmp_path}/run']" in values
    assert all(value == 0 for key, value in values.items() if key.startswith("command_exit_code"))
    assert all(0 < value < 60 for key, value in values.items() if key.startswith("command_duration"))
    assert run("verify", remote) == 4
    values = read(files["verify"])
    assert values[f"command_exit_code['verify', '{remote}']"] == 4
    assert values[f"command_violations['verify', '{remote}']"] == 1
    assert sorted(os.listdir(out)) == sorted(path.name for path in files.values())
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o644}


def test_a_sweep_counts_what_it_finds_damaged(tmp_path: Path, remote: str) -> None:
    file = tmp_path / "sweep.prom"
    [shard] = (tmp_path / "saved-run/ckpt/step-1.g1").iterdir()
    shard.unlink()
    assert main(["sweep", "--remote", remote, "--verify", "--metrics-file", str(file)]) == 1
    assert read(file)[f"command_violations['sweep', '{remote}']"] == 1


def test_a_command_that_fails_says_so_and_a_file_that_cannot_be_written_changes_no_exit_code(
    tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.prom"
    assert main(["verify", f"file://{tmp_path}/nothing", "--metrics-file", str(file)]) == 3
    values = read(file)
    assert values[f"command_exit_code['verify', 'file://{tmp_path}/nothing']"] == 3
    assert not any(key.startswith("command_checkpoints") for key in values)
    assert main(["verify", remote, "--metrics-file", str(tmp_path / "nowhere" / "x.prom")]) == 0
    assert "metrics_not_written" in capsys.readouterr().err
    assert main(["sweep", "--remote", remote, "--interval", "1", "--metrics-file", str(file)]) == 2


def test_a_command_that_is_interrupted_says_so(tmp_path: Path) -> None:
    file = tmp_path / "x.prom"
    options = argparse.Namespace(
        command="verify", metrics_target="url", url="file:///run", metrics_file=str(file)
    )
    with pytest.raises(KeyboardInterrupt), measuring(options):
        raise KeyboardInterrupt
    assert read(file)["command_exit_code['verify', 'file:///run']"] == 130
