"""A folder as one value: its files with their identities, and access to small parts of their content. Pure."""

from __future__ import annotations

import bisect
import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# The size of the end of a zip file, with the longest comment that the format allows.
_ZIP_TAIL_BYTES = 22 + 65_535
_MAX_SAFETENSORS_HEADER_BYTES = 100_000_000


class Identity(NamedTuple):
    """What tells one version of a file from another."""

    inode: int
    size_bytes: int
    mtime_ns: int


# Reads a part of a file, given its path, offset (from the end if negative) and size. Returns b"" if it is
# gone.
Read = Callable[[str, int, int], bytes]


@dataclass(frozen=True, slots=True)
class Tree:
    """The regular files below a folder, by their paths in it.

    `root` is the folder's own name. `changed_ns` tells when an entry was last made, renamed or removed directly in a
    folder. `ctime_ns` tells when a file was written, renamed or linked, or a folder changed or renamed. `links` are
    the symbolic links, which are not followed.
    """

    files: Mapping[str, Identity]
    read: Read
    root: str = ""
    now_ns: int = 0
    changed_ns: Mapping[str, int] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    # What was derived from a file's content, kept from look to look, since a `.metadata` may have a gigabyte.
    memo: dict[tuple[str, str, Identity], Any] = field(default_factory=dict)
    ctime_ns: Mapping[str, int] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)  # what cannot be read, and why
    # Unfinished downloads, by the folder they are written to.
    fetching: Mapping[str, str] = field(default_factory=dict)
    born_ns: Callable[[str], int] = lambda _: 0  # when a file was made; 0 if unknown
    _folders: dict[str, tuple[set[str], set[str]]] = field(default_factory=dict, init=False)
    # What was derived from the names in a folder.
    _derived: dict[tuple[str, str], Any] = field(default_factory=dict, init=False)
    _sorted: list[str] = field(default_factory=list, init=False)
    _all_folders: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._sorted.extend(sorted(self.files))
        self._folders[""] = (set(), set())
        for path in self.files:
            parts = path.split("/")
            for depth in range(1, len(parts)):
                above, here = "/".join(parts[: depth - 1]), "/".join(parts[:depth])
                self._folders.setdefault(above, (set(), set()))[1].add(parts[depth - 1])
                self._folders.setdefault(here, (set(), set()))
            self._folders["/".join(parts[:-1])][0].add(parts[-1])
        self._all_folders.extend(sorted({*self._folders, *self.changed_ns}))

    @property
    def folders(self) -> list[str]:
        return sorted(self._folders)

    def names(self, folder: str) -> set[str]:
        """Return the names of the files directly in a folder."""
        return self._folders.get(folder, (set(), set()))[0]

    def parts(self, folder: str) -> set[str]:
        """Return the names of the folders directly in a folder."""
        return self._folders.get(folder, (set(), set()))[1]

    def below(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder."""
        if not folder:
            return list(self._sorted)
        start, end = (
            bisect.bisect_left(self._sorted, f"{folder}{mark}") for mark in "/0"
        )  # "0" comes after "/"
        return self._sorted[start:end]

    def folders_below(self, folder: str) -> list[str]:
        """Return the folder and every folder below it, including those without files."""
        if not folder:
            return list(self._all_folders)
        start, end = (bisect.bisect_left(self._all_folders, f"{folder}{mark}") for mark in "/0")
        return [folder, *self._all_folders[start:end]]

    def links_below(self, folder: str) -> list[str]:
        """Return the symbolic links below a folder."""
        here = f"{folder}/" if folder else ""
        return [path for path in self.links if path.startswith(here)]

    def unreadable_below(self, folder: str) -> str:
        """Return the first unreadable path that concerns a folder, with the reason; "" if there is none.

        That is the folder itself, a folder that contains it, or something below it.
        """
        here = f"{folder}/" if folder else ""
        for path, why in self.unreadable.items():
            if not path or path.startswith(here) or here.startswith(f"{path}/"):
                return f"{path or '.'} cannot be read: {why}"
        return ""

    def fetched_to(self, folder: str) -> str:
        """Return an unfinished download into a folder, its ancestors or its descendants; "" if there is none.

        A download into the watched folder itself does not concern what others write in that folder.
        """
        here = f"{folder}/" if folder else ""
        for to, path in self.fetching.items():
            if f"{to}/".startswith(here) or (to and here.startswith(f"{to}/")):
                return path
        return ""

    def once(self, what: str, path: str, make: Callable[[], T]) -> T:
        """Return what `make` finds in a file, calling it once for each version of the file.

        If it finds nothing, or returns a reason why not, it is called again next time, since the read may have
        failed.
        """
        key = (what, path, self.files[path])
        if key in self.memo:
            known: T = self.memo[key]
            return known
        found = make()
        if found and not isinstance(found, str):
            self.memo[key] = found
        return found

    def once_in(self, what: str, folder: str, make: Callable[[], T]) -> T:
        """Return what `make` finds by the names in a folder, calling it once for each tree."""
        key = (what, folder)
        if key not in self._derived:
            self._derived[key] = make()
        derived: T = self._derived[key]
        return derived

    def text(self, path: str, most_bytes: int = 1 << 16) -> str:
        """Return the text of a small file, or of the first `most_bytes` of a larger one; "" if it is gone."""
        return self.read(path, 0, most_bytes).decode("utf-8", "replace") if path in self.files else ""

    def whole(self, path: str, most_bytes: int) -> bytes:
        return self.read(path, 0, min(self.files[path].size_bytes, most_bytes))

    def is_json(self, path: str, most_bytes: int = 1 << 26) -> bool:
        try:
            json.loads(self.whole(path, most_bytes))
            return True
        except (ValueError, RecursionError):
            return False

    def tensor_sums(self, path: str) -> dict[str, int]:
        """Return the CRC-32 of each tensor in a torch.save file, as the file records them.

        Empty if it is no such file, or was written without checksums (torch.serialization.set_crc32_options).
        """

        def sums() -> dict[str, int]:
            try:
                with zipfile.ZipFile(io.BufferedReader(_Reading(self, path))) as file:
                    inner = [(each.filename.partition("/")[2], each.CRC) for each in file.infolist()]
                    if not any(crc for _, crc in inner):
                        return {}
                    return {name: crc for name, crc in inner if name.startswith("data/")}
            except Exception:  # noqa: BLE001  whatever is wrong with it: it says nothing then
                return {}

        return self.once("sums", path, sums)

    def is_whole(self, path: str) -> bool:
        """Return whether a file has its end, as far as its own format tells.

        Checks torch.save's zip files and safetensors. Any other file counts as whole, unless it is empty and has a
        suffix that stands for tensors.
        """
        size_bytes = self.files[path].size_bytes
        if path.endswith(".safetensors"):
            return _is_whole_safetensors(self.read(path, 0, 8), lambda n: self.read(path, 8, n), size_bytes)
        if self.read(path, 0, 4) == b"PK\x03\x04":
            return _is_whole_zip(self.read(path, -_ZIP_TAIL_BYTES, _ZIP_TAIL_BYTES), size_bytes)
        return size_bytes > 0 or not path.endswith((".pt", ".pth", ".bin", ".ckpt", ".distcp"))


class _Reading(io.RawIOBase):
    """A file of a tree as a readable stream."""

    def __init__(self, tree: Tree, path: str) -> None:
        self._tree, self._path, self._at = tree, path, 0
        self._size_bytes = tree.files[path].size_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size_bytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        data = self._tree.read(self._path, self._at, min(len(room), self._size_bytes - self._at))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)


def files_of(path: str, tree: Tree) -> dict[str, Identity]:
    """Return the files below a folder, or only those directly in the watched folder if the path is ""."""
    return {each: tree.files[each] for each in (tree.below(path) if path else sorted(tree.names("")))}


def _is_whole_zip(tail: bytes, size_bytes: int) -> bool:
    """Return whether a zip file has its directory, which comes last and says where it begins."""
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < 22:
        return False
    directory_bytes, offset, comment_bytes = struct.unpack_from("<IIH", tail, at + 12)
    if at + 22 + comment_bytes != len(tail):
        return False
    end = size_bytes - len(tail) + at
    is_zip64 = 0xFFFFFFFF in (directory_bytes, offset)
    return is_zip64 or offset + directory_bytes <= end


def _is_whole_safetensors(length: bytes, header: Callable[[int], bytes], size_bytes: int) -> bool:
    if len(length) < 8:
        return False
    (header_bytes,) = struct.unpack("<Q", length)
    if header_bytes > min(size_bytes, _MAX_SAFETENSORS_HEADER_BYTES):
        return False
    try:
        told = json.loads(header(header_bytes))
        ends = [each["data_offsets"][1] for name, each in told.items() if name != "__metadata__"]
        return bool(size_bytes >= 8 + header_bytes + max(ends, default=0))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
