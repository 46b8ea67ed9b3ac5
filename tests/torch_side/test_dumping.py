"""States are written such that `load`, torch, safetensors, tar and the compression
programs can read them, or not at all.
"""

import collections
import contextlib
import copy
import fnmatch
import gzip
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_async import Uploader, restore
from ckpt_async.errors import DestinationError, FormatError, InvalidNameError, SettingsError
from ckpt_async.torch import check_writable, deepspeed_filename, dump, dumping, load, load_into, load_remote
from tests.faults.small_disk import on_small_disk

# All suffixes that Composer's CheckpointSaver documents, its example without a suffix, and some of our own.
ARCHIVES = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.lzma", ".tar.xz", ".tar.zst"]
COMPRESSED = [".pt.bz2", ".pt.gz", ".pt.lz4", ".pt.lzma", ".pt.xz", ".pt.zst", ".gz"]
SUFFIXES = ["", "-rank0", ".pt", ".pth", ".bin", ".ckpt", *ARCHIVES, *COMPRESSED]
ROOT = Path(__file__).resolve().parents[2]


def composer_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    return {
        "state": {
            "model": model.state_dict(),
            "optimizers": {
                "AdamW": {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]}
            },
            "integrations": {"huggingface": {"tokenizer": "gpt2"}},
            "metadata": {"composer_env_info": {"composer_version": "0.32.1"}},
            "rank_zero_seed": 17,
            "timestamp": {"Timestamp": {"batch": 42}},
        },
        "rng": [{"python": [1, 2]}],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(
                a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
            )
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


# --- round trips -------------------------------------------------------------------------------------------------

tensors = st.builds(
    lambda dtype, shape, is_transposed: (
        torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1).T
        if is_transposed and len(shape) == 2
        else torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
    ),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.float8_e5m2]
    ),
    st.lists(st.integers(0, 5), max_size=3),
    st.booleans(),
)
leaves = (
    tensors
    | st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(state=states, suffix=st.sampled_from(SUFFIXES), is_file_object=st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back_from_any_format(
    tmp_path: Path, state: Any, suffix: str, is_file_object: bool
) -> None:
    path = tmp_path / f"ep1-ba42{suffix}"
    if is_file_object:
        with path.open("wb") as file:
            dump(state, file, format=suffix)
    else:
        dump(state, path)
    assert same(load(path), state)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    path.unlink()  # for the next example


@given(
    state=st.recursive(
        st.dictionaries(st.text("abc_é", min_size=1, max_size=4), tensors, max_size=4),
        lambda inner: st.dictionaries(st.text("defg", min_size=1, max_size=4), inner, max_size=3),
        max_leaves=6,
    )
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_safetensors_are_what_their_own_library_reads_and_writes(tmp_path: Path, state: Any) -> None:
    def flat(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return {prefix: value}
        found: dict[str, torch.Tensor] = {}
        for key, each in value.items():
            found |= flat(each, f"{prefix}.{key}" if prefix else key)
        return found

    path, theirs = tmp_path / "a.safetensors", tmp_path / "theirs"
    dump(state, path, overwrite=True)
    expected = dict(sorted(flat(state).items()))
    for found in (safetensors.torch.load_file(path), load(path)):
        assert same(dict(sorted(found.items())), expected)
    if len({each.dtype for each in expected.values()}) > 1:
        return  # safetensors orders dtypes of the same size in its own way
    contiguous = {name: each.contiguous() for name, each in expected.items()}
    safetensors.torch.save_file(contiguous, theirs, metadata={"format": "pt"})
    assert path.read_bytes() == theirs.read_bytes()


def test_shared_and_strided_tensors_are_whole_in_safetensors(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {
        "a": whole,
        "tied": whole,
        "row": whole[1],
        "columns": whole.T,
        "b": torch.nn.Parameter(whole[:, ::2]),
    }
    dump(state, tmp_path / "a.safetensors")
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], each) for name, each in state.items())
    assert found.keys() == state.keys()
    imaginary = torch.tensor([1 + 2j]).conj()  # a view whose bit marks it as conjugated
    dump({"c": imaginary}, tmp_path / "c.safetensors")
    assert torch.equal(load(tmp_path / "c.safetensors")["c"], torch.tensor([1 - 2j]))


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"a": {"b": 3}}, "'a.b' is not a tensor but int"),
        ({"a": [torch.ones(1)]}, "'a' is not a tensor but list"),
        (torch.ones(1), "'' is not a valid"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "'a.b' is not a valid tensor name"),
        ({"__metadata__": torch.ones(1)}, "'__metadata__' is not a valid"),
        ({"w": torch.ones(3, device="meta")}, "'w' is a tensor that is meta"),
        ({"w": torch.eye(3).to_sparse()}, "'w' is a tensor that is meta, nested or sparse"),
        ({"w": torch.ones(3, dtype=torch.complex128)}, "'w' is a tensor of torch.complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_named(tmp_path: Path, state: Any, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        dump(state, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


# --- read by others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "ep1-ba42-rank0", "lr0.1-rank0"])
def test_torch_reads_plain_files(tmp_path: Path, name: str) -> None:
    dump(composer_state(), tmp_path / name)
    found = torch.load(tmp_path / name, weights_only=True)
    assert same(found["state"]["optimizers"], composer_state()["state"]["optimizers"])
    assert found["state"]["model"]._metadata is not None  # the module versions, which torch.save keeps


PROGRAMS = {
    ".gz": ["gzip", "-dc"],
    ".bz2": ["bzip2", "-dc"],
    ".xz": ["xz", "-dc"],
    ".lzma": ["xz", "--format=lzma", "-dc"],
    ".zst": ["zstd", "-dc"],
    ".lz4": ["lz4", "-dc"],
}


@pytest.mark.parametrize(
    ("suffix", "command"),
    [pytest.param(*each, id=each[0]) for each in PROGRAMS.items() if shutil.which(each[1][0])],
)
def test_the_programs_read_compressed_files(tmp_path: Path, suffix: str, command: list[str]) -> None:
    """Composer reads compressed files this way: through the program for the suffix, into torch.load."""
    dump(composer_state(), tmp_path / f"a.pt{suffix}")
    with (tmp_path / f"a.pt{suffix}").open("rb") as packed, (tmp_path / "a.pt").open("wb") as plain:
        subprocess.run(command, stdin=packed, stdout=plain, check=True)
    assert same(torch.load(tmp_path / "a.pt")["rng"], composer_state()["rng"])


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.lzma", ".tar.xz"])
def test_archives_are_what_composer_unpacks(tmp_path: Path, suffix: str) -> None:
    """Composer's reader extracts everything into a folder and expects `composer_states.pt` there."""
    path = tmp_path / f"ep1-ba42-rank0{suffix}"
    dump(composer_state(), path)
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["composer_states.pt"]
        archive.extractall(tmp_path / "there", filter="data")
    found = torch.load(tmp_path / "there/composer_states.pt")
    assert same(found["state"]["metadata"], composer_state()["state"]["metadata"])
    subprocess.run(["tar", "xf", path, "-C", tmp_path], check=True)
    assert (tmp_path / "composer_states.pt").read_bytes() == (
        tmp_path / "there/composer_states.pt"
    ).read_bytes()
    modes = {".gz": "r:gz", ".tgz": "r:gz", ".bz2": "r:bz2", ".lzma": "r:xz", ".xz": "r:xz", ".tar": "r:"}
    tarfile.open(path, modes[path.suffix]).close()  # exactly the compression that Composer writes


def test_a_file_of_the_uploader_is_a_destination(tmp_path: Path) -> None:
    folder, remote = tmp_path / "checkpoints", f"file://{tmp_path}/remote"
    state = composer_state()
    with Uploader(folder, remote) as uploader:
        for name, suffix in {"r0": "", "r0.tar": ".tar", "r0.tgz": ".tgz", "r0.pt.zst": ".pt.zst"}.items():
            with uploader.open(1, name) as file:
                dump(state, file, format=suffix)
        with pytest.raises(FormatError, match="cannot be saved"), uploader.open(1, "bad.pt") as file:
            dump({"a": lambda: 1}, file)
        uploader.seal(step=1)
        uploader.wait(step=1, timeout_s=60)
    shutil.rmtree(folder)
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    assert set(checkpoint.files) == {"r0", "r0.tar", "r0.tgz", "r0.pt.zst"}
    for name in checkpoint.files:
        assert same(load_remote(checkpoint, name)["state"]["optimizers"], state["state"]["optimizers"])


class Pair(NamedTuple):
    left: Any
    right: Any


# --- parts -------------------------------------------------------------------------------------------------------


def test_weights_only_keeps_what_composer_keeps(tmp_path: Path) -> None:
    dump(composer_state(), tmp_path / "a.pt", weights_only=True, ignore_keys=["state/integrations/*"])
    found = load(tmp_path / "a.pt")
    assert list(found) == ["state"]
    assert list(found["state"]) == ["model", "integrations", "metadata"]
    assert found["state"]["integrations"] == {}
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    assert not load_into(model, found)
    dump(composer_state(), tmp_path / "b.safetensors", weights_only=True)
    assert not load_into(model, load(tmp_path / "b.safetensors"))


@pytest.mark.parametrize("key", ["model", "model_state_dict", "state_dict", "module"])
def test_weights_only_keeps_the_model_where_it_is(tmp_path: Path, key: str) -> None:
    weights = torch.nn.Linear(2, 2).state_dict()
    dump({key: weights, "optimizer": {"lr": 1}, "epoch": 3}, tmp_path / "a.pt", weights_only=True)
    found = load(tmp_path / "a.pt")
    assert list(found) == [key]
    assert same(dict(found[key]), dict(weights))
    dump(weights, tmp_path / "b.pt", weights_only=True)
    assert list(load(tmp_path / "b.pt")) == list(weights)
    with pytest.raises(FormatError, match="no model in it: it has epoch"):
        dump({"epoch": 3}, tmp_path / "c.pt", weights_only=True)
    assert not (tmp_path / "c.pt").exists()


@pytest.mark.parametrize(
    ("ignored", "gone"),
    [
        (["state/model/0.weight", "state/rank_zero_seed"], {"state/model/0.weight", "state/rank_zero_seed"}),
        (["state/model/*"], {f"state/model/{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}),
        (["state/model/*.weight"], {"state/model/0.weight", "state/model/1.weight"}),
        (["state/rank_zero_seed", "rng"], {"state/rank_zero_seed", "rng/0/python/0", "rng/0/python/1"}),
    ],
)
def test_ignored_keys_are_left_out_and_the_callers_state_stays(
    tmp_path: Path, ignored: list[str], gone: set[str]
) -> None:
    """These are the four examples in Composer's documentation."""

    def leaves_of(value: Any, path: str = "") -> set[str]:
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else None
        )
        if items is None:
            return {path.lstrip("/")}
        return {leaf for key, each in items for leaf in leaves_of(each, f"{path}/{key}")}

    state = composer_state()
    before = copy.deepcopy(state)
    dump(state, tmp_path / "a.pt", ignore_keys=ignored)
    assert leaves_of(state) - leaves_of(load(tmp_path / "a.pt")) == gone
    assert same(state, before)
    assert all(any(fnmatch.fnmatch(leaf, f"{each}*") for each in ignored) for leaf in gone)


def test_a_function_may_change_anything_but_the_callers_state(tmp_path: Path) -> None:
    shared = {"lr": 0.1}
    weights = torch.nn.Linear(1, 1).state_dict()
    state: dict[str, Any] = {
        "model": weights,
        "pair": (1, {"inner": [1, 2]}),
        "named": Pair({"x": 1}, 2),
        "groups": [shared, shared],
        "tags": {"a", "b"},
        "counts": collections.defaultdict(int, a=1),
        "queue": collections.deque([{"deep": 1}], maxlen=5),
    }
    state["itself"] = state
    given_ = {}

    def change(copied: dict[str, Any]) -> None:
        given_.update(copied)
        copied["model"]["weight"] = None
        copied["pair"][1]["inner"].append(3)
        copied["named"].left["x"] = 2
        copied["groups"][0]["lr"] = 1
        copied["tags"].add("c")
        copied["counts"]["b"] += 1
        copied["queue"][0]["deep"] = 2
        copied["itself"]["new"] = 1

    dump(state, tmp_path / "a.pt", ignore_keys=change)
    assert state.keys() == {"model", "pair", "named", "groups", "tags", "counts", "queue", "itself"}
    assert torch.is_tensor(weights["weight"])
    assert (state["pair"], state["named"]) == ((1, {"inner": [1, 2]}), Pair({"x": 1}, 2))
    assert state["groups"] == [{"lr": 0.1}, {"lr": 0.1}]
    assert (state["tags"], state["counts"], list(state["queue"])) == ({"a", "b"}, {"a": 1}, [{"deep": 1}])
    assert given_["groups"][1]["lr"] == 1  # shared objects are still shared
    assert given_["model"]._metadata is not weights
    assert given_["model"]._metadata == weights._metadata
    assert type(given_["named"]) is Pair
    assert given_["queue"].maxlen == 5
    assert given_["model"]["bias"] is weights["bias"]  # tensors are not copied
    with pytest.raises(InvalidNameError, match=r"give ignore_keys=\['rng'\]"):
        dump(state, tmp_path / "b.pt", ignore_keys="rng")


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ep1-ba42-rank0", "ep1-ba42-rank0.tar"),
        ("ep1-ba42-rank0.pt", "ep1-ba42-rank0.pt.tar"),
        ("a/ep{epoch}.tgz", "a/ep{epoch}.tgz"),
        ("a.tar", "a.tar"),
        ("a.tar.gz", "a.tar.gz"),
        ("a.tar.bz2", "a.tar.bz2"),
        ("a.tar.lzma", "a.tar.lzma"),
        ("a.pt.gz", "a.pt.gz.tar"),
    ],
)
def test_deepspeed_has_an_archive_for_each_rank(name: str, expected: str) -> None:
    assert deepspeed_filename(name) == expected
    with pytest.raises(SettingsError, match="weights_only=True cannot be used with DeepSpeed"):
        deepspeed_filename(name, weights_only=True)


def test_names_are_filled_and_folders_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dump([1], tmp_path / "{run_name}/deep/rank{rank}.pt", run_name="run-a")
    assert load(tmp_path / "run-a/deep/rank3.pt") == [1]


@pytest.mark.parametrize("name", ["a.npz", "a.pt.ztd", "a.tar.rar", "a.zip.gz", "ep{epoch}.safetensor"])
def test_an_unknown_suffix_is_refused_before_training_and_when_saving(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match=r"unknown format '\.\w+' \(known: .*\.safetensors .*\.zst"):
        check_writable(name)
    with pytest.raises(FormatError, match="unknown format"):
        dump([1], tmp_path / name.replace("{epoch}", "1"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a.pt.lzo", r"\(install lzop\)"),
        ("a.pt.zst", r"\(run pip install '\.\[compression\]' in the clone of ckpt_async, or install zstd\)"),
        (
            "ep{epoch}.tar.lz4",
            r"\(run pip install '\.\[compression\]' in the clone of ckpt_async, or install lz4\)",
        ),
    ],
)
def test_a_missing_library_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    for library in ("compression.zstd", "backports.zstd", "lz4.frame"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FormatError, match=hint):
        check_writable(name)
    with pytest.raises(FormatError, match=hint):
        dump([1], tmp_path / name.replace("{epoch}", "1"))
    assert not list(tmp_path.iterdir())
    for each in ("ep{epoch}-ba{batch}-rank{rank}", "a.tar.lzma", Path("b.pt.gz"), "c.safetensors"):
        check_writable(each)


# --- programs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs a Python script as the program `lzop`. A working one here speaks gzip."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def does(script: str) -> None:
        (folder / "lzop").write_text(f"#!{sys.executable}\nimport gzip, shutil, sys\n{script}\n")
        (folder / "lzop").chmod(0o755)

    return does


def test_a_program_compresses_where_there_is_no_library(
    tmp_path: Path, program: Callable[[str], None]
) -> None:
    program(
        "assert sys.argv[1:] == ['-c']\nshutil.copyfileobj(sys.stdin.buffer, gzip.open(sys.stdout.buffer, 'wb'))"
    )
    dump({"a": torch.ones(1 << 20)}, tmp_path / "a.pt.lzo")
    with gzip.open(tmp_path / "a.pt.lzo") as file:
        assert torch.equal(torch.load(file)["a"], torch.ones(1 << 20))


@pytest.mark.parametrize("script", ["sys.exit('it burns')", "sys.stdin.buffer.read(); sys.exit('it burns')"])
def test_a_program_that_fails_leaves_nothing_and_says_why(
    tmp_path: Path, program: Callable[[str], None], script: str
) -> None:
    program(script)
    with pytest.raises(FormatError, match=r"a\.pt\.lzo: lzop failed: it burns"):
        dump({"a": torch.ones(1 << 20)}, tmp_path / "a.pt.lzo")
    assert [each.name for each in tmp_path.iterdir()] == ["bin"]


# --- all or nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".pt.gz", ".tar", ".safetensors"])
def test_what_is_there_is_left_alone_unless_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    first, second = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    dump(first, path)
    linked = tmp_path / "linked"  # stands for the uploader's hard link to the file
    linked.hardlink_to(path)
    before = linked.read_bytes()
    with pytest.raises(DestinationError, match=r"already exists; .*pass overwrite=True"):
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


def stall(path: Path, writing: int, *, is_nameless: bool) -> NoReturn:
    """Write a file, report from the middle of it, and wait there until the process is killed."""
    try:
        torch.set_num_threads(1)
        if not is_nameless:
            os.O_TMPFILE = os.O_DIRECTORY
        write = dumping._Sink.write

        def stalling(self: Any, data: Any) -> Any:
            if self._stream is not None and self.size_bytes > 3_000_000:
                os.write(writing, b"x")
                threading.Event().wait()
            return write(self, data)

        dumping._Sink.write = stalling  # type: ignore[method-assign]
        dump({"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}, path, overwrite=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@pytest.mark.parametrize(("suffix", "is_nameless"), [(".pt.gz", True), (".tar", False)])
def test_killed_in_the_middle_it_leaves_the_old_file_or_none(
    tmp_path: Path, suffix: str, is_nameless: bool
) -> None:
    old, new = tmp_path / f"old{suffix}", tmp_path / f"new{suffix}"
    dump({"w": torch.ones(3)}, old)
    for path in (old, new):
        reading, writing = os.pipe()
        pid = os.fork()  # the child has torch loaded already
        if pid == 0:
            stall(path, writing, is_nameless=is_nameless)
        os.close(writing)
        with os.fdopen(reading, "rb") as said:
            assert said.read(1) == b"x"
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert load(old)["w"].tolist() == [1.0, 1.0, 1.0]
    left = {each.name for each in tmp_path.iterdir()} - {old.name}
    assert new.name not in left
    assert is_nameless == (not left)  # where the kernel has no O_TMPFILE, a hidden file stays
    assert all(name.startswith(".ckpt-async-") for name in left)
    dump({"w": torch.zeros(3)}, new)  # a leftover does not get in the way
    assert load(new)["w"].tolist() == [0.0, 0.0, 0.0]


def test_two_that_write_one_name_do_not_mix(tmp_path: Path) -> None:
    """If another writer creates the name after this one has started, this one must fail and not replace the file."""

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
