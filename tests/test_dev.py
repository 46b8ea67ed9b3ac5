"""./dev, the entry point for developers: it sets up once, repairs an interrupted one, and reports what is missing."""

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DEV = Path(__file__).resolve().parent.parent / "dev"
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tiny"
version = "1"
[project.optional-dependencies]
dev = ["iniconfig"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(DEV, tmp_path)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "constraints.txt").write_text("")
    return tmp_path


def load(tree: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("dev_under_test", str(tree / "dev"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Commands:
    """Stands in for subprocess.run: records each command, and fails those that `fails` selects."""

    def __init__(self, tree: Path, fails: Callable[[str], bool] = lambda _command: False) -> None:
        self.python = tree / ".venv" / "bin" / "python"
        self.fails = fails
        self.seen: list[str] = []

    def __call__(self, command: tuple[object, ...], **_options: object) -> subprocess.CompletedProcess[str]:
        self.seen.append(" ".join(str(part) for part in command))
        if "-m venv" in self.seen[-1]:
            self.python.parent.mkdir(parents=True, exist_ok=True)
            self.python.touch()
        failed = self.fails(self.seen[-1])
        return subprocess.CompletedProcess(command, int(failed), "", "the reason\n" if failed else "")


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def dev(tree: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    plain_python = [sys.executable, "-I", "-S", str(tree / "dev"), *args]  # -S: no site-packages
    return run(plain_python, cwd="/", env=os.environ | env)


def test_help_needs_nothing_but_python() -> None:
    done = dev(DEV.parent, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("test", "demo", "bench", "soak", "setup", "clean"):
        assert f"./dev {command}" in done.stdout


@pytest.mark.parametrize("args", [("nonsense",), (), ("setup", "now"), ("soak", "1", "2"), ("soak", "long")])
def test_a_wrong_call_is_rejected(tree: Path, args: tuple[str, ...]) -> None:
    done = dev(tree, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dev: ")
    assert not (tree / ".venv").exists()


def test_an_old_python_is_rejected_in_one_sentence() -> None:
    pretend = "import sys; sys.version_info = (3, 10, 1); exec(compile(open('dev').read(), 'dev', 'exec'))"
    done = run([sys.executable, "-c", pretend], cwd=DEV.parent)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "needs Python 3.11 or newer" in done.stderr


def test_the_second_setup_starts_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, first, second, third = load(tree), Commands(tree), Commands(tree), Commands(tree)
    monkeypatch.setattr(module.subprocess, "run", first)
    assert module.main(["setup"]) == 0
    assert [command for command in first.seen if "-m uv pip install" in command]
    monkeypatch.setattr(module.subprocess, "run", second)
    # A change that needs no new install.
    (tree / "pyproject.toml").write_text(PYPROJECT + "[tool.ruff]\nline-length = 99\n")
    assert module.main(["setup"]) == 0
    assert not second.seen
    monkeypatch.setattr(module.subprocess, "run", third)
    (tree / "constraints.txt").write_text("iniconfig>=2\n")
    assert module.main(["setup"]) == 0
    assert len(third.seen) == len(first.seen)


@pytest.mark.parametrize("command", ["setup", "clean"])
def test_an_environment_that_a_link_leads_to_is_left_alone(tree: Path, command: str) -> None:
    """`venv --clear` follows the link, and emptied the environment of another clone."""
    other = tree / "other"
    other.mkdir()
    (other / "ready").write_text("of another clone")
    (tree / ".venv").symlink_to(other)
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    done = dev(tree, command, **offline)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert ".venv is a symbolic link" in done.stderr
    assert "remove the link" in done.stderr
    assert [each.name for each in other.iterdir()] == ["ready"]


def test_an_interrupted_setup_is_repaired(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(command: str) -> bool:
        if "-m uv pip install" in command:
            raise KeyboardInterrupt
        return False

    module, again = load(tree), Commands(tree)
    monkeypatch.setattr(module.subprocess, "run", Commands(tree, interrupt))
    assert module.main(["setup"]) == 130
    assert not module.ready()
    monkeypatch.setattr(module.subprocess, "run", again)
    assert module.main(["setup"]) == 0
    assert "-m venv --clear" in again.seen[0]
    assert module.ready()


@pytest.mark.parametrize("broken", ["pip install -q uv", "-m uv pip install"])
def test_without_uv_pip_installs_the_same(tree: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    module, commands = load(tree), Commands(tree, lambda command: broken in command)
    monkeypatch.setattr(module.subprocess, "run", commands)
    assert module.main(["setup"]) == 0
    assert commands.seen[-1].endswith("-m pip install -e .[dev] -c constraints.txt")


def test_concurrent_setups_run_once(tree: Path) -> None:
    """The second set-up waits for the first, and then finds that there is nothing left to do."""
    module = load(tree)
    first = os.open(tree, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    command = [sys.executable, tree / "dev", "setup"]
    with contextlib.ExitStack() as processes, contextlib.ExitStack() as lock:
        second = processes.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        lock.callback(os.close, first)
        assert second.stderr is not None
        assert "waiting for another ./dev" in second.stderr.readline()
        module.PYTHON.parent.mkdir(parents=True)
        module.PYTHON.touch()
        module.STAMP.write_text(module.wanted_stamp())
        lock.close()
        assert second.stderr.read() == ""
        assert second.wait(30) == 0


def test_an_installer_that_outlives_dev_keeps_the_lock(tree: Path) -> None:
    module = load(tree)
    with module.exclusive() as lock:
        look = f"import os; os.fstat({lock}); print('held')"
        assert module.stage("any", sys.executable, "-c", look, lock=lock) == "held\n"


def test_uv_uses_pips_index(tree: Path) -> None:
    wheels, extra = tree / "wheels", tree / "simple"
    wheels.mkdir()
    extra.mkdir()
    listing = (
        f"global.find-links='{wheels} /nowhere/wheels'\n"
        f"global.extra-index-url='file://{extra} file:///nowhere/simple'\n"
        "global.index-url='https://first.invalid/simple'\n"
        "install.index-url='https://second.invalid/simple'\n"
        ":env:.cert='/ca.pem'\n:env:.no-color='1'\n:env:.index-url=''\n"
    )
    own = {"UV_HTTP_TIMEOUT": "7", "CKPT_ASYNC_TORCH_INDEX": "https://torch.invalid/cpu"}
    env = load(tree).install_environment(listing, own)
    assert env["UV_FIND_LINKS"] == str(wheels)
    assert env["UV_DEFAULT_INDEX"] == "https://second.invalid/simple"
    assert env["UV_INDEX"] == env["PIP_EXTRA_INDEX_URL"] == f"file://{extra} https://torch.invalid/cpu"
    assert (env["SSL_CERT_FILE"], env["UV_HTTP_TIMEOUT"]) == ("/ca.pem", "7")
    assert "UV_INDEX" not in load(tree).install_environment("", {})


def test_a_failing_check_does_not_hide_the_others(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, calls = load(tree), []
    monkeypatch.setattr(module, "set_up", lambda: None)
    monkeypatch.setattr(module, "has_prometheus", lambda: True)
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(module, "find_chromium", lambda: True)

    def call(command: tuple[str, ...], **_options: object) -> int:
        calls.append(command[2])
        return int(command[2] in ("mypy", "ruff"))

    monkeypatch.setattr(module.subprocess, "call", call)
    assert module.main(["test"]) == 1
    assert calls == ["ruff", "ruff", "mypy", "pip", "pytest"]
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "dev: FAILED: ruff check, ruff format, mypy")


UNSTEADY = """
from pathlib import Path

def test_passes_the_second_time():
    seen = Path(__file__).with_name("seen")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen

def test_passes():
    pass
"""


@pytest.mark.parametrize(
    ("more", "code", "last"),
    [
        (
            "",
            0,
            [
                "dev: UNSTEADY: what failed above, beside other tests, has passed alone",
                "dev: all good: pytest",
            ],
        ),
        ("def test_fails():\n    assert False\n", 1, ["dev: FAILED: pytest"]),
    ],
    ids=["passes then", "fails again"],
)
def test_what_failed_is_tried_once_more_alone(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    more: str,
    code: int,
    last: list[str],
) -> None:
    (tree / "test_unsteady.py").write_text(UNSTEADY + more)
    module = load(tree)
    monkeypatch.setattr(module, "set_up", lambda: None)
    monkeypatch.setattr(module, "has_prometheus", lambda: True)
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(module, "CHECKS", {"pytest": ("pytest",)})
    assert module.main(["test"]) == code
    out, err = capfd.readouterr()
    assert err.splitlines()[-len(last) :] == last
    assert out.count("test_unsteady.py ") == 2  # pytest's line for the file, once in each of the two runs
    assert "1 failed, 1 passed" in out or "2 failed, 1 passed" in out


def test_what_python_compiles_is_kept_even_where_it_may_not_lie_beside_the_sources(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every launch would compile torch again."""
    module = load(tree)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert not {"PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"} & module.environment().keys()
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tree / "imported.py").touch()
    subprocess.run([sys.executable, "-c", "import imported"], cwd=tree, env=module.environment(), check=True)
    assert [*(tree / ".venv").rglob("imported.*.pyc")]
    assert not [*tree.glob("__pycache__")]


def test_bench_lists_the_benchmarks(tree: Path) -> None:
    (tree / "benchmarks").mkdir()
    (tree / "benchmarks" / "upload.py").write_text('"""How fast parts move.\n\nMore.\n"""\n')
    (tree / "benchmarks" / "_common.py").write_text("")
    assert dev(tree, "bench").stdout.split(maxsplit=1) == ["upload", "How fast parts move.\n"]
    unknown = dev(tree, "bench", "uplaod")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "How fast parts move." in unknown.stderr


def test_a_broken_index_is_a_clear_message(tree: Path) -> None:
    closed = "http://127.0.0.1:9/simple"
    offline = {
        **dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), closed),
        **dict.fromkeys(("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX"), ""),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
    }
    done = dev(tree, "setup", **offline)
    assert (done.returncode, done.stdout) == (1, "")
    assert "-m pip install -e '.[dev]' -c constraints.txt" in done.stderr  # the command that failed
    assert "No matching distribution found for hatchling" in done.stderr  # the last lines of its output
    assert "check the network" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not load(tree).ready()


# --- a test that hangs ---------------------------------------------------------------------------------------

HANGS = """
import asyncio, signal, threading

def test_waits():
    threading.Event().wait()

def test_waits_in_a_loop():
    asyncio.run(asyncio.Event().wait())

def test_passes():
    pass
"""
HANGS_FOR_GOOD = """
import signal, threading

def test_hears_no_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()
"""


def checked(tree: Path, tests: str, *limits: str) -> subprocess.CompletedProcess[str]:
    """Run `./dev test` on these tests, with the project's own settings except for the limits."""
    (tree / "test_hang.py").write_text(tests)
    command = load(DEV.parent).CHECKS["pytest"]
    settings = ("-c", str(DEV.parent / "pyproject.toml"), "--rootdir", str(tree), "-p", "no:cacheprovider")
    # Other installed packages register plugins that take seconds to import, in each of four processes.
    plugins = ("-p", "xdist.plugin", "-p", "pytest_timeout")
    return run(
        [sys.executable, "-m", *command, *plugins, *settings, *limits, str(tree / "test_hang.py")],
        cwd=tree,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_a_hanging_test_fails_and_shows_where(tmp_path: Path) -> None:
    """A hanging test costs its time limit only once. If its process were ended and restarted each time, the test
    would be run again and again.
    """
    done = checked(tmp_path, HANGS, "--timeout=1")
    assert done.returncode == 1
    assert "2 failed, 1 passed" in done.stdout
    assert ">       threading.Event().wait()" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout


def test_a_test_that_cannot_be_interrupted_ends_the_run(tmp_path: Path) -> None:
    done = checked(tmp_path, HANGS_FOR_GOOD, "--timeout=1", "-o", "faulthandler_timeout=2")
    assert done.returncode
    assert "test_hears_no_signal" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("has_apt", "fails", "is_had"),
    [
        (True, "nothing", True),
        (True, "apt-get -q download prometheus", True),  # apt's lists are empty, so ours are used
        (True, "download", False),
        (False, "nothing", False),
    ],
)
def test_prometheus_falls_back_to_debians_package(
    tree: Path, monkeypatch: pytest.MonkeyPatch, has_apt: bool, fails: str, is_had: bool
) -> None:
    """The package is unpacked into .venv, without root privileges. If it is not available, that is a normal answer,
    not an error.
    """
    module = load(tree)
    commands = Commands(tree, lambda command: command.endswith(fails) or f"{fails} prometheus" in command)
    (tree / ".venv").mkdir()

    def run_(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[str]:
        done = commands(command, **options)
        if "download" in command and not done.returncode:
            (module.PROMETHEUS / "prometheus_2.0_amd64.deb").touch()
        if command[0] == "dpkg-deb":
            (module.PROMETHEUS / "usr/bin").mkdir(parents=True)
        return done

    monkeypatch.setattr(module.subprocess, "run", run_)
    monkeypatch.setattr(
        module.shutil,
        "which",
        lambda name, path=None: name if has_apt and name in ("apt-get", "dpkg-deb") else None,
    )
    assert module.has_prometheus() is is_had
    assert any("update" in each for each in commands.seen) == (has_apt and fails != "nothing")
    assert not list(module.VENV.rglob("*.deb"))


def test_chromium_comes_with_what_it_needs_and_this_machine_lacks(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(tree)
    (tree / ".venv").mkdir()
    seen: list[tuple[str, ...]] = []

    def run_(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[str]:
        seen.append(tuple(command))
        if "download" in command:
            for name in ("chromium", "libnss3"):
                (module.CHROMIUM / f"{name}_1_amd64.deb").touch()
        plan = "Inst libnss3 (2:3.87 Debian)\nInst chromium (156 Debian)\nConf chromium (156 Debian)\n"
        return subprocess.CompletedProcess(command, 0, plan if "install" in command else "", "")

    monkeypatch.setattr(module.subprocess, "run", run_)
    monkeypatch.setattr(
        module.shutil, "which", lambda name, path=None: name if name in ("apt-get", "dpkg-deb") else None
    )
    assert module.has_chromium()
    assert ("apt-get", "-q", "download", "libnss3", "chromium") in seen
    program = module.CHROMIUM / "usr/bin/chromium"
    assert os.access(program, os.X_OK)
    assert f'exec "{module.CHROMIUM}/usr/lib/chromium/chromium" "$@"' in program.read_text()
    assert not list(module.VENV.rglob("*.deb"))
