"""Coordinates several nodes with a folder each: the node that sees a mark announces it, the others send their files.

The commit needs every file that the mark names (`Uploader.seal(expected=…)`), whichever node has it. A node sends
what it saw at or after the time of the mark: from its folder, or from links if its trainer has rotated the checkpoint
away or written it anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import FencedError, InvalidRecordError
from ckpt_async.watch import plan
from ckpt_async.watch.announcement import Announcement, Version
from ckpt_async.watch.disk import sample
from ckpt_async.watch.entries import Entries, Entry, State, VanishedError
from ckpt_async.watch.formats.checks import (
    LATE_RANK_S,
    are_added,
    is_free,
    is_of_all_nodes,
    is_of_one_node,
    may_be_left_over,
    misses_what_is_gone,
    numberless,
    removed_from,
)
from ckpt_async.watch.formats.found import last
from ckpt_async.watch.formats.ranks import DISTCP, is_beyond, is_unnamed, left_out_of, num_ranks_in
from ckpt_async.watch.holds import Holds, is_same_version
from ckpt_async.watch.options import Options
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.tree import Identity, Tree, files_of

logger = logging.getLogger(__name__)

# How often all nodes together list the announcements.
LOOKS_PER_S = 100
# An announcement of a step lower than the newest NUM_LATE steps is only found by listing all of them, which
# may be many; that happens every ALL_S seconds.
NUM_LATE, ALL_S = 16, 600.0
# How long a file of an announced checkpoint may be without its end here before the checkpoint is given up.
WHOLE_S = 60.0
# How long we wait at the end for the other nodes to say that they announce nothing more.
FAREWELL_S = 60.0
# By how much the clocks of nodes may differ. A step that is saved again within this time may be taken for the
# earlier save, but a trainer needs longer than that to start.
CLOCKS_S = 1.0


class Nodes:
    """What this node has heard from the others in one launch of the run, and what it tells them.

    With a single node, it does nothing.
    """

    def __init__(
        self, options: Options, entries: Entries, holds: Holds, uploader: Uploader, remote: Remote
    ) -> None:
        self._node, self._num_nodes = options.node, options.num_nodes
        self._entries, self._holds, self._uploader, self._remote = entries, holds, uploader, remote
        self._rules = options.rules
        self._has_times = not options.rules.ignores_times
        self._heard: dict[int, tuple[Announcement, float]] = {}  # by step, with when; not handed in yet
        self._known: set[int] = set()  # every announced step
        self._next_look_at = self._next_look_at_all = self._next_roll_at = 0.0
        self._last_before: int | None = None  # the newest entry that was there when this launch began
        self._has_told_all = False
        self._ended_at: float | None = None
        self.awaited: list[int] = []  # at the end: nodes that may still announce something

    @property
    def generation(self) -> int:
        return self._uploader.generation

    @property
    def has_heard(self) -> bool:
        """Whether there is an announced checkpoint of which this node has not handed in its part yet."""
        return bool(self._heard)

    def listen(self) -> None:
        """Read new announcements.

        Raises FencedError if another node has begun a new launch, which this one has to join.
        """
        if self._num_nodes == 1:
            return
        self._uploader.check_takes(keys.MAX_STEP)
        now = time.monotonic()
        if now < self._next_look_at:
            return
        self._next_look_at = now + self._num_nodes / LOOKS_PER_S
        self.check_newest()
        after = -1
        if len(self._known) < NUM_LATE or now >= self._next_look_at_all:
            self._next_look_at_all = now + ALL_S
        else:
            after = sorted(self._known)[-NUM_LATE] - 1
        for id_, told in self._remote.announced(self.generation, after, self._known):
            self._known.add(id_.step)
            if isinstance(told, InvalidRecordError):
                self._uploader.give_up(id_.step, str(told))
            elif told.node != self._node:
                self._heard[id_.step] = told, time.monotonic()

    def check_newest(self) -> None:
        """Raise FencedError if another node has begun a new launch."""
        if self._num_nodes == 1:
            return
        if (newest := self._remote.newest_generation(self.generation)) > self.generation:
            raise FencedError(f"another node has begun generation {newest}")

    def announce(self, entry: Entry) -> Entry:
        """Announce to the other nodes that a checkpoint is complete, and return what this node has to send of it.

        That is everything it has, unless another node announced the checkpoint first and sends some of the files too.
        """
        if self._num_nodes == 1:
            return entry
        ours = Announcement(
            CheckpointId(self.generation, entry.step),
            self._node,
            entry.format,
            entry.path,
            entry.name,
            {shard: self._told(entry, path) for path, shard in sorted(entry.shards.items())},
            entry.expected,
            _marked_ns(entry) if self._has_times else 0,
        )
        there = self._remote.announce(ours)
        logger.info("announced path=%s step=%d by_node=%d", entry.path, entry.step, there.node)
        if (there.path, there.format) != (entry.path, entry.format):
            raise InvalidRecordError(
                f"node {there.node} has {there.path} ({there.format}) as step {entry.step}, but a run has"
                " only one checkpoint per step: watch the other with --kind, or into another remote"
            )
        return entry if there.node == self._node else self._rest(entry, there)

    def _told(self, entry: Entry, path: str) -> Version | None:
        shard = entry.shards[path]
        if path == entry.mark or not is_of_one_node(entry.format, shard, entry.expected):
            return None
        was = entry.files[path]
        return Version(was.size_bytes, was.mtime_ns, sample(self._entries.staged(entry) / shard))

    def _rest(self, entry: Entry, announced: Announcement) -> Entry:
        """Return the entry without the files that the announcing node sends."""
        place = self._entries.staged(entry)
        shards = {
            path: shard
            for path, shard in entry.shards.items()
            if _is_ours(announced, shard, entry.files[path], place / shard)
        }
        return replace(entry, shards=shards, expected=(), is_followed=True, told_ns=announced.marked_ns)

    def follow(
        self, tree: Tree, hand_in: Callable[[Entry], None], give_up: Callable[[Announcement, str], None]
    ) -> None:
        """Hand in what this node has of the checkpoints that others have announced, once it has settled."""
        for step, (announced, heard_at) in sorted(self._heard.items()):
            if any(
                each.generation == self.generation and each.step == step
                for each in self._entries.all.values()
            ):
                del self._heard[step]
                continue
            waited_s = time.monotonic() - heard_at
            if waited_s < self._rules.settle_s:
                continue
            entry = self._staged(announced)
            if entry is None:
                version = self._version(announced, tree)
                unready = self._unready(announced, version, tree)
                if unready and waited_s < WHOLE_S:
                    continue
                if unready or isinstance(version, str):
                    give_up(announced, unready or str(version))
                    del self._heard[step]
                    continue
                entry = self._stage(announced, version)
            if entry is not None:
                hand_in(replace(entry, state=State.HANDED, generation=self.generation))
                del self._heard[step]
                self._drop_earlier(announced, tree)

    def _staged(self, announced: Announcement) -> Entry | None:
        """Return the entry that this node has already staged for an announced checkpoint, or None.

        It was staged or handed in by an earlier launch, or staged because this node has the mark too.
        """
        for entry in reversed(self._entries.of_path(announced.path)):
            is_same = not entry.is_settled and (entry.step, entry.name) == (
                announced.checkpoint.step,
                announced.name,
            )
            if entry.is_followed:
                is_same = is_same and entry.told_ns == announced.marked_ns
            else:
                is_same = is_same and not _late(entry.files, entry.shards, announced)
            if is_same and self._entries.is_intact(entry):
                return self._rest(entry, announced)
        return None

    def _version(self, announced: Announcement, tree: Tree) -> _Version | str:
        """Return the version of the checkpoint that this node has, or the reason why there is none.

        That is the earliest version that was there when the checkpoint was marked or later.
        """
        files = files_of(announced.path, tree)
        gone = {each.number for each in self._holds.gone(tree)}
        held = [each for each in self._holds.of_path(announced.path) if each.number in gone]
        if not announced.marked_ns:  # times tell nothing: take the latest
            held = [] if files else held[-1:]
        for hold in held:
            links = self._holds.tree(hold, tree) if hold.seen_ns >= announced.marked_ns else None
            if links is not None:
                return self._fitting(_version_in(self._holds.folder(hold), links, announced), announced)
        is_rest = (
            bool(held) and is_same_version(files, held[-1].files) and held[-1].files.keys() - files.keys()
        )
        if is_rest or (held and not files):
            return f"the files of node {self._node} were removed, and were last seen before the marker was written"
        if announced.path and (linked := tree.links_below(announced.path)):
            return f"{linked[0]} on node {self._node} is a symbolic link, which is not followed"
        return self._lost(announced, tree) or self._fitting(
            _version_in(self._entries.source, tree, announced), announced
        )

    def _lost(self, announced: Announcement, tree: Tree) -> str:
        """Return why this node lacks files of the checkpoint that it once had, or "" if it lacks none.

        Files count if it had them after the mark, or at any time if it has nothing at all now. Returns "" too if the
        mark names its files, since the commit then finds out what is missing.
        """
        path, format_ = announced.path, announced.format
        if not path or misses_what_is_gone(format_):
            return ""
        has_any = bool(files_of(path, tree))
        if has_any and not announced.marked_ns:
            return ""
        since_ns = announced.marked_ns + int(CLOCKS_S * 1e9) if has_any else 0
        gone = self._holds.seen.gone(path, tree, since_ns)
        if lost := next((each for each in gone if not is_free(format_, each[len(path) + 1 :])), ""):
            return f"{lost} was removed on node {self._node} before that node learned of the checkpoint"
        if has_any and (changed := removed_from(tree, format_, path, since_ns)) is not None:
            return f"something was removed from {changed} on node {self._node} after its marker was written"
        if not has_any and is_of_all_nodes(format_, announced.name, announced.here):
            return (
                f"node {self._node} holds no part of it: it was removed there before it was seen, or only other"
                " nodes write checkpoints (then watch on those only)"
            )
        return ""

    def _unready(self, announced: Announcement, version: _Version | str, tree: Tree) -> str:
        """Return what temporarily keeps this node from knowing all that it has of the checkpoint, or ""."""
        seen = tree if isinstance(version, str) else version.tree
        # In the watched folder itself, only what the mark names belongs to the checkpoint, and that would be
        # missed.
        if announced.path and (closed := seen.unreadable_below(announced.path)):
            return f"on node {self._node}, {closed}"
        if isinstance(version, str):
            return ""
        if stale := self._stale(announced, version):
            return f"{stale} belongs to an earlier save on node {self._node}"
        for path in _late(seen.files, version.shards, announced):
            if abs(seen.now_ns - seen.files[path].mtime_ns) < self._rules.settle_s * 1e9:
                return f"{path} is still being written on node {self._node}, after the marker"
        unfinished = next((path for path in version.shards if not version.tree.is_whole(path)), "")
        return f"{unfinished} is truncated or still being written on node {self._node}" if unfinished else ""

    def _stale(self, announced: Announcement, version: _Version) -> str:
        """Return a file of an earlier save that keeps this one from being sent, or "".

        Either its rank may write after the mark, and has yet to write it again. Or the announcing node has written
        others that differ from it by a number, so that it may be of ranks that this save does not have.
        """
        for path, marked_ns in self._sent_before(announced, version).items():
            shard = version.shards[path]
            if is_free(announced.format, shard) or _is_of_fewer(announced, shard, marked_ns):
                return path
        return ""

    def _sent_before(self, announced: Announcement, version: _Version) -> dict[str, int]:
        """Return the files that were already sent with an earlier mark, with the time of that mark."""
        sent: dict[str, int] = {}
        for entry in self._entries.of_path(announced.path):
            marked_ns = entry.told_ns if entry.is_followed else entry.marked_ns
            if entry.generation and entry.is_alive and marked_ns < announced.marked_ns:
                same = (path for path in version.shards if entry.files.get(path) == version.tree.files[path])
                sent |= dict.fromkeys(same, marked_ns)
        return sent

    def _of_this_save(self, announced: Announcement, version: _Version) -> _Version:
        """Return the version without what was sent of ranks that this save does not have."""
        num_ranks = num_ranks_in(announced.format, announced.expected)
        sent = self._sent_before(announced, version) if num_ranks else {}
        beyond = {path for path in sent if is_beyond(announced.format, version.shards[path], num_ranks)}
        shards = {path: shard for path, shard in version.shards.items() if path not in beyond}
        return replace(version, shards=shards, left_out=(*version.left_out, *sorted(beyond)))

    def _fitting(self, version: _Version, announced: Announcement) -> _Version | str:
        version = self._of_this_save(announced, version)
        late = _late(version.tree.files, version.shards, announced)
        named = [path for path, shard in version.shards.items() if DISTCP.fullmatch(last(shard))]
        if late and not are_added(version.tree, late, announced.marked_ns, self._rules, named=named):
            later = late[0]
            late_s = (version.tree.files[later].mtime_ns - announced.marked_ns) / 1e9
            return (
                f"{later} on node {self._node} is {late_s:.0f} s newer than the marker: it was saved again, or the"
                " clocks of the nodes differ (--ignore-times)"
            )
        return version

    def _stage(self, announced: Announcement, version: _Version) -> Entry | None:
        entry = Entry(
            self._entries.next_number(),
            announced.format,
            announced.path,
            announced.checkpoint.step,
            announced.name,
            files_of(announced.path, version.tree),
            version.shards,
            is_followed=True,
            told_ns=announced.marked_ns,
            staged_ns=version.tree.now_ns,
        )
        if version.left_out:
            logger.warning("ranks_left_out: %s", left_out_of(announced.path, version.left_out))
        try:
            return self._entries.stage(entry, version.source)
        except VanishedError as error:
            logger.info("vanished path=%s: %s; looking again", announced.path, error)
            return None

    def _drop_earlier(self, announced: Announcement, tree: Tree) -> None:
        """Drop held versions that were gone before this mark, since no node will announce them any more."""
        awaited = {each.path for each, _ in self._heard.values()}
        for hold in self._holds.gone(tree):
            if hold.seen_ns < announced.marked_ns and hold.path not in awaited:
                self._holds.drop(hold)

    def settle_earlier(self, refuse: Callable[[Entry, Refusal, str], None]) -> None:
        """Settle what this node knew of before this launch.

        Tell the other nodes once this node has announced all of it. When all others have done the same, release
        checkpoints that one of them had announced in an earlier launch and none has in this one.
        """
        if self._num_nodes == 1:
            return
        if self._last_before is None:
            self._last_before = max(self._entries.all, default=0)
        known = self._entries.all.values()
        if not self._has_told_all and plan.has_told_all(known, self.generation, self._last_before):
            self._remote.say_told_all(self.generation, self._node)
            self._has_told_all = True
        now = time.monotonic()
        if now < self._next_roll_at or not any(plan.awaits_others(each) for each in known):
            return
        self._next_roll_at = now + self._num_nodes / LOOKS_PER_S
        if len(self._remote.told_all(self.generation) - {self._node}) < self._num_nodes - 1:
            return
        self._next_look_at = 0.0
        # Hear what was announced before the last of them said so.
        self.listen()
        heard = {(each.path, each.checkpoint.step, each.marked_ns) for each, _ in self._heard.values()}
        left = [each for each in self._entries.open() if plan.awaits_others(each)]
        left = [each for each in left if (each.path, each.step, each.told_ns) not in heard]
        decided = self._remote.decisions(
            CheckpointId(each.generation, each.step) for each in left if each.generation
        )
        for entry in left:
            decision = decided.get(CheckpointId(entry.generation, entry.step))
            if decision is None or decision.outcome is Outcome.ABORT:
                self._let_go(entry, refuse)

    def _let_go(self, entry: Entry, refuse: Callable[[Entry, Refusal, str], None]) -> None:
        staged = self._entries.staged(entry)
        files = {path: entry.files[path] for path in entry.shards}
        links = {path: staged / shard for path, shard in entry.shards.items()}
        if not entry.is_copied and self._entries.is_intact(entry):
            self._holds.take_back(entry.path, files, links, entry.staged_ns)
        self._entries.drop(entry)
        logger.info("not_announced_again path=%s step=%d", entry.path, entry.step)
        if not any(plan.stands_for(each, entry) for each in self._entries.all.values()):
            reason = "no node announces it any more: the one that had its marker gave it up, or was replaced"
            refuse(entry, Refusal.INCOMPLETE, reason)

    def is_over(self) -> bool:
        """Return whether no node, including this one, will announce anything more."""
        if self._num_nodes == 1:
            return True
        if self._heard:
            return False
        now = time.monotonic()
        if self._ended_at is None:
            self._remote.say_ended(self.generation, self._node)
            self._ended_at = now
        self.awaited = sorted({*range(self._num_nodes)} - self._remote.ended(self.generation))
        if not self.awaited:
            self._next_look_at = 0.0
            # Hear what was announced before the last of them ended.
            self.listen()
            return not self._heard
        return now - self._ended_at > FAREWELL_S


def _is_ours(announced: Announcement, shard: str, ours: Identity, file: Path) -> bool:
    """Return whether this node sends a file.

    It does if the announcing node has no file of this name, or has another version, so that one of the two does not
    belong to this checkpoint. The commit refuses two files of one name and says who has them. It does not if a rank of
    an earlier save has left it, and the mark does not name it.
    """
    if is_unnamed(shard, announced.expected, announced.here):
        return False
    if shard not in announced.here:
        return True
    theirs = announced.here[shard]
    if theirs is None:
        return False
    has_times = announced.marked_ns > 0
    is_newer = ours.mtime_ns > theirs.mtime_ns + CLOCKS_S * 1e9
    if has_times and not is_newer and may_be_left_over(announced.format):
        return False
    return (ours.size_bytes, sample(file)) != (theirs.size_bytes, theirs.sample)


def _is_of_fewer(announced: Announcement, shard: str, marked_ns: int) -> bool:
    """Return whether the announcing node has written files after `marked_ns` that differ from this one by a number.

    Where nothing names the files of a checkpoint, it may then be one of those that the earlier save had more.
    """
    if shard in announced.expected or announced.format in plan.MARKLESS:
        return False
    since_ns, kin = marked_ns + CLOCKS_S * 1e9, numberless(shard)
    return any(
        was is not None and was.mtime_ns > since_ns and numberless(name) == kin
        for name, was in announced.here.items()
    )


@dataclass(frozen=True, slots=True)
class _Version:
    """A version of an announced checkpoint: its files' names in the checkpoint by path, the tree with them, and their
    folder. `left_out`: files that ranks of an earlier save have left.
    """

    shards: dict[str, str]
    tree: Tree
    source: Path
    left_out: tuple[str, ...] = ()


def _version_in(source: Path, tree: Tree, announced: Announcement) -> _Version:
    """Return the files that this node sends from below `source`."""
    prefix = f"{announced.path}/" if announced.path else ""
    if announced.path:
        below = tree.below(announced.path)
    else:
        below = [path for path in tree.below("") if path in announced.expected]
    named = {path: path.removeprefix(prefix) for path in below if not path.endswith(".tmp")}
    shards = {
        path: shard
        for path, shard in named.items()
        if _is_ours(announced, shard, tree.files[path], source / path)
    }
    left_out = (
        path for path, shard in named.items() if is_unnamed(shard, announced.expected, announced.here)
    )
    return _Version(shards, tree, source, tuple(left_out))


def _marked_ns(entry: Entry) -> int:
    """Return when the entry was complete, or when it was seen to be if a name marks it and not a file."""
    return entry.marked_ns if entry.mark in entry.files else entry.staged_ns


def _late(files: Mapping[str, Identity], shards: Mapping[str, str], announced: Announcement) -> list[str]:
    """Return the files that were written after the checkpoint's mark; none if times tell nothing."""
    if not announced.marked_ns:
        return []
    late = list[str]()
    for path, shard in shards.items():
        within_s = LATE_RANK_S if is_free(announced.format, shard) else CLOCKS_S
        if files[path].mtime_ns > announced.marked_ns + within_s * 1e9:
            late.append(path)
    return late
