"""Looks at a folder again and again, and hands what is complete to an `Uploader`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_async import StoreOptions, Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.errors import (
    CheckpointAbortedError,
    FencedError,
    FolderInUseError,
    InvalidNameError,
    InvalidShardError,
    NoJournalError,
    NoSpaceError,
    StoreError,
)
from ckpt_async.monitor import status
from ckpt_async.watch import plan
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.disk import Disk
from ckpt_async.watch.entries import Entries, Entry, State, VanishedError, entry_of, remove_files
from ckpt_async.watch.formats import Found, Rules, find
from ckpt_async.watch.lock import FolderLock
from ckpt_async.watch.meanwhile import OutOfTimeError, Stop, attend, begin
from ckpt_async.watch.nodes import Nodes
from ckpt_async.watch.recognise import same_in_store
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.tree import Tree
from ckpt_async.watch.wake import Waker

logger = logging.getLogger(__name__)

# So many are in the uploader's hands at once: what was not begun need not be given up when the watcher is killed.
MAX_OPEN = 4
# Copies take the disk's space twice.
MAX_COPIED = 2
# How often one is handed in again that nobody could finish, though its bytes are still there.
MAX_ATTEMPTS = 20
# What several nodes had sealed before one of them was started again: time for its commit. Later it is done again.
PREDECESSOR_S = 15.0
# Before another start is begun, for what the uploader has in its hands; the journal has the rest.
REOPEN_S = 5.0
STANDBY_S = 2.0
# Of what nothing was written for so long its mark may never come.
STALE_S = 600.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a watcher is to do. `state`: where its links and journal are, on a local disk."""

    folder: Path
    remote: str
    state: Path
    lock: Path
    rules: Rules = field(default_factory=Rules)
    kind: str | None = None
    node: int = 0
    num_nodes: int = 1
    launch_id: str | None = None
    interval_s: float = 5.0
    settle_s: float = 1.0
    keep_local: int | None = None  # None: the trainer's files are left alone
    is_once: bool = False
    drain_timeout_s: float = 3600.0
    store_options: StoreOptions | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    settings_file: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """Something that a person or a script wants to know. `event`: committed, there, refused, incomplete, changed."""

    event: str
    path: str
    step: int
    name: str
    format: str
    reason: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a watcher has done when it ends. `unfinished` were handed in and are not decided: the next start, or
    `ckpt-async drain STATE`, finishes them. `incomplete` have no mark yet, by their paths, and why. `is_cut_short`: the
    time to finish was over before the store, or the other nodes, had answered.
    """

    num_committed: int
    num_there: int
    refused: Mapping[str, str]
    incomplete: Mapping[str, str]
    unfinished: tuple[str, ...]
    stood_by: bool = False
    is_cut_short: bool = False
    is_empty: bool = False  # nothing was ever found, complete or not


class Watcher:
    """One folder and one remote. `run` blocks; all else is for tests and for what `run` calls."""

    def __init__(self, options: Options, tell: Callable[[Told], None] = lambda _: None) -> None:
        self.options = options
        place = options.state / (f"kinds/{options.kind}" if options.kind else "run")
        self.entries = Entries(options.folder, place, keys.kind_remote(options.remote, options.kind or ""))
        self.waker = Waker()
        self._tell_ = tell
        self._said: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, str] = {}
        self._incomplete: dict[str, str] = {}
        self._attempts: Counter[int] = Counter()
        self._disk = Disk(options.folder)
        self._uploader: Uploader | None = None
        self._remote: Remote | None = None
        self._nodes: Nodes | None = None
        self._opened_at = 0.0
        self._sealed_before: frozenset[CheckpointId] = frozenset()
        self._has_looked = False
        self._num_left = 0  # complete, and not taken yet
        self._tree: Tree  # the newest look
        self._stopping = Stop()
        self._is_cut_short = False

    def run(self, stopping: Stop) -> Report:
        """Watch until `stopping` is set (with `is_once`: until all that is complete is committed), then finish what was
        handed in. Raises what keeps it from working: nothing is lost then, the next start goes on.
        """
        self._stopping = stopping
        lock = FolderLock(self.options.lock, otherwise=self.options.state / "watch.lock")
        try:
            while not lock.try_take():
                if self.options.is_once:
                    raise FolderInUseError(f"{self.options.folder} is watched by {lock.holder()}")
                self._say("standing_by", lock.holder(), f"standing by: {lock.holder()} works on the folder")
                if stopping.is_set():
                    return replace(self._report(), stood_by=True)
                self.waker.wait(STANDBY_S)
            self.entries.load()
            try:
                self._open_while_linking()
                self.entries.bind()
                self._work()
            except OutOfTimeError:
                self._is_cut_short = True
            finally:
                self._close(REOPEN_S)
            return self._report()
        finally:
            lock.release()

    # --- a start of the run --------------------------------------------------------------------------------

    def _open_while_linking(self) -> None:
        """The store may take its time, or be away."""
        opened = begin(self._open, "ckpt-async-open")
        self._look_and_take()
        attend(opened, self._go_on)
        assert self._remote is not None
        self._remote.meanwhile = self._go_on

    def _go_on(self) -> None:
        """What cannot wait for the store. Raises OutOfTimeError when waiting is over, too."""
        self._look_and_take()
        has_nothing = self._nodes is None and not self._num_left and not self._open_entries()
        if (has_nothing and self._stopping.is_set()) or self._stopping.is_over(self.options.drain_timeout_s):
            raise OutOfTimeError

    def _look_and_take(self) -> None:
        self._tree = self._disk.look()
        self.waker.follow(self.options.folder, self._tree.folders)
        self._take(self._tree)

    def _open(self) -> None:
        """Begin a new generation of the run; what earlier ones had sealed is finished by it."""
        options = self.options
        self._sealed_before = _sealed(options)
        rank, world_size = options.node, options.num_nodes
        self._uploader = Uploader(
            options.state,
            options.remote,
            kind=options.kind,
            rank=rank,
            world_size=world_size,
            launch_id=options.launch_id,
            store_options=options.store_options,
            settings_file=options.settings_file,
            **{
                **options.settings,
                "on_error": "warn",
                # What is staged goes when its entry is settled; the trainer's files are not the uploader's.
                "num_checkpoints_to_keep": -1,
                "latest_filename": "",
            },
        )
        self._remote = Remote(
            self._uploader.remote, options.store_options, self._uploader.settings, writes=world_size > 1
        )
        self._nodes = Nodes(
            *(options.node, options.num_nodes, self.entries, self._uploader, self._remote),
            settle_s=options.settle_s,
        )
        self._opened_at = time.monotonic()
        logger.info(
            "watching folder=%s remote=%s state=%s generation=%d",
            *(options.folder, self._uploader.remote, options.state, self._uploader.generation),
        )

    def _close(self, timeout_s: float) -> None:
        uploader, remote = self._uploader, self._remote
        self._uploader = self._remote = None
        if remote is not None:
            remote.close()
        if uploader is not None:
            uploader.close(timeout_s)

    def _reopen(self) -> None:
        self._close(REOPEN_S)
        self._open_while_linking()

    # --- rounds --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            was_stopping, is_whole = self._stopping.is_set(), False
            try:
                self._round()
                is_whole = True
            except FencedError:
                if self.options.num_nodes == 1:
                    raise
                logger.warning("another node has begun a new start; joining it")
                self._reopen()
                continue
            except (StoreError, NoSpaceError) as error:
                self._say("trouble", str(error), f"{error}; trying again")
            is_idle = is_whole and not self._open_entries() and not self._num_left
            if is_idle and (was_stopping or self.options.is_once) and self._nodes_are_done():
                return
            if self._stopping.is_over(self.options.drain_timeout_s):
                assert self._nodes is not None
                self._is_cut_short = not is_idle or self._nodes.has_heard
                return
            soon_s = max(0.1, self.options.settle_s / 2)
            pause_s = self.options.interval_s if is_idle and not was_stopping else soon_s
            self.waker.wait(min(pause_s, self.options.interval_s))

    def _round(self) -> None:
        self._tree = self._disk.look()
        self.waker.follow(self.options.folder, self._tree.folders)
        self._review(self._tree)
        self._take(self._tree)
        self._learn()
        assert self._nodes is not None
        self._nodes.listen()
        self._hand_over()
        self._nodes.follow(self._tree, self._hand_in, self._cannot_follow)
        _retire(self.options, self.entries)
        self.entries.forget_gone(self._tree)

    def _review(self, tree: Tree) -> None:
        """Of what waits or is under way: has somebody changed it?"""
        for entry in self._open_entries():
            changed = plan.changed_in_place(entry, tree.files)
            if entry.state is State.STAGED and not self.entries.is_intact(entry):
                self.entries.drop(entry)  # it is looked at anew
                logger.info("changed_while_settling path=%s", entry.path)
            elif changed and entry.state is State.HANDED:
                reason = f"{changed} was changed in place after its checkpoint was complete"
                self._tell("changed", entry, reason)

    def _take(self, tree: Tree) -> None:
        self._incomplete, self._num_left = {}, 0
        for found in find(tree, self.options.rules):
            verdict = plan.judge(found, tree, self.entries.all.values(), num_nodes=self.options.num_nodes)
            if verdict is None:
                continue
            if verdict.is_refused:
                self._refuse(found, verdict.reason)
            elif verdict.is_twin:
                self._say("twin", verdict.reason, verdict.reason)
            elif not verdict.take:
                self._num_left += verdict.is_waiting
                self._incomplete[found.path or "."] = verdict.reason
                if _is_stale(found, tree):
                    self._tell("incomplete", found, verdict.reason)
            elif sum(each.is_copied for each in self._open_entries()) >= MAX_COPIED:
                self._num_left += 1
            else:
                self._stage(found, tree)
        self._has_looked = True

    def _stage(self, found: Found, tree: Tree) -> None:
        expected = tuple(sorted({*found.inner, *found.missing})) if self.options.num_nodes > 1 else ()
        try:
            entry = entry_of(found, tree, self.entries.next_number(), expected=expected)
            entry = self.entries.stage(replace(entry, is_doubtful=not self._has_looked))
        except VanishedError as error:
            self._num_left += 1
            logger.info("vanished path=%s: %s", found.path, error)
            return
        except OSError as error:
            reason = f"it can be neither linked nor copied: {error}"
            if self._open_entries():  # whose end may free space
                self._num_left += 1
                self._say("cannot_link", found.path, f"{found.path}: {reason}; trying again")
            else:
                self._refuse(found, reason)  # for now: the next round tries again
            return
        logger.info("complete path=%s step=%d format=%s", entry.path, entry.step, entry.format)

    def _there(self, entry: Entry) -> Decision | None:
        assert self._remote is not None
        ours = {CheckpointId(each.generation, each.step) for each in self.entries.all.values()}
        return same_in_store(self._remote, entry, self.entries.staged(entry), ours)

    def _hand_over(self) -> None:
        assert self._uploader is not None
        for entry in plan.due(self.entries.all.values(), self._tree.now_ns, self.options.settle_s):
            num_open = sum(each.state is State.HANDED for each in self._open_entries())
            if num_open >= MAX_OPEN:
                return
            if not self.entries.is_intact(entry):
                self.entries.drop(entry)
                continue
            if entry.is_doubtful and (decision := self._there(entry)) is not None:
                self._counts["there"] += 1
                there = replace(entry, generation=decision.checkpoint.generation)
                self._tell("there", self.entries.settle(there, State.COMMITTED))
                continue
            known = self.entries.all.values()
            if plan.needs_new_generation(entry, known, self._uploader.generation):
                logger.info("the trainer has gone back to step %d: beginning a new generation", entry.step)
                self._reopen()
            generation = self._uploader.generation
            if reason := plan.passed_over(entry, known, generation):
                self._settle_refused(entry, reason)
                continue
            assert self._nodes is not None
            ours = self._nodes.announce(entry)
            self._hand_in(replace(ours, state=State.HANDED, generation=generation))

    def _hand_in(self, entry: Entry) -> None:
        """First it is written down: after a kill, the journal tells whether it was sealed."""
        assert self._uploader is not None
        self.entries.put(entry)
        shards = sorted(entry.shards.values())
        try:
            if shards:
                self._uploader.enqueue(self.entries.staged(entry), entry.step, entry.name, files=shards)
            self._uploader.seal(entry.step, name=entry.name, expected=entry.expected)
        except (InvalidNameError, InvalidShardError) as error:
            self._settle_refused(entry, str(error))
        except (NoSpaceError, FencedError):
            self.entries.put(replace(entry, state=State.STAGED, generation=0))
            raise

    def _cannot_follow(self, announced: Announcement, reason: str) -> None:
        assert self._uploader is not None
        self._uploader.give_up(announced.checkpoint.step, reason, name=announced.name)
        self._refused[announced.path or "."] = reason

    def _nodes_are_done(self) -> bool:
        assert self._nodes is not None
        try:
            return self._nodes.is_over()
        except FencedError:
            return False
        except StoreError as error:
            self._say("trouble", str(error), f"{error}; trying again")
            return False

    # --- what became of it ---------------------------------------------------------------------------------

    def _learn(self) -> None:
        assert self._uploader is not None
        assert self._remote is not None
        ours = self._uploader.generation
        handed = [each for each in self._open_entries() if each.generation]
        earlier = [each for each in handed if each.generation != ours]
        for entry in handed:
            if entry.generation != ours or entry.state is not State.HANDED:
                continue
            try:
                if self._uploader.is_committed(entry.step):
                    self._settle_committed(entry)
            except CheckpointAbortedError as error:
                self._given_up(entry, str(error))
        ids = [CheckpointId(each.generation, each.step) for each in earlier]
        decided = self._remote.decisions(ids) if ids else {}
        for entry in earlier:
            id_ = CheckpointId(entry.generation, entry.step)
            decision = decided.get(id_)
            if decision is not None and decision.outcome is not Outcome.ABORT:
                self._settle_committed(entry)
            elif entry.state is State.STAGED:
                continue  # it is handed in again when its turn comes
            elif decision is not None or id_ not in self._sealed_before or self._is_left_alone():
                self._given_up(entry, decision.reason if decision else "it was not sealed", may_repeat=True)

    def _is_left_alone(self) -> bool:
        """Whether other nodes had the time to finish what this one had sealed in an earlier start."""
        return self.options.num_nodes > 1 and time.monotonic() - self._opened_at > PREDECESSOR_S

    def _given_up(self, entry: Entry, reason: str, *, may_repeat: bool = False) -> None:
        """Hand it in again if that can help: its bytes are still here, and a kill was in the way."""
        self._attempts[entry.number] += 1
        if may_repeat and self._attempts[entry.number] <= MAX_ATTEMPTS and self.entries.is_intact(entry):
            self.entries.put(
                replace(entry, state=State.STAGED)
            )  # its generation stays: others may finish it yet
        else:
            self._settle_refused(entry, reason)

    def _settle_committed(self, entry: Entry) -> None:
        self._counts["committed"] += 1
        self.entries.settle(entry, State.COMMITTED)
        self._tell("committed", entry)

    def _settle_refused(self, entry: Entry, reason: str) -> None:
        self.entries.settle(entry, State.REFUSED, reason)
        self._refused[entry.path or "."] = reason
        self._tell("refused", entry, reason)

    def _refuse(self, found: Found, reason: str) -> None:
        self._refused[found.path or "."] = reason
        self._tell("refused", found, reason)

    # --- telling -------------------------------------------------------------------------------------------

    def _open_entries(self) -> list[Entry]:
        return [each for each in self.entries.all.values() if not each.is_settled]

    def _tell(self, event: str, what: Entry | Found, reason: str = "") -> None:
        """Once for each thing and reason."""
        path = what.path or "."
        number = str(what.number) if isinstance(what, Entry) else ""
        if (path, event + number + reason) in self._said:
            return
        self._said.add((path, event + number + reason))
        size_bytes = what.size_bytes if isinstance(what, Entry) else 0
        self._tell_(Told(event, path, what.step, what.name, what.format, reason, size_bytes))

    def _say(self, kind: str, what: str, message: str) -> None:
        if (kind, what) not in self._said:
            self._said.add((kind, what))
            logger.warning(message)

    def _report(self) -> Report:
        return Report(
            self._counts["committed"],
            self._counts["there"],
            dict(self._refused),
            dict(self._incomplete),
            tuple(each.path or "." for each in self._open_entries()),
            is_cut_short=self._is_cut_short,
            is_empty=not (self.entries.all or self._incomplete or self._refused),
        )


def _is_stale(found: Found, tree: Tree) -> bool:
    newest_ns = max((tree.files[path].mtime_ns for path in found.files), default=tree.now_ns)
    return tree.now_ns - newest_ns > STALE_S * 1e9


def _sealed(options: Options) -> frozenset[CheckpointId]:
    """What earlier starts had sealed and nobody has decided, as the journal has it."""
    try:
        found = status.load(options.state).get(options.kind or "")
    except NoJournalError:
        return frozenset()
    open_ = [each for each in found.checkpoints if each.state != "open"] if found else []
    return frozenset(each.id for each in open_)


def _retire(options: Options, entries: Entries) -> None:
    """Delete the trainer's older checkpoints, if that was asked for: only what is committed and has not changed."""
    if options.keep_local is not None:
        for entry in plan.to_remove(entries.all.values(), options.keep_local):
            remove_files(options.folder, entry)
