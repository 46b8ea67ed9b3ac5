"""Completion as real shells perform it, and manual pages as man(1) and mandoc read them."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_async import cli
from ckpt_async.cli.completion import SHELLS
from ckpt_async.cli.describing import Argument, Command, described
from ckpt_async.cli.man import page


def program() -> Command:
    return described(cli._parser())


def needs(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"no {tool} here: it is Debian's package of that name")
    return found


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    return tmp_path / "script"


def written(script: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> Path:
    assert cli.main(["completion", shell]) == 0
    script.write_text(capsys.readouterr().out)
    return script


# (what is typed, some words that must be offered, some that must not)
TYPED = [
    ("", {"status", "ls", "diff"}, {"--json", "bash"}),
    ("st", {"status"}, {"ls"}),
    ("ls --g", {"--generation"}, {"--verbose", "ls"}),
    ("completion ", {"bash", "zsh", "fish"}, {"status"}),
    ("--v", {"--version"}, {"verify"}),
    ("status --log-format ", {"text", "json"}, {"status", "README.md"}),
    ("drain --exec-on ", {"committed", "given_up", "all"}, {"README.md"}),
    ("status --log-format j", {"json"}, {"text"}),
    ("status --log-format json x --i", {"--interval"}, {"json"}),
    ("watch out s3://b/r --format light", {"lightning"}, {"dcp"}),
    ("run s3://b/r --folder x --fo", {"--format"}, {"--all"}),
    ("run s3://b/r -- tru", {"true"}, {"--folder"}),
    ("run s3://b/r -- true --fo", set(), {"--format", "--folder"}),
]


# Bash splits words at "=".
BY_BASH = [
    ("status --log-format = ", {"text", "json"}, {"status"}),
    ("ls --log-format = j", {"json"}, {"text"}),
]


@pytest.mark.parametrize(("typed", "offered", "not_offered"), [*TYPED, *BY_BASH])
def test_bash_completes(
    typed: str, offered: set[str], not_offered: set[str], script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = f"""
        source {written(script, "bash", capsys)}
        COMP_WORDS=(ckpt-async {typed}) COMP_CWORD={len(re.split(" +", typed))}
        _ckpt_async && printf '%s\\n' "${{COMPREPLY[@]}}"; complete -p ckpt-async
    """
    done = subprocess.run([needs("bash"), "--norc", "-c", asking], capture_output=True, text=True, timeout=60)
    *found, registered = done.stdout.splitlines()
    assert (done.stderr, registered) == ("", "complete -o default -F _ckpt_async ckpt-async")
    assert offered <= set(found)
    assert not not_offered & set(found)


@pytest.mark.parametrize(("typed", "offered", "not_offered"), TYPED)
def test_fish_completes(
    typed: str,
    offered: set[str],
    not_offered: set[str],
    script: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asking = f"source {written(script, 'fish', capsys)}; complete -C 'ckpt-async {typed}'"
    done = subprocess.run(
        [needs("fish"), "--no-config", "-c", asking],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert done.stderr == ""
    found = {line.partition("\t")[0] for line in done.stdout.splitlines()}
    assert offered <= found
    assert not not_offered & found


def test_zsh_completes(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test types Tab into a terminal, because zsh completes nowhere else."""
    shell = needs("zsh")
    written(script, "zsh", capsys)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execve(
            shell, [shell, "-f", "-i"], {"PS1": "> ", "TERM": "dumb", "HOME": str(tmp_path), "PATH": "/bin"}
        )
    try:
        setup = f"zstyle ':completion:*' menu no; autoload -Uz compinit; compinit -u -D; source {script}"
        asked(terminal, f"LISTMAX=9999; unsetopt zle_bracketed_paste; {setup}; echo rea''dy\n", "ready")
        assert "status" in asked(terminal, "ckpt-async st\t", "status ")
        assert "--generation" in asked(terminal, "\x15ckpt-async ls --gen\t", "--generation ")
        assert "sweeper" not in asked(terminal, "\x15ckpt-async completion f\t", "fish ")
        assert "text" in asked(terminal, "\x15ckpt-async ls --log-format t\t", "text ")
        assert asked(terminal, "\x15ckpt-async run s3://b/r -- whoam\t", "whoami ")
        assert "--format" not in asked(terminal, "--form\tzz", "zz")
        (tmp_path / "checkpoints").mkdir()
        assert "checkpoints/" in asked(terminal, "\x15ckpt-async status ch\t", "checkpoints/")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def asked(terminal: int, typed: str, awaited: str) -> str:
    os.write(terminal, typed.encode())
    seen, until = "", time.monotonic() + 30
    while awaited not in seen:
        assert select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode()
    return seen


def test_every_command_and_option_is_known_everywhere() -> None:
    """Completion and manual pages are generated from the parser, so nothing may be missing."""
    whole = program()
    assert {each.name for each in whole.commands} == {name for name, *_ in cli._COMMANDS}
    for command in whole.commands:
        for option in command.options:
            for name in option.names:
                for shell in SHELLS.values():
                    assert name.lstrip("-") in shell(whole), (command.name, name)
                assert name.replace("-", "\\-") in page(command, whole), (command.name, name)
        assert command.summary in "".join(page(whole, whole).replace("\\", ""))


# --- manual pages ------------------------------------------------------------------------------------------


def test_manual_pages_are_read_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "man1"
    assert cli.main(["man", "--into", str(folder)]) == 0
    pages = sorted(map(Path, capsys.readouterr().out.split()))
    assert pages == sorted(folder.iterdir())
    assert len(pages) == len(cli._COMMANDS) + 1
    if mandoc := shutil.which("mandoc"):
        done = subprocess.run(
            [mandoc, "-T", "lint", "-W", "warning", *pages], capture_output=True, text=True, timeout=60
        )
        assert done.stdout + done.stderr == ""
    shown = subprocess.run(
        [needs("man"), "-l", str(folder / "ckpt-async-ls.1")], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0
    text = " ".join(re.sub(r".\x08", "", shown.stdout).split())
    for expected in ("NAME", "ckpt-async-ls - list the committed", "-l, --long", "EXIT CODES", "SEE ALSO"):
        assert expected in text


def test_a_page_is_the_same_on_any_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert "1970-01-02" in page(program(), program()).partition("\n")[0]


def test_text_is_never_an_instruction_to_roff() -> None:
    command = Command("x", ".so /etc/passwd", (Argument(("--a",), "V", "'\\n~^"),), ())
    assert "\n.so" not in page(command, command)
    assert "\\&'\\en\\(ti\\(ha" in page(command, command)


def test_an_unknown_command_has_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["man", "lss"]) == 2
    assert "ls" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_async", "man", "ls"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(".TH CKPT")
