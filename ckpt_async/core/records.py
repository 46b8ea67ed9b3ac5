"""Protocol objects <-> bytes: JSON with a format version, canonical, size-capped, schema-checked. Pure.

Whatever another machine wrote is untrusted input: every decoder raises InvalidRecordError for anything that this
package cannot have written, before it costs memory or time (fault F28). No pickle, no YAML, ever.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_async.core import keys
from ckpt_async.core.boundary import (
    MAX_BOUNDARY_SIZE_BYTES,
    Boundary,
    Checkpoints,
    checkpoints_as_json,
    checkpoints_from_json,
    sets_as_json,
    sets_from_json,
)
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import (
    Beat,
    CheckpointId,
    Checksum,
    Claim,
    Damage,
    Decision,
    Enqueued,
    FileIdentity,
    Generation,
    Latest,
    Lease,
    Outcome,
    Receipt,
    Sealed,
    Shard,
    StoredShard,
    Target,
    without_slash,
)
from ckpt_async.core.naming import check_publish_as, check_relative, checkpoint_name
from ckpt_async.errors import InvalidNameError, InvalidRecordError, UnknownVersionError

FORMAT_VERSION = 1
# A receipt of 100,000 shards takes about 20 MiB; a decision holds 30 bytes per rank.
MAX_RECEIPT_SIZE_BYTES = 64 << 20
MAX_RECORD_SIZE_BYTES = 8 << 20

Json = dict[str, Any]


# --- receipts ----------------------------------------------------------------------------------------------


def encode_receipt(receipt: Receipt) -> bytes:
    return _encode(
        "receipt",
        {
            **_checkpoint_fields(receipt.checkpoint),
            **_fields_of(receipt, "name", "rank", "world_size"),
            "metrics": dict(receipt.metrics),
            "shards": [
                _fields_of(shard, "name", "key", "size_bytes")
                | _checksum_fields(shard.checksum)
                | _publish_fields(shard)
                for shard in receipt.shards
            ],
            "expected": list(receipt.expected),
            "nonce": receipt.nonce,
        },
    )


def decode_receipt(data: bytes, expected: CheckpointId, rank: int) -> Receipt:
    """Decode a receipt and check that it belongs under its key.

    A receipt of another checkpoint, generation or rank under this key would mix checkpoints (rule R5).
    """
    fields = _decode("receipt", data, MAX_RECEIPT_SIZE_BYTES)
    name = _name(fields)
    receipt = Receipt(
        checkpoint=_checkpoint(fields),
        name=name,
        rank=_int(fields, "rank", 0, keys.MAX_RANK),
        world_size=_int(fields, "world_size", 1, keys.MAX_RANK + 1),
        shards=_stored_shards(_list(fields, "shards"), keys.data_prefix(name, expected.generation)),
        metrics=_metrics(fields),
        expected=_expected(fields),
        nonce=_str(fields, "nonce"),
    )
    if (receipt.checkpoint, receipt.rank) != (expected, rank):
        raise InvalidRecordError(
            f"receipt of rank {receipt.rank}, {receipt.checkpoint} found under the key of rank {rank}, {expected}"
        )
    if receipt.rank >= receipt.world_size:
        raise InvalidRecordError(f"receipt: rank {receipt.rank} is not below world size {receipt.world_size}")
    if len({shard.name for shard in receipt.shards}) != len(receipt.shards):
        raise InvalidRecordError(f"receipt of rank {rank}, {expected} lists a shard twice")
    return receipt


def _stored_shards(items: Iterable[object], prefix: str) -> tuple[StoredShard, ...]:
    found = []
    for item in items:
        fields = _object(item, "shard")
        name, key = _relative(fields, "name"), _str(fields, "key")
        if key != prefix + name:
            raise InvalidRecordError(f"receipt: key {key!r} is not that of shard {name!r}")
        size_bytes = _int(fields, "size_bytes", 0, 1 << 60)
        found.append(StoredShard(name, key, size_bytes, _checksum(fields), _publish_as(fields)))
    return tuple(found)


def _publish_fields(shard: Shard | StoredShard) -> Json:
    """Return the field `publish_as`, or none for a shard that is not published, as almost all are."""
    return {"publish_as": shard.publish_as} if shard.publish_as else {}


def _expected(fields: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_relative({"expected": name}, "expected") for name in _list(fields, "expected"))


def _publish_as(fields: Mapping[str, Any]) -> str:
    if "publish_as" not in fields:
        return ""
    try:
        return check_publish_as(_str(fields, "publish_as"))
    except InvalidNameError as error:
        raise InvalidRecordError(str(error)) from None


# --- decisions, latest, generations ------------------------------------------------------------------------


def encode_decision(decision: Decision) -> bytes:
    return _encode(
        "decision",
        {
            **_checkpoint_fields(decision.checkpoint),
            **_fields_of(decision, "name", "world_size", "nonce", "decided_at", "decided_by"),
            **_fields_of(decision, "num_shards", "size_bytes", "reason"),
            **_fields_of(decision, "is_pinned", "is_superseded", "is_lost_by_store"),
            "outcome": decision.outcome.value,
            "receipts": [_checksum_fields(checksum) for checksum in decision.receipts],
            "metrics": dict(decision.metrics),
        },
    )


def decode_decision(data: bytes, expected: CheckpointId) -> Decision:
    fields = _decode("decision", data, MAX_RECORD_SIZE_BYTES)
    try:
        outcome = Outcome(_str(fields, "outcome"))
    except ValueError:
        raise InvalidRecordError(f"decision: unknown outcome {_shown(fields['outcome'])}") from None
    decision = Decision(
        checkpoint=_checkpoint(fields),
        outcome=outcome,
        name=_name(fields),
        world_size=_int(fields, "world_size", 1, keys.MAX_RANK + 1),
        nonce=_str(fields, "nonce"),
        decided_at=_float(fields, "decided_at"),
        decided_by=_str(fields, "decided_by"),
        receipts=tuple(_checksum(_object(item, "receipt")) for item in _list(fields, "receipts")),
        num_shards=_int(fields, "num_shards", 0, 1 << 40),
        size_bytes=_int(fields, "size_bytes", 0, 1 << 62),
        metrics=_metrics(fields),
        reason=_str(fields, "reason"),
        is_pinned=_bool(fields, "is_pinned"),
        is_superseded=_bool(fields, "is_superseded"),
        is_lost_by_store=_bool(fields, "is_lost_by_store"),
    )
    if decision.checkpoint != expected:
        raise InvalidRecordError(f"decision of {decision.checkpoint} found under the key of {expected}")
    if outcome is not Outcome.ABORT and len(decision.receipts) != decision.world_size:
        raise InvalidRecordError(
            f"decision of {expected}: {len(decision.receipts)} receipts for world size {decision.world_size}"
        )
    return decision


def encode_boundary(boundary: Boundary) -> bytes:
    fields = _checkpoint_fields(boundary.upto) | _fields_of(boundary, "number", "nonce")
    return _encode("boundary", fields | sets_as_json(boundary))


def decode_boundary(data: bytes) -> Boundary:
    fields = _decode("boundary", data, MAX_BOUNDARY_SIZE_BYTES)
    generation, step = (
        _int(fields, "generation", 0, keys.MAX_GENERATION),
        _int(fields, "step", 0, keys.MAX_STEP),
    )
    number, nonce = _int(fields, "number", 1, 1 << 62), _str(fields, "nonce")
    return Boundary(CheckpointId(generation, step), number=number, nonce=nonce, **sets_from_json(fields))


def encode_lease(lease: Lease) -> bytes:
    return _encode("lease", _checkpoint_fields(lease.checkpoint) | _fields_of(lease, "reader", "ttl_s"))


def decode_lease(data: bytes) -> Lease:
    fields = _decode("lease", data, MAX_RECORD_SIZE_BYTES)
    return Lease(_checkpoint(fields), _str(fields, "reader"), _float(fields, "ttl_s"))


def encode_damage(damage: Damage) -> bytes:
    fields = _fields_of(damage, "reason", "found_by", "found_at")
    return _encode("damage", _checkpoint_fields(damage.checkpoint) | fields)


def decode_damage(data: bytes, expected: CheckpointId) -> Damage:
    fields = _decode("damage", data, MAX_RECORD_SIZE_BYTES)
    damage = Damage(
        checkpoint=_checkpoint(fields),
        reason=_str(fields, "reason"),
        found_by=_str(fields, "found_by"),
        found_at=_float(fields, "found_at"),
    )
    if damage.checkpoint != expected:
        raise InvalidRecordError(f"damage: it is about {damage.checkpoint}, not about {expected}")
    return damage


def encode_latest(latest: Latest) -> bytes:
    fields = _fields_of(latest, "name", "prefix", "number", "nonce")
    return _encode("latest", _checkpoint_fields(latest.checkpoint) | fields)


def decode_latest(data: bytes) -> Latest:
    fields = _decode("latest", data, MAX_RECORD_SIZE_BYTES)
    checkpoint, name = _checkpoint(fields), _name(fields)
    latest = Latest(
        checkpoint=checkpoint,
        name=name,
        prefix=_str(fields, "prefix"),
        number=_int(fields, "number", 0, 1 << 62),
        nonce=_str(fields, "nonce"),
    )
    if latest.prefix != keys.data_prefix(name, checkpoint.generation):
        raise InvalidRecordError(f"latest: prefix {latest.prefix!r} is not that of {name!r}")
    return latest


def encode_target(target: Target) -> bytes:
    return _encode("target", _checkpoint_fields(target.checkpoint) | _fields_of(target, "number", "nonce"))


def decode_target(data: bytes) -> Target:
    fields = _decode("target", data, MAX_RECORD_SIZE_BYTES)
    return Target(_checkpoint(fields), _int(fields, "number", 0, 1 << 62), _str(fields, "nonce"))


def encode_owed(owed: Checkpoints) -> bytes:
    return _encode("owed", {"owed": checkpoints_as_json(owed)})


def decode_owed(data: bytes) -> Checkpoints:
    return checkpoints_from_json(_decode("owed", data, MAX_BOUNDARY_SIZE_BYTES).get("owed"))


def encode_claim(claim: Claim) -> bytes:
    fields = _fields_of(claim, "key", "source", "size_bytes", "number", "nonce")
    return _encode("claim", _checkpoint_fields(claim.checkpoint) | _checksum_fields(claim.checksum) | fields)


def decode_claim(data: bytes, key: str) -> Claim:
    fields = _decode("claim", data, MAX_RECORD_SIZE_BYTES)
    claim = Claim(
        key=_publish_as({"publish_as": _str(fields, "key")}),
        checkpoint=_checkpoint(fields),
        source=_relative(fields, "source"),
        size_bytes=_int(fields, "size_bytes", 0, 1 << 60),
        checksum=_checksum(fields),
        number=_int(fields, "number", 1, 1 << 62),
        nonce=_str(fields, "nonce"),
    )
    named = keys.parse_data_key(claim.source)
    if claim.key != key or named is None or named[0] != claim.checkpoint:
        raise InvalidRecordError(f"claim of {claim.source!r} on {claim.key!r} found under that of {key!r}")
    return claim


def encode_copy(source: str, nonce: str) -> bytes:
    return _encode("copy", {"source": source, "nonce": nonce})


def decode_copy(data: bytes) -> str:
    """Return the URL of the run that is being copied."""
    return _str(_decode("copy", data, MAX_RECORD_SIZE_BYTES), "source")


def encode_generation(generation: Generation) -> bytes:
    fields = _fields_of(generation, "launch_key", "world_size", "host", "nonce", "claimed_at")
    return _encode("generation", {"generation": generation.number, **fields})


def decode_generation(data: bytes, expected: int) -> Generation:
    fields = _decode("generation", data, MAX_RECORD_SIZE_BYTES)
    generation = Generation(
        number=_int(fields, "generation", 1, keys.MAX_GENERATION),
        launch_key=_str(fields, "launch_key"),
        world_size=_int(fields, "world_size", 1, keys.MAX_RANK + 1),
        host=_str(fields, "host"),
        nonce=_str(fields, "nonce"),
        claimed_at=_float(fields, "claimed_at"),
    )
    if generation.number != expected:
        raise InvalidRecordError(f"generation {generation.number} found under the key of {expected}")
    return generation


def encode_member(nonce: str, rank: int) -> bytes:
    return _encode("member", {"nonce": nonce, "rank": rank})


def decode_member(data: bytes) -> str:
    """Return the nonce of the process that has taken this rank's place in this generation."""
    return _str(_decode("member", data, MAX_RECORD_SIZE_BYTES), "nonce")


def encode_beat(beat: Beat) -> bytes:
    return _encode("beat", _fields_of(beat, "generation", "rank", "count"))


def decode_beat(data: bytes, expected: int) -> Beat:
    fields = _decode("beat", data, MAX_RECORD_SIZE_BYTES)
    generation = _int(fields, "generation", 1, keys.MAX_GENERATION)
    if generation != expected:
        raise InvalidRecordError(f"beat of generation {generation} found under the key of {expected}")
    return Beat(generation, _int(fields, "rank", 0, keys.MAX_RANK), _int(fields, "count", 1, 1 << 62))


# --- the spool's manifest: what the journal said, kept beside the links (rule R10) --------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says. In a run without a remote, `remote` and `nonce` (as in `Opened`) are "", in one with a
    remote `launch` is.
    """

    enqueued: list[Enqueued]
    sealed: Sealed | None
    remote: str
    launch: str
    nonce: str


def manifest_of(checkpoint: LocalCheckpoint, remote: str, nonce: str = "") -> bytes:
    """Encode what the journal says about a checkpoint's shards and its seal, with the time of the seal."""
    shards = (each.shard for each in checkpoint.shards.values())
    sealed = checkpoint.sealed and replace(checkpoint.sealed, sealed_at=checkpoint.sealed_at)
    return encode_manifest(checkpoint.id, checkpoint.name, shards, sealed, remote, nonce=nonce)


def encode_manifest(
    checkpoint: CheckpointId,
    name: str,
    shards: Iterable[Shard],
    sealed: Sealed | None,
    remote: str = "",
    launch: str = "",
    nonce: str = "",
) -> bytes:
    return _encode(
        "manifest",
        {
            **_checkpoint_fields(checkpoint),
            "name": name,
            "world_size": sealed.world_size if sealed else None,
            "metrics": dict(sealed.metrics) if sealed else {},
            "sealed_at": sealed.sealed_at if sealed else None,
            "expected": list(sealed.expected) if sealed else [],
            "shards": [_shard_fields(shard) for shard in shards],
            "remote": without_slash(remote),
            "launch": launch,
            "nonce": nonce,
        },
    )


def decode_manifest(data: bytes, expected: CheckpointId) -> Manifest:
    fields = _decode("manifest", data, MAX_RECEIPT_SIZE_BYTES)
    checkpoint, name = _checkpoint(fields), _name(fields)
    if checkpoint != expected:
        raise InvalidRecordError(f"manifest of {checkpoint} found under the name of {expected}")
    enqueued = [Enqueued(checkpoint, name, decode_shard(item)) for item in _list(fields, "shards")]
    sealed = None
    if _typed(fields, "world_size", lambda value: value is None or type(value) is int) is not None:
        world_size = _int(fields, "world_size", 1, keys.MAX_RANK + 1)
        sealed_at = _float(fields, "sealed_at")
        sealed = Sealed(checkpoint, name, world_size, _metrics(fields), sealed_at, _expected(fields))
    remote, launch, nonce = (_str(fields, each) for each in ("remote", "launch", "nonce"))
    return Manifest(enqueued, sealed, remote, launch, nonce)


def _shard_fields(shard: Shard) -> Json:
    identity = shard.identity
    return {
        "name": shard.name,
        "source": shard.source,
        "identity": [identity.device, identity.inode, identity.size_bytes, identity.mtime_ns],
        "is_linked": shard.is_linked,
        **_publish_fields(shard),
    }


def decode_shard(item: object) -> Shard:
    fields = _object(item, "shard")
    identity = _list(fields, "identity")
    if len(identity) != 4 or not all(type(number) is int for number in identity):
        raise InvalidRecordError(f"shard: identity {_shown(identity)} is not four numbers")
    if not isinstance(fields.get("is_linked"), bool):
        raise InvalidRecordError("shard: is_linked is not true or false")
    name, source = _relative(fields, "name"), _relative(fields, "source")
    return Shard(name, source, FileIdentity(*identity), fields["is_linked"], _publish_as(fields))


# --- JSON, capped and checked ------------------------------------------------------------------------------


def _encode(kind: str, fields: Json) -> bytes:
    document = {"format": f"ckpt_async/{kind}", "version": FORMAT_VERSION, **fields}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _decode(kind: str, data: bytes, max_size_bytes: int) -> Json:
    fields = parse(kind, data, max_size_bytes)
    if fields.get("format") != f"ckpt_async/{kind}":
        raise InvalidRecordError(f"{kind}: format is {_shown(fields.get('format'))}")
    version = fields.get("version")
    if version != FORMAT_VERSION or type(version) is not int:
        raise UnknownVersionError(
            f"{kind}: format version {_shown(version)}; this program reads only version {FORMAT_VERSION}",
            hint="if a newer ckpt_async wrote it, upgrade",
        )
    return fields


def parse(kind: str, data: bytes, max_size_bytes: int) -> Json:
    """Return the JSON object in `data`, which takes at most fifty times as much memory. Raises InvalidRecordError."""
    if len(data) > max_size_bytes:
        raise InvalidRecordError(f"{kind}: {len(data)} bytes, more than {max_size_bytes}")
    # `[],[],…` takes twenty times as much memory as it has bytes; only a small record, the boundary, is as dense.
    is_large = len(data) > MAX_BOUNDARY_SIZE_BYTES
    if is_large and (
        data.count(b"[") + data.count(b"{") > 100 + len(data) // 12 or data.count(b",") > 100 + len(data) // 8
    ):
        raise InvalidRecordError(f"{kind}: too many values for its {len(data)} bytes")
    try:
        document = json.loads(
            data, parse_int=_small_int, parse_constant=_no_constant, object_pairs_hook=_no_duplicates
        )
    except (ValueError, RecursionError) as error:  # deep nesting ends in RecursionError, not in a crash
        raise InvalidRecordError(f"{kind}: not JSON that this package writes: {error}") from None
    return _object(document, kind)


def _shown(value: object) -> str:
    """Return a short form of a value for a message, without walking into data that may be nested a thousand deep."""
    return (
        f"{str(value)[:80]!r}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    )


def _small_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"number of {len(text)} digits")
    return int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return result


def _object(value: object, what: str) -> Json:
    if not isinstance(value, dict):
        raise InvalidRecordError(f"{what}: not a JSON object")
    return value


def _typed(fields: Mapping[str, Any], name: str, is_right: Callable[[Any], bool]) -> Any:
    if name not in fields or not is_right(fields[name]):
        raise _unfit(fields, name)
    return fields[name]


def _unfit(fields: Mapping[str, Any], name: str) -> InvalidRecordError:
    if name not in fields:
        return InvalidRecordError(f"field {name!r} is missing")
    return InvalidRecordError(f"field {name!r} has the value {_shown(fields[name])}")


def _str(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _unfit(fields, name)
    return value


def _int(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _unfit(fields, name)
    return value


def _float(fields: Mapping[str, Any], name: str) -> float:
    return float(_typed(fields, name, lambda value: type(value) in (int, float) and math.isfinite(value)))


def _bool(fields: Mapping[str, Any], name: str) -> bool:
    return bool(_typed(fields, name, lambda value: isinstance(value, bool)))


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    return list(_typed(fields, name, lambda value: isinstance(value, list)))


def _fields_of(record: object, *names: str) -> Json:
    return {name: getattr(record, name) for name in names}


def _checkpoint_fields(checkpoint: CheckpointId) -> Json:
    return _fields_of(checkpoint, "generation", "step")


def _checksum_fields(checksum: Checksum) -> Json:
    return {checksum.algorithm: checksum.value}


def _checkpoint(fields: Mapping[str, Any]) -> CheckpointId:
    return CheckpointId(
        _int(fields, "generation", 1, keys.MAX_GENERATION), _int(fields, "step", 0, keys.MAX_STEP)
    )


def _name(fields: Mapping[str, Any]) -> str:
    """Return the checkpoint's name, which ends in its step, as `checkpoint_name` makes every name."""
    name, step = _str(fields, "name"), _checkpoint(fields).step
    try:
        if checkpoint_name(name, step) == name:
            return name
    except InvalidNameError as error:
        raise InvalidRecordError(str(error)) from None
    raise InvalidRecordError(f"checkpoint name {name!r} does not end in its step, {step}")


def _relative(fields: Mapping[str, Any], name: str) -> str:
    try:
        return check_relative(_str(fields, name), name)
    except InvalidNameError as error:
        raise InvalidRecordError(str(error)) from None


def _checksum(fields: Mapping[str, Any]) -> Checksum:
    for algorithm, width in (("crc64nvme", 8), ("crc32c", 4)):
        if algorithm in fields:
            value = _str(fields, algorithm)
            if not _is_base64(value, width):
                raise InvalidRecordError(f"{algorithm} {value[:40]!r} is not base64 of {width} bytes")
            return Checksum(algorithm, value)
    raise InvalidRecordError("no checksum")


def _is_base64(text: str, width: int) -> bool:
    try:
        return len(b64decode(text, validate=True)) == width
    except ValueError:
        return False


def _metrics(fields: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    metrics = _object(_typed(fields, "metrics", lambda value: isinstance(value, dict)), "metrics")
    return tuple((name, _float(metrics, name)) for name in sorted(metrics))
