"""What the node that has a checkpoint's mark tells the others. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ckpt_async.core.model import CheckpointId
from ckpt_async.core.naming import check_component, check_relative
from ckpt_async.errors import InvalidNameError, InvalidRecordError

_FORMAT = "ckpt_async/announcement"


@dataclass(frozen=True, slots=True)
class Announcement:
    """A checkpoint is complete: every node sends what it has of it and `node` has not. `here` names what that has,
    `expected` all that the mark names. `marked_ns` is when that was written, by the clock of `node`; 0 if times tell
    nothing (`Rules.ignores_times`).
    """

    checkpoint: CheckpointId
    node: int
    format: str
    path: str  # in the watched folder; "": the folder itself
    name: str
    here: tuple[str, ...]
    expected: tuple[str, ...]
    marked_ns: int = 0

    def encode(self) -> bytes:
        fields = {"format": _FORMAT, "version": 2, "node": self.node, "of": self.format, "path": self.path}
        names = {"name": self.name, "here": self.here, "expected": self.expected}
        return json.dumps({**fields, **names, "marked_ns": self.marked_ns}, sort_keys=True).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, checkpoint: CheckpointId) -> Announcement:
        """Raises InvalidRecordError: what another machine wrote is input."""
        try:
            fields = json.loads(data)
            if fields["format"] != _FORMAT or fields["version"] != 2:
                raise InvalidRecordError(
                    f"announcement of {checkpoint}: {fields['format']} {fields['version']}"
                )
            if fields["path"]:
                check_relative(fields["path"], "path")
            return cls(
                checkpoint,
                int(fields["node"]),
                check_component(fields["of"], "format"),
                fields["path"],
                check_component(fields["name"], "name"),
                tuple(check_relative(each, "file") for each in fields["here"]),
                tuple(check_relative(each, "file") for each in fields["expected"]),
                int(fields["marked_ns"]),
            )
        except (ValueError, LookupError, TypeError, RecursionError, InvalidNameError) as error:
            raise InvalidRecordError(f"announcement of {checkpoint} cannot be read: {error}") from None
