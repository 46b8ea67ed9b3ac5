"""Coordinates several nodes with a folder each: the node that sees a marker announces it, the others send their files.

The commit needs every file that the marker names (`Uploader.seal(expected=…)`), whichever node has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import FencedError, InvalidRecordError
from ckpt_async.formats import Identity, Tree, is_late
from ckpt_async.formats.checks import LATE_RANK_S
from ckpt_async.trainer.uploader import Uploader
from ckpt_async.watch import plan
from ckpt_async.watch.announcement import Announcement, Version
from ckpt_async.watch.disk import sample
from ckpt_async.watch.entries import Entries, Entry, State, VanishedError
from ckpt_async.watch.options import Options
from ckpt_async.watch.remote import Remote

logger = logging.getLogger(__name__)

# How often all nodes together list the announcements.
LISTS_PER_S = 100
# How long a file of an announced checkpoint may be unfinished here before the checkpoint is given up.
WHOLE_S = 60.0
# How long we wait at the end for the other nodes to say that they announce nothing more.
FAREWELL_S = 60.0
# By how much the clocks of nodes may differ. A step that is saved again within this time may be taken for the
# previous save, but a trainer needs longer than that to start.
CLOCKS_S = 1.0


class Nodes:
    """What this node has heard from the others in one launch of the run, and what it tells them.

    With a single node, it does nothing.
    """

    def __init__(self, options: Options, entries: Entries, uploader: Uploader, remote: Remote) -> None:
        self._node, self._num_nodes = options.node, options.num_nodes
        self._entries, self._uploader, self._remote = entries, uploader, remote
        self._rules = options.rules
        self._heard: dict[int, tuple[Announcement, float]] = {}  # by step, with when; not handed in yet
        self._known: set[int] = set()  # every announced step
        self._next_listen_at = 0.0
        self._newest_ns = 0  # the newest marker that was announced
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
        if now < self._next_listen_at:
            return
        self._next_listen_at = now + self._num_nodes / LISTS_PER_S
        self.check_newest()
        for id_, each in self._remote.announced(self.generation, self._known):
            self._known.add(id_.step)
            if isinstance(each, InvalidRecordError):
                self._uploader.give_up(id_.step, str(each))
            elif each.node != self._node:
                self._heard[id_.step] = each, time.monotonic()
                self._newest_ns = max(self._newest_ns, each.completed_ns)

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
            {shard: self._version(entry, path) for path, shard in sorted(entry.shards.items())},
            entry.expected,
            0 if self._rules.ignores_times else entry.completed_ns,
        )
        there = self._remote.announce(ours)
        logger.info("announced path=%s step=%d by_node=%d", entry.path, entry.step, there.node)
        if (there.path, there.format) != (entry.path, entry.format):
            raise InvalidRecordError(
                f"node {there.node} has {there.path} ({there.format}) as step {entry.step}, but a run has"
                " only one checkpoint per step: watch the other with --kind, or into another remote"
            )
        return entry if there.node == self._node else self._rest(entry, there)

    def _version(self, entry: Entry, path: str) -> Version:
        was = entry.files[path]
        return Version(was.size_bytes, was.mtime_ns, sample(self._entries.staged(entry) / entry.shards[path]))

    def _rest(self, entry: Entry, announced: Announcement) -> Entry:
        """Return the entry without the files that the announcing node sends."""
        place = self._entries.staged(entry)
        shards = {
            path: shard
            for path, shard in entry.shards.items()
            if _is_ours(announced, shard, entry.files[path], place / shard)
        }
        return replace(
            entry, shards=shards, expected=(), is_followed=True, announced_ns=announced.completed_ns
        )

    def follow(
        self, tree: Tree, hand_in: Callable[[Entry], None], give_up: Callable[[Announcement, str], None]
    ) -> None:
        """Hand in what this node has of the checkpoints that others have announced, once it has settled."""
        for step, (announced, heard_at) in sorted(self._heard.items()):
            ours = (each for each in self._entries.all.values() if each.generation == self.generation)
            if any(each.step == step for each in ours):
                del self._heard[step]
                continue
            waited_s = time.monotonic() - heard_at
            if waited_s < self._rules.settle_s:
                continue
            entry = self._staged(announced)
            if entry is None:
                files = self._part(announced, tree)
                unready, reason = (
                    self._unready(announced, files, tree),
                    self._not_of_it(announced, files, tree),
                )
                if unready and not reason and waited_s < WHOLE_S:
                    continue
                if reason := reason or unready:
                    give_up(announced, reason)
                    del self._heard[step]
                    continue
                entry = self._stage(announced, files, tree)
            if entry is not None:
                hand_in(replace(entry, state=State.HANDED, generation=self.generation))
                del self._heard[step]

    def _staged(self, announced: Announcement) -> Entry | None:
        """Return the entry that this node has already staged for an announced checkpoint, or None.

        It was staged or handed in by a previous launch, or staged because this node has the marker too.
        """
        for entry in reversed(self._entries.of_path(announced.path)):
            is_same = not entry.is_settled and (entry.step, entry.name) == (announced.step, announced.name)
            if entry.is_followed:
                is_same = is_same and entry.announced_ns == announced.completed_ns
            else:
                is_same = is_same and not _newer(announced, entry.shards, entry.files)
            if is_same and self._entries.is_intact(entry):
                return self._rest(entry, announced)
        return None

    def _part(self, announced: Announcement, tree: Tree) -> dict[str, str]:
        """Return the files that this node has of those that the marker names, with their names in the checkpoint."""
        prefix = f"{announced.path}/" if announced.path else ""
        named = {f"{prefix}{shard}": shard for shard in announced.expected}
        return {
            path: shard
            for path, shard in named.items()
            if path in tree.files
            and _is_ours(announced, shard, tree.files[path], self._entries.source / path)
        }

    def _not_of_it(self, announced: Announcement, files: dict[str, str], tree: Tree) -> str:
        """Return why what this node has is not of the announced save; "" if it may be."""
        prefix = f"{announced.path}/" if announced.path else ""
        for path in tree.links_below(announced.path):
            if path.removeprefix(prefix) in announced.expected:
                return f"{path} on node {self._node} is a symbolic link, which is not followed"
        if later := _newer(announced, files, tree.files):
            late_s = (tree.files[later].mtime_ns - announced.completed_ns) / 1e9
            return (
                f"{later} on node {self._node} is {late_s:.0f} s newer than the marker: it was saved again, or the"
                " clocks of the nodes differ (--ignore-times)"
            )
        return ""

    def _unready(self, announced: Announcement, files: Collection[str], tree: Tree) -> str:
        """Return what temporarily keeps this node from knowing all that it has of the checkpoint, or ""."""
        if announced.path and (closed := tree.unreadable_below(announced.path)):
            return f"on node {self._node}, {closed}"
        sent = {
            path: was
            for entry in self._entries.of_path(announced.path)
            if entry.generation
            and entry.is_alive
            and (entry.announced_ns or entry.completed_ns) != announced.completed_ns
            for path, was in entry.files.items()
        }
        for path in files:
            if sent.get(path) == tree.files[path]:
                return f"{path} belongs to a previous save on node {self._node}"
            if abs(tree.now_ns - tree.files[path].mtime_ns) < self._rules.settle_s * 1e9:
                return f"{path} is still being written on node {self._node}"
            if not tree.is_whole(path):
                return f"{path} is truncated or still being written on node {self._node}"
        return ""

    def _stage(self, announced: Announcement, files: dict[str, str], tree: Tree) -> Entry | None:
        entry = Entry(
            self._entries.next_number(),
            announced.format,
            announced.path,
            announced.step,
            announced.name,
            {path: tree.files[path] for path in files},
            files,
            is_followed=True,
            announced_ns=announced.completed_ns,
            staged_ns=tree.now_ns,
        )
        try:
            return self._entries.stage(entry, self._entries.source)
        except VanishedError as error:
            logger.info("vanished path=%s: %s; scanning again", announced.path, error)
            return None

    def let_go(self, refuse: Callable[[Entry, Refusal, str], None]) -> None:
        """Drop what was announced in a previous launch and is not in this one, once a later save is, or if this node is
        alone now.

        A node announces its saves in their order, after a restart too: the one that had the marker gave it up, or was
        replaced. The next scan takes it anew if this node has all of it.
        """
        heard = {(each.path, each.step, each.completed_ns) for each, _ in self._heard.values()}
        for entry in [each for each in self._entries.open() if plan.awaits_others(each)]:
            is_late = (
                entry.announced_ns < self._newest_ns
                and (entry.path, entry.step, entry.announced_ns) not in heard
            )
            if is_late or self._num_nodes == 1:
                self._entries.drop(entry)
                # Without its number, which may be given out again.
                refuse(replace(entry, number=0), Refusal.INCOMPLETE, "no node announces it any more")

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
            self._next_listen_at = 0.0
            # Hear what was announced before the last of them ended.
            self.listen()
            return not self._heard
        return now - self._ended_at > FAREWELL_S


def _is_ours(announced: Announcement, shard: str, ours: Identity, file: Path) -> bool:
    """Return whether this node sends a file.

    It does if the announcing node has no file of this name, or an older one that differs, so that one of the two does
    not belong to this checkpoint. The commit refuses two files of one name and says who has them.
    """
    if (theirs := announced.here.get(shard)) is None:
        return True
    if announced.completed_ns and ours.mtime_ns <= theirs.mtime_ns + CLOCKS_S * 1e9:
        return False
    return (ours.size_bytes, sample(file)) != (theirs.size_bytes, theirs.sample)


def _newer(announced: Announcement, shards: Mapping[str, str], files: Mapping[str, Identity]) -> str:
    """Return a file that was written after the checkpoint's marker; "" if there is none, or if times tell nothing."""
    for path, shard in shards.items() if announced.completed_ns else ():
        within_s = LATE_RANK_S if is_late(announced.format, shard) else CLOCKS_S
        if files[path].mtime_ns > announced.completed_ns + within_s * 1e9:
            return path
    return ""
