"""Which checkpoints are in a folder, and which of them are complete: one table of predicates over a listing. Pure.

Every rule goes by what the format's own writer leaves last, and by what that promises; docs/watch.md has the table.

A mark is older than no file that it stands for. Where one is, the mark is of an earlier save to the same place, and the
checkpoint is being written anew. (Copies that did not keep times look like that: `Rules.ignores_times`.)
"""

from __future__ import annotations

import fnmatch
import functools
import json
import pickletools
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt_async.errors import UnsafePickleError
from ckpt_async.restore.dcp_files import MAX_METADATA_BYTES, named_files
from ckpt_async.watch.tree import Tree

METADATA = ".metadata"
# Folders that hold a DCP checkpoint as a part of another one: OLMo-core's, NeMo's, what transformers and accelerate
# write of FSDP, OLMo's.
_PARTS = ("model_and_optim", "weights", "pytorch_model_fsdp_0", "optimizer_0", "model", "optim", "train")
_NUMBER = re.compile(r"[0-9]{1,12}")
_NAMED_STEP = re.compile(r"(?:step=?[-_]?|iter[-_]?|ba|checkpoint-)([0-9]{1,12})")
_TRANSFORMERS = re.compile(r"checkpoint-([0-9]{1,12})")
_OLMO = re.compile(r"step([0-9]{1,12})(-unsharded)?(-tmp)?")
_MEGATRON = re.compile(r"iter_([0-9]{1,12})")
_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
_FLASHPOINT = re.compile(r"step-([0-9]{1,12})_ckpt")
_ORBAX = re.compile(r"(?:[a-z_]*_)?([0-9]{1,12})")
_DEEPSPEED_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_DEEPSPEED_OPTIM = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d+)(_mp_rank_(\d+)_optim_states\.pt)")
_DEEPSPEED_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:model|optim)_states\.pt")
# Lightning's names have metrics too (`val_loss=0.29`, `train_loss_step=0.29`), and versions (`-v1`).
_LIGHTNING_STEP = re.compile(r"(?<![A-Za-z_])(?:global_)?step=([0-9]{1,12})(?!\.?[0-9])")
# Written by other ranks than 0, after `latest` too, and no file says how many there are: pipeline stages, experts.
_DEEPSPEED_UNCOUNTED = re.compile(r"(?:layer_|expert_|(?:bf16_|fp16_)?expp_rank_)\d+[-_].*_states\.pt")
_COMPOSER = re.compile(r"ep[0-9]+-ba([0-9]{1,12})(?:-rank([0-9]+))?\.pt")
_RNG = re.compile(r"rng_state_([0-9]+)\.pth|random_states_([0-9]+)\.pkl")
# How much of a pickle is searched for a number that it says. DeepSpeed's comes after the names of all tensors.
_SEARCHED_BYTES = 1 << 22
_MAX_JSON_BYTES = 1 << 26
_NS = 1_000_000_000
# Between the last byte of a file and what its writer then does to the folder: a rename.
_TOLERANCE_NS = _NS
# Formats of Lightning, and the file of a folder that says the step where its name does not.
_SAYS_STEP = {"lightning": "meta.pt", "nemo": "weights/common.pt"}
# How long nothing may have changed where it is unknown how many ranks write.
UNCOUNTED_S = 30.0
# Whose marks name every file, so that one that was deleted is missed.
_NAMING = frozenset({"dcp", "lightning", "nemo", "deepspeed", "composer"})


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user said about how checkpoints are told. `done`, `pattern` and `quiet_s` replace the table."""

    formats: tuple[str, ...] = ()  # only these of the table
    done: str = ""  # a folder is complete once it has a file of this name
    pattern: str = ""  # what has such a path was renamed to it when it was complete
    quiet_s: float = 0.0  # complete when nothing of it has changed for so long
    ignores_times: bool = False
    ranks: int = 0  # trainer processes on all nodes, where the format does not tell; 0: unknown
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint. `files` are those here, by their paths in the folder; `missing` those that its mark names and
    that are not here (on one node: it is incomplete). `reason` says why it is not complete, "" if it is. `is_waiting`:
    time alone will tell. `is_refused`: it will never be complete as it is.
    """

    format: str
    path: str  # of its folder ("": the watched folder itself), or its one file
    step: int
    name: str
    files: tuple[str, ...]
    mark: str = ""  # the file that says so; "" where the name does
    missing: tuple[str, ...] = ()
    reason: str = ""
    is_waiting: bool = False
    is_refused: bool = False

    @property
    def is_file(self) -> bool:
        return self.files == (self.path,)

    def shard(self, path: str) -> str:
        """The name of a file of it within the checkpoint."""
        return path.rpartition("/")[2] if self.is_file else path[len(self.path) + 1 if self.path else 0 :]

    @property
    def inner(self) -> tuple[str, ...]:
        return tuple(self.shard(each) for each in self.files)


def find(tree: Tree, rules: Rules = Rules()) -> list[Found]:
    """Every checkpoint of the folder that is there or on its way, by step."""
    found: list[Found] = []
    taken: set[str] = set()
    recognise = _by_rules if rules.done or rules.pattern or rules.quiet_s else _by_table
    for each in recognise(tree, rules, taken):
        checked = each if each.reason else _checked(tree, each, rules)
        found.append(checked)
    return sorted(found, key=lambda each: (each.step, each.path))


def _by_table(tree: Tree, rules: Rules, taken: set[str]) -> Iterator[Found]:
    table = [each for name, each in TABLE.items() if not rules.formats or name in rules.formats]
    for folder in tree.folders:
        if _is_within(folder, taken):
            continue
        for of_folder in table:
            if (found := of_folder(tree, folder, rules)) is not None:
                if found.path or folder == "":
                    taken.add(folder if not found.is_file else found.path)
                yield found
                break
    if not rules.formats or "torch-file" in rules.formats:
        for path in sorted(tree.files):
            if not _is_within(path, taken) and (found := torch_file(tree, path)) is not None:
                yield found


def _is_within(path: str, taken: set[str]) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:depth]) in taken for depth in range(1, len(parts) + 1)) or (
        "" in taken and path == ""
    )


def _by_rules(tree: Tree, rules: Rules, taken: set[str]) -> Iterator[Found]:
    """What the user's own rules say. A pattern alone trusts that names are given by renaming."""
    if rules.done:
        for folder in tree.folders:
            if not _is_within(folder, taken) and rules.done in tree.names(folder):
                taken.add(folder)
                yield _of_folder(tree, "done", folder, mark=_join(folder, rules.done))
        return
    for path in [*tree.folders[1:], *sorted(tree.files)]:
        is_wanted = fnmatch.fnmatchcase(path, rules.pattern) if rules.pattern else "/" not in path
        if not is_wanted or _is_within(path, taken):
            continue
        taken.add(path)
        kind = "quiet" if rules.quiet_s else "pattern"
        found = _one_file(tree, kind, path) if path in tree.files else _of_folder(tree, kind, path)
        newest_ns = max((tree.files[each].mtime_ns for each in found.files), default=tree.now_ns)
        if rules.quiet_s and tree.now_ns - newest_ns < rules.quiet_s * _NS:
            found = replace(found, reason=f"it changed within the last {rules.quiet_s:g} s")
        yield found


# --- what a format's mark says -----------------------------------------------------------------------------


def orbax(tree: Tree, folder: str, _: Rules) -> Found | None:
    """`commit_success.txt`, or a folder that was renamed into place, with `_CHECKPOINT_METADATA`."""
    name = _last(folder)
    if ".orbax-checkpoint-tmp" in name:
        return _of_folder(tree, "orbax", folder, reason="Orbax has not renamed it into place")
    marks = tree.names(folder) & {"commit_success.txt", "_CHECKPOINT_METADATA"}
    if not (_ORBAX.fullmatch(name) and marks):
        return None
    if "commit_success.txt" in marks:
        return _of_folder(tree, "orbax", folder, mark=_join(folder, "commit_success.txt"))
    return _of_folder(tree, "orbax", folder)


def flashpoint(tree: Tree, folder: str, _: Rules) -> Found | None:
    """No `…unfinished` beside it: made before the folder, removed when all ranks are done."""
    if not _FLASHPOINT.fullmatch(_last(folder)):
        return None
    above = folder.rpartition("/")[0]
    beside = [each for each in tree.names(above) | tree.parts(above) if each.endswith("unfinished")]
    is_unfinished = any(each.startswith(_last(folder)) for each in beside)
    reason = "an …unfinished mark is beside it" if is_unfinished else ""
    return _of_folder(tree, "ml-flashpoint", folder, reason=reason)


def nemo(tree: Tree, folder: str, _: Rules) -> Found | None:
    """`weights/.metadata` in it, and no `<name>-unfinished` beside it."""
    if not folder or METADATA not in tree.names(_join(folder, "weights")):
        return None
    above, name = folder.rpartition("/")[0], _last(folder)
    reason = f"{name}-unfinished is beside it" if f"{name}-unfinished" in tree.names(above) else ""
    return _of_folder(tree, "nemo", folder, reason=reason)


def olmo(tree: Tree, folder: str, _: Rules) -> Found | None:
    """OLMo-core's `.metadata.json`, or OLMo's `config.yaml` in a folder that is not called `…-tmp`."""
    name, names = _last(folder), tree.names(folder)
    match = _OLMO.fullmatch(name)
    if not folder:
        return None
    if ".metadata.json" in names and not (match and match[3]):
        return _of_folder(tree, "olmo-core", folder, mark=_join(folder, ".metadata.json"))
    if match and match[3]:
        return _of_folder(tree, "olmo", folder, reason="OLMo has not renamed it into place")
    if match and "config.yaml" in names:
        return _of_folder(tree, "olmo", folder, mark=_join(folder, "config.yaml"))
    if match and tree.parts(folder) & {"model_and_optim", "train"}:
        reason = "it has neither .metadata.json nor config.yaml, which OLMo-core and OLMo write last"
        return _of_folder(tree, "olmo-core", folder, reason=reason)
    return None


def transformers(tree: Tree, folder: str, rules: Rules) -> Found | None:
    """`trainer_state.json`, which rank 0 writes last; of other ranks it says nothing, so their files are counted."""
    match = _TRANSFORMERS.fullmatch(_last(folder))
    if not match:
        return None
    mark = _join(folder, "trainer_state.json")
    if mark not in tree.files:
        return _of_folder(
            tree, "transformers", folder, reason="it has no trainer_state.json, which is written last"
        )
    try:
        step = json.loads(tree.whole(mark, _MAX_JSON_BYTES))["global_step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        step = None
    found = _of_folder(tree, "transformers", folder, mark=mark)
    if step != int(match[1]):
        return replace(found, reason="its trainer_state.json is not whole, or of another step")
    ranks = {int(number[1] or number[2]) for each in found.inner if (number := _RNG.fullmatch(each))}
    if ranks and rules.num_nodes > 1 and not rules.ranks:
        return replace(
            found, reason="of several nodes it does not say how many ranks there were: give --ranks"
        )
    count = rules.ranks or max(*ranks, 1, 1) + 1  # one process alone has no number in the name
    lacking = [f"rng_state_{rank}.pth" for rank in range(count) if ranks and rank not in ranks]
    named = set(re.findall(r'"([^"/]+\.(?:safetensors|bin))"', "".join(_indexes(tree, folder))))
    found = replace(found, missing=tuple(sorted({*lacking} | (named - tree.names(folder)))))
    return _settled(tree, found) if ranks and not rules.ranks else found


def _indexes(tree: Tree, folder: str) -> Iterator[str]:
    for name in sorted(tree.names(folder)):
        if name.endswith(".index.json"):
            yield tree.text(_join(folder, name), _MAX_JSON_BYTES)


def megatron(tree: Tree, folder: str, _: Rules) -> Found | None:
    """`latest_checkpointed_iteration.txt`, written after a barrier, names it or a later one."""
    match = _MEGATRON.fullmatch(_last(folder))
    above = folder.rpartition("/")[0]
    if not match:
        return None
    tracker = _join(above, _MEGATRON_TRACKER)
    if tracker not in tree.files:
        if METADATA in tree.names(folder):
            return None  # megatron-core without Megatron-LM: DCP's mark
        return _of_folder(tree, "megatron", folder, reason=f"there is no {_MEGATRON_TRACKER} yet")
    told = tree.text(tracker).strip()
    if not told.isdecimal() and told != "release":
        return _of_folder(tree, "megatron", folder, reason=f"{_MEGATRON_TRACKER} is not whole")
    found = _of_folder(tree, "megatron", folder)
    if told.isdecimal() and int(told) == int(match[1]):
        return replace(found, mark=tracker)
    later = told.isdecimal() and int(told) > int(match[1])
    written_ns = max((tree.files[each].mtime_ns for each in found.files), default=0)
    if not later or written_ns > tree.files[tracker].mtime_ns:
        return replace(found, reason=f"{_MEGATRON_TRACKER} says {told}")
    if METADATA in tree.names(folder):
        return replace(found, mark=_join(folder, METADATA))
    return replace(found, reason=f"{_MEGATRON_TRACKER} says {told} already: whether this one was is unknown")


def deepspeed(tree: Tree, folder: str, rules: Rules) -> Found | None:
    """`latest` names it; rank 0 writes that before the other ranks are done, so their files are counted too."""
    names = tree.names(folder)
    models = [match for each in names if (match := _DEEPSPEED_MODEL.fullmatch(each))]
    optims = [match for each in names if (match := _DEEPSPEED_OPTIM.fullmatch(each))]
    if not (models or optims) or not folder:
        return None
    found = _of_folder(tree, "deepspeed", folder)
    latest = _join(folder.rpartition("/")[0], "latest")
    told = tree.text(latest).strip()
    if not told:
        return replace(found, reason="there is no `latest` that names it yet")
    if told != _last(folder):
        return replace(found, reason=f"`latest` names {told}")
    world_sizes = [
        _said(tree, _join(folder, each[0]), ("dp_world_size", "mp_world_size")) for each in models[:1]
    ]
    if not world_sizes:
        return replace(found, reason="it has no …model_states.pt yet", mark=latest)
    mp = world_sizes[0].get("mp_world_size", 1)
    dp = world_sizes[0].get("dp_world_size", rules.ranks // mp)
    if not dp:
        return replace(found, reason="its model states do not say how many ranks there were: give --ranks")
    wanted = set()
    for rank in range(mp):
        if any(each[1] is not None for each in models):  # ZeRO 3: each rank has its part of the model
            wanted |= {f"zero_pp_rank_{each}_mp_rank_{rank:02d}_model_states.pt" for each in range(dp)}
        else:
            wanted.add(f"mp_rank_{rank:02d}_model_states.pt")
        for optim in optims[:1]:
            wanted |= {f"{optim[1]}{each}_mp_rank_{rank:02d}_optim_states.pt" for each in range(dp)}
    found = replace(found, missing=tuple(sorted(wanted - names)), mark=latest)
    return _settled(tree, found) if any(_DEEPSPEED_UNCOUNTED.fullmatch(each) for each in names) else found


def lightning(tree: Tree, folder: str, _: Rules) -> Found | None:
    """A `.ckpt` folder: DCP, and `meta.pt`, which rank 0 writes after `.metadata`."""
    if not folder.endswith(".ckpt") or not folder:
        return None
    if METADATA not in tree.names(folder) or "meta.pt" not in tree.names(folder):
        return _of_folder(tree, "lightning", folder, reason="it has no meta.pt, which Lightning writes last")
    return _of_folder(tree, "lightning", folder, mark=_join(folder, "meta.pt"))


def dcp(tree: Tree, folder: str, _: Rules) -> Found | None:
    """`.metadata`, written last and renamed, and every file that it names."""
    names = tree.names(folder)
    if METADATA not in names:
        is_begun = any(each.endswith(".distcp") for each in names)
        reason = "it has no .metadata, which is written last"
        return (
            _of_folder(tree, "dcp", folder, reason=reason)
            if is_begun and _last(folder) not in _PARTS
            else None
        )
    if "common.pt" in names and "metadata.json" not in names:
        return _of_folder(
            tree, "dcp", folder, reason="it has no metadata.json, which megatron-core writes last"
        )
    mark = "metadata.json" if "common.pt" in names else METADATA
    return _of_folder(tree, "dcp", folder, mark=_join(folder, mark))


# In this order: what is in a folder that one of them recognises is part of that.
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
    """One file, as Lightning (`.ckpt`) and Composer (`ep…-ba…-rank0.pt`) write it: the directory that ends its zip."""
    composer = _COMPOSER.fullmatch(_last(path))
    if not path.endswith(".ckpt") and not composer:
        return None
    found = _one_file(tree, "composer" if composer else "lightning", path)
    if composer and composer[2] not in (None, "0"):
        reason = "one file for each rank has no mark that says whether all are there: hand them in by --done"
        return replace(found, reason=reason)
    if tree.read(path, 0, 2) != b"PK":
        return replace(found, reason="it is not one of torch.save's zip files yet")
    return found


def _settled(tree: Tree, found: Found) -> Found:
    """Not complete while ranks that nobody has counted may still be writing."""
    newest_ns = max(tree.files[each].mtime_ns for each in found.files)
    if found.missing or abs(tree.now_ns - newest_ns) >= UNCOUNTED_S * _NS:
        return found
    reason = f"how many ranks write to it is unknown, and it changed within the last {UNCOUNTED_S:g} s"
    return replace(found, reason=reason, is_waiting=True)


# --- what is checked of every mark -------------------------------------------------------------------------


def _checked(tree: Tree, found: Found, rules: Rules) -> Found:
    """The same with a reason, if a file that is here breaks the promise."""
    found = _with_named(tree, found)
    if found.reason:
        return found
    if not found.files:
        return replace(found, reason="it has no files yet")
    if link := _link_in(tree, found):
        reason = f"{link} is a symbolic link, which is not followed: have the trainer write the file itself"
        return replace(found, reason=reason, is_refused=True)
    for path in found.files:
        if not tree.is_whole(path):
            return replace(found, reason=f"{path} has no end yet")
    if found.mark.endswith(".json") and not _is_json(tree, found.mark):
        return replace(found, reason=f"{found.mark} has no end yet")
    if found.mark and not rules.ignores_times:
        marked_ns = tree.files[found.mark].mtime_ns
        newer = [path for path in found.files if tree.files[path].mtime_ns > marked_ns]
        newer = [path for path in newer if not _is_free(found, path)]
        if newer:
            return replace(
                found,
                reason=f"{newer[0]} is newer than its mark {found.mark}: it is being written anew, or was copied"
                " without its times (--ignore-times)",
            )
        if found.format not in _NAMING and (changed := _changed_later(tree, found, marked_ns)) is not None:
            return replace(
                found,
                reason=f"something was removed from {changed or 'it'} after its mark {found.mark} was written, or it"
                " was copied without its times (--ignore-times)",
            )
    return found


def _link_in(tree: Tree, found: Found) -> str:
    """A symbolic link in its folder; "" if there is none. What DCP's mark right in the watched folder names is missed
    where it is a link, and other links beside it are none of its own.
    """
    if found.is_file or (found.format == "dcp" and not found.path):
        return ""
    here = f"{found.path}/" if found.path else ""
    return next((each for each in tree.links if each.startswith(here)), "")


def _is_json(tree: Tree, path: str) -> bool:
    try:
        json.loads(tree.whole(path, _MAX_JSON_BYTES))
        return True
    except (ValueError, RecursionError):
        return False


def _changed_later(tree: Tree, found: Found, marked_ns: int) -> str | None:
    """The folder from which something seems to have been deleted since, as a rotation does that was cut short."""
    for folder in tree.folders_below(found.path):
        newest_ns = max((tree.files[_join(folder, each)].mtime_ns for each in tree.names(folder)), default=0)
        if tree.changed_ns.get(folder, 0) > max(marked_ns, newest_ns) + _TOLERANCE_NS:
            return folder
    return None


def _is_free(found: Found, path: str) -> bool:
    """Whether another rank than the one that writes the mark may write it later: no barrier is between them."""
    if found.format == "deepspeed" and _DEEPSPEED_UNCOUNTED.fullmatch(found.shard(path)):
        return True
    of_rank = {"deepspeed": _DEEPSPEED_RANK, "transformers": _RNG}.get(found.format)
    match = of_rank.fullmatch(found.shard(path)) if of_rank else None
    return match is not None and int(next(filter(None, match.groups()))) > 0


def _with_named(tree: Tree, found: Found) -> Found:
    """With what the `.metadata` files in it name and is not here; or with the reason why one cannot be read."""
    marks = [path for path in found.files if _last(path) == METADATA]
    missing = list(found.missing)
    for mark in marks:
        folder = mark.rpartition("/")[0]
        named = tree.once("named", mark, functools.partial(_named, tree, mark))
        if isinstance(named, str):
            return replace(found, reason=f"{mark} cannot be read: {named}")
        for name, least_bytes in named.items():
            path = _join(folder, name)
            if path not in tree.files:
                missing.append(found.shard(path))
            elif tree.files[path].size_bytes < least_bytes:
                return replace(found, reason=f"{path} is shorter than {mark} says")
    return replace(found, missing=tuple(sorted({*missing})))


def _named(tree: Tree, mark: str) -> dict[str, int] | str:
    """What a `.metadata` names, or why it cannot be read."""
    try:
        return named_files(tree.whole(mark, MAX_METADATA_BYTES))
    except UnsafePickleError as error:
        return error.without_hint


# --- values ------------------------------------------------------------------------------------------------


def _of_folder(tree: Tree, format_: str, folder: str, *, mark: str = "", reason: str = "") -> Found:
    files = [] if not folder and format_ == "dcp" else tree.below(folder)
    if not folder and format_ == "dcp":
        files = sorted(tree.names(""))  # what is beside its mark; other folders are others
    files = [each for each in files if not each.endswith(".tmp")]
    name = _last(folder) or tree.root
    step = _step_of(name, format_)
    if step is None and format_ in _SAYS_STEP:
        step = _said(tree, _join(folder, _SAYS_STEP[format_]), ("global_step",)).get("global_step")
    if step is None:
        step = _written_s(tree, mark or max(files, key=lambda each: tree.files[each].mtime_ns, default=""))
    return Found(format_, folder, step, name, tuple(files), mark, (), reason)


def _one_file(tree: Tree, format_: str, path: str) -> Found:
    step = _step_of(_last(path), format_)
    if step is None:
        step = _said(tree, path, ("global_step",)).get("global_step")
    if step is None:
        step = _written_s(tree, path)
    return Found(format_, path, step, _last(path), (path,))


def _step_of(name: str, format_: str) -> int | None:
    if format_ in _SAYS_STEP:
        told = _LIGHTNING_STEP.search(name)
        return int(told[1]) if told else None
    if match := _NAMED_STEP.search(name):
        return int(match[1])
    numbers = _NUMBER.findall(name.removesuffix(".safetensors"))
    return int(numbers[-1]) if numbers else None


def _written_s(tree: Tree, path: str) -> int:
    """Where nothing tells a step: later ones are higher."""
    return tree.files[path].mtime_ns // _NS if path in tree.files else 0


def _said(tree: Tree, path: str, keys: tuple[str, ...]) -> dict[str, int]:
    """Whole numbers that the state in a file of torch.save's says under these keys, first come; nothing is run."""
    if path not in tree.files:
        return {}
    return tree.once("says", path, lambda: _said_in(tree.read(path, 0, _SEARCHED_BYTES), keys))


def _said_in(data: bytes, keys: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    if data[:4] != b"PK\x03\x04" or len(data) < 30:
        return found
    name_bytes, more_bytes = struct.unpack_from("<HH", data, 26)
    key = ""
    with suppress(ValueError, IndexError, struct.error, UnicodeDecodeError):
        for opcode, argument, _ in pickletools.genops(data[30 + name_bytes + more_bytes :]):
            if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                continue
            if key and isinstance(argument, int) and "INT" in opcode.name:
                found.setdefault(key, argument)
            key = argument if argument in keys else ""
            if len(found) == len(keys):
                break
    return found


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
