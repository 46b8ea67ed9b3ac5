"""Every decoder of what is not ours, on bytes changed at random from real ones: the right value or an error of ours, in
memory in proportion. Fixed seed: a failure is always the same one.
"""

from __future__ import annotations

import pickle
import pickletools
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_async import Uploader
from ckpt_async.core import keys, records
from ckpt_async.core.boundary import Boundary, Checkpoints
from ckpt_async.core.model import Beat, CheckpointId, Checksum, Claim, Damage, Generation, Lease, Target
from ckpt_async.core.pickled import Rules
from ckpt_async.errors import CkptAsyncError
from ckpt_async.formats import Identity, Tree, find
from ckpt_async.formats.dcp_files import named_files
from ckpt_async.local import journals
from ckpt_async.restore.objects import pointed
from ckpt_async.runners import wire
from ckpt_async.torch.dcp_metadata import load_metadata
from ckpt_async.watch.announcement import Announcement, Version

MIB = 1 << 20
SEED = 42
NUM_MUTANTS = 60
DENSE_BYTES = MIB // 2
# At most this much for each byte of input, and the floor that the smallest may take.
TIMES, FLOOR_BYTES = 50, 4 * MIB
ID = CheckpointId(3, 100)
# What takes the most memory for each byte: containers, marks, memos, objects, numbers, escapes.
DENSE = (b"]", b"}", b"(", b"N\x94", b"N\x85", b")\x81", b"[],", b"{},", b"0,", b'"a":[],', b"\\u0000", b"/a")


class Decoder(NamedTuple):
    decode: Callable[[bytes], Any]
    seed: bytes
    encode: Callable[[Any], bytes] | None = None


def _records() -> Iterator[tuple[str, Decoder]]:
    some = Checkpoints.of([CheckpointId(1, step) for step in range(0, 500, 10)])
    checksum = Checksum("crc64nvme", "AAAAAAAAAAA=")
    key = f"exact/{ID.step}"
    claim = Claim(key, ID, keys.data_key("step-100", 3, "m.pt"), 5, checksum, 1, "n")
    for name, value, encode, decode in (
        ("boundary", Boundary(ID, some, 2, "n"), records.encode_boundary, records.decode_boundary),
        ("lease", Lease(ID, "me", 60.0), records.encode_lease, records.decode_lease),
        ("target", Target(ID, 1, "n"), records.encode_target, records.decode_target),
        ("owed", some, records.encode_owed, records.decode_owed),
        (
            "damage",
            Damage(ID, "why", "me", 1.5),
            records.encode_damage,
            lambda data: records.decode_damage(data, ID),
        ),
        ("claim", claim, records.encode_claim, lambda data: records.decode_claim(data, key)),
        (
            "generation",
            Generation(3, "k", 8, "host", "n", 1.5),
            records.encode_generation,
            lambda data: records.decode_generation(data, 3),
        ),
        ("beat", Beat(3, 0, 7), records.encode_beat, lambda data: records.decode_beat(data, 3)),
    ):
        yield name, Decoder(decode, encode(value), encode)  # type: ignore[operator]
    here = {f"model-{n:05d}.safetensors": Version(n, 1_700_000_000_000_000_000, n) for n in range(100)}
    announced = Announcement(ID, 1, "dcp", "run/step-100", "step-100", here, tuple(here), 7)
    yield (
        "announcement",
        Decoder(lambda data: Announcement.decode(data, ID), announced.encode(), Announcement.encode),
    )


def _of_a_run(tmp_path: Path) -> Iterator[tuple[str, Decoder]]:
    """The records that a real run leaves."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.pt").write_bytes(b"weights")
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/remote", rank=0, world_size=1) as uploader:
        uploader.enqueue(tmp_path / "folder" / "model.pt", 100)
        uploader.seal(100, metrics={"loss": 0.5})
        uploader.wait(100, timeout_s=60)
    id_ = CheckpointId(1, 100)
    for key, encode, decode in (
        (
            keys.receipt_key(id_, 0),
            records.encode_receipt,
            lambda data: records.decode_receipt(data, id_, 0),
        ),
        (
            keys.decision_key(id_),
            records.encode_decision,
            lambda data: records.decode_decision(data, id_),
        ),
        (keys.LATEST, records.encode_latest, records.decode_latest),
    ):
        yield key, Decoder(decode, (tmp_path / "remote" / key).read_bytes(), encode)  # type: ignore[operator]
    journal = tmp_path / "other" / keys.PRIVATE / keys.journal_name(0)
    journal.parent.mkdir(parents=True)

    def of_a_folder(data: bytes) -> object:
        journal.write_bytes(data)
        return journals.read(tmp_path / "other")[0].rows

    name = journal.relative_to(tmp_path / "other")
    yield "journal", Decoder(of_a_folder, (tmp_path / "folder" / name).read_bytes())
    listed = "\n".join(
        str(each.relative_to(tmp_path / "remote")) for each in (tmp_path / "remote").rglob("*")
    )
    others = "step20/config.yaml\nstep20/model.pt\nep1-ba20-rank0.pt\n20/commit_success.txt\nstep-20_ckpt/.metadata"
    yield "listing", Decoder(_listed, f"{listed}\n{others}".encode())


def _listed(data: bytes) -> object:
    names = [each[:1024] for each in data.decode(errors="replace").split("\n")]  # no store has longer ones
    parsers = [each for name, each in vars(keys).items() if name.startswith("parse_")]
    tree = Tree({name: Identity(0, 1, 0) for name in names if name}, lambda *_: b"x")
    return find(tree), [[parse(name) for parse in parsers] for name in names]


def _others() -> Iterator[tuple[str, Decoder]]:
    size = torch.Size([4, 4])
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in range(4)]
    weights = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    places = {
        MetadataIndex("w", each.offsets, n): _StorageInfo("0.distcp", n * 16, 16)
        for n, each in enumerate(chunks)
    }
    real = Metadata({"w": weights, "x": BytesStorageMetadata()}, {"w": ("model", "w")}, places)
    for protocol, decode in ((2, named_files), (4, named_files), (4, load_metadata)):
        yield decode.__name__, Decoder(decode, pickle.dumps(real, protocol=protocol))
    yield (
        "packet",
        Decoder(
            wire.decode, wire.encode("report", {"a": [1, 2], "b": None}), lambda each: wire.encode(*each)
        ),
    )
    yield (
        "pointer",
        Decoder(lambda data: pointed(data.decode(errors="replace"), "it"), b"run/step-20/model.pt"),
    )


def _mutants(chance: random.Random, seed: bytes) -> Iterator[bytes]:
    is_pickle = seed[:1] == b"\x80"
    places = [at for _, _, at in pickletools.genops(seed) if at] if is_pickle else range(len(seed))
    for _ in range(NUM_MUTANTS):
        data = bytearray(seed)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data) + 1)
            to = min(len(data), at + chance.randint(1, 20))
            match chance.randrange(5):
                case 0:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 1:
                    del data[at:to]
                case 2:
                    data[at:at] = data[at:to] * chance.choice((1, 2, 1000))
                case 3:
                    data[at:at] = chance.choice(DENSE) * chance.choice((1, 1000))
                case _:
                    data = data[:at] or bytearray(b"\0")
        yield bytes(data)
    at, dense = chance.choice(places), chance.choice(DENSE[:4] if is_pickle else DENSE[6:])
    yield seed[:at] + dense * (DENSE_BYTES // len(dense)) + seed[at:]


def _weaknesses(decoders: dict[str, Decoder]) -> list[str]:
    """Return what was neither the right value nor an error of ours, or took too much memory."""
    found: list[str] = []
    num_read = 0
    for name, (decode, seed, encode) in decoders.items():
        chance = random.Random(f"{SEED} {name}")
        decode(seed)  # also imports what it needs
        for data in _mutants(chance, seed):
            tracemalloc.start()
            try:
                value = decode(data)
                if encode is not None and decode(encode(value)) != value:
                    found.append(f"{name}: another value from {data[:200]!r}")
                num_read += 1
            except CkptAsyncError:
                pass
            except Exception as error:
                found.append(f"{name}: {error!r:.200} from {len(data)} bytes {data[:200]!r}")
            finally:
                _, peak_bytes = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            if peak_bytes > TIMES * len(data) + FLOOR_BYTES:
                found.append(
                    f"{name}: {peak_bytes / MIB:.0f} MiB for {len(data) / MIB:.2f} MiB {data[:50]!r}"
                )
    print(f"decoders={len(decoders)} readable={num_read} weaknesses={len(found)}")
    return found


@pytest.mark.fault("F28")
def test_a_changed_record_is_refused_or_read_in_little_memory(tmp_path: Path) -> None:
    assert _weaknesses({**dict(_records()), **dict(_of_a_run(tmp_path)), **dict(_others())}) == []


def test_a_decoder_without_its_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no weakness must be known to find one."""
    monkeypatch.setattr(Rules, "spend", lambda *_: None)
    assert any("MiB for" in each for each in _weaknesses(dict(_others())))
