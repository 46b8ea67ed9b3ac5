"""Unpacks archives and compressed files within bounds. From an archive only plain files and folders are taken."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tarfile
from pathlib import Path
from typing import IO, Any, cast

from ckpt_async.errors import FormatError
from ckpt_async.torch.codecs import CHUNK_BYTES, CODECS, TAR_SUFFIXES

_MAX_MEMBERS = 100_000
_MAX_DEPTH = 100
_NOT_UNPACKABLE = (
    tarfile.TarError,
    FileExistsError,
    NotADirectoryError,
    OverflowError,
    RecursionError,  # headers that follow each other without a file between them
    ValueError,
)


def decompress(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    max_size_bytes: int | None = None,
    suffix: str = "",
) -> None:
    """Write what the compressed file `path` holds to the new file `destination`.

    Writes at most `max_size_bytes`, or nine tenths of the free space there. `suffix` is used instead of that of the
    name. On an error nothing is left. Blocks. Raises FormatError.
    """
    source, target = Path(path), Path(destination)
    limit = _limit(target.parent, max_size_bytes)
    with target.open("xb") as file:
        try:
            with _unpacking(source, suffix) as stream:
                _copy(stream, file, limit, source)
        except BaseException:
            target.unlink()
            raise


def extract(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    max_size_bytes: int | None = None,
    suffix: str = "",
) -> list[Path]:
    """Write the files of an archive below `folder`, which must exist, and return their paths.

    `suffix` is used instead of that of the name. Only files and folders are accepted: a link, a device, a path that is
    absolute or leads out of the folder, or a file that exists already raises FormatError, and so do more than
    `max_size_bytes` (or nine tenths of the free space) in total. Owners and modes are not restored. What was written
    before an error stays. Blocks.
    """
    source, target = Path(path), Path(folder)
    if not (suffix or source.name).endswith(TAR_SUFFIXES):
        raise FormatError(
            f"{source} does not have the file name of an archive", hint=f"known: {' '.join(TAR_SUFFIXES)}"
        )
    limit = _limit(target, max_size_bytes)
    written: list[Path] = []
    with _unpacking(source, suffix) as stream:
        try:
            bounded = _Bounded(stream, limit, source)
            with tarfile.open(fileobj=cast(Any, bounded), mode="r:") as archive:
                for number, member in enumerate(archive):
                    bounded.allow(0)
                    if number >= _MAX_MEMBERS:
                        raise FormatError(f"{source} has more than {_MAX_MEMBERS} members")
                    if (found := _member_path(member, source)) is None:
                        continue
                    place = target / found
                    place.parent.mkdir(parents=True, exist_ok=True)
                    if member.isdir():
                        place.mkdir(exist_ok=True)
                        continue
                    with place.open("xb") as file:
                        bounded.allow(member.size)
                        content = archive.extractfile(member)
                        assert content is not None
                        _copy(content, file, limit, source)
                    if place.stat().st_size != member.size:
                        raise FormatError(f"{source} is cut short in {member.name[:200]!r}")
                    limit -= member.size
                    written.append(place)
        except (*_NOT_UNPACKABLE, OSError) as error:
            if not isinstance(error, _NOT_UNPACKABLE) and error.errno != errno.ENAMETOOLONG:
                raise
            raise FormatError(f"{source} cannot be unpacked: {str(error)[:500]}") from error
    return written


def _member_path(member: tarfile.TarInfo, source: Path) -> str | None:
    """Return where a member belongs below the folder; None for the folder itself."""
    what = f"{source}: {member.name[:200]!r}"
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise FormatError(f"{what} is neither a plain file nor a folder")
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise FormatError(f"{what} would lead out of the folder")
    if len(parts) > _MAX_DEPTH:  # creating and removing folders recurses
        raise FormatError(f"{what} is more than {_MAX_DEPTH} folders deep")
    return "/".join(parts) or None


def _limit(folder: Path, max_size_bytes: int | None) -> int:
    return shutil.disk_usage(folder).free * 9 // 10 if max_size_bytes is None else max_size_bytes


def _unpacking(path: Path, suffix: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open the decompressed bytes of a file, or the file itself if it is a plain `.tar`."""
    suffix = Path(suffix or path.name).suffix or suffix
    if codec := CODECS.get(".gz" if suffix == ".tgz" else suffix):
        return codec.reading(path)
    if suffix == ".tar":
        return path.open("rb")
    raise FormatError(f"{path}: unknown compression {suffix!r}")


class _Bounded:
    """The file that `tarfile` reads from, with bounds on the size of headers.

    `tarfile` takes headers of any size and number into memory, and a sparse file's map, which takes fourteen times its
    size there. Here the headers of one file may have at most 1 MiB.
    """

    def __init__(self, stream: IO[bytes], limit: int, source: Path) -> None:
        self._stream = stream
        self._end = limit + CHUNK_BYTES * 100  # the limit does not include headers and padding
        self._source = source
        self._left = CHUNK_BYTES

    def allow(self, content_bytes: int) -> None:
        """Allow the next reads: this much content, and the next file's headers."""
        self._left = content_bytes + CHUNK_BYTES

    def read(self, size: int) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0 or self._stream.tell() > self._end:
            raise FormatError(
                f"{self._source} has headers of more than {CHUNK_BYTES} bytes, or unpacks to more than is allowed"
            )
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        if position > self._end:
            raise FormatError(f"{self._source} unpacks to more than is allowed")
        return self._stream.seek(position)

    def tell(self) -> int:
        return self._stream.tell()


def _copy(stream: IO[bytes], file: IO[bytes], limit: int, source: Path) -> None:
    while chunk := stream.read(CHUNK_BYTES):
        limit -= len(chunk)
        if limit < 0:
            raise FormatError(
                f"{source} unpacks to more than is allowed",
                hint="pass max_size_bytes, or a roomier temporary folder in $TMPDIR",
            )
        file.write(chunk)


def is_tar(path: Path) -> bool:
    """Return whether the content of the file is a tar archive."""
    with path.open("rb") as file:
        try:
            tarfile.open(fileobj=cast(Any, _Bounded(file, path.stat().st_size, path)), mode="r:").close()
        except tarfile.TarError:
            return False
        except _NOT_UNPACKABLE:
            return True  # as far as we can tell
    return True
