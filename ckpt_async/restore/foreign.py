"""Checkpoints that other tools wrote, known by the marks they leave when a save is complete. Read-only.

    torch DCP        <any>/.metadata, written last (torch/distributed/checkpoint/filesystem.py, finish)
    OLMo             step<N>[-unsharded]/config.yaml, written last (olmo/checkpoint.py, _save_config)
    OLMo-core        step<N>/.metadata.json, written last (olmo_core/train/checkpoint.py)
    Composer         <name>.symlink, a text object that names a file or folder (composer/utils/file_helpers.py);
                     ep<E>-ba<B>-rank0.pt where no other rank wrote one
    ML Flashpoint    step-<N>_ckpt/ without a step-<N>_ckpt…unfinished beside it
    Orbax            <N>/commit_success.txt, or <N>/_CHECKPOINT_METADATA in a folder that was renamed into place

None of them keeps checksums: what is read can be compared by size only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from ckpt_async import keys
from ckpt_async.conditional import read
from ckpt_async.errors import InvalidNameError
from ckpt_async.model import CheckpointId
from ckpt_async.naming import check_relative
from ckpt_async.restore.checkpoint import Checkpoint, Rejected, RemoteFile
from ckpt_async.restore.session import Session
from ckpt_async.store import ObjectInfo
from ckpt_async.stores import StoreOptions

logger = logging.getLogger(__name__)

# A pointer is a name; whatever is larger is a file that happens to be called so.
MAX_POINTER_BYTES = 4096
MAX_POINTERS = 100

_LAST_NUMBER = re.compile(r"([0-9]{1,12})[^0-9]*$")
_FLASHPOINT = re.compile(r"step-([0-9]{1,12})_ckpt")
_UNFINISHED = re.compile(r"(step-[0-9]{1,12}_ckpt).*unfinished")
_OLMO = re.compile(r"step([0-9]{1,12})(-unsharded)?")
_ORBAX = re.compile(r"(?:[a-z_]*_)?([0-9]{1,12})")
_ORBAX_COMMIT = "commit_success.txt"
_COMPOSER = re.compile(r"(.*)-rank([0-9]+)\.(?:pt|safetensors)(?:\..+)?")
_BATCH = re.compile(r"ba([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint of another tool. `path` is its folder, or its one file. `reason` says why it is not complete."""

    format: str
    step: int
    path: str
    reason: str = ""


def recognise(names: Iterable[str], pointers: Mapping[str, str]) -> list[Found]:
    """Every checkpoint among these keys, newest first. `pointers` holds what `*.symlink` keys say, relative to the same
    root. Pure.
    """
    known = sorted(names)
    folders: dict[str, set[str]] = {}  # folder: the names of the files right in it
    unfinished: set[str] = set()
    for key in known:
        parts = key.split("/")
        for depth in range(1, len(parts)):
            folders.setdefault("/".join(parts[:depth]), set())
        if len(parts) > 1:
            folders["/".join(parts[:-1])].add(parts[-1])
        for depth, part in enumerate(parts):
            if match := _UNFINISHED.fullmatch(part):
                unfinished.add("/".join([*parts[:depth], match[1]]))
    found: list[Found] = []
    taken: set[str] = set()
    # Where folders cannot be renamed, Orbax writes this file last, and its other mark says nothing.
    is_committed_by_file = any(_ORBAX_COMMIT in files for files in folders.values())
    for folder in sorted(folders):
        if any(str(parent) in taken for parent in PurePosixPath(folder).parents):
            continue  # part of a checkpoint that was recognised
        if _UNFINISHED.fullmatch(folder.rpartition("/")[2]):
            taken.add(folder)  # the mark itself: nothing in it is whole
            continue
        each = _of_folder(folder, folders[folder], unfinished, is_committed_by_file)
        if each is not None:
            taken.add(folder)
            found.append(each)
    found += _of_composer(known, folders, pointers, taken)
    return sorted(found, key=lambda each: (each.step, not each.path.endswith("-unsharded")), reverse=True)


def _of_folder(
    folder: str, files: set[str], unfinished: set[str], is_committed_by_file: bool
) -> Found | None:
    name = folder.rpartition("/")[2]
    if match := _FLASHPOINT.fullmatch(name):
        reason = "an …unfinished mark is beside it" if folder in unfinished else ""
        return Found("ml-flashpoint", int(match[1]), folder, reason)
    if ".orbax-checkpoint-tmp" in name:
        number = _LAST_NUMBER.search(name.partition(".")[0])
        return Found("orbax", int(number[1]) if number else 0, folder, "it was never finalised")
    if ".metadata.json" in files:
        return Found("olmo-core", _step(name), folder)
    if "config.yaml" in files and (match := _OLMO.fullmatch(name)):
        return Found("olmo", int(match[1]), folder)
    if (match := _ORBAX.fullmatch(name)) and files & {_ORBAX_COMMIT, "_CHECKPOINT_METADATA"}:
        reason = "" if _ORBAX_COMMIT in files or not is_committed_by_file else f"it has no {_ORBAX_COMMIT}"
        return Found("orbax", int(match[1]), folder, reason)
    if ".metadata" in files:
        return Found("dcp", _step(name), folder)
    return None


def _of_composer(
    known: list[str], folders: Mapping[str, set[str]], pointers: Mapping[str, str], taken: set[str]
) -> Iterable[Found]:
    objects = set(known)
    pointed = sorted({target.rstrip("/") for target in pointers.values()})
    for target in pointed:
        if target in objects or (target in folders and target not in taken):
            yield Found("composer", _batch(target), target)
    ranks: dict[str, dict[int, str]] = {}
    for key in known:
        if (match := _COMPOSER.fullmatch(key)) and not key.endswith(".symlink"):
            ranks.setdefault(match[1], {})[int(match[2])] = key
    for files in ranks.values():
        if set(files) == {0} and files[0] not in pointed and _BATCH.search(files[0].rpartition("/")[2]):
            yield Found("composer", _batch(files[0]), files[0])


def _batch(path: str) -> int:
    match = _BATCH.search(path.rpartition("/")[2])
    return int(match[1]) if match else _step(path.partition("-rank")[0])


def _step(name: str) -> int:
    match = _LAST_NUMBER.search(name)
    return int(match[1]) if match else 0


async def find_foreign(
    opened: Session,
    remote: str,
    options: StoreOptions | None,
    step: int | None,
    passing_over: Collection[CheckpointId],
) -> tuple[Checkpoint | None, list[Rejected]]:
    """The newest complete checkpoint of another tool (or that of one step) or None, and the complete ones that cannot
    be used. What our own trainers are uploading is none, whatever marks are in it.
    """
    listing = await opened.asking.control("list", lambda: opened.store.list(""))
    objects = {each.key: each for each in listing.objects if not _is_own(each.key)}
    rejected: list[Rejected] = []
    for each in recognise(objects, await _read_pointers(opened, objects, remote)):
        name = each.path.rpartition("/")[2]
        if step is not None and each.step != step:
            continue
        if each.reason:
            logger.warning("checkpoint_incomplete path=%s reason=%s", each.path, each.reason)
            continue
        id_ = CheckpointId(0, each.step)
        if id_ in passing_over:
            rejected.append(Rejected(id_, name, "the caller could not use it"))
            continue
        try:
            files = _files(objects, each.path)
        except InvalidNameError as error:
            rejected.append(Rejected(id_, name, str(error)))
            continue
        checkpoint = Checkpoint(
            remote=remote,
            id=id_,
            name=name,
            world_size=1,
            files=files,
            rejected=tuple(rejected),
            format=each.format,
            store_options=options,
        )
        return checkpoint, rejected
    return None, rejected


def _is_own(key: str) -> bool:
    return key.startswith(f"{keys.PRIVATE}/") or keys.parse_data_key(key) is not None


def _files(objects: Mapping[str, ObjectInfo], path: str) -> dict[str, RemoteFile]:
    """The one file, or all below the folder. Their names become paths here, so they are checked like our own."""
    if path in objects:
        found = {path.rpartition("/")[2]: objects[path]}
    else:
        found = {key[len(path) + 1 :]: each for key, each in objects.items() if key.startswith(f"{path}/")}
    return {
        check_relative(name, "file"): RemoteFile(name, each.key, each.size_bytes, None, (0,))
        for name, each in found.items()
    }


async def _read_pointers(opened: Session, objects: Mapping[str, ObjectInfo], remote: str) -> dict[str, str]:
    """What Composer's pointers name, made relative to the remote: they hold object names without the bucket."""
    root = urlsplit(remote).path.strip("/")
    found: dict[str, str] = {}
    pointers = [
        each
        for key, each in objects.items()
        if key.endswith(".symlink") and each.size_bytes <= MAX_POINTER_BYTES
    ]
    for each in pointers[:MAX_POINTERS]:
        there = await read(opened.store, opened.asking, each.key, max_size_bytes=MAX_POINTER_BYTES)
        target = there[0].decode("utf-8", "replace").strip() if there else ""
        for prefix in (f"{root}/", ""):
            relative = target.removeprefix(prefix)
            if relative in objects or any(key.startswith(f"{relative}/") for key in objects if relative):
                found[each.key] = relative
                break
    return found
