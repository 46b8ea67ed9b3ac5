"""DCP's `.metadata` is read without executing anything in it, with the same result as torch's own reader."""

import collections
import contextlib
import copyreg
import os
import pathlib
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_async.errors import UnsafePickleError
from ckpt_async.torch import load_metadata

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about saving without ranks

STORABLE = [
    *("bfloat16 bool complex128 complex32 complex64 float16 float32 float64 int16 int32 int64 int8").split(),
    *("uint8 uint16 uint32 uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz").split(),
    # Only in torch later than 2.4:
    *(each for each in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, each)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a trainer saves it: tensors of all types, an optimizer, nested and plain values."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "types": {each: torch.zeros(16, dtype=torch.uint8).view(getattr(torch, each)) for each in STORABLE},
        "images": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "nested": [1, {"a": torch.ones(2)}, collections.OrderedDict(b=None)],
        0: "a key that is a number",
    }
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save(state, checkpoint_id=folder)
    return folder


def test_real_metadata_is_read_as_torch_reads_it(saved: Path) -> None:
    """It can be given by path, folder or bytes. (Metadata of FSDP2 and DDP on several
    ranks is covered by the DCP tests.)
    """
    data = (saved / ".metadata").read_bytes()
    expected = pickle.loads(data)
    assert len(expected.state_dict_metadata) > 30
    assert load_metadata(saved / ".metadata") == load_metadata(saved) == load_metadata(data) == expected
    assert type(load_metadata(saved).storage_meta.checkpoint_id) is pathlib.PosixPath


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("path", [Path("/x/y"), pathlib.PurePosixPath("z"), "s3://b/c", None])
def test_every_field_and_protocol_is_read(protocol: int, path: Any) -> None:
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    layouts = (torch.strided, torch.sparse_coo, torch.sparse_csr)
    tensors = {
        f"{dtype}{layout}{memory}": TensorStorageMetadata(
            TensorProperties(dtype, layout, True, memory, False),
            torch.Size([70_000, 1 << 40]),
            [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([70_000, 1 << 40]))],
        )
        for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
        for layout in layouts
        for memory in formats
    }
    index = MetadataIndex("ключ", torch.Size([0]), 7)
    metadata = Metadata(
        tensors,
        collections.OrderedDict(a=("a", 3, True, 1.5, None)),
        {index: _StorageInfo("__0_0.distcp", 1 << 33, 9, ["zstd"])},
        StorageMeta(path, "s", "l", ["m"]),
    )
    data = pickle.dumps(metadata, protocol)
    assert load_metadata(data) == pickle.loads(data) == metadata


def test_metadata_of_torch_2_4_is_read() -> None:
    """torch 2.4 knows fewer fields, and the file does not contain the missing ones."""
    stored, meta = _StorageInfo("__0_0.distcp", 0, 9), StorageMeta(Path("/x/y"), "s", "l")
    stored.__dict__.pop("transform_descriptors", None)
    meta.__dict__.pop("modules", None)
    data = pickle.dumps(Metadata({}, {}, {MetadataIndex("a"): stored}, meta))
    assert b"modules" not in data
    assert b"transform_descriptors" not in data
    assert load_metadata(data).storage_meta.checkpoint_id == Path("/x/y")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b"torch.strided", b"torch.stripes", "layout 'torch.stripes'"),
        (b"float32", b"float24", r"torch\.float24"),
        (b"K\x00\x85", b"K\x63\x85", "memory format '99'"),
    ],
)
def test_what_a_newer_torch_writes_is_named(old: bytes, new: bytes, named: str) -> None:
    properties = TensorProperties(torch.float32, torch.strided, False, torch.contiguous_format, False)
    tensor = TensorStorageMetadata(properties, torch.Size([]), [])
    data = pickle.dumps(Metadata({"w": tensor}, {}, {}), 2)
    assert old in data
    with pytest.raises(UnsafePickleError, match=f"{named}.*upgrade torch"):
        load_metadata(data.replace(old, new))


# --- hostile ---------------------------------------------------------------------------------------------------


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


DCP = "torch.distributed.checkpoint.metadata"
NEW_METADATA = named(DCP, "Metadata") + b")\x81"
# Two hundred tuples, each containing the one before twice: 2²⁰⁰ items to hash or to print.
LAUGHS = b")" + b"\x94h\x00h\x00\x86" + b"".join(b"\x94h%ch%c\x86" % (n, n) for n in range(1, 200))

HOSTILE: dict[str, tuple[bytes, str]] = {
    # code that would be executed, and the name in the error message
    "system": (pickle.dumps(Calls(os.system, "touch pwned")), "posix.system"),
    "eval": (pickle.dumps(Calls(eval, "open('pwned', 'w')")), "builtins.eval"),
    "exec by protocol 0": (b'c__builtin__\nexec\n(S\'open("pwned","w")\'\ntR.', "__builtin__.exec"),
    "inst": (b"(" + text("touch pwned") + b"ios\nsystem\n.", "INST"),
    "obj": (b"(" + named("os", "system") + text("touch pwned") + b"o.", "os.system"),
    "within real": (pickle.dumps(Metadata({"a": Calls(os.system, "touch pwned")})), "posix.system"),
    "as a storage": (
        pickle.dumps(Metadata({}, storage_data=Calls(os.system, "touch pwned"))),
        "posix.system",
    ),
    "dotted": (
        b"\x80\x04" + named("torch", "os.system") + text("touch pwned") + b"\x85R.",
        "torch.os.system",
    ),
    "dotted in an allowed class": (
        named(DCP, "Metadata.__init__.__globals__") + b".",
        "Metadata.__init__.__glob",
    ),
    "getattr": (
        named("builtins", "getattr") + NEW_METADATA + text("__class__") + b"\x86R.",
        "builtins.getattr",
    ),
    "torch.load": (pickle.dumps(Calls(torch.load, "x")), "torch.serialization.load"),
    "a function of torch": (pickle.dumps(torch.zeros(2)), "torch._utils._rebuild_tensor_v2"),
    "numpy": (named("numpy", "load") + b".", "numpy.load"),
    "name that is no text": (b"K\x01K\x02\x93.", "without a name"),
    "laughing name": (b"\x80\x04" + LAUGHS + b"\x94" + text("x") + b"\x93.", "without a name"),
    # allowed names used for something else
    "poison a function": (
        named("torch.serialization", "_get_layout") + b"}" + text("cache") + b"}sb.",
        "did not just create",
    ),
    "poison a class": (
        named(DCP, "Metadata") + b"N}" + text("__init__") + b"Ns\x86b.",
        "did not just create",
    ),
    "poison a member": (
        named(DCP, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R}" + text("_value_") + b"K\x07sb.",
        "did not just create",
    ),
    "call a class": (named(DCP, "Metadata") + b"}\x85R.", "never calls"),
    "call a dtype": (named("torch", "float32") + b")R.", "never calls"),
    "enum with a name": (named(DCP, "_MEM_FORMAT_ENCODING") + b"K\x00K\x01\x86R.", "not DCP metadata"),
    "new of a function": (named("torch", "Size") + b")\x81.", "not a class"),
    "new with arguments": (named(DCP, "Metadata") + b"K\x01\x85\x81.", "not a class"),
    "new with keywords": (named(DCP, "Metadata") + b")}\x92.", "NEWOBJ_EX"),
    "setstate": (
        NEW_METADATA + b"}" + text("__setstate__") + named("torch", "Size") + b"sb.",
        "__setstate__",
    ),
    "dict": (NEW_METADATA + b"}" + text("__dict__") + b"}sb.", "__dict__"),
    "class": (NEW_METADATA + b"}" + text("__class__") + named(DCP, "StorageMeta") + b"sb.", "__class__"),
    "slots": (NEW_METADATA + b"N}" + text("__class__") + b"Ns\x86b.", "not its fields"),
    "built twice": (NEW_METADATA + b"}" + text("version") + text("1") + b"sb}b.", "did not just create"),
    "wrong type": (NEW_METADATA + b"}" + text("state_dict_metadata") + b"K\x01sb.", "state_dict_metadata"),
    "class as a value": (
        NEW_METADATA + b"}" + text("planner_data") + named("torch", "Size") + b"sb.",
        "planner_data",
    ),
    "extension": (b"\x82\x01.", "EXT1"),
    "extension of 4 bytes": (b"\x84\x01\x00\x00\x00.", "EXT4"),
    "persistent id": (b"Pos.system\n.", "PERSID"),
    "persistent object": (text("x") + b"Q.", "BINPERSID"),
    "out of band": (b"\x97.", "NEXT_BUFFER"),
    "set": (b"\x8f.", "EMPTY_SET"),
    "bytearray of 2⁶² bytes": (b"\x96" + struct.pack("<Q", 1 << 62) + b".", "BYTEARRAY8"),
    "number of 2 GiB": (b"\x8b\xff\xff\xff\x7f.", "LONG4"),
    # excessive memory or time
    "memo of 32 GiB": (b"Nr\xff\xff\xff\xff0.", "another order"),
    "memo that is not there": (b"j\xff\xff\xff\xff.", "not DCP metadata"),
    "text of 4 GiB": (b"X\xff\xff\xff\xff.", "cut short"),
    "text of 1 MiB": (text("x" * (1 << 20)) + b".", "a string of"),
    "frame of 2⁶³ bytes": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"N.", "cut short"),
    "frame that is too long": (b"\x80\x04\x95" + struct.pack("<Q", 3) + b"N.", "cut short"),
    "laughs": (b"\x80\x04" + LAUGHS + b".", "not a Metadata"),
    "laughs as a key": (b"\x80\x04" + LAUGHS + b"\x94}h\xc8Ns.", "a key that is"),
    "deep key": (b"})" + b"\x85" * 100_000 + b"Ns.", "a key that is"),
    "deep": (b")" + b"\x85" * 100_000 + b".", "not a Metadata"),
    "deep lists": (b"]" * 100_000 + b"a" * 99_999 + b".", "not a Metadata"),
    "marks": (b"(" * 100_000, "nests far deeper"),
    "lists in one": (b"](" + b"]" * 1_000_000 + b"e.", "far more data"),
    "itself": (b"]\x94h\x00a.", "not a Metadata"),
    "key that is not built": (b"}" + named(DCP, "MetadataIndex") + b")\x81Ns.", "not DCP metadata"),
    "many dimensions": (named("torch", "Size") + b"(" + b"K\x01" * 65 + b"t\x85R.", "non-negative"),
    "negative size": (named("torch", "Size") + b"J\xff\xff\xff\xff\x85\x85R.", "non-negative"),
    "nothing": (b"", "not DCP metadata"),
    "stop": (b".", "not DCP metadata"),
    "another thing": (pickle.dumps({"a": 1}), "not a Metadata"),
}


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.fault("F29")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_rejected_without_effect(name: str, somewhere: Path) -> None:
    data, complaint = HOSTILE[name]
    copyreg.add_extension("os", "system", 1)
    try:
        with pytest.raises(UnsafePickleError) as raised:
            load_metadata(data)
    finally:
        copyreg.remove_extension("os", "system", 1)
    assert complaint in str(raised.value)
    assert not list(somewhere.iterdir())
    assert torch.serialization._get_layout("torch.strided") is torch.strided
    assert Metadata({}).state_dict_metadata == {}


def test_the_corpus_is_hostile_to_pickle(somewhere: Path) -> None:
    """If these attacks did not work against plain pickle, the test above would prove nothing."""
    for name in ("system", "eval", "within real", "dotted"):
        try:
            pickle.loads(HOSTILE[name][0])
        except SyntaxError as error:
            raise AssertionError(name) from error
        assert (somewhere / "pwned").exists(), name
        (somewhere / "pwned").unlink()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.storage_data.update({MetadataIndex("a"): _StorageInfo("../x", 0, 1)}), "outside"),
        (lambda m: m.storage_data.update({MetadataIndex("a"): _StorageInfo("/etc/passwd", 0, 1)}), "outside"),
        (lambda m: m.storage_data.update({MetadataIndex("a"): _StorageInfo("x", -1, 1)}), "the place of 'a'"),
        (lambda m: m.storage_data.update({"a": _StorageInfo("x", 0, 1)}), "storage_data"),
        (lambda m: m.planner_data.update(a=(("b",),)), "planner_data"),
        (lambda m: m.state_dict_metadata.update(a=3), "'a'"),
        (lambda m: m.state_dict_metadata["images"].chunks.append(3), "a chunk of 'images'"),
        (lambda m: m.state_dict_metadata["images"].chunks[0].__dict__.pop("sizes"), "not DCP metadata"),
        (
            lambda m: m.state_dict_metadata["images"].chunks.append(
                ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
            ),
            "a chunk of 'images'",
        ),
        (lambda m: m.storage_meta.modules.append(3), "storage_meta"),
    ],
)
def test_malformed_metadata_is_rejected(saved: Path, change: Any, complaint: str) -> None:
    metadata = load_metadata(saved)
    change(metadata)
    with pytest.raises(UnsafePickleError, match=complaint):
        load_metadata(pickle.dumps(metadata))


def test_work_is_linear_in_the_file_size() -> None:
    """A long list shared by many tensors is one way to make the work quadratic. It must be refused at once."""
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1])) for _ in range(1000)]
    shared = {
        f"t{n}": TensorStorageMetadata(TensorProperties(), torch.Size([1]), chunks) for n in range(1000)
    }
    with pytest.raises(UnsafePickleError, match="the list of chunks of"):
        load_metadata(pickle.dumps(Metadata(shared)))


def test_a_file_that_is_too_large_is_refused(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    assert load_metadata(saved, max_size_bytes=len(data))
    with pytest.raises(UnsafePickleError, match="more than"):
        load_metadata(saved, max_size_bytes=len(data) - 1)
    with pytest.raises(FileNotFoundError):
        load_metadata(saved / "nothing")


def test_every_truncation_of_real_metadata_is_rejected(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    for end in range(0, len(data), 7):
        with pytest.raises(UnsafePickleError):
            load_metadata(data[:end])


@pytest.mark.fault("F29")
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=6)), min_size=1, max_size=4))
@example(edits=[(0, b"")])
def test_mutations_are_read_or_rejected(saved: Path, somewhere: Path, edits: list[tuple[int, bytes]]) -> None:
    """For any bytes written into a real file, the result is metadata or UnsafePickleError,
    quickly, with nothing executed.
    """
    data = bytearray((saved / ".metadata").read_bytes())
    for at, new in edits:
        start = at % len(data)
        data[start : start + len(new)] = new
    before = time.process_time()
    with contextlib.suppress(UnsafePickleError):
        assert isinstance(load_metadata(bytes(data)), Metadata)
    assert time.process_time() - before < 20
    assert not list(somewhere.iterdir())
