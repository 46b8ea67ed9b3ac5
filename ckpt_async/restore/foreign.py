"""Checkpoints that other tools wrote, recognised by the markers they leave when a save is complete. Read-only.

    torch DCP        <any>/.metadata, written last (torch/distributed/checkpoint/filesystem.py, finish)
    OLMo             step<N>[-unsharded]/config.yaml, written last (olmo/checkpoint.py, _save_config); in a `…-tmp`
                     folder it means nothing until that folder is renamed
    OLMo-core        step<N>/.metadata.json, written last (olmo_core/train/checkpoint.py), after model_and_optim
    Composer         <name>.symlink, a text object that names a file or folder (composer/utils/file_helpers.py);
                     ep<E>-ba<B>-rank0.pt where no other rank writes there. A set of one file per rank, as Composer
                     wrote before DCP, has no marker: the number of ranks is in the name, or the caller gives it
    ML Flashpoint    step-<N>_ckpt/ without a step-<N>_ckpt…unfinished beside it; `src<rank>` in a file's name is the
                     rank that wrote and reads it, and `common.pt` is for all ranks
    Orbax            <N>/commit_success.txt, or <N>/_CHECKPOINT_METADATA in a folder that was renamed into place

A marker is a promise that copied, pruned or badly synchronised checkpoints break, so what can be checked is
checked: every file that a `.metadata` names must exist and be long enough, and every item that Orbax names must
exist, as must OLMo's model and the files of all its ranks, and `.metadata` and `common.pt` of ML Flashpoint. A
checkpoint that has a marker but breaks its promise is damaged; one without a marker was not finished, and is passed
over.

None of these tools keeps checksums, so what is read can be compared by size only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.naming import check_component, check_relative
from ckpt_async.errors import InvalidNameError, InvalidRecordError, UnsafePickleError
from ckpt_async.formats.dcp_files import (
    FLASHPOINT_HEAD_BYTES,
    FLASHPOINT_PREFIX_BYTES,
    MAX_METADATA_BYTES,
    flashpoint_is_optimised,
    named_files,
)
from ckpt_async.protocol.cas import read
from ckpt_async.restore import olmo_files
from ckpt_async.restore.checkpoint import (
    METADATA,
    Checkpoint,
    Rejected,
    RemoteFile,
    is_metadata,
    why_passed_over,
)
from ckpt_async.restore.session import Session
from ckpt_async.restore.unlisted import objects_by_name
from ckpt_async.stores.interface import ObjectInfo, Sink
from ckpt_async.threads import in_thread

logger = logging.getLogger(__name__)

# A pointer contains only a name; anything larger is a file that happens to have the suffix.
MAX_POINTER_BYTES = 4096
MAX_POINTERS = 100
MAX_YAML_BYTES = 64 << 10
MAX_DEPTH = 32  # of folders: each costs memory with its whole path, and no tool nests as deep
MAX_MARK_BYTES = 1 << 20  # as JSON in memory it takes thirty times as much

_LAST_NUMBER = re.compile(r"([0-9]{1,12})[^0-9]*$")
_FLASHPOINT = re.compile(r"step-([0-9]{1,12})_ckpt")
_UNFINISHED = re.compile(r"(step-[0-9]{1,12}_ckpt).*unfinished")
_OLMO = re.compile(r"step([0-9]{1,12})(-unsharded)?")
_OLMO_CORE_MARK = ".metadata.json"
_NOT_RENAMED = "it was never renamed into place"
_NO_OLMO_MARK = "it has neither .metadata.json nor config.yaml, which are written last"
_ORBAX = re.compile(r"(?:[a-z_]*_)?([0-9]{1,12})")
_ORBAX_COMMIT, _ORBAX_METADATA = "commit_success.txt", "_CHECKPOINT_METADATA"
# Parts of OLMo's checkpoints, and the folders that transformers leaves with FSDP: each is DCP of its own, but
# no checkpoint by itself.
_OLMO_DCP = "model_and_optim"
_OLMO_PARTS = (_OLMO_DCP, "model", "optim", "train")
_OLMO_FILE = re.compile(r"(rank[0-9]{1,6}|model|optim|train|other)\.(pt|safetensors)")
_OLMO_UNNAMED = re.compile(r"step([0-9]{1,12})(-unsharded)?-tmp")
_FLASHPOINT_COMMON = "common.pt"
_FLASHPOINT_RANK = re.compile(r"src([0-9]{1,6})")
_TRANSFORMERS = re.compile(r"checkpoint-([0-9]{1,12})")
_TRANSFORMERS_PARTS = ("pytorch_model_fsdp_0", "optimizer_0")
# In a folder that Lightning's FSDP strategies write, rank 0 writes `meta.pt` after `.metadata`.
_LIGHTNING = re.compile(r".*step=([0-9]{1,12}).*\.ckpt")
# The file of one rank (`-rank3.pt.zst`, `-rank3.tar`, `-rank3`), and where a name gives the number of ranks.
_RANK_FILE = re.compile(
    r"(.*)-rank([0-9]{1,6})(?:-of-([1-9][0-9]{0,5}))?"
    r"(\.(?:pt|safetensors)(?:\..+)?|(?:\.(?:tar|tgz|bz2|gz|lzma|xz|lz4|lzo|zst))*)"
)
_WORLD_SIZE = re.compile(r"(?<![a-z])(?:ws|world[-_]?size)[-_]?([1-9][0-9]{0,5})(?![0-9])")
_BATCH = re.compile(r"ba([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint of another tool. `path` is its folder ("": the remote itself), its one file, or the common
    beginning of the names in `by_rank`, the files of its ranks. `reason` says why it is incomplete, or not known to
    be complete.
    """

    format: str
    step: int
    path: str
    reason: str = ""
    by_rank: tuple[str, ...] = ()


def recognise(
    names: Iterable[str], pointers: Mapping[str, str], root: str = "", world_size: int | None = None
) -> list[Found]:
    """Return every checkpoint among these keys, newest first. `pointers` maps `*.symlink` keys to their targets,
    relative to the same root; `root` is that root's own name. `world_size` is the number of ranks of a set of one
    file per rank whose name does not give it. Pure.
    """
    known = sorted(name for name in names if name.count("/") <= MAX_DEPTH)
    folders: dict[str, set[str]] = {"": set()}  # folder: the names of the files directly in it
    parts: dict[str, set[str]] = {"": set()}  # folder: the names of the folders directly in it
    unfinished: set[str] = set()
    for key in known:
        path = key.split("/")
        for depth in range(1, len(path)):
            folders.setdefault("/".join(path[:depth]), set())
            parts.setdefault("/".join(path[:depth]), set())
            parts["/".join(path[: depth - 1])].add(path[depth - 1])
        folders["/".join(path[:-1])].add(path[-1])
        for depth, part in enumerate(path):
            if match := _UNFINISHED.fullmatch(part):
                unfinished.add("/".join([*path[:depth], match[1]]))
    found: list[Found] = []
    taken: set[str] = set()
    # Where folders cannot be renamed, Orbax writes this file last, and its other marker means nothing.
    is_committed_by_file = any(_ORBAX_COMMIT in files for files in folders.values())
    for folder in sorted(folders):
        if any(str(parent) in taken for parent in PurePosixPath(folder).parents if folder):
            continue  # part of an already recognised checkpoint
        if _UNFINISHED.fullmatch(folder.rpartition("/")[2]):
            taken.add(folder)  # the marker itself: nothing in it is complete
            continue
        name = folder.rpartition("/")[2] or root
        each = _of_folder(
            name, folder, folders[folder], parts[folder], folder in unfinished, is_committed_by_file
        )
        if each is not None:
            found.append(each)
            if folder or each.format != "dcp":  # DCP's files are directly beside its marker
                taken.add(folder or ".")
    pointed = {target.rstrip("/") for target in pointers.values()}
    of_ranks = {key for key in known if _RANK_FILE.fullmatch(key) and not key.endswith(".symlink")}
    there = set(known) | (folders.keys() - taken)
    found += [Found("composer", _batch(each), each) for each in sorted((pointed - of_ranks) & there)]
    found += _of_ranks(of_ranks, pointed, world_size)
    return sorted(found, key=lambda each: (each.step, not each.path.endswith("-unsharded")), reverse=True)


def _of_folder(
    name: str,
    folder: str,
    files: set[str],
    parts: set[str],
    is_unfinished: bool,
    is_committed_by_file: bool,
) -> Found | None:
    """Return the checkpoint that a folder is, judging by the names of the files and folders directly in it."""
    if match := _FLASHPOINT.fullmatch(name):
        if not folder:
            return None  # its marker would be beside it, out of sight
        reason = "there is an …unfinished marker beside it" if is_unfinished else ""
        return Found("ml-flashpoint", int(match[1]), folder, reason)
    if ".orbax-checkpoint-tmp" in name:
        number = _LAST_NUMBER.search(name.partition(".")[0])
        return Found("orbax", int(number[1]) if number else 0, folder, "it was never finalized")
    if _OLMO_CORE_MARK in files:
        reason = _NOT_RENAMED if name.endswith("-tmp") else ""
        return Found("olmo-core", _step(name), folder, reason)
    if match := _OLMO_UNNAMED.fullmatch(name):
        return Found("olmo", int(match[1]), folder, _NOT_RENAMED)
    if match := _OLMO.fullmatch(name):
        if "config.yaml" in files:
            return Found("olmo", int(match[1]), folder)
        if parts & set(_OLMO_PARTS) or any(_OLMO_FILE.fullmatch(each) for each in files):
            return Found("olmo-core", int(match[1]), folder, _NO_OLMO_MARK)
    if name == _OLMO_DCP and folder and METADATA in files:
        return Found("olmo-core", _step(folder.rpartition("/")[0].rpartition("/")[2]), folder, _NO_OLMO_MARK)
    if (match := _ORBAX.fullmatch(name)) and files & {_ORBAX_COMMIT, _ORBAX_METADATA}:
        reason = "" if _ORBAX_COMMIT in files or not is_committed_by_file else f"it has no {_ORBAX_COMMIT}"
        return Found("orbax", int(match[1]), folder, reason)
    if (match := _TRANSFORMERS.fullmatch(name)) and parts & set(_TRANSFORMERS_PARTS):
        reason = "transformers writes no marker when a save is complete"
        return Found("transformers", int(match[1]), folder, reason)
    if METADATA in files:
        if (match := _LIGHTNING.fullmatch(name)) and "meta.pt" not in files:
            return Found("dcp", int(match[1]), folder, "it has no meta.pt, which Lightning writes last")
        return Found("dcp", int(match[1]) if match else _step(name), folder)
    return None


def _of_ranks(known: set[str], pointed: set[str], world_size: int | None) -> Iterable[Found]:
    """Yield the checkpoints that have the batch in their name or are pointed at: one file that rank 0 wrote for all
    ranks, or one file per rank.

    A set that lacks its last rank looks complete, so it counts only if the number of ranks is known. Where several
    ranks write, a lone file of rank 0 is what a killed save left, even if its pointer exists, since each rank
    writes one.
    """
    sets: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    written_by_several: set[str] = set()  # folders in which several ranks write
    for key in sorted(known):
        match = _RANK_FILE.fullmatch(key)
        assert match
        folder, _, name = match[1].rpartition("/")
        sets.setdefault((match[1], match[3] or "", match[4]), []).append((int(match[2]), key))
        if int(match[2]) and _BATCH.search(name):
            written_by_several.add(folder)
    for (stem, of, suffix), files in sorted(sets.items()):
        folder, _, name = stem.rpartition("/")
        paths = [key for _, key in sorted(files)]
        is_pointed = not pointed.isdisjoint(paths)
        if not (is_pointed or _BATCH.search(name)):
            continue
        told = _WORLD_SIZE.search(name)
        count = int(of) if of else int(told[1]) if told else world_size
        ranks = sorted(rank for rank, _ in files)
        is_for_all = (is_pointed or suffix.startswith((".pt", ".safetensors"))) and count is None
        if ranks == [0] and (1 in (count, world_size) or (is_for_all and folder not in written_by_several)):
            yield Found("composer", _batch(stem), paths[0])
        else:
            yield Found("composer", _batch(stem), stem, _lacking(ranks, count), tuple(paths))


def _lacking(ranks: list[int], count: int | None) -> str:
    """Return why these are not the files of `count` ranks; "" if they are."""
    if count is None:
        return f"it has files of ranks up to {ranks[-1]}, but the number of ranks is unknown: pass world_size"
    if missing := sorted(set(range(count)).difference(ranks)):
        return f"it has no file of rank {missing[0]}, expected {count} ranks"
    if ranks != list(range(count)):
        return f"it has {len(ranks)} files, up to rank {ranks[-1]}, expected {count}"
    return ""


def _batch(path: str) -> int:
    match = _BATCH.search(path.rpartition("/")[2])
    return int(match[1]) if match else _step(path.partition("-rank")[0])


def _step(name: str) -> int:
    match = _LAST_NUMBER.search(name)
    return int(match[1]) if match else 0


async def find_foreign(
    opened: Session,
    step: int | None,
    passing_over: Collection[CheckpointId],
    world_size: int | None = None,
) -> tuple[Checkpoint | None, list[Rejected]]:
    """Return the newest complete checkpoint of another tool (or that of one step) or None, and the checkpoints that
    were rejected: those that are or may be complete but cannot be used. What our own trainers are uploading never
    counts, whatever markers it contains.
    """
    if opened.store.capabilities.lists:
        listed = (await opened.store.list("")).objects
        objects = {each.key: each for each in listed if not _is_own(each.key)}
    else:
        objects = await objects_by_name(opened, step)
    rejected: list[Rejected] = []
    root = keys.path_in(opened.remote).rpartition("/")[2]
    for each in recognise(objects, await _read_pointers(opened, objects), root, world_size):
        name = each.path.rpartition("/")[2] or root
        if step is not None and each.step != step:
            continue
        id_ = CheckpointId(0, each.step)
        if each.reason:
            logger.warning("checkpoint_incomplete path=%s reason=%s", each.path, each.reason)
            # It may be complete, just with another world size than was asked for: then this is no fresh
            # start.
            if each.by_rank:
                rejected.append(Rejected(id_, name, each.reason))
            continue
        if reason := why_passed_over(passing_over, id_):
            rejected.append(Rejected(id_, name, reason))
            continue
        try:
            if each.path:  # else it is the user's own word
                check_component(name, "folder")
            files = _files(objects, each)
            await _check_promise(opened, each, files)
        except (InvalidNameError, InvalidRecordError, UnsafePickleError) as error:
            rejected.append(Rejected(id_, name, str(error)))
            continue
        checkpoint = Checkpoint(
            remote=opened.remote,
            id=id_,
            name=name,
            world_size=1 + max((rank for file in files.values() for rank in file.ranks), default=0),
            files=files,
            rejected=tuple(rejected),
            format=each.format,
            store_options=opened.options,
        )
        return checkpoint, rejected
    return None, rejected


def _is_own(key: str) -> bool:
    if (of_kind := keys.parse_kind_key(key)) is not None:
        key = of_kind[1]
    return key.startswith(f"{keys.PRIVATE}/") or keys.parse_data_key(key) is not None


def _files(objects: Mapping[str, ObjectInfo], found: Found) -> dict[str, RemoteFile]:
    """Return the one file, those of the ranks, or all below the folder. Their names become local paths, so they are
    checked like our own.
    """
    path = found.path
    rank_of = {key: rank for rank, key in enumerate(found.by_rank)}
    if rank_of:
        there = {key.rpartition("/")[2]: objects[key] for key in rank_of}
    elif path in objects:
        there = {path.rpartition("/")[2]: objects[path]}
    elif path:
        there = {key[len(path) + 1 :]: each for key, each in objects.items() if key.startswith(f"{path}/")}
    else:
        there = {key: each for key, each in objects.items() if found.format != "dcp" or "/" not in key}
    ranks = _flashpoint_ranks(there) if found.format == "ml-flashpoint" else {}
    return {
        check_relative(name, "file"): RemoteFile(
            name, each.key, each.size_bytes, None, ranks.get(name, (rank_of.get(each.key, 0),))
        )
        for name, each in there.items()
    }


def _flashpoint_ranks(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Map each file to its ranks: a file with `src<rank>` in its name belongs to that rank, any other to all ranks."""
    own = {name: (int(match[1]),) for name in names if (match := _FLASHPOINT_RANK.search(name))}
    everybody = tuple(sorted({rank for (rank,) in own.values()})) or (0,)
    return {name: own.get(name, everybody) for name in names}


async def _check_promise(opened: Session, found: Found, files: Mapping[str, RemoteFile]) -> None:
    """Check that what the marker stands for exists, as far as the files themselves tell.

    Raises InvalidRecordError, or UnsafePickleError for a `.metadata` that is not one.
    """
    marks = {"config.yaml", _OLMO_CORE_MARK, _ORBAX_COMMIT, _ORBAX_METADATA}
    if not files.keys() - marks:
        raise InvalidRecordError("only its marker exists")
    if found.format == "olmo-core" and f"{_OLMO_DCP}/{METADATA}" not in files:
        raise InvalidRecordError(f"it has no {_OLMO_DCP}/{METADATA}")
    mark = files.get(_OLMO_CORE_MARK)
    if found.format == "olmo-core" and mark is not None and not mark.size_bytes:
        raise InvalidRecordError(f"{_OLMO_CORE_MARK} is empty")
    if found.format == "olmo":
        told = files.get(olmo_files.METADATA_YAML)
        content = await _content(opened, told) if told and told.size_bytes <= MAX_YAML_BYTES else b""
        if reason := olmo_files.lacking(files.keys(), content):
            raise InvalidRecordError(reason)
    is_flashpoint = found.format == "ml-flashpoint"
    for name in (METADATA, _FLASHPOINT_COMMON) if is_flashpoint else ():
        if name not in files:
            raise InvalidRecordError(f"it has no {name}, which every node of ML Flashpoint reads")
    if found.format == "orbax" and (mark := files.get(_ORBAX_METADATA)) is not None:
        for item in _orbax_items(await _content(opened, mark, MAX_MARK_BYTES)):
            if not any(name.startswith(f"{item}/") for name in files):
                raise InvalidRecordError(f"{_ORBAX_METADATA} names the item {item!r}, which has no files")
    for name, file in files.items():
        folder = name.rpartition("/")[0]
        if not is_metadata(name):
            continue
        sizes = await in_thread(named_files, await _content(opened, file))
        for path in sizes:
            size_bytes = sizes[path]
            there = files.get(f"{folder}/{path}" if folder else path)
            if there is None:
                raise InvalidRecordError(f"{name} names {path[:200]!r}, which does not exist")
            if is_flashpoint and there.size_bytes < size_bytes + FLASHPOINT_PREFIX_BYTES:
                size_bytes = await _with_prefix(opened, there, size_bytes)
            if there.size_bytes < size_bytes:
                raise InvalidRecordError(
                    f"{name} names {size_bytes} bytes of {path[:200]!r}, which has only {there.size_bytes}"
                )


def _orbax_items(mark: bytes) -> list[str]:
    """Return the folders of items that were saved by name; none for a checkpoint of a single item, or for Orbax
    versions that do not list them.
    """
    try:
        told = json.loads(mark)
    except (ValueError, RecursionError):
        return []
    items = told.get("item_handlers") if isinstance(told, dict) else None
    return list(items) if isinstance(items, dict) else []


async def _with_prefix(opened: Session, file: RemoteFile, size_bytes: int) -> int:
    """Return how many bytes the file must have, including Flashpoint's block if it begins with one: offsets in
    `.metadata` count from behind it.
    """
    head = await _content(opened, replace(file, size_bytes=min(file.size_bytes, FLASHPOINT_HEAD_BYTES)))
    return size_bytes + (FLASHPOINT_PREFIX_BYTES if flashpoint_is_optimised(head) is not None else 0)


async def _content(opened: Session, file: RemoteFile, max_size_bytes: int = MAX_METADATA_BYTES) -> bytes:
    """Return the whole content of a file that names other files."""
    if file.size_bytes > max_size_bytes:
        raise InvalidRecordError(f"{file.name} has {file.size_bytes} bytes, too many for a list of files")
    data = bytearray()

    @contextlib.asynccontextmanager
    async def receive() -> AsyncIterator[Sink]:
        data.clear()
        yield data.extend

    if file.size_bytes:
        await opened.bulk.get_range(file.key, 0, file.size_bytes, receive)
    return bytes(data)


async def _read_pointers(opened: Session, objects: Mapping[str, ObjectInfo]) -> dict[str, str]:
    """Return the targets of Composer's pointers, made relative to the remote: they hold object names without the
    bucket.
    """
    root = keys.path_in(opened.remote)
    found: dict[str, str] = {}
    pointers = [
        each
        for key, each in objects.items()
        if key.endswith(".symlink") and each.size_bytes <= MAX_POINTER_BYTES
    ]
    for each in pointers[:MAX_POINTERS]:
        there = await read(opened.store, each.key, max_size_bytes=MAX_POINTER_BYTES)
        target = there[0].decode("utf-8", "replace").strip() if there else ""
        for prefix in (f"{root}/", ""):
            relative = target.removeprefix(prefix)
            if relative in objects or any(key.startswith(f"{relative}/") for key in objects if relative):
                found[each.key] = relative
                break
    return found
