"""Decides which checkpoints are taken, which are refused, and to which launch of the run they belong. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_async.core import naming
from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import InvalidNameError
from ckpt_async.formats import Found, Identity, Tree
from ckpt_async.watch.entries import Entry, State

# Two files of one step that were written within this time are of one save, e.g. Lightning's `last.ckpt` and
# `epoch=…-step=….ckpt`.
TWIN_S = 60.0
# How many checkpoints the uploader has in hand at once: what was not begun need not be given up when the
# watcher is killed. More if they are small, or a folder of thousands would be looked at after every four.
MAX_OPEN, MAX_OPEN_SMALL = 4, 64
SMALL_BYTES = 1 << 30  # of all of them together

_NS = 1_000_000_000
NEW_PLACE = (
    "have the trainer save to a new folder or file each time (written under another name, then renamed), or write a"
    " file last and give its name with --done"
)
ONE_NODE = (
    "its marker does not name the files of other nodes, so that nobody could tell when it is whole: let all nodes save"
    " to a shared folder and watch it from one (--node 0/1), give --ranks if its files have ranks in their names, or"
    " use `ckpt_async.Uploader` in the trainer"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to take one checkpoint found in the folder, and if not, why.

    `refusal`: it can never be taken as it is. `is_waiting`: only time has to pass. `late`: files that came, or were
    written again, after the entry `of` was handed in: they do not belong to it. `is_mixed`: a file is of another save.
    """

    take: bool = False
    reason: str = ""
    refusal: Refusal | None = None
    is_waiting: bool = False
    of: Entry | None = None
    late: tuple[str, ...] = ()
    is_mixed: bool = False


def judge(found: Found, tree: Tree, known: Collection[Entry], *, num_nodes: int) -> Verdict | None:
    """Return the verdict on one candidate, or None if it is already known in exactly this form.

    `known` contains at least the entries with the candidate's path and those with its step.
    """
    files = {path: tree.files[path] for path in found.files}
    entries = sorted((each for each in known if each.path == found.path), key=lambda each: each.number)
    if any(each.is_of(files) for each in entries):
        return None
    handed = [each for each in entries if each.state in (State.HANDED, State.COMMITTED)]
    if handed and (late := late_files(handed[-1], tree, files)):
        return Verdict(of=handed[-1], late=late)
    if (twin := twin_of(found, tree, known)) is not None:
        return _of_twin(found, tree, twin)
    if found.reason:
        refusal = Refusal.UNSUPPORTED if found.is_refused else None
        return Verdict(reason=found.reason, refusal=refusal, is_waiting=found.is_waiting)
    if reason := unsafe_name(found):
        return Verdict(reason=reason, refusal=Refusal.UNSUPPORTED)
    if num_nodes > 1 and not found.names_its_files:
        return Verdict(reason=ONE_NODE, refusal=Refusal.UNSUPPORTED)
    if found.missing and num_nodes == 1:
        return Verdict(reason=lacking(found.missing))
    return _saved_again(found, tree, entries[-1], handed) if entries else Verdict(take=True)


def late_files(entry: Entry, tree: Tree, files: Mapping[str, Identity]) -> tuple[str, ...]:
    """Return the files of the entry's folder that came after it, while it is still the same save; () if it is not.

    It is the same save while its marker is unchanged or, if that is not in the folder, while nothing of it has changed.
    """
    kept = [entry.marker] if entry.marker in entry.files else list(entry.files)
    if entry.path in entry.files or any(tree.files.get(path) != entry.files[path] for path in kept):
        return ()
    return tuple(sorted(path for path, is_ in files.items() if entry.files.get(path) != is_))


def _saved_again(found: Found, tree: Tree, before: Entry, handed: Sequence[Entry]) -> Verdict:
    """Return the verdict on a save to a place that an entry has: every file of its state must be a new one.

    A file that is as it was belongs to the previous save, and its rank may be late. A file that was written in place
    shows no end, unless it records checksums of its content.
    """
    # An inode that is reused has another birth time.
    older = [
        each for each in before.files.keys() & tree.files.keys() if tree.born_ns(each) <= before.staged_ns
    ]
    changed = changed_in_place(before, {path: tree.files[path] for path in older})
    if changed and (found.is_file or not found.mark) and not (found.is_file and tree.tensor_sums(found.path)):
        reason = f"{changed} was written in place, so nothing shows when it is complete: {NEW_PLACE}"
        return Verdict(reason=reason, refusal=Refusal.CHANGED)
    sent = {path: was for each in handed for path, was in each.files.items()}
    if same := [path for path in found.state_files if sent.get(path) == tree.files[path]]:
        reason = (
            f"{same[0]} is that of the save to the same place before: its writer is late, or it was left over (then"
            " delete it)"
        )
        return Verdict(reason=reason, is_mixed=True)
    return Verdict(take=True)


def refused_as(found: Found, tree: Tree, known: Iterable[Entry]) -> Entry | None:
    """Return the refused entry for this version of a candidate, perhaps from a previous launch.

    None if the version is being uploaded or in the store.
    """
    files = {path: tree.files[path] for path in found.files}
    entries = [each for each in known if each.path == found.path and each.is_of(files)]
    newest = max(entries, key=lambda each: each.number, default=None)
    return newest if newest is not None and newest.state is State.REFUSED else None


def twin_of(found: Found, tree: Tree, known: Iterable[Entry]) -> Entry | None:
    """Return the entry that is taken in place of a file of the same step and time, since it is the same save."""
    if not found.is_file or found.format == "pattern":
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


def lacking(missing: Sequence[str]) -> str:
    some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"its marker names files that are not here: {some} (on another node? see --node)"


def changed_in_place(entry: Entry, files: Mapping[str, Identity]) -> str:
    """Return a file that has the same inode as before but another size or time; "" if there is none."""
    for path, was in entry.files.items():
        now = files.get(path)
        if now is not None and now != was and now.inode == was.inode:
            return path
    return ""


def needs_new_generation(entry: Entry, known: Iterable[Entry], generation: int) -> bool:
    """Return whether the trainer has gone back to a previous step.

    That is so if this step, or a higher one, was handed in before in this generation, and the entry was complete
    after that. Whatever the trainer saves from then on is newer than what was there before, whatever its step.
    """
    handed = [each for each in known if each.generation == generation and each.number != entry.number]
    if any(each.step == entry.step for each in handed):
        return True
    higher = [each for each in handed if each.step > entry.step]
    return any(entry.completed_ns > each.written_ns for each in higher)


def is_perhaps_copy(entry: Entry, known: Collection[Entry]) -> bool:
    """Return whether the entry may have been renamed or copied by hand, as far as steps and times tell.

    A trainer that goes back would look the same. So would an entry whose step is only derived from its time.
    """
    return has_no_step(entry) or has_gone_back(entry, known)


def has_gone_back(entry: Entry, known: Collection[Entry]) -> bool:
    """Return whether the trainer has gone back, perhaps while no watcher ran."""
    newest = max((each.generation for each in known if each.number != entry.number), default=0)
    return newest > 0 and needs_new_generation(entry, known, newest)


def has_no_step(entry: Entry) -> bool:
    return entry.step == entry.completed_ns // _NS


def akin(entry: Entry, known: Collection[Entry]) -> list[Entry]:
    """Return the entries of other paths that it may be a copy of: their files have the same names and sizes.

    If its step is the next one, as that of a trainer's own save, they also have the same times.
    """
    others = (each for each in originals(known) if each.path != entry.path and each.is_alive)
    alike = [each for each in others if _sizes(each) == _sizes(entry)]
    return alike if is_perhaps_copy(entry, known) else [each for each in alike if has_times_of(entry, each)]


def originals(known: Iterable[Entry]) -> list[Entry]:
    """Return the entries without copies, i.e. those that are committed as the same checkpoint as a previous one."""
    found: dict[tuple[int, int, int], Entry] = {}
    for each in sorted(known, key=lambda each: each.number):
        is_committed = each.state is State.COMMITTED
        found.setdefault((each.generation, each.step, 0) if is_committed else (0, 0, each.number), each)
    return list(found.values())


def _sizes(entry: Entry) -> Mapping[str, int]:
    return {shard: each.size_bytes for shard, each in entry.content.items()}


def has_times_of(entry: Entry, other: Entry) -> bool:
    """Return whether the files of two entries with the same names also have the same times."""
    return all(each.mtime_ns == other.content[name].mtime_ns for name, each in entry.content.items())


def awaits_akin(entry: Entry, known: Collection[Entry]) -> bool:
    """Return whether the entry may be a copy of one that is not decided yet: it then becomes what the other becomes."""
    return any(each.state is State.HANDED for each in akin(entry, known))


def gone_back(entry: Entry) -> str:
    """Return the warning for a trainer that has gone back."""
    return (
        f"{entry.path or entry.name} was completed after a higher step, or a second time: its trainer has gone back to"
        f" step {entry.step}, and what it saves from now on counts as newer than everything before. If it is a copy"
        " without preserved timestamps (`cp -r`), that is wrong: keep copies elsewhere. (For an old folder that nothing"
        " writes to, use --once --ignore-times)"
    )


def predecessors(entry: Entry, known: Iterable[Entry], generation: int, *, num_nodes: int) -> list[Entry]:
    """Return the entries that were saved before this one, are not decided yet, and must be decided first.

    If the trainer has gone back and the previous one is handed in again in a later launch, that one would be the
    newest. With several nodes, a node that was killed may not have sealed its part of what a previous launch handed
    in: that is handed in again, and must come first, or it would be passed over.
    """
    undecided = [each for each in known if each.state is State.HANDED and each.number < entry.number]
    return [
        each
        for each in undecided
        if (each.generation != generation and (num_nodes > 1 or each.step >= entry.step))
        or needs_new_generation(entry, [each], generation)
    ]


def passed_over(entry: Entry, known: Iterable[Entry], generation: int) -> str:
    """Return why the entry would wrongly become the newest, or "" if it would not.

    It would if it is older than what a previous launch of the watcher has committed.
    """
    for each in known:
        is_previous = each.state is State.COMMITTED and 0 < each.generation < generation
        if is_previous and each.step > entry.step and entry.completed_ns <= each.written_ns:
            return (
                f"it is older than step {each.step}, which a previous launch has committed, but would become the"
                " newest: adopt it with --kind, or into another remote"
            )
    return ""


def due(known: Collection[Entry], now_ns: int, settle_s: float) -> list[Entry]:
    """Return the staged entries that were quiet for long enough, in the order in which they were found.

    This works even if the clock was set back far.
    """
    staged = [each for each in known if each.state is State.STAGED and not each.is_followed]
    return sorted(
        (each for each in staged if abs(now_ns - each.staged_ns) >= settle_s * 1e9),
        key=lambda each: each.number,
    )


def are_many(num_handed: int, size_bytes: int) -> bool:
    """Return whether the uploader has so many checkpoints in hand that another one has to wait.

    `size_bytes` is their size together with that of the other one.
    """
    return num_handed >= (MAX_OPEN_SMALL if size_bytes <= SMALL_BYTES else MAX_OPEN)


def awaits_others(entry: Entry) -> bool:
    """Return whether nothing can be done with the entry until another node announces it again."""
    return entry.is_followed and entry.state is State.STAGED


def to_remove(entries: Iterable[Entry], num_kept: int) -> list[Entry]:
    """Return the committed entries beyond the newest `num_kept`, by the order in which they were written.

    A place that was saved to again belongs to its newest save, whatever became of that. A copy that somebody has made
    of a committed checkpoint is not the trainer's. What was taken only for a number in its
    name may be anything.
    """
    everything = sorted(entries, key=lambda each: each.number)
    of_place = {each.path: each for each in everything}
    written = sorted(of_place.values(), key=lambda each: (each.written_ns, each.path.count("/"), each.number))
    of_commit: dict[tuple[int, int], Entry] = {}
    for each in written:
        if each.state is State.COMMITTED and not each.is_plain:
            of_commit.setdefault((each.generation, each.step), each)
    newest = list(of_commit.values())
    return newest[: max(0, len(newest) - num_kept)]
