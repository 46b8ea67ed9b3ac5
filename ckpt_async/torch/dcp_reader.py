"""Loads with torch.distributed.checkpoint, from the nearest copy of each file, and only what the plan needs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import IO, Any, Self, Unpack

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt_async import restore
from ckpt_async.core import naming
from ckpt_async.errors import (
    FormatError,
    InvalidNameError,
    StateMismatchError,
    UnsafePickleError,
)
from ckpt_async.formats.dcp_files import (
    METADATA,
)
from ckpt_async.restore import Checkpoint, Reader, ReadInto
from ckpt_async.restore.options import ReadOptions, check, part
from ckpt_async.torch.agreement import agree, on_all_ranks
from ckpt_async.torch.batches import BATCHES_AHEAD, LOCAL_BATCHES_AHEAD, Piece, Views, batched, read_ahead
from ckpt_async.torch.broadcast import broadcast
from ckpt_async.torch.dcp_metadata import NOT_TORCH, Places, damaged, read_beyond_doubt, read_metadata
from ckpt_async.torch.options import DcpOptions
from ckpt_async.torch.plain import allowed, or_trusted
from ckpt_async.torch.states import matching
from ckpt_async.torch.tensors import flashpoint_tensor
from ckpt_async.torch.torchfile import in_memory, read_state
from ckpt_async.torch.validation import remote_validation_function, validate

# From this size on a tensor is used where it was read; copying a smaller one is faster than locating it.
LARGE_BYTES = 1 << 20


class CkptAsyncReader(StorageReader):
    """A reader for `torch.distributed.checkpoint.load(state_dict, storage_reader=reader)`, on any number of ranks.

    Args:
        checkpoint: What `restore.find` has found: on one rank, then broadcast.
        options: Where bytes may come from, and what may be in a file: see `DcpOptions`.

    The reader is opened on first use, and closed by `with`, `close` or garbage collection; until then a lease keeps
    retention away. Each rank reads only the pieces that its plan needs, in parallel, adjacent pieces in one request.
    `.metadata` is compared with its checksum, and every piece with the CRC-32 that torch saved with it.
    """

    def __init__(self, checkpoint: Checkpoint, **options: Unpack[DcpOptions]) -> None:
        check("CkptAsyncReader", options, DcpOptions)
        super().__init__()
        self.checkpoint = checkpoint
        self._options = options
        self._prefix = _prefix(checkpoint, options.get("subfolder"))
        self._replicas, self._check_nan = options.get("replicas"), options.get("check_nan", False)
        self._weights_only, self._allow = options.get("weights_only", True), allowed(options.get("allow", ()))
        self._ignore_keys = naming.several(options.get("ignore_keys", ()), "ignore_keys")
        self._reader: Reader | None = None
        self._metadata: Metadata | None = None
        self._places: Places | None = None
        # Names whose values come from a checkpoint: this one, or one that was given up in favour of it.
        self.loaded: set[str] = set()

    def open(self) -> Reader:
        """Take the lease and read `.metadata`, unless that is done already. Blocks.

        Raises CheckpointGoneError; DamagedCheckpointError if `.metadata` is not what was saved; InvalidNameError if
        there is none, because then torch.distributed.checkpoint has not saved the checkpoint.
        """
        if self._reader is None:
            self._reader = restore.open(self.checkpoint, **part(self._options, ReadOptions))
            weakref.finalize(self, self._reader.close)
        if self._metadata is None:
            self._validate = remote_validation_function(self._options.get("validate"))
            name = self._metadata_file()
            validate(self._validate, self._path(name), None)
            self._metadata = read_metadata(self._reader, name)
        return self._reader

    def close(self) -> None:
        """Release the lease and the connections. Idempotent; the next use opens them again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bytes_from(self) -> dict[str, int]:
        """Bytes read so far, by their source: local, peer, remote."""
        return dict(self._reader.bytes_from) if self._reader is not None else {}

    # --- what torch calls, in this order -------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise InvalidNameError(
                f"this reader reads {self.checkpoint.name}, not {os.fspath(checkpoint_id)!r}"
            )

    def read_metadata(self) -> Metadata:
        # The signature has no `kwargs`: so torch does not try to read metadata of single ranks.
        self.open()
        assert self._metadata is not None
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        # Of the reader's own method: one of ours would keep this alive, and with it the lease.
        self._places = Places(self.checkpoint, self._prefix, metadata, self.open().read)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check everything that this rank is going to read before any rank reads."""
        if kept := self.loaded - {item.dest_index.fqn for item in plan.items}:
            raise StateMismatchError(
                f"{self.checkpoint.name} ({self.checkpoint.id}) has no {min(kept)!r}, which was loaded from a"
                f" newer one before that turned out damaged ({len(kept)} in all): the state would be a"
                " mixture of two checkpoints",
                hint=f"create the state again and load step={self.checkpoint.step}",
            )
        if self._ignore_keys:
            told = (self._metadata and self._metadata.planner_data) or {}
            names = {item.dest_index.fqn for item in plan.items}
            ignored = matching({name: told.get(name, (name,)) for name in names}, self._ignore_keys)
            plan = replace(plan, items=[item for item in plan.items if item.dest_index.fqn not in ignored])
        specs: dict[str, list[tuple[int, int]]] = {}
        for piece in self._pieces(plan):
            specs.setdefault(piece.file, []).append((piece.offset, piece.size_bytes))
        for file, theirs in specs.items():
            validate(self._validate, self._path(file), theirs)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reader = self.open()
        pieces = self._pieces(plan)
        targets = _floating_targets(plan, planner) if self._check_nan else {}
        for target in targets.values():
            target.fill_(torch.nan)
        if self._replicas is not None:
            what = [(piece.file, piece.offset, piece.size_bytes) for piece in pieces]
            digest = hashlib.sha256(repr(what).encode()).hexdigest()
            agree(digest, what="what to load, so they are not replicas of each other", group=self._replicas)
        failure: Exception | None = None
        # Replicas must communicate in the same order.
        is_local = self._replicas is None and all(map(reader.has_copy, {piece.file for piece in pieces}))
        num_ahead = LOCAL_BATCHES_AHEAD if is_local else BATCHES_AHEAD if self._replicas is None else 1
        batches = batched(pieces, is_local=is_local)
        read: Callable[[Reader, Sequence[Piece], Views], Iterable[memoryview | torch.Tensor]]
        read = self._read if self._replicas is not None else self._read_and_decode
        with contextlib.closing(
            read_ahead(batches, partial(read, reader), num_ahead, abort=self.close, is_local=is_local)
        ) as contents_of:
            for batch, contents in contents_of:
                try:
                    for piece, content in zip(batch, contents, strict=True) if failure is None else ():
                        self._put(piece, content, planner)
                except Exception as error:
                    if self._replicas is None:
                        raise
                    failure = error  # raised after the last batch: other replicas would wait for this rank
        if failure is not None:
            raise failure
        for name, target in targets.items():
            if torch.isnan(target).any():
                raise StateMismatchError(
                    f"{name} has NaN after {self.checkpoint.name} was loaded: they are in the checkpoint, or it has"
                    " only a part of this tensor",
                    hint="load an older step, or load without check_nan if the NaNs are part of what was"
                    " trained",
                )
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # torch does not ask: it never picks this reader by itself

    # --- reading -------------------------------------------------------------------------------------------

    def _path(self, file: str) -> str:
        return f"{self.checkpoint.remote.rstrip('/')}/{self.checkpoint.files[file].key}"

    def check_is_dcp(self) -> None:
        """Raise InvalidNameError if another tool saved the checkpoint, judging by its file names. Makes no request."""
        self._metadata_file()

    def _metadata_file(self) -> str:
        name = f"{self._prefix}{METADATA}"
        if name not in self.checkpoint.files:
            raise InvalidNameError(
                f"{self.checkpoint.name} has no {name}: torch.distributed.checkpoint has not saved it",
                hint="`restore.find` and `restore.fetch` give you its files",
            )
        return name

    def _pieces(self, plan: LoadPlan) -> list[Piece]:
        """Return what the plan reads, in the order of the files.

        Raises DamagedCheckpointError if the checkpoint does not have it.
        """
        assert self._places is not None
        items: dict[tuple[str, int, int, bool], list[ReadItem]] = {}
        for item in plan.items:
            place = self._places.find(item.storage_index)
            is_raw = place.is_optimised and item.type is not LoadItemType.BYTE_IO
            items.setdefault((place.file, place.offset, place.size_bytes, is_raw), []).append(item)
        return [
            Piece(name, offset, size_bytes, tuple(theirs), is_raw)
            for (name, offset, size_bytes, is_raw), theirs in sorted(items.items(), key=lambda each: each[0])
        ]

    def _read_and_decode(
        self, reader: Reader, pieces: Sequence[Piece], views: Views
    ) -> Iterator[memoryview | torch.Tensor]:
        """Read pieces and decode their tensors in the reading thread, while others are copied to their targets."""
        for piece, view in zip(pieces, self._read_self(reader, pieces, views), strict=True):
            is_object = any(item.type is LoadItemType.BYTE_IO for item in piece.items)
            yield view if is_object else self._tensor(piece, view)

    def _read(self, reader: Reader, pieces: Sequence[Piece], views: Views) -> Views:
        """Return the content of these pieces: read, or received from the replica that reads."""
        assert self._replicas is not None
        first = dist.get_global_rank(self._replicas, 0)
        found = on_all_ranks(
            lambda: list(self._read_self(reader, pieces, views)) if dist.get_rank() == first else views,
            group=self._replicas,
        )
        for view in filter(None, found):
            broadcast(torch.frombuffer(view, dtype=torch.uint8), first, self._replicas)
        return found

    def _read_self(self, reader: Reader, pieces: Sequence[Piece], views: Views) -> Iterator[memoryview]:
        reader.read_into(
            [ReadInto(piece.file, piece.offset, view) for piece, view in zip(pieces, views, strict=True)]
        )
        for piece, view in zip(pieces, views, strict=True):
            is_checked = piece.is_optimised or reader.is_verified(piece.file)
            if not is_checked and damage_of(in_memory(view)):
                again = read_beyond_doubt(
                    self.checkpoint, piece.file, piece.offset, piece.size_bytes, damage_of
                )
                yield again.getbuffer()
            else:
                yield view

    def _put(self, piece: Piece, content: memoryview | torch.Tensor, planner: LoadPlanner) -> None:
        objects = [item for item in piece.items if item.type is LoadItemType.BYTE_IO]
        if objects and not isinstance(content, torch.Tensor):
            data = self._object(piece, io.BytesIO(content))
        if len(objects) < len(piece.items):
            saved = content if isinstance(content, torch.Tensor) else self._tensor(piece, content)
        for item in piece.items:
            self.loaded.add(item.dest_index.fqn)
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
            else:
                part, target = narrowed(saved, item), planner.resolve_tensor(item).detach()
                if part is None or target.size() != part.size():  # torch would repeat a part that is smaller
                    fqn, has = item.storage_index.fqn, tuple(saved.size() if part is None else part.size())
                    wanted = f"{tuple(target.size())} at {tuple(item.storage_offsets)}"
                    raise damaged(self.checkpoint, piece.file, f"{fqn!r} has {has} where {wanted} is wanted")
                target.copy_(part)
                planner.commit_tensor(item, target)

    def _tensor(self, piece: Piece, view: memoryview) -> torch.Tensor:
        # ML Flashpoint's own reader detects torch's form in the same way.
        if piece.is_optimised and bytes(view[:4]) != b"PK\x03\x04":
            try:
                return flashpoint_tensor(bytes(view))
            except FormatError as error:
                raise damaged(
                    self.checkpoint, piece.file, f"bytes {piece.offset}+{piece.size_bytes}: {error}"
                ) from error
        found: torch.Tensor
        if piece.size_bytes >= LARGE_BYTES:
            with contextlib.suppress(FormatError, UnsafePickleError):  # torch may know forms that we do not
                if isinstance(there := read_state(in_memory(view), piece.file), torch.Tensor):
                    return there
        found = torch.load(io.BytesIO(view), map_location="cpu", weights_only=True)
        return found

    def _object(self, piece: Piece, stream: io.BytesIO) -> bytes:
        """Return bytes that torch's planners may decode.

        The planners decode without any restriction. So the object is decoded safely here, and they get the result,
        serialized again.
        """
        if not self._weights_only:
            return stream.getvalue()
        name = piece.items[0].storage_index.fqn
        try:
            decoded = read_state(stream, f"{self._path(piece.file)}: {name[:200]!r}", allow=self._allow)
        except UnsafePickleError as error:
            raise or_trusted(error) from None
        again = io.BytesIO()
        torch.save(decoded, again)
        return again.getvalue()


def _prefix(checkpoint: Checkpoint, subfolder: str | None) -> str:
    folders = checkpoint.dcp_folders
    if subfolder is None and len(folders) > 1 and "" not in folders:
        raise InvalidNameError(
            f"{checkpoint.name} has a {METADATA} in {' and in '.join(folders)}",
            hint="choose one with subfolder=",
        )
    if subfolder is None:
        subfolder = folders[0] if folders else ""
    return f"{subfolder.rstrip('/')}/" if subfolder else ""


def _floating_targets(plan: LoadPlan, planner: LoadPlanner) -> dict[str, torch.Tensor]:
    """Return the tensors of this rank's state that the plan fills and that can be NaN.

    For torch's own planners these are whole tensors, by name, so that gaps between the parts that are read show.
    """
    state = getattr(planner, "state_dict", {})
    found: dict[str, torch.Tensor] = {}
    for number, item in enumerate(plan.items):
        if item.type is LoadItemType.BYTE_IO:
            continue
        name = repr(item.dest_index.fqn)
        whole: Any = state.get(item.dest_index.fqn)
        whole = whole.to_local() if hasattr(whole, "to_local") else whole
        if type(whole) in (torch.Tensor, torch.nn.Parameter):
            found[name] = whole.detach()
        else:  # a ShardedTensor's shard, or a target of another planner
            found[f"part {number} of {name}"] = planner.resolve_tensor(item).detach()
    return {name: each for name, each in found.items() if each.is_floating_point() or each.is_complex()}


def narrowed(saved: torch.Tensor, item: ReadItem) -> torch.Tensor | None:
    """Return the part of a saved piece that this item wants, or None if the piece does not have it."""
    ends = [start + length for start, length in zip(item.storage_offsets, item.lengths, strict=True)]
    if len(ends) != saved.dim() or any(end > size for end, size in zip(ends, saved.size(), strict=True)):
        return None
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dimension, start, length)
    return saved


def damage_of(stream: IO[bytes]) -> str:
    """Return why these are not the bytes that torch.save wrote, or "". torch itself does not check their CRC-32."""
    try:
        # torch tells its zip form from older ones in the same way. Before torch 2.6 there is no safe reader
        # for the older forms, and `zipfile` would accept an archive that follows arbitrary bytes.
        if stream.read(4) != b"PK\x03\x04":
            return f"{NOT_TORCH}: it does not begin as a zip archive"
        with zipfile.ZipFile(stream) as archive:
            # Nobody compresses here, and `testzip` compares only one of the two sizes.
            for each in archive.filelist:
                if each.compress_size != each.file_size:
                    return f"{each.filename[:200]} has two sizes in the archive's directory"
            # 0 means that torch computed none (`torch.serialization.set_crc32_options`): nothing to compare.
            archive.filelist = [each for each in archive.filelist if each.CRC != 0]
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as error:
        return f"{NOT_TORCH}: {error}"
    finally:
        stream.seek(0)
    return f"{bad} has a different CRC-32 from the one that torch saved" if bad is not None else ""
