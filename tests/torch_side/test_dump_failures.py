"""A file appears whole under its name, or what was there stays: errors, full disks, kills, races; little memory."""

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async.errors import DestinationError, FormatError
from ckpt_async.torch import dump, load
from tests.faults.small_disk import on_small_disk
from tests.torch_side.equal_states import same

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("suffix", [".pt", ".pt.gz", ".tar", ".safetensors"])
def test_what_is_there_is_left_alone_unless_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    first, second = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    dump(first, path)
    linked = tmp_path / "linked"  # what the uploader has of it
    linked.hardlink_to(path)
    before = linked.read_bytes()
    with pytest.raises(DestinationError, match=r"already exists: .*pass overwrite=True"):
        dump(second, path)
    assert same(load(path), first)
    dump(second, path, overwrite=True)
    assert same(load(path), second)
    assert linked.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "linked"}
    with pytest.raises(DestinationError, match="is a folder"):
        dump(first, tmp_path, overwrite=True, format=".pt")
    (tmp_path / "file").touch()
    with pytest.raises(DestinationError, match=r"'.*file/below\.pt' cannot be written: File exists"):
        dump(first, tmp_path / "file/below.pt")


@pytest.mark.parametrize("suffix", ["", ".pt.gz", ".tar", ".tar.gz"])
def test_a_state_that_cannot_be_saved_leaves_nothing_and_is_named(tmp_path: Path, suffix: str) -> None:
    state = {"model": {"w": torch.ones(1 << 18)}, "hooks": [1, {"on_save": lambda: 1}]}
    with pytest.raises(FormatError, match=r"'hooks/1/on_save' cannot be saved: .*lambda"):
        dump(state, tmp_path / f"a{suffix}")
    assert not list(tmp_path.iterdir())


class Failing(io.BytesIO):
    """Takes 2 MB."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 2_000_000:
            raise OSError(errno.EIO, "the cable is out")
        return super().write(data)


@pytest.mark.parametrize(
    "format_", [".pt", ".pt.zst", ".pt.gz", ".tar", ".tar.bz2", ".safetensors", ".pt.lzo"]
)
def test_an_error_of_a_file_object_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    """torch would say that it finds itself at a position that it did not expect. A program is not left waiting."""
    program = tmp_path / "lzop"
    program.write_text(
        f"#!{sys.executable}\nimport shutil, sys\nshutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="the cable is out"):
        dump({"w": torch.randn(2 << 20)}, Failing(), format=format_)


def test_a_state_that_grows_between_two_looks_at_it_is_reported(tmp_path: Path) -> None:
    """A compressed archive says the size of a file before its content."""

    class Grows:
        size = 1

        def __reduce__(self) -> Any:
            Grows.size *= 1000
            return list, ("x" * Grows.size,)

    with pytest.raises(FormatError, match="the state changed while it was written"):
        dump({"a": Grows()}, tmp_path / "a.tar.gz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_nameless", [True, False])
def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path: Path, is_nameless: bool) -> None:
    suffixes = ["", ".pt.zst", ".pt.gz", ".pt.lz4", ".tar", ".tar.bz2", ".safetensors"]
    done = on_small_disk(
        tmp_path,
        f"""
        import torch
        from ckpt_async.torch import dump, load
        if not {is_nameless}:
            os.O_TMPFILE = os.O_DIRECTORY  # so that the answer is an old kernel's: it is a folder
        large = {{"w": torch.randn(1 << 20)}}
        for suffix in {suffixes}:
            path = disk / f"a{{suffix}}"
            dump({{"w": torch.ones(3)}}, path)
            for name in (path, disk / f"b{{suffix}}"):
                try:
                    dump(large, name, overwrite=True)
                except NoSpaceError as error:
                    assert str(name) in str(error)
                    print("full")
            print([each.name for each in disk.iterdir()], load(path)["w"].tolist())
            path.unlink()
        """,
        size="2m",
    )
    expected = [f"full\nfull\n['a{suffix}'] [1.0, 1.0, 1.0]\n" for suffix in suffixes]
    assert done.stdout == "".join(expected), done.stderr


@pytest.mark.parametrize(("suffix", "is_nameless"), [(".pt.gz", True), (".tar", False)])
def test_killed_in_the_middle_it_leaves_the_old_file_or_none(
    tmp_path: Path, suffix: str, is_nameless: bool
) -> None:
    old, new = tmp_path / f"old{suffix}", tmp_path / f"new{suffix}"
    dump({"w": torch.ones(3)}, old)
    script = """
        import os, sys, torch
        from ckpt_async.torch import dump
        if sys.argv[2] == "False":
            os.O_TMPFILE = os.O_DIRECTORY
        from ckpt_async.torch import dumping
        write = dumping._Sink.write
        def stalling(self, data):
            if self._stream is not None and self.size_bytes > 3_000_000:
                print("here", flush=True)
                sys.stdin.read()
            return write(self, data)
        dumping._Sink.write = stalling
        dump({"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}, sys.argv[1], overwrite=True)
    """
    for path in (old, new):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(path), str(is_nameless)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            process.send_signal(signal.SIGKILL)
    assert load(old)["w"].tolist() == [1.0, 1.0, 1.0]
    left = {each.name for each in tmp_path.iterdir()} - {old.name}
    assert new.name not in left
    assert is_nameless == (not left)  # where the kernel cannot do it, a hidden file stays
    assert all(name.startswith(".ckpt_async-") for name in left)
    dump({"w": torch.zeros(3)}, new)  # and is in nobody's way
    assert load(new)["w"].tolist() == [0.0, 0.0, 0.0]


def test_two_that_write_one_name_do_not_mix(tmp_path: Path) -> None:
    """One has come first; the other hears of it, though nothing was there when it began."""

    def race(state: dict[str, Any]) -> None:
        with contextlib.suppress(DestinationError):
            dump([1], tmp_path / "a.pt")

    class Races:
        def __reduce__(self) -> Any:
            race({})
            return list, ()

    with pytest.raises(DestinationError, match="already exists"):
        dump({"a": Races()}, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt") == [1]
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("suffix", [".pt.zst", ".tar.gz", ".safetensors"])
def test_no_second_copy_of_a_large_state_is_made(tmp_path: Path, suffix: str) -> None:
    script = """
        import re, sys, threading, torch
        from ckpt_async.torch import dump
        state = {str(n): torch.ones(16 << 20) for n in range(4)}  # 256 MiB
        dump({"a": torch.ones(1)}, sys.argv[1] + ".warm" + sys.argv[2])
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
        before = peak()
        dump(state, sys.argv[1] + sys.argv[2])
        print(peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a"), suffix],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path / "none")},  # no copy on disk either
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128  # MiB
