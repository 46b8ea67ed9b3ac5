"""Several nodes, each with a folder of its own: the one that sees a mark tells the others, who send what they have.

The commit needs every file that the mark names (`Uploader.seal(expected=…)`), whoever has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import FencedError
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.entries import Entries, Entry, State, VanishedError
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.tree import Tree

logger = logging.getLogger(__name__)

# All nodes together look so often.
LOOKS_PER_S = 100
# How long a file that is announced may be without its end here, before the checkpoint is given up.
WHOLE_S = 60.0
# At the end, for the others to say that they announce nothing more.
FAREWELL_S = 60.0


class Nodes:
    """What this node has heard from the others in one start of the run, and tells them. Of a single node: nothing."""

    def __init__(
        self, node: int, num_nodes: int, entries: Entries, uploader: Uploader, remote: Remote, settle_s: float
    ) -> None:
        self._node, self._num_nodes = node, num_nodes
        self._entries, self._uploader, self._remote = entries, uploader, remote
        self._settle_s = settle_s
        self._heard: dict[int, tuple[Announcement, float]] = {}  # by step: and when, not handed in yet
        self._heard_upto = -1
        self._next_look_at = 0.0
        self._ended_at: float | None = None

    @property
    def generation(self) -> int:
        return self._uploader.generation

    @property
    def has_heard(self) -> bool:
        """Of a checkpoint of which this node has not handed in its part yet."""
        return bool(self._heard)

    def listen(self) -> None:
        """Hear what is new. Raises FencedError if another node has begun a new start, which this one has to join."""
        if self._num_nodes == 1:
            return
        self._uploader.check_takes(keys.MAX_STEP)
        now = time.monotonic()
        if now < self._next_look_at:
            return
        self._next_look_at = now + self._num_nodes / LOOKS_PER_S
        if (newest := self._remote.newest_generation(self.generation)) > self.generation:
            raise FencedError(f"another node has begun generation {newest}")
        for each in self._remote.announced(self.generation, self._heard_upto):
            self._heard_upto = max(self._heard_upto, each.checkpoint.step)
            if each.node != self._node:
                self._heard[each.checkpoint.step] = each, time.monotonic()

    def announce(self, entry: Entry) -> Entry:
        """Tell the others that it is complete. Returns what this node is to send of it: all that it has, unless another
        node was faster and has some of it too.
        """
        if self._num_nodes == 1:
            return entry
        ours = Announcement(
            CheckpointId(self.generation, entry.step),
            self._node,
            entry.format,
            entry.path,
            entry.name,
            tuple(sorted(entry.shards.values())),
            entry.expected,
        )
        there = self._remote.announce(ours)
        return entry if there.node == self._node else _rest(entry, there)

    def follow(
        self, tree: Tree, hand_in: Callable[[Entry], None], give_up: Callable[[Announcement, str], None]
    ) -> None:
        """Hand in what this node has of what others have announced, once that has settled."""
        for step, (announced, heard_at) in sorted(self._heard.items()):
            if any(
                each.generation == self.generation and each.step == step
                for each in self._entries.all.values()
            ):
                del self._heard[step]
                continue
            waited_s = time.monotonic() - heard_at
            if waited_s < self._settle_s:
                continue
            entry = self._staged(announced)
            if entry is None:
                paths = _paths_here(announced, tree)
                unfinished = [path for path in paths if not tree.is_whole(path)]
                if unfinished and waited_s < WHOLE_S:
                    continue
                if unfinished:
                    give_up(announced, f"{unfinished[0]} has no end on node {self._node}")
                    del self._heard[step]
                    continue
                entry = self._stage(announced, paths, tree)
            if entry is not None:
                del self._heard[step]
                hand_in(replace(entry, state=State.HANDED, generation=self.generation))

    def _staged(self, announced: Announcement) -> Entry | None:
        """What was staged for an earlier start, or because this node has the mark too."""
        for entry in self._entries.of_path(announced.path):
            same = entry.state is State.STAGED and (entry.step, entry.name) == (
                announced.checkpoint.step,
                announced.name,
            )
            if same and self._entries.is_intact(entry):
                return _rest(entry, announced)
        return None

    def _stage(self, announced: Announcement, paths: dict[str, str], tree: Tree) -> Entry | None:
        entry = Entry(
            self._entries.next_number(),
            announced.format,
            announced.path,
            announced.checkpoint.step,
            announced.name,
            {path: tree.files[path] for path in paths},
            paths,
            is_followed=True,
            staged_ns=tree.now_ns,
        )
        try:
            return self._entries.stage(entry)
        except VanishedError as error:
            logger.info("vanished path=%s: %s; looking again", announced.path, error)
            return None

    def is_over(self) -> bool:
        """Whether no node will announce anything more, as this one will not."""
        if self._num_nodes == 1:
            return True
        if self._heard:
            return False
        now = time.monotonic()
        if self._ended_at is None:
            self._remote.say_ended(self.generation, self._node)
            self._ended_at = now
        if len(self._remote.ended(self.generation)) >= self._num_nodes:
            self._next_look_at = 0.0
            self.listen()  # what was announced before the last of them had ended
            return not self._heard
        return now - self._ended_at > FAREWELL_S


def _rest(entry: Entry, announced: Announcement) -> Entry:
    """Without what the announcing node sends."""
    theirs = set(announced.here)
    shards = {path: shard for path, shard in entry.shards.items() if shard not in theirs}
    return replace(entry, shards=shards, expected=(), is_followed=True)


def _paths_here(announced: Announcement, tree: Tree) -> dict[str, str]:
    """The files of it that are on this node and not on the one that announced it, and their names in the checkpoint."""
    prefix = f"{announced.path}/" if announced.path else ""
    if announced.path:
        below = tree.below(announced.path)
    else:
        below = [path for path in tree.below("") if path in announced.expected]
    named = {path: path.removeprefix(prefix) for path in below if not path.endswith(".tmp")}
    return {path: shard for path, shard in named.items() if shard not in announced.here}
