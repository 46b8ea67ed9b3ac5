"""What the ids of blocks tell. Pure.

Uncommitted blocks are the parts of an upload. Azure keeps one set of them per blob, whoever sent them, and lists only
id and size of each. So the id has to carry the rest: the upload, the part number, and the checksum.
"""

from __future__ import annotations

import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_async.core.model import Checksum
from ckpt_async.stores.interface import StoredPart

ALGORITHM = "crc64nvme"
# Every upload has a block of this number from the start; without it, an upload with no parts yet would not exist.
MARK = 0
_UNKNOWN = "-" * 16
_BLOCK = re.compile(r"(?P<upload>[0-9a-f]{24})\.(?P<number>[0-9]{5})\.(?P<checksum>[0-9a-f]{16}|-{16})")


@dataclass(frozen=True, slots=True)
class Block:
    """An uncommitted block of one of our uploads."""

    id: str  # in base64, as the service has it
    upload_id: str
    number: int
    checksum: Checksum | None  # None if the service has copied it
    size_bytes: int

    def as_part(self) -> StoredPart:
        return StoredPart(self.number, self.size_bytes, self.id, self.checksum)


def new_upload_id(server_time: float) -> str:
    """Return a new unique id, which begins with the time by the store's clock."""
    return f"{int(server_time):08x}{secrets.token_hex(8)}"


def began_at(upload_id: str) -> float:
    """Return when an upload began, by the store's clock, to the second."""
    return float(int(upload_id[:8], 16))


def block_id(upload_id: str, number: int, checksum: Checksum | None) -> str:
    """Return the id of a block. All ids have the same length, as Azure demands."""
    told = _UNKNOWN if checksum is None else b64decode(checksum.value).hex()
    return b64encode(f"{upload_id}.{number:05}.{told}".encode()).decode()


def block_of(id_: str, size_bytes: int) -> Block | None:
    """Decode a block, or return None if another program has sent it."""
    try:
        found = _BLOCK.fullmatch(b64decode(id_, validate=True).decode())
    except ValueError:
        return None
    if found is None:
        return None
    told = found["checksum"]
    checksum = None if told == _UNKNOWN else Checksum(ALGORITHM, b64encode(bytes.fromhex(told)).decode())
    return Block(id_, found["upload"], int(found["number"]), checksum, size_bytes)


def parts_of(blocks: Sequence[Block], upload_id: str) -> list[StoredPart] | None:
    """Return the parts of one upload, by number, or None if there is no such upload. If a part was sent twice with
    different bytes, either may be returned: whoever resumes compares its checksum.
    """
    own = {block.number: block for block in blocks if block.upload_id == upload_id}
    if MARK not in own:
        return None
    return [own[number].as_part() for number in sorted(own) if number != MARK]
