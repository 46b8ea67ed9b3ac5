"""Real full states are loaded by default, and nothing in a file is ever executed."""

import collections
import io
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ckpt_async.errors import FormatError, SettingsError, UnsafePickleError
from ckpt_async.torch import load
from tests.torch_side import states
from tests.torch_side.states import (
    Frozen,
    Kind,
    Parts,
    Point,
    Progress,
    Stage,
    dumped,
    is_same,
    packed,
    unpacked,
)

OURS = [Progress, Stage, Frozen, Point, Kind, Parts]
STATES = {"composer": states.composer_state, "olmo": states.olmo_state, "everything": states.everything}


def written(folder: Path, data: bytes, name: str = "a.pt") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


# --- what is loaded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", STATES)
def test_full_states_load_by_default(tmp_path: Path, name: str, protocol: int, mmap: bool) -> None:
    state = STATES[name]()
    found = load(written(tmp_path, dumped(state, protocol)), mmap=mmap)
    assert is_same(found, state)
    if name == "composer":
        # load_state_dict needs this to load states of older versions
        assert found["state"]["model"]._metadata == state["state"]["model"]._metadata


@pytest.mark.parametrize("old", [b"numpy.core.", b"numpy._core."])
def test_arrays_of_old_and_new_numpy_load(tmp_path: Path, old: bytes) -> None:
    """numpy has moved the module. GLOBAL names have no length prefix, so the test can replace one with another."""
    state = {"array": np.arange(3), "scalar": np.float32(2.5)}
    content, records = unpacked(dumped(state))
    spelled = content.replace(b"numpy._core.", old).replace(b"numpy.core.", old)
    assert old in spelled
    assert is_same(load(written(tmp_path, packed(spelled, records))), state)


def test_paths_of_other_systems_load_as_pure_ones(tmp_path: Path) -> None:
    for spelled, expected in {
        b"cpathlib\nWindowsPath\n": pathlib.PureWindowsPath("x"),
        b"cpathlib._local\nPosixPath\n": pathlib.Path("x"),
    }.items():
        found = load(written(tmp_path, packed(b"\x80\x02" + spelled + b"X\x01\0\0\0x\x85R.")))
        assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("protocol", [2, 5])
def test_the_version_of_torch_loads_as_text(tmp_path: Path, protocol: int) -> None:
    """Composer saves the version as torch's own string type."""
    found = load(written(tmp_path, dumped({"version": torch.__version__}, protocol)))["version"]
    assert (type(found), found) == (str, str(torch.__version__))


def test_tensors_that_share_memory_still_do(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    found = load(written(tmp_path, dumped({"a": whole, "b": whole[1:], "c": whole})))
    found["a"][1] = 7
    assert found["b"][0] == 7
    assert found["c"] is found["a"]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("where", ["meta", {"cpu": "meta"}, torch.device("meta"), lambda s, _: s])
def test_tensors_go_where_map_location_says(tmp_path: Path, where: Any, mmap: bool) -> None:
    path = written(tmp_path, dumped({"a": torch.arange(4.0)}))
    mine, theirs = load(path, map_location=where, mmap=mmap), torch.load(path, map_location=where)
    assert mine["a"].device == theirs["a"].device
    assert mine["a"].is_meta or torch.equal(mine["a"], theirs["a"])


def test_files_of_the_other_byte_order_load(tmp_path: Path) -> None:
    other = {"little": "big", "big": "little"}[sys.byteorder]
    content, records = unpacked(dumped({"a": torch.arange(4, dtype=torch.int32)}))
    swapped = {
        name: b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
        for name, data in records.items()
        if name.startswith("data/")
    }
    path = written(tmp_path, packed(content, swapped | {"byteorder": other.encode()}))
    for mmap in (False, True):
        assert load(path, mmap=mmap)["a"].tolist() == [0, 1, 2, 3]


def test_large_sets_and_numbers_of_keys_load(tmp_path: Path) -> None:
    state = {
        "set": set(range(100_000)),
        "dict": {n: str(n) for n in range(100_000)},
        "t": {(n, n): n for n in range(9999)},
    }
    assert load(written(tmp_path, dumped(state))) == state


# --- what is allowed beside it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 5])
def test_allowed_classes_load(tmp_path: Path, protocol: int) -> None:
    state = {
        "progress": Progress(3, Stage.DECAY, {"loss": 1.5}),
        "frozen": Frozen(1, "b"),
        "point": Point(1, 2),
        "enums": [Stage.WARM_UP, Kind.A, Parts.LEFT | Parts.RIGHT, Parts.LEFT],
        Stage.WARM_UP: "a key",
    }
    path = written(tmp_path, dumped(state, protocol))
    assert load(path, allow=OURS) == state
    by_name = [f"{each.__module__}.{each.__qualname__}" for each in OURS]
    assert load(path, allow=by_name) == state
    for missing in OURS:
        with pytest.raises(UnsafePickleError) as raised:
            load(path, allow=[each for each in OURS if each is not missing])
        name = f"{missing.__module__}.{missing.__qualname__}"
        assert name in str(raised.value)
        assert f"allow=[{name!r}]" in str(raised.value)
        assert str(path) in str(raised.value)


def test_enums_that_are_spelled_by_getattr_load(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 and 3.12 pickle some enums this way."""
    module, name = Stage.__module__.encode(), b"Stage"
    by_name = b"\x80\x02c__builtin__\ngetattr\nc%s\n%s\nX\x05\0\0\0DECAY\x86R." % (module, name)
    assert load(written(tmp_path, packed(by_name)), allow=[Stage]) is Stage.DECAY
    for told in (b"name", b"mro", b"__class__"):
        bad = by_name.replace(b"\x05\0\0\0DECAY", b"%c\0\0\0%s" % (len(told), told))
        with pytest.raises((UnsafePickleError, FormatError)):
            load(written(tmp_path, packed(bad)), allow=[Stage])


@pytest.mark.parametrize(
    "wrong", [[3], ["no.such.module.Class"], ["os.system"], ["tests.torch_side.states.Nope"]]
)
def test_what_is_no_class_cannot_be_allowed(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(SettingsError, match="allow"):
        load(written(tmp_path, dumped({})), allow=wrong)


def test_what_is_ignored_is_not_run_either(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = written(tmp_path, dumped({"a": 1, "progress": Progress(3, Stage.DECAY), "runs": [Runs()]}))
    for allow in ((), OURS):
        assert load(path, ignore_keys=["progress", "runs"], allow=allow) == {"a": 1}
    with pytest.raises(UnsafePickleError, match="mkdir"):
        load(path, ignore_keys=["progress"], allow=OURS)
    assert not (tmp_path / "ran").exists()


# --- hostile -----------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def storage(count: int = 16, key: str = "0", where: str = "cpu", kind: str = "FloatStorage") -> bytes:
    number = b"\x8a\x08" + struct.pack("<q", count)
    return b"(" + text("storage") + named("torch", kind) + text(key) + text(where) + number + b"tQ"


def long(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a\x10" + data


def tensor(
    *, offset: int = 0, size: bytes = b"K\x10\x85", stride: bytes = b"K\x01\x85", hooks: bytes = b"N"
) -> bytes:
    arguments = storage() + long(offset) + size + stride + b"\x89" + hooks
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def dtype(code: str, state: bytes = b"") -> bytes:
    return named("numpy", "dtype") + text(code) + b"\x89\x88\x87R" + state


def array(shape: bytes, kind: bytes, content: bytes, version: bytes = b"K\x01") -> bytes:
    made = (
        named("numpy.core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
    )
    return made + b"(" + version + shape + kind + b"\x89" + content + b"tb"


LAUGHS = b")" + b"q\x00h\x00h\x00\x86" + b"".join(b"q%ch%ch%c\x86" % (n, n, n) for n in range(1, 200))
EVIL = named("posix", "system")
MKDIR = "pwned"
SOMETHING = text("x" * 60_000) + b"q\x00"

HOSTILE: dict[str, tuple[bytes, str]] = {
    # code that would be executed
    "system": (EVIL + text("mkdir pwned") + b"\x85R", "posix.system"),
    "eval": (named("builtins", "eval") + text("__import__('os').mkdir('pwned')") + b"\x85R", "builtins.eval"),
    "mkdir as a value": (
        b"}" + text("a") + named("posix", "mkdir") + text("pwned") + b"\x85Rs",
        "posix.mkdir",
    ),
    "getattr": (
        named("builtins", "getattr") + named("collections", "OrderedDict") + text("clear") + b"\x86R",
        "getattr",
    ),
    "getattr of data": (named("builtins", "getattr") + text("a") + text("join") + b"\x86R", "getattr"),
    "import": (named("builtins", "__import__") + text("os") + b"\x85R", "__import__"),
    "a module of numpy": (
        named("numpy.testing._private.utils", "runstring") + text("a") + b"}\x86R",
        "runstring",
    ),
    "numpy.load": (named("numpy", "load") + text("pwned") + b"\x85R", "numpy.load"),
    "dotted": (b"\x8c\x05numpy\x8c\x0endarray.tofile\x93", "ndarray.tofile"),
    "torch.load": (
        named("torch.serialization", "load") + text("pwned") + b"\x85R",
        "torch.serialization.load",
    ),
    "from bytes": (named("torch.storage", "_load_from_bytes") + b"C\x01a\x85R", "_load_from_bytes"),
    "partial": (named("functools", "partial") + EVIL + b"\x85R", "functools.partial"),
    "reconstructor": (named("copyreg", "_reconstructor") + b")R", "copyreg"),
    "storage from a file": (
        named("torch.storage", "UntypedStorage") + text("/etc/passwd") + b"\x85R",
        "a tensor without a storage",
    ),
    "tensor by its class": (named("torch", "Tensor") + b"K\x7f\x85R", "a tensor without a storage"),
    "new tensor": (named("torch", "Tensor") + b")\x81", "a tensor without a storage"),
    # attacks through allowed names
    "factory": (named("collections", "defaultdict") + EVIL + b"\x85R", "posix.system"),
    "factory that is a function": (
        named("collections", "defaultdict") + named("torch._utils", "_rebuild_tensor_v2") + b"\x85R",
        "factory",
    ),
    "factory that is data": (named("collections", "defaultdict") + text("list") + b"\x85R", "factory"),
    "factory of a class of torch": (
        named("collections", "defaultdict") + named("torch", "Tensor") + b"\x85R",
        "factory",
    ),
    "type as data": (b"]" + named("builtins", "list") + b"a", "where data belongs"),
    "type in a tuple as data": (b"]" + named("builtins", "list") + b"\x85\x85a", "where data belongs"),
    "type as all of it": (named("builtins", "list"), "where data belongs"),
    "storage as data": (b"]" + storage() + b"a", "where data belongs"),
    "type as a key": (b"}" + named("builtins", "list") + b"Ns", "a key that is a Function"),
    "setstate": (
        named("collections", "OrderedDict") + b")R}" + text("__setstate__") + EVIL + b"sb",
        "posix.system",
    ),
    "shadowed method": (named("collections", "OrderedDict") + b")R}" + text("items") + b"Nsb", "'items'"),
    "class of an OrderedDict": (
        named("collections", "OrderedDict") + b")R}" + text("__class__") + b"Nsb",
        "'__class__'",
    ),
    "built twice": (named("collections", "OrderedDict") + b")R}b}b", "did not just create"),
    "poison a function": (
        named("torch._utils", "_rebuild_tensor_v2") + b"}" + text("x") + b"Nsb",
        "did not just create",
    ),
    "poison a dtype": (named("torch", "float32") + b"}b", "did not just create"),
    "poison a dict": (b"}}b", "did not just create"),
    "new of a function": (named("collections", "deque") + b")\x81", "not an allowed class"),
    "call data": (text("a") + b")R", "not a function"),
    "hooks": (tensor(hooks=named("collections", "OrderedDict") + b")RK\x01Ns"), "hooks"),
    "hooks that are data": (tensor(hooks=b"]"), "hooks"),
    "attribute of a tensor": (
        named("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + named("torch._utils", "_rebuild_tensor_v2")
        + named("torch", "Tensor")
        + b"("
        + storage()
        + b"K\x00K\x10\x85K\x01\x85\x89Nt}"
        + text("numpy")
        + b"NstR",
        "'numpy' of a tensor",
    ),
    "tensor of another class": (
        named("torch._tensor", "_rebuild_from_type_v2") + b"(" + EVIL + EVIL + b")}tR",
        "posix.system",
    ),
    "storage of another kind": (
        b"(" + text("module") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x10tQ",
        "not a storage",
    ),
    "storage nowhere": (storage(where="os.system('x')"), "a storage on"),
    "storage that is not there": (storage(key="../../x"), "no record"),
    "version of data": (named("torch.torch_version", "TorchVersion") + b"]\x85\x81", "not text"),
    "version by a call": (named("torch.torch_version", "TorchVersion") + b"C\x01a\x85R", "not text"),
    "version as a codec": (
        named("torch.torch_version", "TorchVersion") + b"C\x01a" + text("utf-8") + b"\x86R",
        "not text",
    ),
    "state of a version": (
        named("torch.torch_version", "TorchVersion") + text("2") + b"\x85\x81}b",
        "gives a state to a str",
    ),
    # memory outside the tensor's storage
    "more than its storage": (tensor(size=b"K\x11\x85"), "larger than its storage"),
    "beyond its storage": (tensor(offset=1), "larger than its storage"),
    "before its storage": (tensor(offset=-1), "without a storage"),
    "strides beyond": (tensor(size=b"K\x02\x85", stride=b"K\x10\x85"), "larger than its storage"),
    "negative strides": (tensor(size=b"K\x02\x85", stride=long(-1) + b"\x85"), "strides"),
    "negative size": (tensor(size=long(-1) + b"\x85"), "non-negative integers"),
    "2⁶² by 2⁶² elements of one": (
        tensor(size=(long(1 << 62) * 2) + b"\x86", stride=b"K\x00K\x00\x86"),
        "more elements than there can be",
    ),
    "70 dimensions": (
        tensor(size=b"(" + b"K\x01" * 70 + b"t", stride=b"(" + b"K\x01" * 70 + b"t"),
        "non-negative integers",
    ),
    "more than its record": (storage(count=17), "a different number"),
    "2⁶² elements": (storage(count=1 << 62), "a different number"),
    "two types of one storage": (
        b"]" + storage() + storage(kind="IntStorage") + b"\x86a",
        "a different number",
    ),
    # numpy
    "objects": (array(b"K\x01\x85", dtype("O8"), b"]Na"), "'O8'"),
    "a list for an array": (array(b"K\x01\x85", dtype("f8"), b"]Na"), "something other than bytes"),
    "objects as a scalar": (named("numpy.core.multiarray", "scalar") + dtype("O") + b"C\x01a\x86R", "'O'"),
    "fields": (dtype("V8"), "'V8'"),
    "fields by state": (
        dtype(
            "f8", b"(K\x03" + text("<") + b"N" + text("a") + b"\x85}J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        ),
        "fields",
    ),
    "larger elements by state": (
        dtype("U1", b"(K\x03" + text("<") + b"NNNM\xff\xffK\x04K\x08tb"),
        "a size that differs",
    ),
    "elements of no size": (array(long(1 << 60) + b"\x85", dtype("S0"), b"C\x00"), "do not exist"),
    "2⁴⁰ elements": (
        array(long(1 << 40) + b"\x85", dtype("f8"), b"C\x08" + bytes(8)),
        "8 bytes for an array",
    ),
    "2⁶⁰ by 0 elements": (
        array(long(1 << 60) + long(1 << 60) + b"K\x00\x87", dtype("f8"), b"C\x00"),
        "do not exist",
    ),
    "array built twice": (array(b"K\x01\x85", dtype("i1"), b"C\x01a") + b")b", "did not just create"),
    "array as an array of another class": (
        named("numpy.core.multiarray", "_reconstruct") + named("builtins", "list") + b"K\x00\x85C\x01b\x87R",
        "in a different way",
    ),
    "array of another version": (
        array(b"K\x01\x85", dtype("i1"), b"C\x01a", b"K\x02"),
        "of an unexpected kind",
    ),
    "shape that is text": (array(text("a"), dtype("i1"), b"C\x01a"), "without a shape"),
    "dtype of 4 GiB": (dtype("U99999999999"), "'U99999999999'"),
    # excessive memory or time
    "bytes of 2⁴⁰": (named("builtins", "bytearray") + long(1 << 40) + b"\x85R", "bytes from something else"),
    "bytes of 2⁶² in the file": (b"\x8e" + struct.pack("<Q", 1 << 62), "cut short"),
    "bytearray of 2⁶²": (b"\x96" + struct.pack("<Q", 1 << 62), "cut short"),
    "text of 2⁶²": (b"\x8d" + struct.pack("<Q", 1 << 62), "cut short"),
    "fraction of 10⁹ digits": (named("fractions", "Fraction") + text("1e1000000000") + b"\x85R", "Fraction"),
    "number of 2 GiB": (b"\x8b\xff\xff\xff\x7f", "LONG4"),
    "memo of 32 GiB": (b"Nr\xff\xff\xff\xff0", "another order"),
    "laughs as a key": (b"}" + LAUGHS + b"Ns", "too many parts"),
    "laughs in a set": (named("builtins", "set") + b"](" + LAUGHS + b"e\x85R", "too many parts"),
    "deep key": (b"})" + b"\x85" * 100_000 + b"Ns", "too many parts"),
    "list as a key": (b"}]Ns", "a key that is a list"),
    "long numbers as keys": (b"}" + long(1 << 80) + b"Ns", "more than 64 bits"),
    "complex numbers as keys": (
        b"}" + named("builtins", "complex") + b"G" + bytes(8) + b"G" + bytes(8) + b"\x86RNs",
        "a key that is a complex",
    ),
    "the same text encoded again and again": (
        SOMETHING
        + text("latin1")
        + b"q\x01"
        + named("_codecs", "encode")
        + b"q\x02"
        + b"h\x02h\x00h\x01\x86R" * 8000,
        "far more data",
    ),
    "the same list as a set again and again": (
        b"]("
        + b"K\x01" * 60_000
        + b"eq\x00"
        + named("builtins", "set")
        + b"q\x01"
        + b"h\x01h\x00\x85R" * 200,
        "far more data",
    ),
    "a million deques": (
        named("collections", "deque") + b"q\x00" + b"h\x00)R" * 300_000,
        "far more data",
    ),
    "range of text": (named("builtins", "range") + text("a") + text("b") + b"\x86R", "a range"),
    "path of a number": (named("pathlib", "PosixPath") + b"K\x01\x85R", "a path"),
    "timedelta that overflows": (named("datetime", "timedelta") + long(1 << 100) + b"\x85R", "OverflowError"),
    "datetime of text": (named("datetime", "datetime") + text("x" * 10) + b"\x85R", "10 bytes"),
    "time zone of its own": (
        named("datetime", "datetime")
        + b"C\x0a\x07\xea\x01\x01\x00\x00\x00\x00\x00\x00"
        + text("a")
        + b"\x86R",
        "time zone",
    ),
    "nothing": (b"", "cannot be loaded"),
    "marks": (b"(" * 100_000, "nests far deeper"),
    "inst": (b"(" + text("mkdir pwned") + b"iposix\nsystem\n", "INST"),
    "obj": (b"(" + EVIL + text("mkdir pwned") + b"o", "posix.system"),
    "extension": (b"\x82\x01", "EXT1"),
    "persistent text": (b"Pposix.system\n", "PERSID"),
    "new with keywords": (named("collections", "deque") + b")}\x92", "NEWOBJ_EX"),
}


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "somewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert not list(folder.iterdir()), "something was run"


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_rejected_without_effect(
    tmp_path: Path, somewhere: Path, name: str, mmap: bool
) -> None:
    content, complaint = HOSTILE[name]
    path = written(tmp_path, packed(b"\x80\x02" + content + b"."))
    before = time.process_time()
    with pytest.raises((UnsafePickleError, FormatError)) as raised:
        load(path, mmap=mmap)
    assert complaint in str(raised.value)
    assert time.process_time() - before < 10
    assert torch._utils._rebuild_tensor_v2.__dict__ == {}
    assert type(collections.OrderedDict()) is collections.OrderedDict


def test_the_corpus_is_hostile_to_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If these attacks did not work against plain pickle, the test above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("system", "eval", "mkdir as a value"):
        pickle.loads(b"\x80\x02" + HOSTILE[name][0] + b".")
        (tmp_path / "pwned").rmdir()
    assert (
        len(
            pickle.loads(
                b"\x80\x02" + HOSTILE["bytes of 2⁴⁰"][0].replace(long(1 << 40), long(1 << 20)) + b"."
            )
        )
        == 1 << 20
    )


class Gadget:
    """An allowed class that alone checks its state."""

    ran: ClassVar[list[object]] = []

    def __setstate__(self, state: object) -> None:
        self.ran.append(state)


def test_only_the_code_of_allowed_classes_runs(tmp_path: Path, somewhere: Path) -> None:
    """An allowed class receives plain data, and nothing that could be called."""
    made = named(__name__, "Gadget") + b")\x81"
    load(written(tmp_path, packed(b"\x80\x02" + made + b"}" + text("a") + b"K\x01sb.")), allow=[Gadget])
    assert Gadget.ran == [{"a": 1}]
    for bad in (EVIL, named("builtins", "list"), storage(), named("builtins", "list") + b"\x85"):
        with pytest.raises(UnsafePickleError):
            load(written(tmp_path, packed(b"\x80\x02" + made + bad + b"b.")), allow=[Gadget])
    for bad in (b"__class__", b"__dict__"):
        content = named(Progress.__module__, "Progress") + b")\x81}" + text(bad.decode()) + b"Nsb"
        with pytest.raises(UnsafePickleError, match=bad.decode()):
            load(written(tmp_path, packed(b"\x80\x02" + content + b".")), allow=[Progress])
    assert len(Gadget.ran) == 1


def test_structures_that_hold_themselves_load(tmp_path: Path) -> None:
    itself: dict[str, Any] = {"a": 1}
    itself["me"] = [itself]
    found = load(written(tmp_path, dumped(itself)), ignore_keys=["a"])
    assert found["me"][0] is found
    assert found.keys() == {"me"}
    deep: list[Any] = []
    content = b"]" * 100_000 + b"a" * 99_999
    deep = load(written(tmp_path, packed(b"\x80\x02" + content + b".")))
    assert len(deep) == 1


# --- the archive -------------------------------------------------------------------------------------------------


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytearray:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return bytearray(stream.getvalue())


GOOD = b"\x80\x02" + tensor() + b"."


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (zipped(("a/data.pkl", GOOD), ("a/constants.pkl", b""), ("a/data/0", bytes(64))), "TorchScript"),
        (zipped(("a/data.pkl", GOOD), ("b/data.pkl", GOOD)), "2 files data.pkl"),
        (zipped(("a/data", GOOD)), "0 files data.pkl"),
        (zipped(("a/data.pkl", GOOD), ("a/data/0", bytes(64)), method=zipfile.ZIP_DEFLATED), "is damaged"),
        (zipped(("a/data.pkl", GOOD), ("a/data/0", bytes(63))), "a different number"),
    ],
)
def test_archives_of_another_kind_are_rejected(tmp_path: Path, data: bytearray, complaint: str) -> None:
    with pytest.raises((FormatError, UnsafePickleError), match=complaint):
        load(written(tmp_path, bytes(data)))


def test_records_that_share_bytes_are_rejected(tmp_path: Path) -> None:
    """In a 1 GB file whose directory lists the same bytes a million times, the records would unpack to a petabyte."""
    content = b"\x80\x02]" + b"".join(tensor().replace(text("0"), text(key)) + b"a" for key in "01") + b"."
    data = zipped(("a/data.pkl", content), ("a/data/0", bytes(64)), ("a/data/1", bytes(64)))
    assert len(load(written(tmp_path, bytes(data)))) == 2
    directory = data.index(b"PK\x01\x02")
    first, second = (data.index(name, directory) - 46 for name in (b"a/data/0", b"a/data/1"))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    for mmap in (False, True):
        with pytest.raises(FormatError, match="overlap"):
            load(written(tmp_path, bytes(data)), mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_every_truncation_is_rejected(tmp_path: Path, mmap: bool) -> None:
    whole = dumped(states.olmo_state())
    for end in range(0, len(whole), 997):
        with pytest.raises((FormatError, UnsafePickleError)):
            load(written(tmp_path, whole[:end]), mmap=mmap)


# --- mutants -----------------------------------------------------------------------------------------------------


def test_mutants_run_nothing_and_take_little_memory() -> None:
    """The mutants are read in a watched process; `python -m tests.torch_side.fuzz_states 100000` tries more of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch_side.fuzz_states", "2000", "1"],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no escape" in done.stdout


def test_the_watcher_sees_an_escape() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch_side.fuzz_states", "50", "1", "--unsafe"],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "pickle.find_class" in done.stdout
