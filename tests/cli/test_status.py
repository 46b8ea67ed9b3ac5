"""`status` of several folders and remotes, once or repeatedly, on terminals of any width or without a terminal."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, cli, restore
from ckpt_async.cli.output import Block, Table, Terminal, drawn
from ckpt_async.cli.status import folder_blocks
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Enqueued, FileIdentity, Sealed, Shard
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.local.journals import RankState
from ckpt_async.monitor.report import Seen
from ckpt_async.monitor.status import view
from tests.missing_ranks import lacking_ranks, save
from tests.restore.runs import Run, shard_key

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
    (row,) = (line for line in rest if "in_flight" in line)
    assert " 1/3 " in row
    assert row.endswith("missing: 1, 2")
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
    with Uploader(tmp_path / "a", remote, kind="ema", rank=0, world_size=1) as uploader:
        (tmp_path / "a/more.bin").write_bytes(b"x" * 1000)
        uploader.enqueue(tmp_path / "a/more.bin", 5)
        save(uploader, 5)
    found = told(capsys, remote)
    assert found["last_committed"]["step"] == 5
    assert found["kinds"]["weights"]["remote"] == f"{remote}/kinds/weights"
    sizes = [each["checkpoints"][0]["size_bytes"] for each in (found, found["kinds"]["ema"])]
    assert sizes == [1000, 2000]
    assert cli.main(["status", remote]) == 0
    assert f"{remote}/kinds/ema" in capsys.readouterr().out.splitlines()
    assert cli.main(["status", str(tmp_path / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"the run itself, no kind", "kind weights", "kind ema"} <= set(lines)
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


def test_of_a_long_run_the_newest_are_shown_and_pins_are_told(
    remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(remote)
    for step in range(1, 13):
        run.commit(step, {0: {"a": b"a"}}, moves_latest=False)
    assert cli.main(["pin", remote, "7"]) == 0
    capsys.readouterr()
    assert cli.main(["status", remote]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"and 2 older ones, see `ckpt-async ls {remote}`"
    rows = [line.split() for line in lines if "committed" in line][1:]
    assert [row[0] for row in rows] == [str(step) for step in range(3, 13)]
    remarks = {row[0]: row[-1] for row in rows}
    assert (remarks["7"], remarks["12"]) == ("pinned", "newest")


def test_what_a_remote_does_not_tell_is_named(remote: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(remote)
    for step in (1, 2):
        run.commit(step, moves_latest=False)
    run.delete(keys.decision_key(CheckpointId(1, 2)))
    run.put(keys.decision_key(CheckpointId(1, 1)), b"nonsense")
    assert cli.main(["status", remote]) == 0
    out = capsys.readouterr().out
    assert "step 2: 2 of ? ranks have delivered, total number of ranks unknown" in out
    assert f"cannot be read: {keys.decision_key(CheckpointId(1, 1))}" in out


# --- folders -----------------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """Provide the journal of rank 0, which has sealed step 7 with a file of 1 MiB."""
    id_, shard = CheckpointId(1, 7), Shard("a", "step-7/a", FileIdentity(1, 1, 1 << 20, 1), True)
    journal = Journal(Folder(tmp_path / "node"), 0)
    journal.append([Enqueued(id_, "step-7", shard), Sealed(id_, "step-7", 1)])
    yield journal
    journal.close()


@pytest.mark.usefixtures("journal")
def test_a_folder_whose_trainer_is_dead_says_how_to_finish_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = RankLock(Folder(tmp_path / "node"), 0)
    shown = []
    for is_running in (False, True):
        if is_running:
            lock.acquire()
        assert cli.main(["status", str(tmp_path / "node")]) == 0
        shown.append(capsys.readouterr().out.splitlines())
    lock.release()
    dead, live = shown
    assert dead[1] == "no uploader is running here; `ckpt-async drain` finishes what was sealed"
    assert "ranks   0 (stopped)" in dead
    assert "queue   1 queued (1.0 MiB)" in dead
    assert " 0/1 " in dead[-1]
    assert "ranks   0" in live
    assert dead[1] not in live


def test_the_time_left_is_that_of_what_has_not_been_uploaded(journal: Journal) -> None:
    id_ = CheckpointId(1, 7)
    status = view([RankState(journal.local(), {(id_, "a"): 896 << 10})], 0.0)
    [block] = folder_blocks("/f", {"": Seen(status, (0,), {id_: float(1 << 16)})}, is_titled=False)
    assert ("", "speed   64.0 KiB/s, 2 s left") in block.lines
    assert block.table is not None
    assert block.table.rows[0][-1] == "64.0 KiB/s, 2 s left"


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


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Have --watch do these acts, one in each pause, in place of waiting, and then end as with Ctrl-C."""

    def meanwhile(*acts: Callable[[], object]) -> list[float]:
        left, pauses_s = list(acts), list[float]()

        def pause(pause_s: float) -> None:
            pauses_s.append(pause_s)
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr("ckpt_async.cli.status.pause_for_reader", pause)
        return pauses_s

    return meanwhile


def changes(capsys: pytest.CaptureFixture[str], *targets: object) -> list[str]:
    assert cli.main(["status", "--watch", *map(str, targets)]) == 130
    return [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]


def test_a_target_that_cannot_be_seen_for_a_while_has_not_lost_its_checkpoints(
    tmp_path: Path, remote: str, meanwhile: Callable[..., list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that did not answer once was reported as one that holds none of them any longer."""
    Run(remote).commit(5)
    store, away = tmp_path / "store/run-a", tmp_path / "away"
    meanwhile(lambda: store.rename(away), lambda: None, lambda: away.rename(store))
    seen, error, again = changes(capsys, remote)
    assert (seen, again) == (f"{remote} step 5@g1 committed", f"{remote} can be seen again")
    assert error.startswith(f"{remote} open ")


def test_a_folder_that_appears_later_is_looked_at(
    tmp_path: Path, remote: str, meanwhile: Callable[..., list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    node = tmp_path / "node"

    def train() -> None:
        with Uploader(node, remote, rank=0, world_size=1) as uploader:
            save(uploader, 1)

    meanwhile(train, lambda: shutil.rmtree(node))
    first, *rest, last = changes(capsys, node)
    assert first.startswith(f"{node} there is no journal")
    assert rest == [f"{node} step 1@g1 committed", f"{node} can be seen again"]
    assert last == first


def test_what_is_no_longer_held_and_what_is_damaged_are_told(
    tmp_path: Path, remote: str, meanwhile: Callable[..., list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, node = Run(remote), tmp_path / "node"
    with Uploader(node, remote, rank=0, world_size=1, num_checkpoints_to_keep=1) as uploader:

        def move_on() -> None:
            save(uploader, 2)
            uploader.flush(timeout_s=60)

        save(uploader, 1)
        uploader.wait(1, timeout_s=60)
        meanwhile(move_on)
        assert f"{node} step 1@g1 is no longer held here" in changes(capsys, node)

    def spoil() -> None:
        run.flip(shard_key(2, "rank-0.bin"))
        restore.fetch_latest(remote, tmp_path / "there")

    meanwhile(spoil)
    assert f"{remote} step 2@g1 damaged" in changes(capsys, remote)


def test_a_remote_is_looked_at_less_often_than_a_folder(
    tmp_path: Path, remote: str, meanwhile: Callable[..., list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each look at a remote costs requests, also beside a folder."""
    with Uploader(tmp_path / "node", remote, rank=0, world_size=1):
        pass
    pauses_s = []
    for targets in (["node"], ["node", remote], [remote, "node", "--interval", "0.5"]):
        where = [str(tmp_path / each) if each == "node" else each for each in targets]
        pauses_s.append(meanwhile())
        changes(capsys, *where)
    assert pauses_s == [[2.0], [10.0], [0.5]]


def test_watching_as_json_prints_the_first_look_and_then_only_changes(
    tmp_path: Path, remote: str, meanwhile: Callable[..., list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as nothing had been saved, every look was printed."""
    with Uploader(tmp_path / "node", remote, rank=0, world_size=1) as uploader:
        meanwhile(lambda: None, lambda: (save(uploader, 1), uploader.wait(1, timeout_s=60)), lambda: None)
        assert cli.main(["status", "--watch", "--json", str(tmp_path / "node")]) == 130
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    steps = [[each["step"] for each in look["folders"][0]["checkpoints"]] for look in looks]
    assert steps == [[], [1]]


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


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal_and_states_stay(width: int) -> None:
    words = (
        "a sentence that is longer than a narrow terminal is wide, and /a/path/that/is/longer/than/that/is"
    )
    lines = drawn([Block([("good", words)], TABLE)], Terminal(width, 24, True))
    bare = [COLOUR.sub("", line) for line in lines]
    assert max(map(len, bare)) <= width
    assert " ".join(bare[: bare.index("")]).replace(" ", "") == words.replace(" ", "")
    assert any("committed" in line and "100" in line for line in bare)
    assert any("\x1b[32m" in line for line in lines)
    plain = drawn([Block([("good", words)], TABLE)], Terminal(width, 24, False))
    assert plain == [COLOUR.sub("", line) for line in plain]


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
def test_a_remark_is_whole_however_narrow_the_terminal(width: int) -> None:
    _, *lines = drawn([Block([], TABLE)], Terminal(width, 24))
    assert " ".join(lines).count("why") == 30
    assert all(line.strip() for line in lines)


def test_where_nobody_looks_nothing_is_cut() -> None:
    lines = drawn([Block([("good", "x " * 200)], TABLE)], Terminal())
    assert lines[0] == "x " * 200
    assert lines[-1].endswith("why why")
