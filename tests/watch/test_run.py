"""`ckpt-async run` stands between a command and its caller: descriptors and signals arrive as without it."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt_async import restore
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.watch import supervisor
from ckpt_async.watch.options import Options
from ckpt_async.watch.supervisor import supervise
from ckpt_async.watch.wake import Waker
from ckpt_async.watch.watcher import Watcher

ROOT = Path(__file__).parents[2]
# Says which signals it gets, until SIGTERM; and whose child it is.
TRAINER = """
import os, signal, sys
def tell(number, _=None):
    os.write(said, f"{signal.Signals(number).name}\\n".encode())
    if number == signal.SIGTERM:
        os._exit(0)
said = os.open(sys.argv[1], os.O_WRONLY)
for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(each) != signal.SIG_IGN:
        signal.signal(each, tell)
os.write(said, f"{os.getppid()}\\n".encode())
while True:
    signal.pause()
"""


def command(folder: Path, *argv: str) -> list[str]:
    (folder / "out").mkdir(exist_ok=True)
    us = [sys.executable, "-m", "ckpt_async", "run", f"file://{folder}/remote", "--folder", f"{folder}/out"]
    return [*us, "--", *argv]


def trainer(folder: Path) -> list[str]:
    os.mkfifo(folder / "said")
    return command(folder, sys.executable, "-c", TRAINER, f"{folder}/said")


def after(first: list[signal.Signals], folder: Path, interrupt: Callable[[int], None]) -> list[str]:
    """What the trainer said until SIGTERM, which is sent to `run` after what `interrupt` does to it."""
    with (folder / "said").open() as said:
        run = int(said.readline())
        interrupt(run)
        heard = [said.readline().strip() for _ in first]
        os.kill(run, signal.SIGTERM)
        return heard + [line.strip() for line in said]


def test_the_command_has_the_descriptors_that_its_caller_gave(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"config")
    os.close(write)
    ended = subprocess.run(
        command(tmp_path, "cat", f"/dev/fd/{read}"), pass_fds=[read], capture_output=True, timeout=60
    )
    os.close(read)
    assert (ended.returncode, ended.stdout) == (0, b"config")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_the_caller_ignores_does_not_reach_the_command(tmp_path: Path, number: int) -> None:
    argv = ["sh", "-c", f'trap "" {number}; exec "$@"', "sh", *trainer(tmp_path)]
    with subprocess.Popen(argv) as process:
        assert after([], tmp_path, lambda run: os.kill(run, number)) == ["SIGTERM"]
    assert process.returncode == 0


@pytest.mark.parametrize("stdin", ["/dev/tty", "/dev/null"])
def test_a_terminal_s_ctrl_c_comes_once(tmp_path: Path, stdin: str) -> None:
    """The terminal sends it to the command too."""
    pid, terminal = in_terminal('exec "$@" < ' + stdin, trainer(tmp_path))
    assert after([signal.SIGINT], tmp_path, lambda _: write(terminal, b"\x03")) == ["SIGINT", "SIGTERM"]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_the_closing_of_the_terminal_comes_once(tmp_path: Path) -> None:
    """To the shell, and when that has ended to the foreground group."""
    pid, terminal = in_terminal('"$@"; true', trainer(tmp_path))
    assert after([signal.SIGHUP], tmp_path, lambda _: os.close(terminal)) == ["SIGHUP", "SIGTERM"]
    os.waitpid(pid, 0)


def test_ctrl_z_stops_both_and_fg_lets_both_go_on(tmp_path: Path) -> None:
    pid, terminal = in_terminal('set -m; "$@"; read line; fg', trainer(tmp_path))
    with (tmp_path / "said").open() as said:
        run = int(said.readline())
        children = Path(f"/proc/{run}/task/{run}/children").read_text().split()
        write(terminal, b"\x1a")
        for each in (run, *children):
            while state_of(each) != "T":
                pass
        os.kill(run, signal.SIGTERM)
        write(terminal, b"\n")
        assert [line.strip() for line in said] == ["SIGTERM"]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_a_signal_that_comes_while_the_command_is_started_reaches_it(tmp_path: Path) -> None:
    class Environment(dict[str, str]):
        """Read when the signals are ours and the command is not there yet."""

        def __iter__(self) -> Iterator[str]:
            os.kill(os.getpid(), signal.SIGTERM)
            return iter(dict(os.environ))

        keys = __iter__  # type: ignore[assignment]

        def __getitem__(self, name: str) -> str:
            return os.environ[name]

    (tmp_path / "out").mkdir()
    options = Options(tmp_path / "out", f"file://{tmp_path}/remote", tmp_path / "state", tmp_path / "lock")
    assert supervise(["sleep", "20"], Environment(), partial(new_watcher, options))[0] == 128 + signal.SIGTERM


def new_watcher(options: Options, waker: Waker) -> Watcher:
    return Watcher(options, waker=waker)


def test_a_watcher_that_fails_for_hours_leaves_nothing_behind_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors above all: a process has 1024 of them."""
    monkeypatch.setattr(supervisor, "RESTART_S", 0.0)
    os.mkfifo(tmp_path / "end")
    options = Options(tmp_path, "file:///proc/nowhere", tmp_path / "state", tmp_path / "lock")
    num_open: list[int] = []

    def again(waker: Waker) -> Watcher:
        num_open.append(len(os.listdir("/proc/self/fd")))
        if len(num_open) == 6:
            (tmp_path / "end").write_text("")
        return new_watcher(options, waker)

    status, _, _ = supervise(["cat", str(tmp_path / "end")], dict(os.environ), again)
    assert status == 0
    assert len({*num_open[1:6]}) == 1, num_open


ROTATING = """
until [ -e failed ]; do sleep 0.05; done
mkdir out/checkpoint-1
echo x > out/checkpoint-1/model.bin
echo '{"global_step": 1}' > out/checkpoint-1/trainer_state.json
until [ -e state/run/entries/00000001.json ]; do sleep 0.05; done
rm -r out/checkpoint-1
"""


def test_what_is_saved_before_a_watcher_that_failed_is_started_again_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong key, say: the trainer rotates, and fills its disk, all the same."""
    num_opened: list[int] = []

    def refusing(_: Watcher) -> None:
        num_opened.append(1)
        (tmp_path / "failed").touch()
        raise StoreError("no such key", reason=FailureReason.AUTH)

    monkeypatch.setattr(supervisor, "RESTART_S", 0.2)
    monkeypatch.setattr(Watcher, "_open", refusing)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    options = Options(tmp_path / "out", f"file://{tmp_path}/remote", tmp_path / "state", tmp_path / "lock")
    status, _, error = supervise(
        ["sh", "-c", ROTATING], dict(os.environ), partial(new_watcher, options), grace_s=0
    )
    assert (status, isinstance(error, StoreError)) == (0, True)
    assert len(num_opened) >= 2, "again, and once more at the end"


# Saves three checkpoints, each when the one before is committed, and fails in its own way.
SAVING = """
import json, os, pathlib, sys, time
sys.path.insert(0, sys.argv[3])
from ckpt_async import restore
for step in (10, 20, 30):
    here = pathlib.Path(sys.argv[1], f"checkpoint-{step}")
    here.mkdir()
    (here / "model.bin").write_bytes(b"x" * step)
    (here / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    while step < 30 and restore.find(sys.argv[2], step=step) is None:
        time.sleep(0.05)
sys.exit(5)
"""


# What could not be written is in a buffer still when Python ends.
BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}


def unwritable(why: str) -> int:
    """A descriptor that nothing can be written to."""
    if why == "disk full":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("why", ["disk full", "reader gone"])
@pytest.mark.parametrize("unread", ["stderr", "stdout"])
def test_messages_that_cannot_be_written_change_nothing(tmp_path: Path, why: str, unread: str) -> None:
    remote = f"file://{tmp_path}/remote"
    argv = command(tmp_path, sys.executable, "-c", SAVING, f"{tmp_path}/out", remote, str(ROOT))
    argv[argv.index("--") : argv.index("--")] = ["--settle-s", "0.1", *(["--json"] * (unread == "stdout"))]
    descriptor = unwritable(why)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | {unread: descriptor}
    done = subprocess.run(argv, text=True, timeout=80, env=BUFFERED, **streams)  # type: ignore[call-overload]
    os.close(descriptor)
    assert done.returncode == 5
    found = [restore.find(remote, step=step) for step in (10, 20, 30)]
    assert [each.generation for each in found if each] == [1, 1, 1], "the watcher has not begun anew"
    if unread == "stdout":
        assert done.stderr.count("the output cannot be written") == 1, done.stderr


def test_watch_goes_on_though_nobody_reads_it(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-10").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-10" / "model.bin").write_text("x")
    (tmp_path / "out" / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 10}')
    remote, descriptor = f"file://{tmp_path}/remote", unwritable("reader gone")
    argv = [sys.executable, "-m", "ckpt_async", "watch", f"{tmp_path}/out", remote, "--once"]
    done = subprocess.run(argv, stdout=descriptor, stderr=descriptor, timeout=60, env=BUFFERED)
    os.close(descriptor)
    assert done.returncode == 0
    assert restore.find(remote, step=10)


def state_of(pid: int | str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def in_terminal(script: str, argv: list[str]) -> tuple[int, int]:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started with nohup
        os.execv("/bin/sh", ["sh", "-c", script, "sh", *argv])
    return pid, terminal


def write(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data)
