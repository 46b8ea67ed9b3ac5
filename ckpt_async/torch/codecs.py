"""What the suffixes of a checkpoint's file mean, for both `load` and `dump`, and the streams that (de)compress.

Libraries are preferred: they work in this process without the GIL. If there is none, a program runs in its own process.
"""

from __future__ import annotations

import contextlib
import importlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ckpt_async.errors import FormatError

CHUNK_BYTES = 1 << 20
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.lzma", ".tar.xz")
SAFETENSORS_SUFFIX = ".safetensors"
# Composer's name for the states in an archive.
STATES_NAME = "composer_states.pt"

_MAX_THREADS = 4  # the trainer's data loaders want cores too
# `rank0.1` and `v2.0-rank0` have no suffix, `model.zip` has one.
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*")
_TORCHS_OLD_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"  # a number in the pickle that torch wrote before 1.6


@dataclass(frozen=True, slots=True)
class Codec:
    """How one compression is read and written.

    The first installed module is used, which has an `open` like gzip's; if there is none, the program is run.
    """

    magic: bytes
    modules: tuple[str, ...] = ()
    program: str = ""
    options: Callable[[Any], Mapping[str, Any]] = lambda module: {}  # noqa: ARG005  for `open` when writing

    def module(self) -> Any:
        for name in self.modules:
            with contextlib.suppress(ImportError):
                return importlib.import_module(name)
        return None

    def check(self, what: str) -> None:
        """Raise FormatError if neither a library nor the program is installed."""
        if self.module() is None and (not self.program or shutil.which(self.program) is None):
            ways = ["run pip install '.[compression]' in the clone of ckpt_async"] * bool(self.modules)
            ways += [f"install {self.program}"] * bool(self.program)
            raise FormatError(
                f"{what}: neither a library nor a program for its compression is installed",
                hint=", or ".join(ways),
            )

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[IO[bytes]]:
        """Open the decompressed content of the file. Raises FormatError if it is damaged."""
        self.check(str(path))
        with path.open("rb") as packed:
            if (module := self.module()) is None:
                with _reading_through(self.program, packed, path) as stream:
                    yield stream
                return
            try:
                with module.open(packed, "rb") as stream:
                    yield stream
            except Exception as error:
                if not _says_damaged(error):
                    raise
                raise FormatError(f"{path} is cut short or damaged: {error}") from error

    @contextlib.contextmanager
    def writing(self, file: IO[bytes], what: str) -> Iterator[IO[bytes]]:
        """Open a stream that writes to `file` compressed; everything is written when the context is left."""
        self.check(what)
        if (module := self.module()) is None:
            with _writing_through(self.program, file, what) as stream:
                yield stream
            return
        stream = module.open(file, "wb", **self.options(module))
        try:
            yield stream
        except BaseException:
            with contextlib.suppress(Exception):  # an error while writing the rest does not matter any more
                stream.close()
            raise
        stream.close()


def _zstd_options(zstd: Any) -> Mapping[str, Any]:
    parameter = zstd.CompressionParameter
    _, most = parameter.nb_workers.bounds()  # 0 where the library was built without threads
    threads = min(most, _MAX_THREADS, os.cpu_count() or 1)
    return {"options": {parameter.checksum_flag: 1, parameter.nb_workers: threads if threads > 1 else 0}}


# Compression levels are those of the programs of the same name.
_XZ = Codec(b"\xfd7zXZ\0", ("lzma",))
CODECS = {
    ".bz2": Codec(b"BZh", ("bz2",)),
    ".gz": Codec(b"\x1f\x8b", ("gzip",), options=lambda _: {"compresslevel": 6}),
    ".lz4": Codec(b"\x04\x22\x4d\x18", ("lz4.frame",), "lz4", lambda _: {"content_checksum": True}),
    ".lzma": Codec(b"\x5d\0\0", ("lzma",), options=lambda lzma: {"format": lzma.FORMAT_ALONE}),
    ".lzo": Codec(b"\x89LZO\0\r\n\x1a\n", program="lzop"),
    ".xz": _XZ,
    ".zst": Codec(b"\x28\xb5\x2f\xfd", ("compression.zstd", "backports.zstd"), "zstd", _zstd_options),
}


@dataclass(frozen=True, slots=True)
class Format:
    """What a file holds and how it is compressed: torch's states unless `is_safetensors`, possibly in an archive."""

    is_safetensors: bool = False
    is_archive: bool = False
    codec: Codec | None = None


def format_of(name: str) -> Format | None:
    """Return the format that a file's name indicates; None if the suffix is unknown.

    A file without a suffix holds torch's states, as Composer's `ep1-ba42-rank0` does.
    """
    stem, suffix = _split(name)
    if suffix == ".tgz":
        return Format(is_archive=True, codec=CODECS[".gz"])
    codec = CODECS.get(suffix)
    compression = suffix
    if codec is not None:
        stem, suffix = _split(stem)
    if suffix == ".tar":
        # What Composer calls .tar.lzma is xz; readers distinguish the two.
        return Format(is_archive=True, codec=_XZ if compression == ".lzma" else codec)
    if suffix in ("", *TORCH_SUFFIXES, SAFETENSORS_SUFFIX):
        return Format(is_safetensors=suffix == SAFETENSORS_SUFFIX, codec=codec)
    return None


def unknown(name: str) -> FormatError:
    return FormatError(
        f"{name}: unknown format {_split(name)[1]!r}",
        hint=f"known: {' '.join((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX, *TAR_SUFFIXES, *CODECS))}",
    )


def _split(name: str) -> tuple[str, str]:
    stem, suffix = os.path.splitext(os.path.basename(name))
    return (stem, suffix) if _SUFFIX.fullmatch(suffix) else (stem + suffix, "")


def suffix_by_content(path: Path) -> str:
    """Return the suffix that a file should have according to its first bytes; '' if unknown. Nothing is decoded."""
    with path.open("rb") as file:
        head = file.read(512)
    for suffix, codec in CODECS.items():
        if head.startswith(codec.magic):
            return suffix
    if head[257:262] == b"ustar":
        return ".tar"
    if head.startswith(b"PK\x03\x04") or _TORCHS_OLD_MAGIC in head[:32]:
        return ".pt"
    header_bytes = int.from_bytes(head[:8], "little")
    return SAFETENSORS_SUFFIX if head[8:9] == b"{" and header_bytes < path.stat().st_size else ""


def _says_damaged(error: Exception) -> bool:
    """Return whether a library's error means that what it reads is not what was written."""
    if isinstance(error, OSError):
        return error.errno is None  # gzip's and bz2's way
    if isinstance(error, EOFError | lzma.LZMAError | zlib.error):
        return True
    # lz4's error, and that of zstd, whose module may not be installed.
    return type(error) is RuntimeError or type(error).__name__ == "ZstdError"


# --- programs ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading_through(program: str, packed: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as complaints:
        command = (program, "-dc")
        with subprocess.Popen(command, stdin=packed, stdout=subprocess.PIPE, stderr=complaints) as process:
            assert process.stdout is not None
            try:
                yield process.stdout
            except BaseException:
                process.kill()
                raise
        _check_exit(program, process.returncode, complaints, str(path))


@contextlib.contextmanager
def _writing_through(program: str, file: IO[bytes], what: str) -> Iterator[IO[bytes]]:
    """Write through a program. A thread copies the program's output, so that `file` may be any file object."""
    failures: list[BaseException] = []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen((program, "-c"), stderr=complaints, **pipes)
        assert process.stdin is not None
        assert process.stdout is not None
        output = process.stdout

        def take() -> None:
            try:
                shutil.copyfileobj(output, file, CHUNK_BYTES)
            except BaseException as error:  # noqa: BLE001  raised below
                failures.append(error)
                process.kill()  # so that the writer gets an error

        taker = threading.Thread(target=take, name="ckpt_async-compressed", daemon=True)
        taker.start()
        try:
            yield process.stdin
            process.stdin.close()
        except BrokenPipeError:  # the program has ended; the reason is found below
            pass
        except BaseException:
            process.kill()
            raise
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            taker.join()
            output.close()
            process.wait()
        if failures:
            raise failures[0]
        _check_exit(program, process.returncode, complaints, what)


def _check_exit(program: str, exit_code: int, complaints: IO[bytes], what: str) -> None:
    if exit_code != 0:
        complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - 500))  # the reason comes last
        said = complaints.read().decode(errors="replace").strip()
        raise FormatError(f"{what}: {program} failed: {said}")
