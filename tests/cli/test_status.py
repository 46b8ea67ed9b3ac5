"""`status` of several folders and remotes, once or repeatedly, on terminals of any width or without a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, cli
from ckpt_async.cli.drawing import Block, Table, Terminal, drawn
from tests.missing_ranks import lacking_ranks, save

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run-a"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Uploader]]:
    """Provide three ranks on two nodes: step 1 is committed, and step 2 lacks rank 1 and rank 2."""
    with lacking_ranks(tmp_path, tmp_path / "store/run-a", (0, 0, 1), (1,)) as opened:
        yield opened


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    assert cli.main(["status", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


# --- remotes -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ranks")
def test_a_remote_tells_who_has_delivered_and_who_has_not(
    remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", remote]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"newest committed step 1, \d+ s ago", first)
    assert re.fullmatch(
        r"step 2: 1 of 3 ranks have delivered, waits for ranks 1, 2, last change \d+ s ago", second
    )
    assert "start   generation 1, 3 ranks" in rest
    found = told(capsys, remote)
    assert (found["remote"], found["generation"], found["world_size"]) == (remote, 1, 3)
    assert (found["last_committed"]["step"], found["last_committed"]["age_s"] < 60) == (1, True)
    one, two = found["checkpoints"]
    assert (one["state"], one["shards"], one["missing_ranks"]) == ("committed", 3, [])
    assert (two["state"], two["ranks"], two["missing_ranks"], two["num_missing"]) == (
        "in_flight",
        [0],
        [1, 2],
        2,
    )
    documented = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()
    fields = {*found, *found["last_committed"], *one, *two}
    assert {each for each in fields if f"`{each}`" not in documented} == set()


def test_a_remote_of_which_all_is_damaged_is_no_fresh_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = f"file://{tmp_path}/store"
    with Uploader(tmp_path / "a", remote, rank=0, world_size=1) as uploader:
        save(uploader, 5)
    [shard] = (tmp_path / "store/ckpt").glob("*/*")
    shard.unlink()
    assert cli.main(["pull", remote, str(tmp_path / "here")]) != 0  # marks it as damaged
    capsys.readouterr()
    cli.main(["status", remote])
    assert capsys.readouterr().out.startswith(
        "no checkpoint is usable: 1 checkpoint committed, all found damaged\n"
    )


def test_a_remote_with_kinds_and_one_without_a_run(
    tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in (None, "weights"):
        with Uploader(tmp_path / "a", remote, kind=kind, rank=0, world_size=1) as uploader:
            save(uploader, 5)
    found = told(capsys, remote)
    assert found["last_committed"]["step"] == 5
    assert found["kinds"]["weights"]["remote"] == f"{remote}/kinds/weights"
    assert told(capsys, f"file://{tmp_path}/a", code=3)["error"]["kind"] == "ObjectNotFoundError"


@pytest.mark.usefixtures("ranks")
def test_several_at_once_have_the_shape_of_the_page(
    tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target that cannot be read hides no other."""
    nodes = [tmp_path / "node-0", tmp_path / "none", tmp_path / "node-1"]
    assert cli.main(["status", *map(str, nodes), remote, "--json"]) == 3
    out, err = capsys.readouterr()
    assert err.startswith(f"ckpt-async: {nodes[1]}: there is no journal")
    found = json.loads(out)
    assert [each["folder"] for each in found["folders"]] == [str(each) for each in nodes]
    assert [each.get("error", "")[:19] for each in found["folders"]] == ["", "there is no journal", ""]
    assert found["folders"][2]["ranks"] == [{"rank": 2, "is_running": True}]
    assert [each["remote"] for each in found["remotes"]] == [remote]
    assert cli.main(["status", *map(str, nodes), remote]) == 3
    out, err = capsys.readouterr()
    assert [each in out.splitlines() for each in (str(nodes[0]), str(nodes[1]), remote)] == [
        True,
        False,
        True,
    ]
    assert err.startswith(f"ckpt-async: {nodes[1]}: there is no journal")


# --- again and again ---------------------------------------------------------------------------------------


def watching(*arguments: object, **more: Any) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "ckpt_async",
        "status",
        "--watch",
        "--interval",
        "0.1",
        *map(str, arguments),
    ]
    return subprocess.Popen(command, text=True, **more)


def test_without_a_terminal_a_line_for_each_change(
    ranks: list[Uploader], tmp_path: Path, remote: str
) -> None:
    process = watching(tmp_path / "node-0", remote, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        first = {process.stdout.readline().split(" ", 1)[1].rstrip() for _ in range(4)}
        assert first == {
            f"{tmp_path}/node-0 step 1@g1 committed",
            f"{tmp_path}/node-0 step 2@g1 waiting",
            f"{remote} step 1@g1 committed",
            f"{remote} step 2@g1 in_flight, 1 of 3 ranks",
        }
        for each in ranks[1:]:
            save(each, 2)
        seen: set[str] = set()
        while f"{remote} step 2@g1 committed" not in seen:
            line = process.stdout.readline()
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line)
            seen.add(line.split(" ", 1)[1].rstrip())
        assert f"{tmp_path}/node-0 step 1@g1 committed" not in seen  # it has not changed
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        process.stdout.close()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("how", ["--json", "-v"])
def test_when_nobody_reads_any_more_it_ends_also_while_nothing_changes(tmp_path: Path, how: str) -> None:
    process = watching(
        tmp_path / "node-0", how, "--interval", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()  # as `head -1` does
    try:
        assert process.wait(30) == 141
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.usefixtures("ranks")
def test_on_a_narrow_terminal_it_is_drawn_again_in_place(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    place = {"TERM": "xterm", "COLUMNS": "36", "LINES": "40", "NO_COLOR": ""}
    process = watching(tmp_path / "node-0", stdout=theirs, env={**os.environ, **place})
    os.close(theirs)
    text = ""
    try:
        while text.count("Ctrl-C ends") < 3:
            assert select.select([ours], [], [], 30)[0], text
            text += os.read(ours, 65_536).decode()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        os.close(ours)
    one, two, *_ = re.split(r"\x1b\[(?:\d+F\x1b\[)?J", text)[1:]
    assert "\x1b[32mcommitted" in two
    lines = [COLOUR.sub("", line) for line in two.splitlines()]
    assert max(map(len, lines)) <= 36
    back = re.findall(r"\x1b\[(\d+)F", text)
    assert int(back[0]) == one.count("\n")


TABLE = Table(
    ("STEP", "NAME", "STATE", "SIZE", ""),
    [
        ("100", "epoch-1-batch-100", "committed", "12.0 GiB", ""),
        ("2000", "step-2000", "waiting", "1.0 B", "why " * 30),
    ],
    ("committed", "waiting"),
    2,
    ("NAME", "SIZE"),
)


@pytest.mark.parametrize("has_rich", [False, True])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal_and_states_stay(width: int, has_rich: bool) -> None:
    words = (
        "a sentence that is longer than a narrow terminal is wide, and /a/path/that/is/longer/than/that/is"
    )
    lines = drawn([Block([("good", words)], TABLE)], Terminal(width, 24, True, has_rich))
    bare = [COLOUR.sub("", line) for line in lines]
    assert max(map(len, bare)) <= width
    assert " ".join(bare[: bare.index("")]).replace(" ", "") == words.replace(" ", "")
    assert any("committed" in line and "100" in line for line in bare)
    assert any("\x1b[32m" in line for line in lines)
    plain = drawn([Block([("good", words)], TABLE)], Terminal(width, 24, False, has_rich))
    assert plain == [COLOUR.sub("", line) for line in plain]


def test_where_nobody_looks_nothing_is_cut() -> None:
    lines = drawn([Block([("good", "x " * 200)], TABLE)], Terminal())
    assert lines[0] == "x " * 200
    assert lines[-1].endswith("why why")
