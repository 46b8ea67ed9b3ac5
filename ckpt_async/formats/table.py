"""The table of formats: for each, what its writer leaves in a folder, and what its marker says. Pure.

A new format is one entry here, one test table (tests/formats), and one row in docs/watch.md.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckpt_async.formats import olmo_files
from ckpt_async.formats.dcp_files import DISTCP, METADATA, is_dcp, is_metadata, named_in
from ckpt_async.formats.found import (
    Found,
    Rules,
    join,
    last,
    of_folder,
    said,
    step_folder,
    step_named,
)
from ckpt_async.formats.ranks import lacking, rank_of_file, with_ranks
from ckpt_async.formats.tree import Tree

# As JSON in memory it takes thirty times as much.
MAX_JSON_BYTES, MAX_MARK_BYTES = 1 << 26, 1 << 20
NUM_NEAR = 8  # how many steps before and after one tell what it consists of
# What there is to ask for where nothing can be listed: OLMo's unsharded files, and the marks of OLMo and OLMo-core; the
# folders of a step; those in it that may have a `.metadata`, which names the files beside it; the file of a rank;
# Composer's pointers.
ASKED_FILES = (
    *("config.yaml", "model.pt", "optim.pt", "train.pt", "model.safetensors", "optim.safetensors"),
    *(".metadata.json", "config.json", "meta.pt"),
)
ASKED_STEPS = ("step{step}-unsharded/", "step{step}/", "step-{step}/", "")
ASKED_FOLDERS = ("", "model_and_optim/", "model/", "optim/")
ASKED_OF_RANK = "train/rank{rank}.pt"
ASKED_POINTERS = ("latest-rank0.pt.symlink", "latest-rank0.symlink")
# Suffixes of files with tensors or states in them.
TENSORS = re.compile(r".*\.(?:pt|pth|pth\.tar|bin|safetensors|ckpt|distcp|pkl|npz|msgpack|h5)")
_NONE = re.compile(r"(?!)")
_TRANSFORMERS = re.compile(r"checkpoint-([0-9]{1,12})")
_TRANSFORMERS_STATE = re.compile(
    r"(?:model|pytorch_model|adapter_model).*\.(?:safetensors|bin)|(?:optimizer|scheduler|scaler)\.pt"
    r"|rng_state.*\.pth|training_args\.bin|global_step[0-9]+/.*\.pt"
)
# Parts that accelerate writes before its marker: of FSDP's sharded states, and DeepSpeed's.
_PART = re.compile(r"(?:pytorch_model_fsdp|optimizer)_[0-9]+|pytorch_model(?:_[0-9]+)?")
_OLMO = re.compile(r"step([0-9]{1,12})(-unsharded)?(-tmp)?")
_OLMO_DCP = "model_and_optim"
_OLMO_STATE = re.compile(r"(?:model|optim)\.(?:pt|safetensors)|rank[0-9]+\.pt")
_MEGATRON = re.compile(r"iter_([0-9]{1,12})")
_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
_VERL = re.compile(r"global_step_([0-9]{1,12})")
_VERL_RANK = re.compile(r"((?:.*/)?[a-z_]+_world_size_)(\d{1,6})_rank_\d{1,6}\.pt")
_NEMO_RL = re.compile(r"(tmp_|old_)?step_([0-9]{1,12})")
_AUTOMODEL = re.compile(r"epoch_[0-9]{1,12}_step_([0-9]{1,12})")
_AUTOMODEL_BEGUN = ".incomplete"
_FLASHPOINT = re.compile(r"step-([0-9]{1,12})_ckpt(.*unfinished)?")
_ORBAX = re.compile(r"(?:[a-z_]*_)?([0-9]{1,12})")
_ORBAX_COMMIT, _ORBAX_METADATA = "commit_success.txt", "_CHECKPOINT_METADATA"
_DEEPSPEED_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_DEEPSPEED_OPTIM = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d+)(_mp_rank_(\d+)_optim_states\.pt)")
# Written by ranks other than 0, possibly after `latest`, and no file says how many there are: pipeline stages, experts.
_DEEPSPEED_UNCOUNTED = r"(?:layer_|expert_|(?:bf16_|fp16_)?expp_rank_)\d+[-_].*_states\.pt"


def _as_found(_: Tree, found: Found, __: Rules) -> Found:
    return found


@dataclass(frozen=True, slots=True)
class Format:
    """One entry.

    `recognise` judges a folder by names alone, since a listing may have thousands; `check` reads what its marker says,
    and is called for what is marked. `anew`: the files of this format that a marker stands for, beside those that a
    `.metadata` names; None: all. `late`: those of them that may come up to LATE_RANK_S after it, from ranks without a
    barrier or from callbacks. `is_renamed`: files are renamed to where they are. `is_named`: markers name all files.
    """

    recognise: Callable[[Tree, str], Found | None] = lambda _, __: None
    check: Callable[[Tree, Found, Rules], Found] = _as_found
    anew: re.Pattern[str] | None = None
    late: re.Pattern[str] = _NONE
    is_renamed: bool = False
    is_named: bool = False


def _orbax(tree: Tree, folder: str) -> Found | None:
    """Recognise Orbax: `commit_success.txt`, or a folder with `_CHECKPOINT_METADATA` that was renamed into place."""
    name, names = last(folder) or tree.root, tree.names(folder)
    if ".orbax-checkpoint-tmp" in name:
        return of_folder(tree, "orbax", folder, begun="Orbax has not renamed it into place")
    if not _ORBAX.fullmatch(name):
        return None
    mark = next((each for each in (_ORBAX_COMMIT, _ORBAX_METADATA) if each in names), "")
    return of_folder(tree, "orbax", folder, join(folder, mark)) if mark else None


def _check_orbax(tree: Tree, found: Found, _: Rules) -> Found:
    """Orbax writes the time of the commit into `_CHECKPOINT_METADATA` last of all, after all items. Then it renames the
    folder or, if it does not rename, writes commit_success.txt.
    """
    if not {*found.inner} - {_ORBAX_COMMIT, _ORBAX_METADATA}:
        return replace(found, reason="only its marker is there")
    metadata = join(found.path, _ORBAX_METADATA)
    if metadata in tree.files and (size_bytes := tree.files[metadata].size_bytes) > MAX_MARK_BYTES:
        return replace(found, reason=f"{_ORBAX_METADATA} has {size_bytes} bytes, too many for a marker")
    told = _json(tree, metadata) if metadata in tree.files else {}
    if told is None:
        return replace(
            found, reason=f"its {_ORBAX_METADATA} is truncated or still being written", is_begun=True
        )
    items = told.get("item_handlers")
    for item in items if isinstance(items, dict) else ():
        if not any(name.startswith(f"{item}/") for name in found.inner):
            return replace(found, reason=f"{_ORBAX_METADATA} names the item {item!r}, which has no files")
    if found.mark != metadata:
        return found
    committed = told.get("commit_timestamp_nsecs", "unknown")
    if committed is None:
        return replace(found, reason=f"its {_ORBAX_METADATA} has no commit time yet", is_begun=True)
    if committed != "unknown":
        return found
    # An Orbax that records no time. Where its folders cannot be renamed, they have the other marker.
    above = found.path.rpartition("/")[0]
    if any(_ORBAX_COMMIT in tree.names(join(above, each)) for each in tree.parts(above)):
        return replace(found, reason=f"it has no {_ORBAX_COMMIT}", is_begun=True)
    return replace(found, mark="")


def _flashpoint(tree: Tree, folder: str) -> Found | None:
    """Recognise ML Flashpoint: `.metadata`, and no `…unfinished` beside the folder, where each rank has its own.

    `common.pt` is there before the first of them is made.
    """
    match = _FLASHPOINT.fullmatch(last(folder))
    if not match:
        return None
    above = folder.rpartition("/")[0]
    beside = (each for each in tree.names(above) | tree.parts(above) if each.endswith("unfinished"))
    begun = (
        "an …unfinished marker is beside it" if any(each.startswith(last(folder)) for each in beside) else ""
    )
    if METADATA not in tree.names(folder) or match[2]:
        begun = begun or "it has no .metadata yet"
    return of_folder(tree, "ml-flashpoint", folder, begun=begun)


def _check_flashpoint(_: Tree, found: Found, __: Rules) -> Found:
    return lacking(found, ["common.pt"])


def _nemo(tree: Tree, folder: str) -> Found | None:
    """Recognise NeMo: `weights/.metadata`, and no `<name>-unfinished` beside the folder."""
    weights = tree.names(join(folder, "weights")) if folder else set()
    if METADATA not in weights:
        begun = "it has no weights/.metadata, which is written last"
        return of_folder(tree, "nemo", folder, begun=begun) if any(map(DISTCP.fullmatch, weights)) else None
    above, name = folder.rpartition("/")[0], last(folder).removesuffix("-EMA")
    begun = f"{name}-unfinished is beside it" if f"{name}-unfinished" in tree.names(above) else ""
    return of_folder(tree, "nemo", folder, begun=begun)


def _check_nemo(tree: Tree, found: Found, _: Rules) -> Found:
    """The `context` is not always saved."""
    found = lacking(found, ["context/io.json"] if "context" in tree.parts(found.path) else [])
    return _with_core(tree, found, "weights/")


def _olmo(tree: Tree, folder: str) -> Found | None:
    """Recognise OLMo-core's `.metadata.json`, or OLMo's `config.yaml` in a folder that was renamed from `…-tmp`.

    Other trainers also call a folder `step100`, and write a `config.yaml` first.
    """
    name, names, parts = last(folder) or tree.root, tree.names(folder), tree.parts(folder)
    match = _OLMO.fullmatch(name)
    is_dcp_part = METADATA in tree.names(join(folder, _OLMO_DCP))
    if name.endswith("-tmp") and (match or ".metadata.json" in names):
        return of_folder(tree, "olmo", folder, begun="it was never renamed into place")
    if ".metadata.json" in names:
        return of_folder(tree, "olmo-core", folder, join(folder, ".metadata.json"))
    has_state = any(map(_OLMO_STATE.fullmatch, names)) or parts & {"model", "train", _OLMO_DCP}
    is_dcp = any(map(is_metadata, tree.below(folder)))
    if match and "config.yaml" in names and (has_state or not is_dcp):
        return of_folder(tree, "olmo", folder, join(folder, "config.yaml"))
    has_ranks = METADATA not in names and any(rank_of_file(each) is not None for each in names)
    if is_dcp_part or (match and (has_ranks or parts & {_OLMO_DCP, "train"})):
        begun = "it has neither .metadata.json nor config.yaml, which OLMo-core and OLMo write last"
        return of_folder(tree, "olmo-core", folder, begun=begun)
    return None


def _check_olmo(tree: Tree, found: Found, _: Rules) -> Found:
    told = tree.text(join(found.path, olmo_files.METADATA_YAML))
    return replace(found, reason=olmo_files.lacking(found.inner, told.encode()))


def _check_olmo_core(_: Tree, found: Found, rules: Rules) -> Found:
    """Callbacks write a configuration after the mark: each file under another name, which they then rename."""
    unnamed = {path for path in found.files if re.fullmatch("tmp[a-z0-9_]{8}", found.shard(path))}
    found = replace(found, files=tuple(path for path in found.files if path not in unnamed))
    found = lacking(found, [f"{_OLMO_DCP}/{METADATA}"])
    if rules.ranks:
        found = with_ranks(found, "train/rank*.pt", rules.ranks)
    return replace(found, is_waiting=bool(unnamed) or "config.json" not in found.inner)


def _transformers(tree: Tree, folder: str) -> Found | None:
    """Recognise transformers: `trainer_state.json`, which rank 0 writes last."""
    if not _TRANSFORMERS.fullmatch(last(folder) or tree.root):
        return None
    names, parts = tree.names(folder), tree.parts(folder)
    if "trainer_state.json" in names:
        return of_folder(tree, "transformers", folder, join(folder, "trainer_state.json"))
    is_other = METADATA in names or any(each.startswith("random_states_") for each in names)
    is_begun = any(map(_TRANSFORMERS_STATE.fullmatch, names)) or any(
        _PART.fullmatch(each) or each.startswith("global_step") for each in parts
    )
    begun = "it has no trainer_state.json, which is written last"
    return of_folder(tree, "transformers", folder, begun=begun) if is_begun and not is_other else None


def _check_transformers(tree: Tree, found: Found, rules: Rules) -> Found:
    """`trainer_state.json` says nothing about other ranks, so their files are counted."""
    match, state = _TRANSFORMERS.fullmatch(found.name), _json(tree, found.mark) or {}
    if match and state.get("global_step") != int(match[1]):
        return replace(found, reason="its trainer_state.json is incomplete, or belongs to another step")
    indexes = (each for each in found.files if each.endswith(".index.json"))
    found = lacking(found, [name for each in indexes for name in _named_by_index(tree, found, each)])
    ranks = any(each.startswith("rng_state") for each in found.inner)
    told = said(tree, join(found.path, "training_args.bin"), ("num_processes",)).get("num_processes", 0)
    # A single process writes no number, so it has not written what is only numbered.
    count = rules.ranks or (0 if told == 1 and "rng_state.pth" not in found.inner else told)
    found = _with_deepspeed(tree, found, replace(rules, ranks=count))
    if ranks and not found.reason:
        return with_ranks(found, "rng_state_*.pth", count, at_least=2, alone="rng_state.pth")
    return replace(found, num_ranks=count, names_its_files=bool(count))


def _accelerate(tree: Tree, folder: str) -> Found | None:
    """Recognise accelerate's `save_state`: each rank writes its random states after all of the model and optimizer.

    With FSDP, these are DCP folders of their own.
    """
    names = tree.names(folder)
    if "random_states_0.pkl" in names and folder:
        return of_folder(tree, "accelerate", folder, join(folder, "random_states_0.pkl"))
    if not folder or not (any(map(_PART.fullmatch, tree.parts(folder))) or "random_states_1.pkl" in names):
        return None
    return of_folder(
        tree, "accelerate", folder, begun="it has no random_states_0.pkl, which rank 0 writes last"
    )


def _check_accelerate(tree: Tree, found: Found, rules: Rules) -> Found:
    """The number of ranks is unknown, but no rank writes a part of a sharded state without its random states."""
    found = _with_deepspeed(tree, found, rules)
    shards = (rank_of_file(last(each)) for each in found.files if DISTCP.fullmatch(last(each)))
    sharded = max(found.num_ranks, 1 + max((each for each in shards if each is not None), default=0))
    return found if found.reason else with_ranks(found, "random_states_*.pkl", rules.ranks, at_least=sharded)


def _megatron(tree: Tree, folder: str) -> Found | None:
    """Recognise Megatron-LM: `latest_checkpointed_iteration.txt` names it. It is written after a barrier."""
    if not _MEGATRON.fullmatch(last(folder)):
        return None
    tracker = join(folder.rpartition("/")[0], _MEGATRON_TRACKER)
    if tracker in tree.files:
        return of_folder(tree, "megatron", folder, tracker)
    if METADATA in tree.names(folder):
        return None  # megatron-core without Megatron-LM: DCP's mark
    return of_folder(tree, "megatron", folder, begun=f"there is no {_MEGATRON_TRACKER} yet")


def _check_megatron(tree: Tree, found: Found, rules: Rules) -> Found:
    match, told = _MEGATRON.fullmatch(last(found.path)), tree.text(found.mark).strip()
    is_core = METADATA in tree.names(found.path)
    found = _with_core(tree, replace(found, names_its_files=is_core))
    if found.reason:
        return found
    if not re.fullmatch("[0-9]{1,12}|release", told):
        return replace(found, reason=f"{_MEGATRON_TRACKER} is incomplete or invalid")
    if match and told.isdecimal() and int(told) == int(match[1]):
        return found
    written_ns = max((tree.files[each].mtime_ns for each in found.files), default=0)
    is_older = match and told.isdecimal() and int(told) > int(match[1])
    if not is_older or written_ns > tree.files[found.mark].mtime_ns:
        return replace(found, reason=f"{_MEGATRON_TRACKER} says {told}", is_begun=True)
    if is_core:
        return _check_dcp(tree, replace(found, mark=join(found.path, METADATA)), rules)
    reason = f"{_MEGATRON_TRACKER} already says {told}: it is unknown whether this one was completed"
    return replace(found, reason=reason)


def _verl(tree: Tree, folder: str) -> Found | None:
    """Recognise verl: the file beside it that Megatron-LM also has; without `async_save`, it is written last.

    As 0.8.0.dev does (trainer/ppo/ray_trainer.py `_save_checkpoint`): `actor/`, `critic/`, `data.pt`; its SFT trainer
    (utils/checkpoint/checkpoint_handler.py): the files of an actor, and `data_<dp rank>.pt`, perhaps late.
    """
    if not _VERL.fullmatch(last(folder)):
        return None
    tracker = join(folder.rpartition("/")[0], _MEGATRON_TRACKER)
    if tracker in tree.files:
        return of_folder(tree, "verl", folder, tracker)
    if "actor" not in tree.parts(folder) and not any(map(_VERL_RANK.fullmatch, tree.names(folder))):
        return None
    return of_folder(tree, "verl", folder, begun=f"there is no {_MEGATRON_TRACKER} yet")


def _check_verl(tree: Tree, found: Found, _: Rules) -> Found:
    """A rotation deletes the actor and the critic of a step, each by its own number, and leaves the rest."""
    told = tree.text(found.mark).strip()
    if not told.isdecimal() or int(told) < found.step:
        return replace(found, reason=f"{_MEGATRON_TRACKER} says {told or 'nothing yet'}", is_begun=True)
    is_sft = "data_0.pt" in found.inner
    data = "data_0.pt" if is_sft else "data.pt"
    if not (is_sft or any(each.startswith("actor/") for each in found.inner)):
        return replace(found, reason="it has no actor, which is saved first and may have been rotated away")
    if int(told) > found.step and data in found.inner:
        found = replace(found, mark=join(found.path, data))  # the last of its own
    sets = {(match[1], int(match[2])) for each in found.inner if (match := _VERL_RANK.fullmatch(each))}
    wanted = {f"{kind}{count}_rank_{rank}.pt" for kind, count in sets for rank in range(count)}
    # With sequences or a model in parts, fewer than all ranks have data.
    ranks = max((count for _, count in sets), default=0)
    is_waiting = is_sft and f"data_{ranks - 1}.pt" not in found.inner
    return replace(lacking(found, {data, *wanted}), num_ranks=ranks, is_waiting=is_waiting)


def _nemo_rl(tree: Tree, folder: str) -> Found | None:
    """Recognise NeMo-RL: `training_info.json`, which is written first, in a folder that is renamed when all is there.

    As 0.6.0 does (nemo_rl/utils/checkpoint.py `CheckpointManager`, nemo_rl/algorithms/*.py): the data loader's state
    comes after the models.
    """
    match, names = _NEMO_RL.fullmatch(last(folder)), tree.names(folder)
    if not match or "training_info.json" not in names:
        return None
    begun = f"it was never renamed to step_{match[2]}, or it was replaced" if match[1] else ""
    if not any(re.fullmatch(r"train_dataloader(?:_.*)?\.pt", each) for each in names):
        begun = begun or "it has no train_dataloader.pt, which is written after the models"
    return of_folder(tree, "nemo-rl", folder, begun=begun)


def _automodel(tree: Tree, folder: str) -> Found | None:
    """Recognise NeMo Automodel: `losses.json`, which is written first, and no `.incomplete`, which newer versions have
    beside it while they save.

    As 0.5.0 does (nemo_automodel/recipes/base_recipe.py `save_checkpoint`): `config.yaml` comes last.
    """
    names = tree.names(folder)
    if not _AUTOMODEL.fullmatch(last(folder)) or not names & {"losses.json", _AUTOMODEL_BEGUN}:
        return None
    begun = f"its {_AUTOMODEL_BEGUN} is still there" if _AUTOMODEL_BEGUN in names else ""
    if "config.yaml" not in names:
        begun = begun or "it has no config.yaml, which is written last"
    return of_folder(tree, "automodel", folder, begun=begun)


def _check_automodel(tree: Tree, found: Found, rules: Rules) -> Found:
    """`config.yaml` is no marker that a rotation's time is compared with: `.incomplete` is removed after it."""
    config_ns = tree.files[join(found.path, "config.yaml")].mtime_ns
    newer = [each for each in found.files if tree.files[each].mtime_ns > config_ns]
    if newer and not (rules.is_store or rules.ignores_times):
        reason = (
            f"{newer[0]} was written after config.yaml, and nothing tells when it is complete: have the trainer save"
            " with is_async: false"
        )
        return replace(found, reason=reason, is_refused=True)
    if not any(each.startswith("model/") and TENSORS.fullmatch(each) for each in found.inner):
        return replace(found, reason="it has no tensors in model/")
    return lacking(found, [f"optim/{METADATA}"])


def _deepspeed(tree: Tree, folder: str) -> Found | None:
    """Recognise DeepSpeed: `latest` names the folder. Rank 0 writes it before the other ranks are done.

    Lightning has both in a folder `….ckpt`, and its own state, with the step, in the model's.
    """
    name = last(folder) or tree.root
    inner = [join(folder, each) for each in sorted(tree.parts(folder))] if name.endswith(".ckpt") else []
    states = (join(part, each) for part in inner for each in sorted(tree.names(part)))
    if of_model := next((each for each in states if _DEEPSPEED_MODEL.fullmatch(last(each))), ""):
        is_marked = "latest" in tree.names(folder)
        begun = "" if is_marked else "there is no `latest` in it yet"
        found = of_folder(tree, "deepspeed", folder, join(folder, "latest") if is_marked else "", begun=begun)
        told = {} if step_named(name) is not None else said(tree, of_model, ("global_step",))
        return replace(found, step=told.get("global_step", found.step))
    if not folder or not any(map(is_of_deepspeed, tree.names(folder))):
        return None
    latest = join(folder.rpartition("/")[0], "latest")
    if latest in tree.files:
        return of_folder(tree, "deepspeed", folder, latest)
    return of_folder(tree, "deepspeed", folder, begun="there is no `latest` that names it yet")


def _check_deepspeed(tree: Tree, found: Found, rules: Rules) -> Found:
    told = tree.text(found.mark).strip()
    is_within = found.mark in found.files
    if told not in tree.parts(found.path) if is_within else told != last(found.path):
        is_begun = is_within or (step_named(told) or 0) <= found.step
        return replace(found, reason=f"`latest` names {told or 'nothing yet'}", is_begun=is_begun)
    return _of_deepspeed(tree, found, join(found.path, told) if is_within else found.path, rules)


def _with_deepspeed(tree: Tree, found: Found, rules: Rules) -> Found:
    """Return `found` with what DeepSpeed's part of it lacks, which trainers save below their own folder."""
    for part in sorted(tree.parts(found.path)):
        if any(map(_DEEPSPEED_MODEL.fullmatch, tree.names(join(found.path, part)))):
            found = _of_deepspeed(tree, found, join(found.path, part), rules)
    return found


def _of_deepspeed(tree: Tree, found: Found, folder: str, rules: Rules) -> Found:
    """Return `found`, which needs a file of every rank: the model states record their number."""
    names = tree.names(folder)
    models = [match for each in names if (match := _DEEPSPEED_MODEL.fullmatch(each))]
    if not models:
        return replace(found, reason="it has no …model_states.pt yet")
    # The newest is of this save; others may be left from an earlier one on more ranks.
    newest = max(models, key=lambda each: (tree.files[join(folder, each[0])].mtime_ns, each[0]))[0]
    told = said(tree, join(folder, newest), ("dp_world_size", "mp_world_size"))
    mp = told.get("mp_world_size", 1)
    dp = told.get("dp_world_size", rules.ranks // mp)
    if not dp:
        return replace(found, reason="its model states do not record the number of ranks: give --ranks")
    wanted = set()
    for rank in range(mp):
        if any(each[1] is not None for each in models):  # ZeRO 3: each rank has its part of the model
            wanted |= {f"zero_pp_rank_{each}_mp_rank_{rank:02d}_model_states.pt" for each in range(dp)}
        else:
            wanted.add(f"mp_rank_{rank:02d}_model_states.pt")
        for optim in [match for each in names if (match := _DEEPSPEED_OPTIM.fullmatch(each))][:1]:
            wanted |= {f"{optim[1]}{each}_mp_rank_{rank:02d}_optim_states.pt" for each in range(dp)}
    if beyond := sorted({*filter(is_of_deepspeed, names)} - wanted):
        reason = f"{beyond[0]} belongs to more than its {dp} ranks: delete it if it is left over from an earlier save"
        return replace(found, reason=reason)
    is_uncounted = any(re.fullmatch(_DEEPSPEED_UNCOUNTED, each) for each in names)
    found = lacking(found, [found.shard(join(folder, each)) for each in wanted])
    return replace(found, num_ranks=dp, names_its_files=not is_uncounted, is_waiting=is_uncounted)


def _lightning(tree: Tree, folder: str) -> Found | None:
    """Recognise a Lightning folder `….ckpt`: DCP, and `meta.pt`, which rank 0 writes after `.metadata`."""
    names = tree.names(folder)
    if not (last(folder) or tree.root).endswith(".ckpt"):
        return None
    if METADATA not in names or "meta.pt" not in names:
        return of_folder(tree, "lightning", folder, begun="it has no meta.pt, which Lightning writes last")
    return of_folder(tree, "lightning", folder, join(folder, "meta.pt"))


def _parts(tree: Tree, folder: str) -> Found | None:
    """Recognise a step folder that has DCP folders below it, and is no other entry's.

    One of them, alone, is the checkpoint of that step, together with what lies beside it. Of several, or with tensors
    beside it, each is a part, and nothing tells when all are there.
    """
    if not folder or step_named(last(folder)) is None or is_dcp(tree, folder):
        return None
    parts = [each for each in tree.folders_below(folder)[1:] if is_dcp(tree, each)]
    outermost = [each for each in parts if not any(each.startswith(f"{other}/") for other in parts)]
    if not outermost or any(step_folder(each) != folder for each in outermost):
        return None
    beside = [
        path
        for path in tree.below(folder)
        if TENSORS.fullmatch(path) and not any(path.startswith(f"{each}/") for each in outermost)
    ]
    if len(outermost) == 1 and not beside:
        (part,) = outermost
        if METADATA not in tree.names(part):
            return of_folder(tree, "dcp", folder, begun=f"{part} has no .metadata, which is written last")
        return of_folder(tree, "dcp", folder, join(part, METADATA))
    some = [path[len(folder) + 1 :] for path in [*outermost, *beside]]
    return replace(of_folder(tree, "dcp", folder), reason=_unknown_parts(folder, some), is_refused=True)


def _unknown_parts(folder: str, parts: list[str]) -> str:
    return (
        f"it has several parts ({', '.join(parts[:3])}), and nothing tells when all are there: let the trainer write an"
        " empty file DONE into it last, and give --done DONE; or write to another name, rename the folder, and give"
        f" --pattern '{glob_of(folder)}'"
    )


def glob_of(path: str) -> str:
    """Return a pattern for a path whose numbers differ from save to save."""
    return re.sub(r"[0-9]+(?:\.[0-9]+)*", "*", path)


def _dcp(tree: Tree, folder: str) -> Found | None:
    """Recognise DCP: `.metadata`, which is written last and renamed, and every file that it names."""
    if not is_dcp(tree, folder):
        return None
    is_marked = METADATA in tree.names(folder)
    begun = "" if is_marked else "it has no .metadata, which is written last"
    found = of_folder(tree, "dcp", folder, join(folder, METADATA) if is_marked else "", begun=begun)
    # What else is below the tree's own folder is something else.
    return found if folder else replace(found, files=tuple(each for each in found.files if "/" not in each))


def _check_dcp(tree: Tree, found: Found, _: Rules) -> Found:
    """megatron-core writes `metadata.json` after `.metadata`."""
    inner = found.shard(found.mark)
    if "/" in inner:
        # Nothing tells whether its trainer writes more beside it; if it did so in the steps beside this one, it will.
        lacks = {part for each in _near(tree, found) for part in _shape(tree, each)} - _shape(
            tree, found.path
        )
        reason = f"it has no {min(lacks)}, which other steps beside it have" if lacks else ""
        return replace(found, is_waiting=not reason, reason=reason)
    if not found.path and not isinstance(named := named_in(tree, found.mark), str):
        found = replace(found, files=tuple(sorted({*found.files, *(named.keys() & tree.files.keys())})))
    found = _with_core(tree, found)
    is_core = "common.pt" in found.inner or bool(found.missing)
    return replace(found, mark=join(found.path, "metadata.json")) if is_core and not found.reason else found


def _near(tree: Tree, found: Found) -> list[str]:
    """Return the folders of the steps beside this one that are nearest to it."""
    above = found.path.rpartition("/")[0]

    def steps() -> list[tuple[int, str]]:
        named = ((step_named(each), join(above, each)) for each in tree.parts(above))
        return sorted((step, folder) for step, folder in named if step is not None)

    beside = tree.once_in("steps", above, steps)
    at = bisect.bisect_left(beside, (found.step, found.path))
    return [folder for _, folder in beside[max(0, at - NUM_NEAR) : at + NUM_NEAR + 1]]


def _shape(tree: Tree, folder: str) -> set[str]:
    """Return the names, without numbers, of what has tensors in a folder."""

    def shape() -> set[str]:
        inner = (path[len(folder) + 1 :] for path in tree.below(folder) if TENSORS.fullmatch(path))
        return {glob_of(each.partition("/")[0]) for each in inner}

    return tree.once_in("shape", folder, shape)


def _with_core(tree: Tree, found: Found, part: str = "") -> Found:
    """Return `found` with what it lacks of megatron-core's files that `.metadata` does not name: `common.pt`, and
    `metadata.json`, which is written after `.metadata`. A rotation may have begun with either.
    """
    common, core = f"{part}common.pt", f"{part}metadata.json"
    if common in found.inner and core not in found.inner:
        return replace(found, reason=f"it has no {core}, which megatron-core writes last", is_begun=True)
    if core in found.inner and not tree.is_json(join(found.path, core)):
        return replace(found, reason=f"{core} is truncated or still being written")
    is_core = '"sharded_backend"' in tree.text(join(found.path, core), MAX_JSON_BYTES)
    return lacking(found, [common] if is_core else [])


def _json(tree: Tree, path: str) -> dict[str, object] | None:
    """Return the object in a file; None if it is truncated."""
    try:
        told = json.loads(tree.whole(path, MAX_JSON_BYTES))
        return told if isinstance(told, dict) else {}
    except (ValueError, RecursionError):
        return None


def _named_by_index(tree: Tree, found: Found, index: str) -> set[str]:
    """Return the files that an index of sharded weights names."""
    folder = found.shard(index).rpartition("/")[0]
    text = tree.text(index, MAX_JSON_BYTES)
    return {join(folder, each) for each in re.findall(r'"([^"/]+\.(?:safetensors|bin))"', text)}


def _recognise_index(tree: Tree, folder: str) -> Found | None:
    """Recognise sharded weights in the folder of a step: `….safetensors.index.json`, written after the shards that it
    names. In any other folder they may be a model to begin with, or the last one.
    """
    index = sorted(each for each in tree.names(folder) if each.endswith(".safetensors.index.json"))
    if not index or step_named(last(folder)) is None:
        return None
    return replace(of_folder(tree, "safetensors-file", folder, join(folder, index[-1])), is_plain=True)


def _check_index(tree: Tree, found: Found, _: Rules) -> Found:
    if not found.mark:
        return found  # a single file
    if not (named := _named_by_index(tree, found, found.mark)):
        return replace(found, reason=f"{found.mark} is truncated or still being written")
    others = {*found.inner} - named - {"training_args.bin"}
    if beside := sorted(each for each in others if TENSORS.fullmatch(each)):
        return replace(found, reason=_unknown_parts(found.path, beside), is_refused=True)
    return lacking(replace(found, names_its_files=True), named)


# The order matters: what is in a folder that one of these recognises is part of that checkpoint.
FOLDERS: dict[str, Format] = {
    "orbax": Format(_orbax, _check_orbax, is_renamed=True),
    "ml-flashpoint": Format(_flashpoint, _check_flashpoint, anew=_NONE, is_named=True),
    "olmo": Format(_olmo, _check_olmo, late=re.compile(r"(?:.*/)?rank[1-9]\d*\.pt")),
    "transformers": Format(
        _transformers, _check_transformers, _TRANSFORMERS_STATE, re.compile(r"rng_state_[1-9]\d*\.pth")
    ),
    "accelerate": Format(
        _accelerate,
        _check_accelerate,
        re.compile(r"(?:.*/)?[^/]*\.(?:bin|pt|pkl|safetensors)"),
        re.compile(r"random_states_[1-9]\d*\.pkl|custom_checkpoint_\d+\.pkl"),
    ),
    "megatron": Format(_megatron, _check_megatron, is_renamed=True),
    "verl": Format(_verl, _check_verl, late=re.compile(r"data_[1-9]\d*\.pt")),
    "nemo-rl": Format(_nemo_rl, is_renamed=True),
    "automodel": Format(_automodel, _check_automodel),
    "deepspeed": Format(
        _deepspeed,
        _check_deepspeed,
        re.compile(r".*_states\.pt"),
        re.compile(
            rf"(?:.*/)?(?:(?:bf16_|fp16_)?zero_pp_rank_[1-9]\d*_mp_rank_\d+_\w+_states\.pt|{_DEEPSPEED_UNCOUNTED})"
        ),
    ),
    "lightning": Format(_lightning, anew=_NONE, is_named=True),
    "nemo": Format(_nemo, _check_nemo, is_renamed=True, is_named=True),
    "parts": Format(_parts),
    # megatron-core writes `common.pt` first, and no `.metadata` names it.
    "dcp": Format(_dcp, _check_dcp, re.compile(r"common\.pt"), is_named=True),
    "safetensors-file": Format(_recognise_index, _check_index, is_named=True),
}
TABLE: dict[str, Format] = {
    **FOLDERS,
    # `olmo` recognises both.
    "olmo-core": Format(
        check=_check_olmo_core, late=re.compile(r"config\.json|data_paths\.txt"), is_renamed=True
    ),
    "composer": Format(),
    "torch-file": Format(),
    "done": Format(is_renamed=True),
    "pattern": Format(is_renamed=True),
}
# What has no marker but its name, and its end.
PLAIN_FORMATS = frozenset({"torch-file", "safetensors-file"})
FORMATS = tuple(each for each in TABLE if each not in ("parts", "done", "pattern"))


def is_of_deepspeed(name: str) -> bool:
    """Return whether it is a file of DeepSpeed's, which only its own tools can merge."""
    return bool(_DEEPSPEED_MODEL.fullmatch(name) or _DEEPSPEED_OPTIM.fullmatch(name))


def is_late(format_: str, shard: str) -> bool:
    """Return whether a file may come after the marker, from a rank without a barrier or from a callback."""
    return TABLE[format_].late.fullmatch(shard) is not None
