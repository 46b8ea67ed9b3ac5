"""What is to be done about what was found: which checkpoints are taken, which are refused, and in which start of the
run they belong. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ckpt_async.core import naming
from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import InvalidNameError
from ckpt_async.watch import added
from ckpt_async.watch.entries import Entry, State
from ckpt_async.watch.formats import Found, Rules
from ckpt_async.watch.formats.found import marked_ns
from ckpt_async.watch.tree import Identity, Tree

# Formats without a mark of their own beside the bytes: a file that is written again in place has no end that proves
# that it is whole.
MARKLESS = ("pattern", "quiet")
# Two files of one step that were written so close are of one save: Lightning's `last.ckpt` and `epoch=…-step=….ckpt`.
TWIN_S = 60.0
# So many are in the uploader's hands at once: what was not begun need not be given up when the watcher is killed. Of
# small ones more, or a folder of thousands would be looked at for every four.
MAX_OPEN, MAX_OPEN_SMALL = 4, 64
SMALL_BYTES = 1 << 30  # all of them
# What trainers call files with tensors in them.
_OF_TENSORS = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".distcp", ".npz", ".msgpack", ".h5")

_NS = 1_000_000_000
_NOTHING: Mapping[str, Mapping[str, Identity]] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one checkpoint of the folder: take it, or why not. `refusal`: it was handed in before and then changed, or can
    never be taken as it is. `is_waiting`: it wants only time. `is_in_place`: it was written over the one before it, and
    says itself what its bytes should be.
    """

    found: Found
    take: bool = False
    reason: str = ""
    refusal: Refusal | None = None
    is_waiting: bool = False
    is_in_place: bool = False


def judge(found: Found, tree: Tree, known: Collection[Entry], *, num_nodes: int) -> Verdict | None:
    """None: it is known already, as it is. `known`: at least those of its path, and of its step."""
    files = {path: tree.files[path] for path in found.files}
    entries = sorted((each for each in known if each.path == found.path), key=lambda each: each.number)
    if any(each.is_of(files) for each in entries):
        return None
    if (twin := twin_of(found, tree, known)) is not None:
        return _of_twin(found, tree, twin)
    if found.reason:
        refusal = Refusal.UNSUPPORTED if found.is_refused else None
        return Verdict(found, reason=found.reason, refusal=refusal, is_waiting=found.is_waiting)
    if found.missing and num_nodes == 1:
        return Verdict(found, reason=lacking(found.missing))
    if reason := unsafe_name(found):
        return Verdict(found, reason=reason, refusal=Refusal.UNSUPPORTED)
    if entries and (found.is_file or found.format in MARKLESS):
        known_files = entries[-1].files.keys() & tree.files.keys()
        older = [path for path in known_files if tree.born_ns(path) <= entries[-1].staged_ns]
        changed = changed_in_place(entries[-1], {path: tree.files[path] for path in older})
        if changed and found.is_file and tree.tensor_sums(found.path):
            return Verdict(found, take=True, is_in_place=True)
        if changed:
            reason = (
                f"{changed} was written in place after it had been handed in, so nothing tells when it is whole: have"
                " the trainer write under another name while the earlier one is there, and then rename it"
            )
            return Verdict(found, reason=reason, refusal=Refusal.CHANGED)
    return Verdict(found, take=True)


def refused_as(found: Found, tree: Tree, known: Iterable[Entry]) -> Entry | None:
    """What was refused of this version of it, perhaps in an earlier start; None if it is on its way or in the store."""
    files = {path: tree.files[path] for path in found.files}
    entries = [each for each in known if each.path == found.path and each.is_of(files)]
    newest = max(entries, key=lambda each: each.number, default=None)
    return newest if newest is not None and newest.state is State.REFUSED else None


def unknown(tree: Tree, candidates: Iterable[Found], since_ns: int, until_ns: int) -> dict[str, str]:
    """By folder, a file that looks like a part of a checkpoint, was written between these times, and is in none of the
    `candidates`: its format is not known.
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
    """Whether it may become a checkpoint after its trainer has deleted it: by what another node tells, or because its
    mark is there and only time is wanting. Whoever guesses by time alone (`--quiet-s`) has no mark.
    """
    if found.is_file or found.is_refused or not found.files:
        return False
    return num_nodes > 1 or (found.is_waiting and bool(found.mark))


def is_overtaken(found: Found, tree: Tree, known: Iterable[Entry]) -> bool:
    """Whether a later save to the same place is known: what is taken after that would pass for the newest."""
    return any(each.is_alive and each.marked_ns > marked_ns(tree, found) for each in known)


def is_taken_otherwise(found: Found, tree: Tree, known: Iterable[Entry]) -> bool:
    """Whether the same save is known, with other files than these and what they have grown from."""
    files, at_ns = {path: tree.files[path] for path in found.files}, marked_ns(tree, found)
    same = (each for each in known if each.is_alive and each.marked_ns == at_ns)
    return any(not added.has_grown(each, files) for each in same)


def has_peer(found: Found, tree: Tree, known: Iterable[Entry]) -> bool:
    """Whether a later one of the same trainer, seen to its end, has files of the same names. Of one that was deleted
    before it had been quiet for long enough, this says that no rank's file was missed.
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
    """The one that is taken, if a file is of the same step and time: what its trainer saved then is there."""
    if not found.is_file or found.format in MARKLESS:
        return None
    written_ns = tree.files[found.path].mtime_ns
    others = (each for each in known if each.step == found.step and each.path != found.path)
    near = (each for each in others if each.is_alive and abs(each.written_ns - written_ns) < TWIN_S * 1e9)
    return max(near, key=lambda each: (each.written_ns, each.number), default=None)


def _of_twin(found: Found, tree: Tree, twin: Entry) -> Verdict | None:
    """None where it is the same state, by the checksums of its tensors."""
    tensors = tree.tensor_sums(found.path)
    theirs = twin.tensors or (tree.tensor_sums(twin.path) if twin.path in tree.files else {})
    if tensors and tensors == theirs:
        return None
    how = "they differ" if tensors and theirs else "nothing tells whether they are the same"
    reason = (
        f"{found.path} is not uploaded: {twin.path} is, of the same step {found.step} and minute, and {how}."
        " Watch its folder by itself with another --kind, or take both by --pattern"
    )
    return Verdict(found, reason=reason, refusal=Refusal.UNSUPPORTED)


def unsafe_name(found: Found) -> str:
    """Why not every store takes its name, or one of its files': nothing of it may be staged, or told to other nodes. ""
    if all do.
    """
    try:
        naming.checkpoint_name(found.name, found.step)
        for name in found.inner:
            naming.check_relative(name, "file")
    except InvalidNameError as error:
        return str(error)
    return ""


def lacking(missing: tuple[str, ...]) -> str:
    some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"its mark names files that are not here: {some} (on another node? see --node)"


def changed_in_place(entry: Entry, files: Mapping[str, Identity]) -> str:
    """A file of it that has the same inode and another size or time; "" if there is none."""
    for path, was in entry.files.items():
        now = files.get(path)
        if now is not None and now != was and now.inode == was.inode:
            return path
    return ""


def needs_new_generation(entry: Entry, known: Iterable[Entry], generation: int) -> bool:
    """Whether the trainer has gone back: the step was handed in before in this generation, or a higher one, and this
    one was complete after that. Then what comes is newer than what was, whatever its step.
    """
    handed = [each for each in known if each.generation == generation and each.number != entry.number]
    if any(each.step == entry.step for each in handed):
        return True
    higher = [each for each in handed if each.step > entry.step]
    return any(entry.marked_ns > each.written_ns for each in higher)


def is_perhaps_copy(entry: Entry, known: Iterable[Entry], generation: int) -> bool:
    """Whether it may be what somebody has renamed, or copied by hand, as far as steps and times tell: a trainer that
    goes back would have written the same; or nothing but its time tells its step.
    """
    return has_no_step(entry) or needs_new_generation(entry, known, generation)


def has_no_step(entry: Entry) -> bool:
    return entry.step == entry.marked_ns // _NS


def akin(entry: Entry, known: Collection[Entry], generation: int) -> list[Entry]:
    """Those of other paths that may be the same: they have files of the same names and sizes, and the same blocks of
    them where both were sampled, whatever the names say of the steps. Where they were not, few are worth reading.
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
    """Without those that are committed as what another one was handed in as: copies of that."""
    found: dict[tuple[int, int, int], Entry] = {}
    for each in sorted(known, key=lambda each: each.number):
        is_committed = each.state is State.COMMITTED
        found.setdefault((each.generation, each.step, 0) if is_committed else (0, 0, each.number), each)
    return list(found.values())


def _sizes(entry: Entry) -> Mapping[str, int]:
    return {shard: each.size_bytes for shard, each in entry.content.items()}


def awaits_akin(entry: Entry, known: Collection[Entry], generation: int) -> bool:
    """Whether one of which it may be a copy is not decided: what that becomes, it is."""
    return any(each.state is State.HANDED for each in akin(entry, known, generation))


def gone_back(entry: Entry, known: Collection[Entry]) -> str:
    """What is said when its trainer has gone back, perhaps while nobody watched; "" if it has not."""
    newest = max((each.generation for each in known if each.number != entry.number), default=0)
    if not newest or not needs_new_generation(entry, known, newest):
        return ""
    return (
        f"{entry.path or entry.name} was complete after a higher step, or again: its trainer has gone back to step"
        f" {entry.step}, and what it saves from now on is newer than all before it. If it is a copy that did not"
        " keep its times (`cp -r`), that is wrong: keep copies elsewhere. (For an old folder, to which nobody writes,"
        " there is --once --ignore-times)"
    )


def is_early(entry: Entry, known: Iterable[Entry], generation: int, *, num_nodes: int) -> bool:
    """Whether it has to wait for one that was saved before it and is not decided: its trainer has gone back, and that
    one, handed in again in a later start, would be the newest. Of several nodes, one that was killed may not have
    sealed its part of what an earlier start has handed in: that comes again, and first, or it would be passed over.
    """
    earlier = [each for each in known if each.state is State.HANDED and each.number < entry.number]
    if any(each.generation != generation and (num_nodes > 1 or each.step >= entry.step) for each in earlier):
        return True
    return needs_new_generation(entry, earlier, generation)


def passed_over(entry: Entry, known: Iterable[Entry], generation: int) -> str:
    """Why it would wrongly become the newest: it is older than what an earlier start of the watcher has committed. ""
    if it would not.
    """
    for each in known:
        is_earlier = each.state is State.COMMITTED and 0 < each.generation < generation
        if is_earlier and each.step > entry.step and entry.marked_ns <= each.written_ns:
            return (
                f"it is older than step {each.step}, which an earlier start has committed, and would become the"
                " newest: adopt it with --kind, or into another remote"
            )
    return ""


def due(
    known: Collection[Entry], now_ns: int, rules: Rules, now: Mapping[str, Mapping[str, Identity]] = _NOTHING
) -> list[Entry]:
    """What is staged and has settled, in the order in which it was found; also if the clock was set back far. `now`:
    the files that the folder has of each candidate.
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
    """Whether so many are in the uploader's hands that another one, with which they have this size, has to wait."""
    return num_handed >= (MAX_OPEN_SMALL if size_bytes <= SMALL_BYTES else MAX_OPEN)


def has_told_all(known: Iterable[Entry], generation: int, last_number: int) -> bool:
    """Whether what this node had found, up to `last_number`, is decided or was announced in this start."""
    ours = (
        each for each in known if not (each.is_followed or each.is_settled) and each.number <= last_number
    )
    return all(each.generation == generation for each in ours)


def awaits_others(entry: Entry) -> bool:
    """Whether nothing is to be done with it until another node has announced it, again."""
    return entry.is_followed and entry.state is State.STAGED


def stands_for(other: Entry, entry: Entry) -> bool:
    """Whether `other` is the same checkpoint, handed in again, of which nothing was refused."""
    is_same = (other.path, other.step, other.told_ns) == (entry.path, entry.step, entry.told_ns)
    return is_same and other.number != entry.number and other.is_alive


def to_remove(entries: Iterable[Entry], num_kept: int) -> list[Entry]:
    """Committed ones beyond the newest `num_kept`, by the order in which they were written. A place that was saved to
    again is its newest save's, whatever became of that; and a copy that somebody has made of one that is committed is
    not the trainer's.
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
