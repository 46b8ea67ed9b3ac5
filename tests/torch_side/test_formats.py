"""Files of every format are loaded, hostile ones are refused, and remote ones are unpacked only once they are local."""

import bz2
import collections
import dataclasses
import enum
import gzip
import io
import json
import logging
import lzma
import os
import pickle
import random
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import Uploader, restore
from ckpt_async.core import naming
from ckpt_async.errors import (
    CheckpointRefusedError,
    FormatError,
    InvalidNameError,
    SettingsError,
    StateMismatchError,
    UnsafePickleError,
)
from ckpt_async.torch import load, load_into, load_remote, model_state
from ckpt_async.torch.archives import decompress, extract
from ckpt_async.torch.codecs import CODECS
from ckpt_async.torch.formats import fill, flashpoint_tensor
from ckpt_async.torch.states import drop

STATE = {
    "state": {"model": {"layer1.weight": torch.arange(6.0).reshape(2, 3), "layer2.bias": torch.ones(2)}},
    "rng": [{"python": 1}, {"python": 2}],
    "step": 3,
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for unpacked copies, which must be empty again after each load."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def saved(path: Path, state: Any = STATE) -> Path:
    torch.save(state, path)
    return path


def safetensors(path: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write a safetensors file by hand, strictly following the format, with `changes` to its entries."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        new = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        offsets = [len(data), len(data) + len(new)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += new
    for name, change in changes.items():
        header[name] |= change
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def archive(path: Path, mode: str, *members: tuple[str, bytes | None]) -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


# --- what is loaded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_files_load(tmp_path: Path, suffix: str, mmap: bool) -> None:
    assert same(load(saved(tmp_path / f"a{suffix}"), mmap=mmap), STATE)


def test_files_of_torch_before_1_6_load_with_mmap_requested(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert same(load(tmp_path / "a.pt", mmap=True), STATE)


@pytest.mark.parametrize(
    ("suffix", "opener"), [(".bz2", bz2.open), (".gz", gzip.open), (".lzma", lzma.open), (".xz", lzma.open)]
)
def test_compressed_files_load(
    tmp_path: Path, temporary: Path, suffix: str, opener: Callable[..., Any]
) -> None:
    plain = saved(tmp_path / "a.pt").read_bytes()
    format_option = {"format": lzma.FORMAT_ALONE} if suffix == ".lzma" else {}
    with opener(tmp_path / f"b.pt{suffix}", "wb", **format_option) as file:
        file.write(plain)
    assert same(load(tmp_path / f"b.pt{suffix}"), STATE)
    assert not list(temporary.iterdir())


def test_files_without_a_known_suffix_load_by_their_content(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composer's own example of a file name has no suffix: `ep1-ba42-rank0`."""
    torch.save(STATE, tmp_path / "old", _use_new_zipfile_serialization=False)
    plain = saved(tmp_path / "ep1-ba42-rank0").read_bytes()
    archive(tmp_path / "an-archive", "w", ("x.pt", plain))
    for name, pack in {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}.items():
        (tmp_path / f"packed-{name}").write_bytes(pack(plain))
    for path in sorted(each for each in tmp_path.iterdir() if each.is_file()):
        assert same(load(path), STATE), path
    safetensors(tmp_path / "model-of.7b-run", {"w": torch.ones(3)})
    assert same(load(tmp_path / "model-of.7b-run"), {"w": torch.ones(3)})
    (tmp_path / "hostile").write_bytes(saved(tmp_path / "b.pt", {"a": Runs()}).read_bytes())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickleError, match="mkdir"):
        load(tmp_path / "hostile")
    assert not list(temporary.iterdir())


def test_what_is_recognised_by_its_content_is_unpacked_once(tmp_path: Path, temporary: Path) -> None:
    """A gzip file can contain itself, so without suffixes that say how often to unpack, unpacking might never end."""
    (tmp_path / "twice").write_bytes(gzip.compress(gzip.compress(saved(tmp_path / "a.pt").read_bytes())))
    with pytest.raises(FormatError, match="unknown format"):
        load(tmp_path / "twice")
    assert not list(temporary.iterdir())
    shutil.copy(tmp_path / "twice", tmp_path / "a.pt.gz.gz")
    assert same(load(tmp_path / "a.pt.gz.gz"), STATE)


@pytest.mark.parametrize("suffix", [".zst", ".lz4"])
def test_libraries_read_what_is_compressed_and_report_damage(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # so no programs are found
    library = CODECS[suffix].module()
    whole = library.compress(saved(tmp_path / "a.pt").read_bytes())
    path = tmp_path / f"b.pt{suffix}"
    path.write_bytes(whole)
    assert same(load(path), STATE)
    for bad in (whole[:-30], whole[:50] + b"nonsense" + whole[58:], b"", b"nonsense" * 40):
        path.write_bytes(bad)
        with pytest.raises(FormatError, match=r"b\.pt.* is cut short or damaged"):
            load(path)
    assert not list(temporary.iterdir())


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide programs `zstd`, `lz4` and `lzop` that speak gzip and hide the libraries, so that the
    real ones need not be installed.
    """
    for library in ("compression.zstd", "backports.zstd", "lz4.frame"):
        monkeypatch.setitem(sys.modules, library, None)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("zstd", "lz4", "lzop"):
        script = folder / name
        script.write_text(
            f"#!{sys.executable}\nimport gzip, shutil, sys\nassert sys.argv[1:] == ['-dc']\n"
            "shutil.copyfileobj(gzip.open(sys.stdin.buffer), sys.stdout.buffer)\n"
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.parametrize("suffix", [".zst", ".lz4", ".lzo"])
def test_files_compressed_by_external_tools_load(
    tmp_path: Path, tools: Path, temporary: Path, suffix: str
) -> None:
    path = tmp_path / f"b.pt{suffix}"
    path.write_bytes(gzip.compress(saved(tmp_path / "a.pt").read_bytes()))
    assert same(load(path), STATE)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"(?s)failed: .*EOFError"):
        load(path)
    assert not list(temporary.iterdir())


def test_a_tool_that_is_stopped_early_does_not_linger(tmp_path: Path, tools: Path, temporary: Path) -> None:
    (tmp_path / "a.pt.zst").write_bytes(gzip.compress(bytes(10 << 20)))
    with pytest.raises(FormatError, match="more than is allowed"):
        load(tmp_path / "a.pt.zst", max_size_bytes=1 << 20)
    assert not list(temporary.iterdir())


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.pt.lzo").write_bytes(b"")
    with pytest.raises(FormatError, match=r"install lzop"):
        load(tmp_path / "a.pt.lzo")


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [("tar", "w"), ("tar.gz", "w:gz"), ("tgz", "w:gz"), ("tar.bz2", "w:bz2"), ("tar.lzma", "w:xz")],
)
def test_archives_load(tmp_path: Path, temporary: Path, suffix: str, mode: str) -> None:
    """Composer's archives contain the folder itself as their first member."""
    states = saved(tmp_path / "a.pt").read_bytes()
    members = [("", None), ("composer_states.pt", states), ("deepspeed", None), ("deepspeed/zero.pt", b"x")]
    path = archive(tmp_path / f"b.{suffix}", mode, *members)
    assert same(load(path), STATE)
    assert not list(temporary.iterdir())
    out = tmp_path / "out"
    out.mkdir()
    assert extract(path, out) == [out / "composer_states.pt", out / "deepspeed/zero.pt"]


def test_an_archive_compressed_by_an_external_tool_loads(tmp_path: Path, tools: Path) -> None:
    plain = archive(tmp_path / "a.tar", "w", ("x.pt", saved(tmp_path / "a.pt").read_bytes()))
    (tmp_path / "b.tar.zst").write_bytes(gzip.compress(plain.read_bytes()))
    assert same(load(tmp_path / "b.tar.zst"), STATE)


def test_an_archive_with_several_states_is_rejected(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", "w", ("x.pt", b""), ("y/z.pt", b""))
    with pytest.raises(FormatError, match=r"2 files that could be loaded: x\.pt, y/z\.pt"):
        load(path)


def test_a_safetensors_file_beside_it_is_preferred(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        "c": torch.tensor(True),
        "d": torch.zeros(0, 3),
        "e": torch.ones(4).to(torch.float8_e4m3fn),
    }
    saved(tmp_path / "m.pt")
    safetensors(tmp_path / "m.safetensors", tensors)
    found = load(tmp_path / "m.pt")
    assert {name: (each.dtype, each.tolist()) for name, each in found.items()} == {
        name: (each.dtype, each.tolist()) for name, each in tensors.items()
    }
    found["a"].add_(1)  # the tensor is our own memory, not a view of the file
    assert load(tmp_path / "m.safetensors", map_location="meta")["a"].is_meta
    with pytest.raises(FormatError, match="single device"):
        load(tmp_path / "m.safetensors", map_location={"cuda:0": "cpu"})


def test_map_location_is_honoured(tmp_path: Path) -> None:
    assert load(saved(tmp_path / "a.pt"), map_location="meta")["state"]["model"]["layer2.bias"].is_meta


def test_flashpoint_tensors_are_read_without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str) -> None:
        raise AssertionError(f"{name}, from a file, was looked up in torch, which may import a module for it")

    monkeypatch.setattr(torch, "__getattr__", look_up)
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    header = json.dumps({"dtype": "torch.int16", "shape": [2, 3]}).encode()
    data = struct.pack("<I", len(header)) + header + bytes(tensor.view(torch.uint8).flatten().tolist())
    assert same(flashpoint_tensor(data), tensor)
    pickled = pickle.dumps({"dtype": torch.int16, "shape": (2, 3)})
    odd, lazy = (json.dumps({"dtype": name, "shape": [2, 3]}).encode() for name in ("load", "a_lazy_module"))
    for bad in (
        data[:-1],
        data + b"x",
        b"",
        b"\xff" * 8,
        struct.pack("<I", len(pickled)) + pickled + bytes(12),
        struct.pack("<I", len(odd)) + odd + bytes(12),
        struct.pack("<I", len(lazy)) + lazy + bytes(12),
        struct.pack("<I", 2) + b"[]",
    ):
        with pytest.raises(FormatError, match="not an optimised tensor"):
            flashpoint_tensor(bad)


# --- what is refused ---------------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


@pytest.mark.fault("F29")
def test_a_file_that_would_run_code_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "a.pt", {"a": Runs()})
    (tmp_path / "a.pt.gz").write_bytes(gzip.compress(path.read_bytes()))
    archive(tmp_path / "a.tar", "w", ("x.pt", path.read_bytes()))
    for name in ("a.pt", "a.pt.gz", "a.tar"):
        with pytest.raises(UnsafePickleError, match="mkdir"):
            load(tmp_path / name)
    assert not (tmp_path / "pwned").exists()
    load(path, weights_only=False)
    assert (tmp_path / "pwned").exists()


def test_torchs_legacy_tar_format_is_rejected(tmp_path: Path) -> None:
    """Before 2.6, torch unpacks and reads the content of such a file whether or not `weights_only` is set."""
    tar = archive(tmp_path / "a.tar", "w", ("storages", pickle.dumps(Runs())), ("pickle", b""))
    tar.rename(tmp_path / "a.pt")
    with pytest.raises(UnsafePickleError, match="legacy tar"):
        load(tmp_path / "a.pt")


def test_damage_anywhere_in_a_torch_file_is_reported(tmp_path: Path) -> None:
    """On damage torch may raise almost any error; the user must learn which file is damaged."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(4, 4)}, "n": [1, (2,)]}, path, _use_new_zipfile_serialization=False)
    whole, chance = path.read_bytes(), random.Random(5)
    causes = set()
    for _ in range(400):
        data = bytearray(whole)
        data[chance.randrange(len(data))] = chance.choice(b"cq(\x8c}X\x94RQ.stuhaeb\x85\x86\x81\x93iob02PN")
        path.write_bytes(data)
        try:
            load(path)
        except (FormatError, UnsafePickleError) as error:
            causes.add(type(error.__cause__) if str(path) in str(error) else "no path")
    assert causes & {IndexError, KeyError, TypeError, AttributeError, AssertionError, struct.error}
    assert "no path" not in causes


@pytest.mark.parametrize(
    "name", ["a.pt", "a.pt.gz", "a.pt.bz2", "a.pt.xz", "a.tar", "a.tar.gz", "a.safetensors"]
)
def test_truncated_or_foreign_files_are_rejected(tmp_path: Path, temporary: Path, name: str) -> None:
    plain = saved(tmp_path / "b.pt").read_bytes()
    path = tmp_path / name
    if name.startswith("a.tar"):
        archive(path, "w:gz" if name.endswith("gz") else "w", ("x.pt", plain))
    elif name == "a.safetensors":
        safetensors(path, {"a": torch.ones(30)})
    else:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(plain))
    whole = path.read_bytes()
    load(path)
    for data in (b"", b"nonsense" * 400, whole[: len(whole) * 1 // 10], whole[:40]):
        path.write_bytes(data)
        with pytest.raises((FormatError, UnsafePickleError), match=f"(?s){path.stem}"):
            load(path)
    assert not list(temporary.iterdir())
    with pytest.raises(FileNotFoundError):
        load(tmp_path / f"none-{name}")


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 8]},  # does not match the shape's size
        {"data_offsets": [4, 44]},  # beyond the end of the file
        {"data_offsets": [-40, 0]},
        {"data_offsets": [0, 40.0]},
        {"shape": [10, True]},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]},
        {"shape": [0, 1 << 70], "data_offsets": [0, 0]},
        {"shape": [10] + [1] * 64},
        {"shape": 10},
        {"dtype": "X"},
        {"dtype": ["F32"]},
    ],
)
def test_safetensors_with_false_headers_are_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    path = safetensors(tmp_path / "a.safetensors", {"a": torch.ones(10)}, a=change)
    with pytest.raises(FormatError, match=r"a\.safetensors"):
        load(path)


def test_safetensors_with_overlaps_or_deep_nesting_are_rejected(tmp_path: Path) -> None:
    ones = {"a": torch.ones(10), "b": torch.ones(10)}
    with pytest.raises(FormatError, match="overlap"):
        load(safetensors(tmp_path / "a.safetensors", ones, b={"data_offsets": [20, 60]}))
    for text in (b"[" * 200_000, b'{"a": 3}', b"[]", b"\xff\xff"):
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(FormatError, match="not a safetensors file"):
            load(tmp_path / "a.safetensors")


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


@pytest.mark.parametrize(
    "bad",
    [
        member("../out.pt"),
        member("a/../../out.pt"),
        member("/out.pt"),
        member("..\\out.pt"),
        member("link", type=tarfile.SYMTYPE, linkname="/"),
        member("hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("disk", type=tarfile.BLKTYPE),
        member("pipe", type=tarfile.FIFOTYPE),
        member("good.pt"),  # a second member of that name
        member("good.pt/below"),
        member("f" * 300),
    ],
    ids=lambda bad: bad.name,
)
def test_archives_that_escape_their_folder_are_rejected(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(member("good.pt"))
        tar.addfile(bad)
    out = tmp_path / "deep/out"
    out.mkdir(parents=True)
    with pytest.raises(FormatError, match=r"a\.tar"):
        extract(tmp_path / "a.tar", out)
    assert {each.name for each in tmp_path.rglob("*")} == {"a.tar", "deep", "out", "good.pt"}


def test_archives_are_limited_in_unpacked_size(tmp_path: Path, temporary: Path) -> None:
    bomb = archive(tmp_path / "a.tgz", "w:gz", ("x.pt", bytes(3 << 20)), ("y.pt", bytes(3 << 20)))
    assert bomb.stat().st_size < 20_000
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FormatError, match="more than is allowed"):
        extract(bomb, out, max_size_bytes=4 << 20)
    assert sum(each.stat().st_size for each in out.iterdir()) <= 4 << 20
    with pytest.raises(FormatError, match="more than is allowed"):
        load(bomb, max_size_bytes=4 << 20)
    assert not list(temporary.iterdir())


def test_archives_with_huge_headers_take_little_memory(tmp_path: Path) -> None:
    """`tarfile` reads a PAX header into memory whole; this one claims to be 64 GiB."""
    header = member("x", type=tarfile.XHDTYPE, size=64 << 30)
    (tmp_path / "a.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(FormatError, match="headers of more than"):
        load(tmp_path / "a.tar")


def test_a_sparse_files_map_takes_little_memory(tmp_path: Path) -> None:
    """A map of 20 million numbers compresses to 39 KB, and `tarfile` would turn it into 1 GB of memory."""
    sparse = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "x.pt",
        "GNU.sparse.realsize": "9",
    }
    numbers = b"1000000\n" + b"1\n" * 2_000_000
    header = member("x.pt", size=len(numbers), pax_headers=sparse).tobuf(tarfile.PAX_FORMAT)
    (tmp_path / "a.tgz").write_bytes(gzip.compress(header + numbers + bytes(2048)))
    with pytest.raises(FormatError, match="headers of more than"):
        load(tmp_path / "a.tgz")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_archives_of_headers_only_are_refused(tmp_path: Path, kind: bytes) -> None:
    """`tarfile` recurses once for each header."""
    body = b"9 path=a\n" if kind != tarfile.GNUTYPE_LONGNAME else b"x.pt\0"
    header = member("x", type=kind, size=len(body)).tobuf(tarfile.USTAR_FORMAT) + body.ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(header * 900 + member("x.pt").tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    with pytest.raises(FormatError, match="cannot be unpacked"):
        load(tmp_path / "a.tar")


def test_archives_with_deep_folders_are_refused_and_leave_nothing(tmp_path: Path, temporary: Path) -> None:
    """Creating and removing folders recurses once for each level."""
    archive(tmp_path / "a.tar", "w", ("a/" * 700 + "x.pt", b""), ("a/" * 1400 + "x.pt", b""))
    with pytest.raises(FormatError, match="folders deep"):
        load(tmp_path / "a.tar")
    assert not list(temporary.iterdir())


def test_compressed_files_are_limited_in_unpacked_size(tmp_path: Path) -> None:
    (tmp_path / "a.pt.gz").write_bytes(gzip.compress(bytes(3 << 20)))
    decompress(tmp_path / "a.pt.gz", tmp_path / "whole", max_size_bytes=3 << 20)
    assert (tmp_path / "whole").stat().st_size == 3 << 20
    with pytest.raises(FormatError, match="more than is allowed"):
        decompress(tmp_path / "a.pt.gz", tmp_path / "cut", max_size_bytes=(3 << 20) - 1)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(FileExistsError):
        decompress(tmp_path / "a.pt.gz", tmp_path / "whole")


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"")
    with pytest.raises(FormatError, match=r"unknown format '\.npz'.*\.safetensors"):
        load(tmp_path / "a.npz")


# --- validation ------------------------------------------------------------------------------------------------

asked: list[str] = []


def says_no(path: str, specs: Any) -> bool:
    """A validation function that CHECKPOINT_VALIDATION_FUNCTION may name."""
    assert specs is None
    assert Path(path).stat().st_size > 0  # it may look into the file that is about to be loaded
    asked.append(Path(path).name)
    return False


@pytest.mark.parametrize("is_named", [True, False])
def test_the_validation_function_runs_before_anything_is_decoded(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Composer calls the function before each torch.load, with the unpacked file; so does `load`."""
    monkeypatch.chdir(tmp_path)
    if is_named:
        monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", f"{__name__}.says_no")
    plain = saved(tmp_path / "a.pt", {"a": Runs()}).read_bytes()
    (tmp_path / "b.pt.gz").write_bytes(gzip.compress(plain))
    archive(tmp_path / "c.tar", "w", ("x.pt", plain))
    safetensors(tmp_path / "d.safetensors", {"a": torch.ones(30)})
    asked.clear()
    for name in ("a.pt", "b.pt.gz", "c.tar", "d.safetensors"):
        with pytest.raises(CheckpointRefusedError, match=r"was refused by .*says_no"):
            load(tmp_path / name, weights_only=False, validate=None if is_named else says_no)
    assert asked == ["a.pt", "b.pt", "x.pt", "d.safetensors"]
    assert not (tmp_path / "pwned").exists()
    assert not list(temporary.iterdir())
    load(tmp_path / "a.pt", weights_only=False, validate=lambda path, specs: True)
    assert (tmp_path / "pwned").exists()


# --- parts, and into a model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("globs", "left"),
    [
        (
            ["state/model/layer1.weight", "step"],
            {"state": {"model": {"layer2.bias"}}, "rng": [{"python"}, {"python"}]},
        ),
        (["state/model/*"], {"state": {"model": set()}, "rng": [{"python"}, {"python"}], "step": None}),
        (["state", "rng/0", "rng/1/*"], {"rng": [set()], "step": None}),
        (["rng/*"], {"state": {"model": {"layer1.weight", "layer2.bias"}}, "rng": [], "step": None}),
        (["*"], {}),
    ],
)
def test_ignored_keys_are_left_out(tmp_path: Path, globs: list[str], left: Any) -> None:
    def keys(value: Any) -> Any:
        if isinstance(value, list):
            return [keys(each) for each in value]
        if not isinstance(value, dict):
            return None
        inner = {key: keys(each) for key, each in value.items()}
        return set(inner) if (not any(inner.values()) and None in inner.values()) or not inner else inner

    found = load(saved(tmp_path / "a.pt"), ignore_keys=globs)
    expected = left if any(left.values()) or not left else set(left)
    assert keys(found) == expected or (not found and not left)


def test_ignored_keys_may_be_a_function_and_unknown_keys_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "a.pt")
    assert load(path, ignore_keys=lambda state: state.pop("rng")).keys() == {"state", "step"}
    with caplog.at_level(logging.WARNING):
        load(path, ignore_keys=["step", "stat/model"])
    assert [each.getMessage() for each in caplog.records] == ["ignore_keys_unmatched glob=stat/model"]
    with pytest.raises(InvalidNameError, match=r"give ignore_keys=\['rng'\]"):
        load(tmp_path / "not there.pt", ignore_keys="rng")
    itself: dict[Any, Any] = {3: 1}
    itself["me"] = itself
    drop(itself, ["me/*", "3"])
    assert itself.keys() == {"me"}


@pytest.mark.parametrize(
    "state",
    [
        {"state": {"model": {"w": torch.ones(1)}, "optimizers": {}}},
        {"model": {"w": torch.ones(1)}, "optimizer": {}, "step": 3},
        {"state_dict": collections.OrderedDict(w=torch.ones(1)), "epoch": 1},
        {"model_state_dict": {"w": torch.ones(1)}},
        {"module": {"w": torch.ones(1)}},
        {"w": torch.ones(1)},
    ],
)
def test_the_model_state_is_found(state: Any) -> None:
    assert dict(model_state(state)) == {"w": torch.ones(1)}


def test_a_state_without_a_model_is_an_error() -> None:
    with pytest.raises(FormatError, match="no model in it: it has optim, step"):
        model_state({"optim": {}, "step": 3})


def test_keys_that_do_not_fit_the_model_are_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    before = {key: each.clone() for key, each in model.state_dict().items()}
    state = {
        "0.weight": torch.full((3, 2), 7.0),
        "0.bias": torch.ones(4),
        "1.weight": torch.ones(1, 3),
        "x": torch.ones(1),
    }
    with pytest.raises(
        StateMismatchError, match=r"1 missing: 1\.bias; 1 unexpected: x; 1 with a different shape: 0\.bias"
    ):
        load_into(model, {"model": state})
    assert same(dict(model.state_dict()), before)
    report = load_into(model, {"model": state}, strict=False)
    assert (report.missing, report.unexpected) == (("1.bias",), ("x",))
    assert report.reshaped == ("0.bias (4,) for (3,)",)
    assert same(dict(model.state_dict()), before | {key: state[key] for key in ("0.weight", "1.weight")})
    assert not load_into(model, before)
    assert same(dict(model.state_dict()), before)


# --- names and remote --------------------------------------------------------------------------------------------


def test_name_templates_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert fill("{run_name}/{rank}-{local_rank}-{node_rank}-{rank:03d}", run_name="r") == "r/5-1-1-005"
    monkeypatch.setenv("GROUP_RANK", "3")
    assert fill("{node_rank}") == "3"
    with pytest.raises(InvalidNameError, match=r"\{rank\}, \{local_rank\}.*'epoch'"):
        fill("{epoch}")
    monkeypatch.delenv("RANK")  # needed only if the pattern names it
    assert fill("{run_name}/rank-0", run_name="r") == "r/rank-0"
    with pytest.raises(SettingsError, match="but not RANK"):
        fill("{rank:03d}")
    monkeypatch.setenv("RANK", "5")
    saved(tmp_path / "rank5.pt")
    assert same(load(tmp_path / "rank{rank}.pt"), STATE)


def test_local_file_templates_accept_only_the_rank() -> None:
    assert naming.fill("latest-{rank}", rank=3) == "latest-3"
    with pytest.raises(InvalidNameError, match=r"only \{rank\} can be used"):
        naming.fill("{run_name}", rank=3)


def test_remote_files_are_unpacked_after_the_fetch(
    s3_url: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composer unpacks while it downloads. Here, a file that is damaged in the store is never unpacked at all."""
    folder = tmp_path / "ckpt"
    step = folder / "step-1"
    step.mkdir(parents=True)
    plain = saved(tmp_path / "a.pt").read_bytes()
    (step / "rank0.pt.gz").write_bytes(gzip.compress(plain))
    (step / "rank0.tar").write_bytes(archive(tmp_path / "a.tar", "w", ("x.pt", plain)).read_bytes())
    (step / "m.pt").write_bytes(plain)
    safetensors(step / "m.safetensors", {"w": torch.ones(1)})
    with Uploader(folder, s3_url) as uploader:
        uploader.enqueue(step, step=1)
        uploader.seal(step=1)
        uploader.wait(step=1, timeout_s=60)
    shutil.rmtree(folder)
    checkpoint = restore.find(s3_url)
    assert checkpoint is not None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert same(load_remote(checkpoint, "rank{rank}.pt.gz"), STATE)
    assert same(load_remote(checkpoint, "rank0.tar", ignore_keys=["rng"]).keys(), {"state", "step"})
    assert load_remote(checkpoint, "m.pt").keys() == {"w"}
    assert not list(temporary.iterdir())
    load_remote(checkpoint, "m.safetensors", destination=tmp_path / "there")
    assert (tmp_path / "there/m.safetensors").exists()
    with pytest.raises(InvalidNameError, match="none"):
        load_remote(checkpoint, "none.pt")
    with pytest.raises(CheckpointRefusedError):
        load_remote(checkpoint, "rank0.tar", validate=says_no)


class Foreign:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass(frozen=True)
class Reduced:
    value: Any

    def __reduce__(self) -> Any:
        return Reduced, (self.value,), {"more": [self.value]}


class ForeignEnum(enum.Enum):
    A = 1


class ForeignDict(dict[str, Any]):
    pass


FOREIGN = [
    Foreign(torch.ones(2)),
    Reduced({"a": Foreign(1)}),
    ForeignEnum.A,
    ForeignDict(a=ForeignEnum.A),
    {ForeignEnum.A: 1},
    (1, [ForeignEnum.A]),
    ForeignEnum,
    torch.nn.Linear(2, 2),
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda each: type(each).__name__)
def test_only_what_is_kept_must_be_plain(tmp_path: Path, foreign: Any) -> None:
    path = saved(tmp_path / "a.pt", {"state": {"w": torch.ones(3), "algorithm": foreign}, "other": [1, 2]})
    found = load(path, ignore_keys=["state/algorithm"])
    assert found.keys() == {"state", "other"}
    assert found["state"].keys() == {"w"}
    assert load(path, ignore_keys=lambda state: state["state"].pop("algorithm")).keys() == {"state", "other"}
    for others in (["other"], ["state/w", "nothing"], []):
        with pytest.raises(UnsafePickleError, match="which is not plain data"):
            load(path, ignore_keys=others)


def test_what_is_kept_of_a_foreign_part_is_refused(tmp_path: Path) -> None:
    shared = Foreign(1)
    path = saved(tmp_path / "a.pt", {"a": shared, "b": collections.OrderedDict(c=[shared]), "w": 1})
    with pytest.raises(UnsafePickleError, match=r"Foreign.*allow="):
        load(path, ignore_keys=["a"])
    assert load(path, ignore_keys=["a", "b/c"]) == {"b": {}, "w": 1}


@pytest.mark.parametrize("of_model", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("of_state", ["", "module.", "_orig_mod.module."])
def test_keys_may_differ_by_what_wrappers_add(of_model: str, of_state: str) -> None:
    inner = torch.nn.Linear(2, 1)
    model: torch.nn.Module = inner
    for name in filter(None, reversed(of_model.split("."))):
        outer = torch.nn.Module()
        outer.add_module(name, model)
        model = outer
    state = {"model": {f"{of_state}weight": torch.ones(1, 2), f"{of_state}bias": torch.ones(1)}}
    if of_model != of_state:
        with pytest.raises(StateMismatchError, match="ignore_wrappers=True"):
            load_into(model, state)
    assert not load_into(model, state, ignore_wrappers=True)
    assert torch.equal(inner.weight, torch.ones(1, 2))


def test_other_differences_get_no_hint_at_wrappers() -> None:
    with pytest.raises(StateMismatchError) as caught:
        load_into(torch.nn.Linear(2, 1), {"other": torch.ones(1)}, ignore_wrappers=True)
    assert "ignore_wrappers" not in str(caught.value)


def test_a_bytes_buffer_is_plain_data(tmp_path: Path) -> None:
    """torch's own tests have one in their state."""
    buffer = io.BytesIO(b"abc")
    buffer.seek(1)
    found = load(saved(tmp_path / "a.pt", {"buffer": buffer, "empty": [io.BytesIO()]}))
    assert found["buffer"].read() == b"bc"
    assert found["buffer"].getvalue() == b"abc"
    assert found["empty"][0].getvalue() == b""
