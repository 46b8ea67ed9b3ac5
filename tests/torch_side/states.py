"""States as trainers save them, built by hand from the same classes, and torch files assembled from arbitrary bytes."""

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import random
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class Stage(enum.Enum):
    WARM_UP = "warm-up"
    DECAY = ("decay", 2)


class Kind(str, enum.Enum):  # noqa: UP042  as in libraries that support older Pythons
    A = "a"


class Parts(enum.Flag):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass
class Progress:
    step: int
    stage: Stage
    best: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: str


class Point(collections.namedtuple("Point", ["x", "y"])):  # noqa: PYI024
    __slots__ = ()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def composer_state() -> dict[str, Any]:
    """Return a state as Composer 0.32 writes it from one rank: `state` and `rng`."""
    model, optimizer, scheduler = trained()
    return {
        "state": {
            "model": model.state_dict(),
            "optimizers": {"DecoupledAdamW": optimizer.state_dict()},
            "schedulers": {"LambdaLR": scheduler.state_dict()},
            "timestamp": {
                "Timestamp": {
                    "epoch": 1,
                    "batch": 42,
                    "sample": 1344,
                    "token": 2**40,
                    "total_wct": dt.timedelta(seconds=1234, microseconds=5),
                    "epoch_wct": dt.timedelta(seconds=34),
                    "batch_wct": dt.timedelta(microseconds=812),
                }
            },
            "algorithms": [("EMA", {"ema_started": True, "smoothing": 0.99})],
            "callbacks": [("SpeedMonitor", {"total_eval_wct": 1.5})],
            "dataset_state": {"train": {"epoch": 1, "sample_in_epoch": 1344}, "eval": {}},
            "rank_zero_seed": 17,
            "run_name": "awesome-training-run",
            "metadata": {"torch_version": "2.6.0", "dist_world_size": 8},
        },
        "rng": [
            {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
                "cuda": torch.get_rng_state(),
            }
            for _ in range(2)
        ],
    }


def olmo_state() -> dict[str, Any]:
    """Return the content of `train/rank0.pt` of OLMo 0.6: what its trainer_state_dict() contains."""
    return {
        "epoch": 0,
        "global_step": 1000,
        "global_train_examples_seen_this_epoch": 2048000,
        "global_train_tokens_seen": 4194304000,
        "world_size": 8,
        "checkpoints": [pathlib.Path("/runs/step500"), pathlib.Path("/runs/step1000")],
        "unsharded_checkpoints": [],
        "ephemeral_checkpoints": [],
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.random.get_rng_state(),
            "cuda": torch.random.get_rng_state(),
        },
        "grad_norms": np.array([0.5, 0.25], dtype=np.float32),
        "loss": np.float64(2.5),
    }


def everything() -> dict[str, Any]:
    """Return a state with one value of each kind that is loaded by default."""
    with_note = torch.ones(2)
    with_note.note = {"a": 1}  # type: ignore[attr-defined]
    return {
        "timedelta": dt.timedelta(1, 2, 3),
        "datetime": dt.datetime(2026, 11, 22, 1, 2, 3, 4, tzinfo=dt.UTC),
        "naive": dt.datetime(2026, 11, 22),  # noqa: DTZ001
        "zone": dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2), "here")),
        "date": dt.date(2026, 11, 22),
        "time": dt.time(1, 2),
        "deque": collections.deque([1, {"a": 2}], maxlen=5),
        "empty deque": collections.deque(),
        "defaultdict": collections.defaultdict(list, a=[1]),
        "nested defaultdict": collections.defaultdict(dict, a=collections.defaultdict(int, b=2)),
        "Counter": collections.Counter("aab"),
        "OrderedDict": collections.OrderedDict(b=1, a=2),
        "paths": [pathlib.Path("/x/y"), pathlib.PurePosixPath("z"), pathlib.PureWindowsPath("c:/x")],
        "size": torch.Size([1, 2]),
        "types": [torch.bfloat16, torch.device("cuda", 0), torch.device("cpu"), torch.strided],
        "fractions": [fractions.Fraction(-1, 3), fractions.Fraction(2), decimal.Decimal("1.50")],
        "sets": [{1, 2}, set(), frozenset("ab"), frozenset()],
        "numbers": [1 + 2j, 1 << 100, -1, 255, 1 << 40, 2.5, float("inf"), True, None],
        "bytes": [b"\x00\xff", b"", bytearray(b"x\xff"), bytearray(), b"long" * 100],
        "range": range(0, 9, 2),
        (1, ("a", 2.5)): "a tuple as a key",
        torch.float32: "a dtype as a key",
        "arrays": {
            "matrix": np.arange(6.0).reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
            "texts": np.array(["a", "bcd"]),
            "bytes": np.array([b"a", b"bc"]),
            "bools": np.array([True, False]),
            "complex": np.array([1 + 2j]),
            "big-endian": np.arange(3, dtype=">i4"),
            "empty": np.zeros((0, 3)),
            "0-d": np.array(5),
        },
        "scalars": [np.float32(3), np.int64(4), np.bool_(True), np.str_("ä"), np.dtype("int32")],
        "tensors": {
            "uint16": torch.arange(3).to(torch.uint16),
            "float8": torch.ones(3).to(torch.float8_e4m3fn),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "frozen parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
            "expanded": torch.zeros(1).expand(5),
            "view": torch.arange(10)[2:8:2],
            "sparse": torch.eye(3).to_sparse(),
            "channels last": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3.5),
            "with an attribute": with_note,
            "needs gradients": torch.ones(2, requires_grad=True),
        },
        "generator": torch.Generator().manual_seed(3).get_state(),
    }


def is_same(a: Any, b: Any) -> bool:
    """Return whether two states are equal in content and in type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided:
            return a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
        looks = [(each.dtype, each.shape, each.stride(), each.requires_grad, vars(each)) for each in (a, b)]
        return looks[0] == looks[1] and a.detach().flatten().tolist() == b.detach().flatten().tolist()
    if isinstance(a, np.ndarray):
        orders = [(each.shape, each.flags.f_contiguous, each.dtype.newbyteorder("=")) for each in (a, b)]
        return orders[0] == orders[1] and bool((a == b).all())
    if isinstance(a, dict):
        has_same_keys = list(a) == list(b) and getattr(a, "default_factory", 0) == getattr(
            b, "default_factory", 0
        )
        return has_same_keys and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        is_as_long = len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        return is_as_long and all(map(is_same, a, b))
    return bool(a == b)


def dumped(state: Any, protocol: int = 2) -> bytes:
    """Return the bytes that torch.save writes."""
    stream = io.BytesIO()
    torch.save(state, stream, pickle_protocol=protocol)
    return stream.getvalue()


def unpacked(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return the pickle of a torch file, and its other records."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return records.pop("data.pkl"), records


def packed(pickle: bytes, records: Mapping[str, bytes] = {"data/0": bytes(64)}) -> bytes:
    """Return a torch file that contains this pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {"data.pkl": pickle, **records}.items():
            archive.writestr(f"a/{name}", content)
    return stream.getvalue()
