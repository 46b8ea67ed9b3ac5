"""Decides which checkpoints are taken, which are refused, and to which launch of the run they belong. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_async.core import naming
from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import InvalidNameError
from ckpt_async.watch import added
from ckpt_async.watch.entries import Entry, State
from ckpt_async.watch.formats import Found, Rules
from ckpt_async.watch.formats.checks import is_free, is_of_all_nodes
from ckpt_async.watch.formats.found import marked_ns
from ckpt_async.watch.tree import Identity, Tree

# Formats without a mark of their own beside the bytes: when a file is written again in place, nothing proves
# that it is whole.
MARKLESS = ("pattern", "quiet")
# Two files of one step that were written within this time are of one save, e.g. Lightning's `last.ckpt` and
# `epoch=…-step=….ckpt`.
TWIN_S = 60.0
# How many checkpoints the uploader has in hand at once: what was not begun need not be given up when the
# watcher is killed. More if they are small, or a folder of thousands would be looked at after every four.
MAX_OPEN, MAX_OPEN_SMALL = 4, 64
SMALL_BYTES = 1 << 30  # of all of them together
# Suffixes that trainers give to files with tensors in them.
_OF_TENSORS = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".distcp", ".npz", ".msgpack", ".h5")

_NS = 1_000_000_000
_NOTHING: Mapping[str, Mapping[str, Identity]] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to take one checkpoint found in the folder, and if not, why.

    `refusal`: it was handed in before and changed since, or can never be taken as it is. `is_waiting`: only time has
    to pass. `is_in_place`: it was written over the previous one, and records checksums of what its bytes should be.
    """

    take: bool = False
    reason: str = ""
    refusal: Refusal | None = None
    is_waiting: bool = False
    is_in_place: bool = False


def judge(found: Found, tree: Tree, known: Collection[Entry], *, num_nodes: int) -> Verdict | None:
    """Return the verdict on one candidate, or None if it is already known in exactly this form.

    `known` contains at least the entries with the candidate's path and those with its step.
    """
    files = {path: tree.files[path] for path in found.files}
    entries = sorted((each for each in known if each.path == found.path), key=lambda each: each.number)
    if any(each.is_of(files) for each in entries):
        return None
    if (twin := twin_of(found, tree, known)) is not None:
        return _of_twin(found, tree, twin)
    if found.reason:
        refusal = Refusal.UNSUPPORTED if found.is_refused else None
        return Verdict(reason=found.reason, refusal=refusal, is_waiting=found.is_waiting)
    if found.missing and num_nodes == 1:
        return Verdict(reason=lacking(found.missing))
    if reason := unsafe_name(found):
        return Verdict(reason=reason, refusal=Refusal.UNSUPPORTED)
    if entries and (found.is_file or found.format in MARKLESS):
        known_files = entries[-1].files.keys() & tree.files.keys()
        older = [path for path in known_files if tree.born_ns(path) <= entries[-1].staged_ns]
        changed = changed_in_place(entries[-1], {path: tree.files[path] for path in older})
        if changed and found.is_file and tree.tensor_sums(found.path):
            return Verdict(take=True, is_in_place=True)
        if changed:
            reason = (
                f"{changed} was written in place after it had been handed in, so nothing shows when it is complete:"
                " have the trainer write the new file under another name, and then rename it"
            )
            return Verdict(reason=reason, refusal=Refusal.CHANGED)
    return Verdict(take=True)


def refused_as(found: Found, tree: Tree, known: Iterable[Entry]) -> Entry | None:
    """Return the refused entry for this version of a candidate, perhaps from an earlier launch.

    None if the version is being uploaded or in the store.
    """
    files = {path: tree.files[path] for path in found.files}
    entries = [each for each in known if each.path == found.path and each.is_of(files)]
    newest = max(entries, key=lambda each: each.number, default=None)
    return newest if newest is not None and newest.state is State.REFUSED else None


def unknown(tree: Tree, candidates: Iterable[Found], since_ns: int, until_ns: int) -> dict[str, str]:
    """Return, by folder, a file that looks like part of a checkpoint but is in none of the `candidates`.

    Only files written between the two times count. Their format is not known.
    """
    taken = {each.path for each in candidates}
    found: dict[str, str] = {}
    for path in tree.below(""):
        folder = path.rpartition("/")[0]
        is_between = since_ns < tree.files[path].mtime_ns < until_ns
        if folder in found or not path.endswith(_OF_TENSORS) or not is_between:
            continue
        parts = path.split("/")
        if "" not in taken and taken.isdisjoint(
            "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)
        ):
            found[folder] = path
    return found


def is_held(found: Found, num_nodes: int) -> bool:
    """Return whether a candidate may become a checkpoint after its trainer has deleted it.

    That is so if another node may announce it, or if its mark is there and only time has to pass. A format that is
    told by time alone (`--quiet-s`) has no mark.
    """
    if found.is_file or found.is_refused or not found.files:
        return False
    return num_nodes > 1 or (found.is_waiting and bool(found.mark))


def is_overtaken(found: Found, tree: Tree, known: Iterable[Entry]) -> bool:
    """Return whether a later save to the same place is known: anything taken after that would be mistaken for the
    newest.
    """
    return any(each.is_alive and each.marked_ns > marked_ns(tree, found) for each in known)


def is_taken_otherwise(found: Found, tree: Tree, known: Iterable[Entry]) -> bool:
    """Return whether the same save is known with files other than these and those from which they have grown."""
    files, at_ns = {path: tree.files[path] for path in found.files}, marked_ns(tree, found)
    same = (each for each in known if each.is_alive and each.marked_ns == at_ns)
    return any(not added.has_grown(each, files) for each in same)


def has_peer(found: Found, tree: Tree, known: Iterable[Entry]) -> bool:
    """Return whether a later checkpoint of the same trainer, seen to its end, has files of the same names.

    If this one was deleted before it had been quiet for long enough, such a peer shows that no rank's file was
    missed.
    """
    names, written_ns = (
        _numberless(found.inner, found.step),
        max(tree.files[each].mtime_ns for each in found.files),
    )
    place = found.path.rpartition("/")[0]
    for each in known:
        is_akin = each.format == found.format and each.path.rpartition("/")[0] == place
        if is_akin and each.written_ns > written_ns and _numberless(each.shards.values(), each.step) == names:
            return True
    return False


def _numberless(names: Iterable[str], step: int) -> set[str]:
    return {re.sub(rf"(?<![0-9]){step}(?![0-9])", "STEP", each) for each in names}


def twin_of(found: Found, tree: Tree, known: Iterable[Entry]) -> Entry | None:
    """Return the entry that is taken in place of a file of the same step and time, since it is the same save."""
    if not found.is_file or found.format in MARKLESS:
        return None
    written_ns = tree.files[found.path].mtime_ns
    others = (each for each in known if each.step == found.step and each.path != found.path)
    near = (each for each in others if each.is_alive and abs(each.written_ns - written_ns) < TWIN_S * 1e9)
    return max(near, key=lambda each: (each.written_ns, each.number), default=None)


def _of_twin(found: Found, tree: Tree, twin: Entry) -> Verdict | None:
    """Return the verdict on a file that has a twin, or None if checksums of the tensors show that both are the same."""
    tensors = tree.tensor_sums(found.path)
    theirs = twin.tensors or (tree.tensor_sums(twin.path) if twin.path in tree.files else {})
    if tensors and tensors == theirs:
        return None
    how = "the two differ" if tensors and theirs else "nothing shows whether the two are the same"
    reason = (
        f"{found.path} is not uploaded, since {twin.path} of the same step {found.step} and minute is, and {how}."
        " Watch its folder separately with another --kind, or take both with --pattern"
    )
    return Verdict(reason=reason, refusal=Refusal.UNSUPPORTED)


def unsafe_name(found: Found) -> str:
    """Return why some store does not accept the name of the checkpoint or of one of its files; "" if all stores do.

    Nothing of such a checkpoint may be staged, or announced to other nodes.
    """
    try:
        naming.checkpoint_name(found.name, found.step)
        for name in found.inner:
            naming.check_relative(name, "file")
    except InvalidNameError as error:
        return str(error)
    return ""


def lacking(missing: tuple[str, ...]) -> str:
    return f"its marker names files that are not here: {_some(missing)} (on another node? see --node)"


def _some(missing: Sequence[str]) -> str:
    return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")


def changed_in_place(entry: Entry, files: Mapping[str, Identity]) -> str:
    """Return a file that has the same inode as before but another size or time; "" if there is none."""
    for path, was in entry.files.items():
        now = files.get(path)
        if now is not None and now != was and now.inode == was.inode:
            return path
    return ""


def needs_new_generation(entry: Entry, known: Iterable[Entry], generation: int) -> bool:
    """Return whether the trainer has gone back to an earlier step.

    That is so if this step, or a higher one, was handed in before in this generation, and the entry was complete
    after that. Whatever the trainer saves from then on is newer than what was there before, whatever its step.
    """
    handed = [each for each in known if each.generation == generation and each.number != entry.number]
    if any(each.step == entry.step for each in handed):
        return True
    higher = [each for each in handed if each.step > entry.step]
    return any(entry.marked_ns > each.written_ns for each in higher)


def is_perhaps_copy(entry: Entry, known: Iterable[Entry], generation: int) -> bool:
    """Return whether the entry may have been renamed or copied by hand, as far as steps and times tell.

    A trainer that goes back would look the same. So would an entry whose step is only derived from its time.
    """
    return has_no_step(entry) or needs_new_generation(entry, known, generation)


def has_no_step(entry: Entry) -> bool:
    return entry.step == entry.marked_ns // _NS


def akin(entry: Entry, known: Collection[Entry], generation: int) -> list[Entry]:
    """Return the entries of other paths that may be the same checkpoint, whatever their names say about steps.

    Their files have the same names and sizes, and the same sampled blocks where both were sampled. Where they were
    not, only few are worth reading.
    """
    sizes, any_step = _sizes(entry), has_no_step(entry)
    may_be_copy = is_perhaps_copy(entry, known, generation)

    def is_alike(other: Entry) -> bool:
        if entry.samples and other.samples:
            return entry.samples == other.samples
        return may_be_copy and (any_step or other.step == entry.step)

    others = (each for each in originals(known) if each.path != entry.path and each.is_alive)
    return [each for each in others if is_alike(each) and _sizes(each) == sizes]


def originals(known: Iterable[Entry]) -> list[Entry]:
    """Return the entries without copies, i.e. those that are committed as the same checkpoint as an earlier one."""
    found: dict[tuple[int, int, int], Entry] = {}
    for each in sorted(known, key=lambda each: each.number):
        is_committed = each.state is State.COMMITTED
        found.setdefault((each.generation, each.step, 0) if is_committed else (0, 0, each.number), each)
    return list(found.values())


def _sizes(entry: Entry) -> Mapping[str, int]:
    return {shard: each.size_bytes for shard, each in entry.content.items()}


def awaits_akin(entry: Entry, known: Collection[Entry], generation: int) -> bool:
    """Return whether the entry may be a copy of one that is not decided yet: it then becomes what the other becomes."""
    return any(each.state is State.HANDED for each in akin(entry, known, generation))


def gone_back(entry: Entry, known: Collection[Entry]) -> str:
    """Return the warning for a trainer that has gone back, perhaps while no watcher ran; "" if it has not."""
    newest = max((each.generation for each in known if each.number != entry.number), default=0)
    if not newest or not needs_new_generation(entry, known, newest):
        return ""
    return (
        f"{entry.path or entry.name} was completed after a higher step, or a second time: its trainer has gone back to"
        f" step {entry.step}, and what it saves from now on counts as newer than everything before. If it is a copy"
        " without preserved timestamps (`cp -r`), that is wrong: keep copies elsewhere. (For an old folder that nothing"
        " writes to, use --once --ignore-times)"
    )


def predecessors(entry: Entry, known: Iterable[Entry], generation: int, *, num_nodes: int) -> list[Entry]:
    """Return the entries that were saved before this one, are not decided yet, and must be decided first.

    If the trainer has gone back and the earlier one is handed in again in a later launch, that one would be the
    newest. With several nodes, a node that was killed may not have sealed its part of what an earlier launch handed
    in: that is handed in again, and must come first, or it would be passed over.
    """
    earlier = [each for each in known if each.state is State.HANDED and each.number < entry.number]
    return [
        each
        for each in earlier
        if (each.generation != generation and (num_nodes > 1 or each.step >= entry.step))
        or needs_new_generation(entry, [each], generation)
    ]


def passed_over(entry: Entry, known: Iterable[Entry], generation: int) -> str:
    """Return why the entry would wrongly become the newest, or "" if it would not.

    It would if it is older than what an earlier launch of the watcher has committed.
    """
    for each in known:
        is_earlier = each.state is State.COMMITTED and 0 < each.generation < generation
        if is_earlier and each.step > entry.step and entry.marked_ns <= each.written_ns:
            return (
                f"it is older than step {each.step}, which an earlier launch has committed, but would become the"
                " newest: adopt it with --kind, or into another remote"
            )
    return ""


def lost_part(entry: Entry, known: Iterable[Entry], num_nodes: int) -> str:
    """Return why the entry cannot be handed in any more now that there are other nodes than had saved it, or "".

    Files that are known to be missing need not be waited for. Where the mark does not name the files of other nodes,
    nobody can tell what is missing. What is `known` tells whether it was saved again since: a rank that may write after
    the mark may then have a file of either save.
    """
    if entry.num_nodes == num_nodes:
        return ""
    left = "this node is alone now" if num_nodes == 1 else f"there are {num_nodes} now"
    missing = sorted({*entry.expected} - {*entry.shards.values()})
    free = [each for each in missing if is_free(entry.format, each)]
    if free and any(each.path == entry.path and each.marked_ns > entry.marked_ns for each in known):
        return (
            f"it was saved by {entry.num_nodes} nodes, {left}, and it was saved again to the same place: nothing"
            f" shows which save their {_some(free)} would belong to"
        )
    if entry.num_nodes < num_nodes:
        return ""
    if missing and num_nodes == 1:
        return f"it was saved by {entry.num_nodes} nodes, {left}, and has no {_some(missing)}"
    if entry.path in entry.files or not is_of_all_nodes(entry.format, entry.name, entry.files):
        return ""
    return (
        f"it was saved by {entry.num_nodes} nodes, {left}, and its marker does not say which files the others had:"
        " if none are missing, send it with --kind, or to another remote"
    )


def due(
    known: Collection[Entry], now_ns: int, rules: Rules, now: Mapping[str, Mapping[str, Identity]] = _NOTHING
) -> list[Entry]:
    """Return the staged entries that have settled, in the order in which they were found.

    This works even if the clock was set back far. `now` has the current files of each candidate in the folder.
    """
    versions = added.by_path(known)
    staged = [each for each in known if each.state is State.STAGED and not each.is_followed]
    settled = [each for each in staged if added.has_settled(each, now_ns, rules.settle_s)]
    ready = [
        each
        for each in settled
        if not added.is_held_back(each, versions[each.path], now.get(each.path, {}), now_ns, rules)
    ]
    return sorted(ready, key=lambda each: each.number)


def are_many(num_handed: int, size_bytes: int) -> bool:
    """Return whether the uploader has so many checkpoints in hand that another one has to wait.

    `size_bytes` is their size together with that of the other one.
    """
    return num_handed >= (MAX_OPEN_SMALL if size_bytes <= SMALL_BYTES else MAX_OPEN)


def has_told_all(known: Iterable[Entry], generation: int, last_number: int) -> bool:
    """Return whether everything that this node had found is decided or was announced in this launch.

    Only entries up to `last_number` count.
    """
    ours = (
        each for each in known if not (each.is_followed or each.is_settled) and each.number <= last_number
    )
    return all(each.generation == generation for each in ours)


def awaits_others(entry: Entry) -> bool:
    """Return whether nothing can be done with the entry until another node announces it again."""
    return entry.is_followed and entry.state is State.STAGED


def stands_for(other: Entry, entry: Entry) -> bool:
    """Return whether `other` is the same checkpoint, handed in again, and not refused."""
    is_same = (other.path, other.step, other.told_ns) == (entry.path, entry.step, entry.told_ns)
    return is_same and other.number != entry.number and other.is_alive


def to_remove(entries: Iterable[Entry], num_kept: int) -> list[Entry]:
    """Return the committed entries beyond the newest `num_kept`, by the order in which they were written.

    A place that was saved to again belongs to its newest save, whatever became of that. A copy that somebody has made
    of a committed checkpoint is not the trainer's.
    """
    everything = sorted(entries, key=lambda each: each.number)
    of_place = {each.path: each for each in everything}
    written = sorted(of_place.values(), key=lambda each: (each.written_ns, each.path.count("/"), each.number))
    of_commit: dict[tuple[int, int], Entry] = {}
    for each in written:
        if each.state is State.COMMITTED:
            of_commit.setdefault((each.generation, each.step), each)
    newest = list(of_commit.values())
    return newest[: max(0, len(newest) - num_kept)]
