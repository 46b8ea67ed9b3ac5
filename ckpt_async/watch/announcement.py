"""The message by which the node that has a checkpoint's marker announces it to the others. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from ckpt_async.core.model import CheckpointId
from ckpt_async.core.naming import check_component, check_relative
from ckpt_async.core.records import MAX_RECEIPT_SIZE_BYTES, parse
from ckpt_async.errors import InvalidNameError, InvalidRecordError

_FORMAT = "ckpt_async/announcement"
_ILL_FORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, InvalidNameError)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a file, as far as it shows that another one is different. For `sample`, see `disk.sample`."""

    size_bytes: int
    mtime_ns: int
    sample: int | None


@dataclass(frozen=True, slots=True)
class Announcement:
    """States that a checkpoint is complete: every node sends what it has of it and `node` has not.

    `here` names the files that `node` has, with their versions, since other nodes must not have different ones.
    `expected` names all that the marker names. `completed_ns` is when the marker was written, by the clock of `node`;
    0 if times tell nothing (`Rules.ignores_times`).
    """

    checkpoint: CheckpointId
    node: int
    format: str
    path: str  # in the watched folder; "": the folder itself
    name: str
    here: Mapping[str, Version]
    expected: tuple[str, ...]
    completed_ns: int = 0

    @property
    def step(self) -> int:
        return self.checkpoint.step

    def encode(self) -> bytes:
        fields = {"format": _FORMAT, "version": 3, "node": self.node, "of": self.format, "path": self.path}
        here = {name: astuple(each) for name, each in self.here.items()}
        names = {"name": self.name, "here": here, "expected": self.expected}
        return (
            json.dumps({**fields, **names, "completed_ns": self.completed_ns}, sort_keys=True).encode()
            + b"\n"
        )

    @classmethod
    def decode(cls, data: bytes, checkpoint: CheckpointId) -> Announcement:
        """Decode an announcement. Raises InvalidRecordError, because what another machine wrote is untrusted input."""
        try:
            fields = parse("announcement", data, MAX_RECEIPT_SIZE_BYTES)
            if fields["format"] != _FORMAT or fields["version"] != 3:
                raise InvalidRecordError(
                    f"announcement of {checkpoint} has an unknown format: {fields['format']} {fields['version']}"
                )
            return cls(
                checkpoint,
                int(fields["node"]),
                check_component(fields["of"], "format"),
                _path(fields["path"]),
                check_component(fields["name"], "name"),
                {check_relative(name, "file"): _version(each) for name, each in fields["here"].items()},
                tuple(check_relative(each, "file") for each in fields["expected"]),
                int(fields["completed_ns"]),
            )
        except _ILL_FORMED as error:
            raise InvalidRecordError(f"announcement of {checkpoint} cannot be read: {error}") from None


def _path(value: object) -> str:
    """Return a path, checked to be within the watched folder. Its folders may have any name."""
    if not isinstance(value, str) or (value and not {"", ".", ".."}.isdisjoint(value.split("/"))):
        raise ValueError(f"the path {value!r} is invalid")
    return value


def _version(value: list[int | None]) -> Version:
    size_bytes, mtime_ns, sample = value
    if size_bytes is None or mtime_ns is None:
        raise ValueError("a file's version is incomplete")
    return Version(int(size_bytes), int(mtime_ns), None if sample is None else int(sample))
