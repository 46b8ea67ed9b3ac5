"""What each format's mark says, by what its own writer leaves last. The table is in docs/watch.md. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from ckpt_async.watch.formats.checks import (
    DEEPSPEED_UNCOUNTED,
    MAX_JSON_BYTES,
    OLMO_CORE_LATE,
    RNG,
    UNCOUNTED_S,
)
from ckpt_async.watch.formats.found import (
    METADATA,
    Found,
    Rules,
    changed_ns,
    join,
    last,
    of_folder,
    one_file,
    said,
)
from ckpt_async.watch.tree import Tree

# Folders that hold a DCP checkpoint as part of another one: OLMo-core's, NeMo's, those that transformers and
# accelerate write for FSDP, and OLMo's.
_PARTS = ("model_and_optim", "weights", "pytorch_model_fsdp_0", "optimizer_0", "model", "optim", "train")
_TRANSFORMERS = re.compile(r"checkpoint-([0-9]{1,12})")
_OLMO = re.compile(r"step([0-9]{1,12})(-unsharded)?(-tmp)?")
_OLMO_STATE = re.compile(r"model\.(pt|safetensors)|rank[0-9]+\.pt")
_MEGATRON = re.compile(r"iter_([0-9]{1,12})")
_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
_FLASHPOINT = re.compile(r"step-([0-9]{1,12})_ckpt")
_ORBAX = re.compile(r"(?:[a-z_]*_)?([0-9]{1,12})")
_DEEPSPEED_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_DEEPSPEED_OPTIM = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d+)(_mp_rank_(\d+)_optim_states\.pt)")
_COMPOSER = re.compile(r"ep[0-9]+-ba([0-9]{1,12})(?:-rank([0-9]+))?\.pt")
# The time between two small files that a writer leaves one after the other.
NEXT_FILE_S = 2.0
_NS = 1_000_000_000


def orbax(tree: Tree, folder: str, _: Rules) -> Found | None:
    """Recognise Orbax: `commit_success.txt`, or a folder with `_CHECKPOINT_METADATA` that was renamed into place."""
    name = last(folder)
    if ".orbax-checkpoint-tmp" in name:
        return of_folder(tree, "orbax", folder, reason="Orbax has not renamed it into place")
    marks = tree.names(folder) & {"commit_success.txt", "_CHECKPOINT_METADATA"}
    if not (_ORBAX.fullmatch(name) and marks):
        return None
    if "commit_success.txt" in marks:
        return of_folder(tree, "orbax", folder, mark=join(folder, "commit_success.txt"))
    mark = join(folder, "_CHECKPOINT_METADATA")
    # Orbax writes the time of the commit into it last of all. Then it renames the folder or, if it does not rename,
    # writes commit_success.txt.
    try:
        committed = json.loads(tree.whole(mark, MAX_JSON_BYTES)).get("commit_timestamp_nsecs", "unknown")
    except (ValueError, AttributeError, RecursionError):
        return of_folder(tree, "orbax", folder, reason="its _CHECKPOINT_METADATA is incomplete")
    found = of_folder(tree, "orbax", folder, mark="" if committed == "unknown" else mark)
    if committed is None:
        return replace(found, reason="its _CHECKPOINT_METADATA has no commit time yet")
    if abs(tree.now_ns - tree.files[mark].mtime_ns) < NEXT_FILE_S * _NS:
        return replace(found, reason="its commit_success.txt may still be written", is_waiting=True)
    return found


def flashpoint(tree: Tree, folder: str, _: Rules) -> Found | None:
    """Recognise ML Flashpoint: `.metadata`, and no `…unfinished` beside the folder.

    Each rank removes its own `…unfinished` when it is done, after `.metadata`. `common.pt` is there before the first
    of them is made.
    """
    if not _FLASHPOINT.fullmatch(last(folder)):
        return None
    above = folder.rpartition("/")[0]
    beside = [each for each in tree.names(above) | tree.parts(above) if each.endswith("unfinished")]
    is_unfinished = any(each.startswith(last(folder)) for each in beside)
    reason = "an …unfinished marker is beside it" if is_unfinished else ""
    if METADATA not in tree.names(folder):
        reason = reason or "it has no .metadata yet"
    return of_folder(tree, "ml-flashpoint", folder, reason=reason)


def nemo(tree: Tree, folder: str, _: Rules) -> Found | None:
    """Recognise NeMo: `weights/.metadata`, and no `<name>-unfinished` beside the folder.

    The `context` is not always saved.
    """
    weights = tree.names(join(folder, "weights")) if folder else set()
    if METADATA not in weights:
        is_begun = any(each.endswith(".distcp") for each in weights)
        reason = "it has no weights/.metadata, which is written last"
        return of_folder(tree, "nemo", folder, reason=reason) if is_begun else None
    above, name = folder.rpartition("/")[0], last(folder).removesuffix("-EMA")
    reason = f"{name}-unfinished is beside it" if f"{name}-unfinished" in tree.names(above) else ""
    missing = {f"weights/{each}" for each in _core_missing(tree, join(folder, "weights"))}
    if "context" in tree.parts(folder):
        missing |= {f"context/{each}" for each in {"io.json"} - tree.names(join(folder, "context"))}
    return replace(of_folder(tree, "nemo", folder, reason=reason), missing=tuple(sorted(missing)))


def olmo(tree: Tree, folder: str, _: Rules) -> Found | None:
    """Recognise OLMo-core's `.metadata.json`, or OLMo's `config.yaml` in a folder that was renamed from `…-tmp`."""
    name, names = last(folder), tree.names(folder)
    match = _OLMO.fullmatch(name)
    if not folder:
        return None
    if ".metadata.json" in names and not (match and match[3]):
        return _olmo_core(tree, folder)
    if match and match[3]:
        return of_folder(tree, "olmo", folder, reason="OLMo has not renamed it into place")
    if match and "config.yaml" in names and _has_state_of_olmo(tree, folder):
        return of_folder(tree, "olmo", folder, mark=join(folder, "config.yaml"))
    if match and tree.parts(folder) & {"model_and_optim", "train"}:
        reason = "it has neither .metadata.json nor config.yaml, which OLMo-core and OLMo write last"
        return of_folder(tree, "olmo-core", folder, reason=reason)
    return None


def _has_state_of_olmo(tree: Tree, folder: str) -> bool:
    """Return whether there is state under the names of OLMo's five checkpointers (olmo/checkpoint.py, 0.6.0).

    Other trainers also call a folder `step100`, and write a `config.yaml` first.
    """
    is_named = any(_OLMO_STATE.fullmatch(each) for each in tree.names(folder))
    return is_named or not tree.parts(folder).isdisjoint({"model", "model_and_optim", "train"})


def _olmo_core(tree: Tree, folder: str) -> Found:
    """Recognise OLMo-core, whose callbacks also write a configuration after the mark.

    They write each file under another name, and then rename it.
    """
    found = of_folder(tree, "olmo-core", folder, mark=join(folder, ".metadata.json"))
    late = [path for path in found.files if OLMO_CORE_LATE.fullmatch(found.shard(path))]
    unnamed = {path for path in late if not path.endswith((".json", ".txt"))}
    found = replace(found, files=tuple(path for path in found.files if path not in unnamed))
    is_whole = join(folder, "config.json") in late and not unnamed
    newest_ns = max(tree.files[path].mtime_ns for path in (found.mark, *late))
    if abs(tree.now_ns - newest_ns) >= (NEXT_FILE_S if is_whole else UNCOUNTED_S) * _NS:
        return found
    return replace(found, reason="its config.json and data_paths.txt may still be written", is_waiting=True)


def transformers(tree: Tree, folder: str, rules: Rules) -> Found | None:
    """Recognise transformers: `trainer_state.json`, which rank 0 writes last.

    It says nothing about other ranks, so their files are counted.
    """
    match = _TRANSFORMERS.fullmatch(last(folder))
    if not match:
        return None
    mark = join(folder, "trainer_state.json")
    if mark not in tree.files:
        return of_folder(
            tree, "transformers", folder, reason="it has no trainer_state.json, which is written last"
        )
    try:
        step = json.loads(tree.whole(mark, MAX_JSON_BYTES))["global_step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        step = None
    found = of_folder(tree, "transformers", folder, mark=mark)
    if step != int(match[1]):
        return replace(found, reason="its trainer_state.json is incomplete, or belongs to another step")
    ranks = {int(number[1] or number[2]) for each in found.inner if (number := RNG.fullmatch(each))}
    is_one = "rng_state.pth" in tree.names(folder)  # a single process has no number in the name
    num_ranks = rules.ranks or _world_size(tree, folder, is_numbered=bool(ranks) and not is_one)
    if ranks and rules.num_nodes > 1 and not num_ranks:
        return replace(
            found,
            reason="it does not record the number of ranks, which is needed with several nodes: give --ranks",
        )
    count = num_ranks or max(*ranks, 1, 1) + 1
    wanted = {*range(count)} if ranks and not (is_one and count == 1) else set()
    lacking = [f"rng_state_{rank}.pth" for rank in wanted - ranks]
    named = set(re.findall(r'"([^"/]+\.(?:safetensors|bin))"', "".join(_indexes(tree, folder))))
    missing = tuple(sorted({*lacking} | (named - tree.names(folder))))
    found = replace(found, missing=missing, num_ranks=num_ranks)
    return settled(tree, found) if ranks and not num_ranks else found


def _world_size(tree: Tree, folder: str, *, is_numbered: bool) -> int:
    """Return the number of processes from the pickled arguments; 0 if they do not tell.

    There may be files of more ranks, left by an earlier save: see `ranks`. A single process writes no number, so it
    has not written what is only numbered.
    """
    told = said(tree, join(folder, "training_args.bin"), ("num_processes",)).get("num_processes", 0)
    return 0 if told == 1 and is_numbered else told


def _indexes(tree: Tree, folder: str) -> Iterator[str]:
    for name in sorted(tree.names(folder)):
        if name.endswith(".index.json"):
            yield tree.text(join(folder, name), MAX_JSON_BYTES)


_MAX_DIGITS = 12


def megatron(tree: Tree, folder: str, _: Rules) -> Found | None:
    """Recognise Megatron: `latest_checkpointed_iteration.txt` names this iteration or a later one.

    It is written after a barrier.
    """
    match = _MEGATRON.fullmatch(last(folder))
    above = folder.rpartition("/")[0]
    if not match:
        return None
    tracker = join(above, _MEGATRON_TRACKER)
    if tracker not in tree.files:
        if METADATA in tree.names(folder):
            return None  # megatron-core without Megatron-LM: DCP's mark
        return of_folder(tree, "megatron", folder, reason=f"there is no {_MEGATRON_TRACKER} yet")
    told = tree.text(tracker).strip()
    if not (told.isdecimal() and len(told) <= _MAX_DIGITS) and told != "release":
        return of_folder(tree, "megatron", folder, reason=f"{_MEGATRON_TRACKER} is incomplete or invalid")
    found = of_folder(tree, "megatron", folder)
    if told.isdecimal() and int(told) == int(match[1]):
        return replace(found, mark=tracker)
    later = told.isdecimal() and int(told) > int(match[1])
    written_ns = max((tree.files[each].mtime_ns for each in found.files), default=0)
    if not later or written_ns > tree.files[tracker].mtime_ns:
        return replace(found, reason=f"{_MEGATRON_TRACKER} says {told}")
    if METADATA in tree.names(folder) and (core := dcp(tree, folder, _)) is not None:
        return replace(found, mark=core.mark, missing=core.missing, reason=core.reason)
    return replace(
        found, reason=f"{_MEGATRON_TRACKER} already says {told}: it is unknown whether this one was completed"
    )


def deepspeed(tree: Tree, folder: str, rules: Rules) -> Found | None:
    """Recognise DeepSpeed: `latest` names the folder.

    Rank 0 writes it before the other ranks are done, so their files are counted too.
    """
    names = tree.names(folder)
    models = [match for each in names if (match := _DEEPSPEED_MODEL.fullmatch(each))]
    optims = [match for each in names if (match := _DEEPSPEED_OPTIM.fullmatch(each))]
    if not (models or optims) or not folder:
        return None
    found = of_folder(tree, "deepspeed", folder)
    latest = join(folder.rpartition("/")[0], "latest")
    told = tree.text(latest).strip()
    if not told:
        return replace(found, reason="there is no `latest` that names it yet")
    if told != last(folder):
        return replace(found, reason=f"`latest` names {told}")
    # The newest is of this save; others may be left from an earlier one on more ranks.
    models.sort(key=lambda each: tree.files[join(folder, each[0])].mtime_ns, reverse=True)
    world_sizes = [
        said(tree, join(folder, each[0]), ("dp_world_size", "mp_world_size")) for each in models[:1]
    ]
    if not world_sizes:
        return replace(found, reason="it has no …model_states.pt yet", mark=latest)
    mp = world_sizes[0].get("mp_world_size", 1)
    dp = world_sizes[0].get("dp_world_size", rules.ranks // mp)
    if not dp:
        return replace(found, reason="its model states do not record the number of ranks: give --ranks")
    wanted = set()
    for rank in range(mp):
        if any(each[1] is not None for each in models):  # ZeRO 3: each rank has its part of the model
            wanted |= {f"zero_pp_rank_{each}_mp_rank_{rank:02d}_model_states.pt" for each in range(dp)}
        else:
            wanted.add(f"mp_rank_{rank:02d}_model_states.pt")
        for optim in optims[:1]:
            wanted |= {f"{optim[1]}{each}_mp_rank_{rank:02d}_optim_states.pt" for each in range(dp)}
    found = replace(found, missing=tuple(sorted(wanted - names)), mark=latest, num_ranks=dp)
    return settled(tree, found) if any(DEEPSPEED_UNCOUNTED.fullmatch(each) for each in names) else found


def lightning(tree: Tree, folder: str, _: Rules) -> Found | None:
    """Recognise a Lightning folder `….ckpt`: DCP, and `meta.pt`, which rank 0 writes after `.metadata`."""
    if not folder.endswith(".ckpt") or not folder:
        return None
    if METADATA not in tree.names(folder) or "meta.pt" not in tree.names(folder):
        return of_folder(tree, "lightning", folder, reason="it has no meta.pt, which Lightning writes last")
    return of_folder(tree, "lightning", folder, mark=join(folder, "meta.pt"))


def dcp(tree: Tree, folder: str, _: Rules) -> Found | None:
    """Recognise DCP: `.metadata`, which is written last and renamed, and every file that it names."""
    names = tree.names(folder)
    if METADATA not in names:
        is_begun = any(each.endswith(".distcp") for each in names)
        reason = "it has no .metadata, which is written last"
        return (
            of_folder(tree, "dcp", folder, reason=reason) if is_begun and last(folder) not in _PARTS else None
        )
    if "common.pt" in names and "metadata.json" not in names:
        return of_folder(
            tree, "dcp", folder, reason="it has no metadata.json, which megatron-core writes last"
        )
    missing = _core_missing(tree, folder)
    if "common.pt" not in names and not missing:
        return of_folder(tree, "dcp", folder, mark=join(folder, METADATA))
    core = of_folder(tree, "dcp", folder, mark=join(folder, "metadata.json"))
    return replace(core, missing=tuple(missing))


def _core_missing(tree: Tree, folder: str) -> list[str]:
    """Return the files of megatron-core that are missing here and that .metadata does not name.

    A rotation that was interrupted may have begun with them.
    """
    names, core = tree.names(folder), join(folder, "metadata.json")
    is_core = '"sharded_backend"' in tree.text(core, MAX_JSON_BYTES)
    return ["common.pt"] if is_core and "common.pt" not in names else []


# The order matters: what is in a folder that one of these recognises is part of that checkpoint.
TABLE: dict[str, Callable[[Tree, str, Rules], Found | None]] = {
    "orbax": orbax,
    "ml-flashpoint": flashpoint,
    "olmo": olmo,
    "transformers": transformers,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "lightning": lightning,
    "nemo": nemo,
    "dcp": dcp,
}
FORMATS = (*TABLE, "torch-file")


def torch_file(tree: Tree, path: str) -> Found | None:
    """Recognise a single file of Lightning (`.ckpt`) or Composer (`ep…-ba…-rank0.pt`) by the directory that ends its
    zip.
    """
    composer = _COMPOSER.fullmatch(last(path))
    if not path.endswith(".ckpt") and not composer:
        return None
    found = one_file(tree, "composer" if composer else "lightning", path)
    if composer and composer[2] not in (None, "0"):
        reason = "with one file per rank, no marker says whether all are there: use --done"
        return replace(found, reason=reason)
    if tree.read(path, 0, 2) != b"PK":
        return replace(found, reason="it is not a torch.save zip file yet")
    return found


def settled(tree: Tree, found: Found) -> Found:
    """Return `found`, still waiting while ranks that nobody has counted may be writing."""
    if found.missing or abs(tree.now_ns - changed_ns(tree, found)) >= UNCOUNTED_S * _NS:
        return found
    reason = f"how many ranks write to it is unknown, and it changed within the last {UNCOUNTED_S:g} s"
    return replace(found, reason=reason, is_waiting=True)
