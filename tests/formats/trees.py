"""Folders as values: what a format's writer has left when it is done, and at each moment before."""

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

from ckpt_async.formats import Identity, Tree

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


def tree_of(
    written: Mapping[str, bytes],
    *,
    root: str = "run",
    changed_ns: Mapping[str, int] | None = None,
    now_s: float = 0,
    links: tuple[str, ...] = (),
    ctime_ns: Mapping[str, int] | None = None,
    born_ns: Mapping[str, int] | None = None,
) -> Tree:
    """Files in the order in which they were written, a second each."""
    files = {
        path: Identity(inode, len(data), START + inode * SECOND)
        for inode, (path, data) in enumerate(written.items(), start=1)
    }

    def read(path: str, offset: int, size_bytes: int) -> bytes:
        data = written[path]
        start = offset if offset >= 0 else max(0, len(data) + offset)
        return data[start : start + size_bytes]

    now_ns = int(START + (len(written) + now_s) * SECOND)
    born = (born_ns or {}).get
    return Tree(
        *(files, read, root, now_ns, changed_ns or {}, links),
        ctime_ns=ctime_ns or {},
        born_ns=lambda path: born(path, 0),
    )


def torch_zip(*, tensor: bytes | None = b"\0" * 400, **state: Any) -> bytes:
    """As torch.save writes it: `archive/data.pkl` first, stored."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(state, protocol=2))
        if tensor is not None:
            file.writestr("archive/data/0", tensor)
    return buffer.getvalue()


def safetensors(size_bytes: int = 64) -> bytes:
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size_bytes, size_bytes)
    return struct.pack("<Q", len(header)) + header + b"\1" * size_bytes
