"""Compares the records of a torch.save file, which is a zip archive, with the checksums that the file has of them."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from awscrt import checksums as crt

_READ_BYTES = 8 << 20


def wrong_record(path: Path) -> str:
    """Return the first record of a torch.save file that does not match the checksum that the file has of it.

    If something else is wrong with the file, return that; "" if all records are right. A checksum of 0 is not compared:
    torch can be told to compute none.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb", buffering=0) as file:
            room = memoryview(bytearray(_READ_BYTES))
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:  # torch compresses none
                    with archive.open(record) as compressed:
                        while compressed.read(_READ_BYTES):
                            pass
                    continue
                file.seek(record.header_offset + 26)
                file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
                left, crc = record.file_size, 0
                while left and (count := file.readinto(room[: min(left, _READ_BYTES)])):
                    left, crc = left - count, crt.crc32(room[:count], crc)
                if left or (record.CRC and crc != record.CRC):
                    return f"{record.filename} does not match the zip directory"
    except Exception as error:  # noqa: BLE001  whatever is wrong with it
        return repr(error)
    return ""
