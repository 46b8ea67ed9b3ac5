"""The watcher: scans a folder periodically and hands complete checkpoints to an `Uploader`.

    scan ──► staged ──────────► handed in ──────────► committed
             linked, settles    sealed, uploading └─► refused, with the reason
               ▲      │              │
               │      └─ changed: dropped, the next scan decides
               └──────────── a launch ended before anybody had sealed it

What is staged is handed in once it has settled, in the order in which it was found, unless the store has it already
(`recognise`), it would wrongly become the newest (`plan`), or previous saves must be decided first. Going back to a
lower step begins a new launch of the run. With several nodes, the node with the marker announces the checkpoint and
the others follow (`nodes`). Scans go on while the store is awaited, since the trainer rotates its checkpoints anyway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.refusal import Refusal
from ckpt_async.core.units import age, named
from ckpt_async.errors import (
    CheckpointAbortedError,
    FencedError,
    FolderInUseError,
    InvalidNameError,
    InvalidRecordError,
    InvalidShardError,
    NoJournalError,
    NoSpaceError,
    StoreError,
)
from ckpt_async.formats import Tree, files_of
from ckpt_async.local.settings_file import load_settings
from ckpt_async.monitor import status
from ckpt_async.trainer.uploader import Uploader
from ckpt_async.watch import plan
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.background import REST, OutOfTimeError, Stop, attend, begin
from ckpt_async.watch.entries import Entries, Entry, State, remove_files
from ckpt_async.watch.lock import FolderLock
from ckpt_async.watch.nodes import Nodes
from ckpt_async.watch.options import Options
from ckpt_async.watch.recognise import Same, find_same
from ckpt_async.watch.refusal_events import RefusalEvents
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.reporter import Event, Report, Reporter
from ckpt_async.watch.room import Room
from ckpt_async.watch.scanner import FolderScanner
from ckpt_async.watch.wake import Waker

logger = logging.getLogger(__name__)

# How long the uploader may finish what it has in hand before a new launch begins; the journal keeps the rest.
REOPEN_S = 5.0
STANDBY_S = 2.0
# With several nodes: how long we wait for a checkpoint that was sealed before a node restarted to be
# committed by the others, before it is handed in again. New checkpoints wait for that, and the other nodes
# hold only a limited number of those that were rotated away.
PREDECESSOR_S = 5.0
# An ordinary end takes less time than this, and does not say what it waits for.
QUIET_S = 2.0


@dataclass(slots=True)
class _Launch:
    """A generation of the run. `sealed` are the checkpoints that previous launches had sealed, by the journal."""

    uploader: Uploader
    remote: Remote
    nodes: Nodes
    sealed: frozenset[CheckpointId]
    began_s: float

    @property
    def generation(self) -> int:
        return self.uploader.generation

    def close(self, timeout_s: float) -> None:
        with contextlib.ExitStack() as closing:  # the last first, and all of them
            closing.callback(self.uploader.close, timeout_s)
            closing.callback(self.remote.close)


class Watcher:
    """Watches one folder for one remote.

    `run` blocks. The other methods are called by `run` or by tests.
    """

    def __init__(
        self, options: Options, on_event: Callable[[Event], None] = lambda _: None, waker: Waker | None = None
    ) -> None:
        self.options = options
        place = options.state / (f"kinds/{options.kind}" if options.kind else "run")
        self.entries = Entries(options.folder, place, keys.kind_remote(options.remote, options.kind or ""))
        self.entries.num_nodes = options.num_nodes
        self.waker = Waker() if waker is None else waker
        self._reporter = Reporter(on_event)
        self._room = self.entries.room = Room(place)
        self._scanner = FolderScanner(options, self.entries, self._reporter, self.waker, self._room)
        self._current: _Launch | None = None  # None: not open now
        self._has_opened = False
        self._stopping = Stop()
        self._is_cut_short, self._num_there_before = False, 0

    @property
    def _launch(self) -> _Launch:
        assert self._current is not None
        return self._current

    def run(self, stopping: Stop) -> Report:
        """Watch until `stopping` is set, then finish what was handed in.

        With `is_once`, end as soon as everything that is complete is committed. Raises whatever keeps the watcher
        from working; nothing is lost then, because the next launch continues.
        """
        self._stopping = stopping
        lock = FolderLock(self.options.lock, self.options.state / "watch.lock")
        try:
            while not lock.try_take():
                who = f"{self.options.folder} is watched by {lock.holder()}"
                if self.options.is_once:
                    raise FolderInUseError(who)
                self._reporter.say(
                    "standing_by",
                    who,
                    f"{who}; this watcher takes over when that ends (use --kind for another one)",
                )
                if stopping.is_set():
                    return replace(self._report(), stood_by=True)
                self.waker.wait(STANDBY_S)
            return self._run_locked()
        finally:
            lock.release()

    def _run_locked(self) -> Report:
        options = self.options
        if not options.folder.is_dir():
            logger.warning("folder_awaited folder=%s: it does not exist yet; waiting for it", options.folder)
        self.entries.load()
        settings = load_settings(options.settings, os.environ, options.settings_file)
        self._room.min_free_bytes = max(0, settings.min_free_bytes)
        events = RefusalEvents(self.entries.remote, options.node, self.entries.place, settings)
        self._reporter.publish = events.add
        close_s = REOPEN_S
        try:
            self._open_while_linking()
            if options.is_once:
                self._num_there_before = self.entries.num_committed_in(self._scanner.tree)
            self.entries.bind()
            self._work()
            if self._is_cut_short:
                close_s = 0.0
        except OutOfTimeError:
            close_s = 0.0
            # With nothing to finish, the only answers that can be missed are those of other nodes.
            self._is_cut_short = options.num_nodes > 1 or self._has_left()
        except KeyboardInterrupt:
            close_s = 0.0
            raise
        finally:
            with contextlib.ExitStack() as ending:  # the last first, and all of them
                ending.callback(lambda: events.close(at_once=close_s == 0.0))
                ending.callback(self._close, close_s)
                ending.callback(self._scanner.end)
        return self._report()

    # --- a launch of the run --------------------------------------------------------------------------------

    def _open_while_linking(self) -> None:
        """Open the remote on another thread and keep scanning the folder: the store may be slow or unreachable."""
        opened = begin(self._open, "ckpt-async-open")
        try:
            self._scanner.scan_and_take()
            launch = self._current = attend(opened, self._go_on)
        except BaseException:
            opened.add_done_callback(_close_unused)
            raise
        self._has_opened = True
        self._reporter.count_in(launch.uploader.metrics)
        launch.remote.while_waiting = self._go_on
        self._refuse_lost()

    def _go_on(self) -> None:
        """Do the work that cannot wait for the store.

        Raises OutOfTimeError once the watcher has to stop waiting, too.
        """
        self._scanner.scan_and_take()
        has_nothing = not self._has_opened and not self._has_left()
        if (has_nothing and self._stopping.is_set()) or self._stopping.is_over(self.options.drain_timeout_s):
            raise OutOfTimeError
        self._say_what_the_end_waits_for()

    def _has_left(self) -> bool:
        return bool(self._scanner.num_left or self.entries.open())

    def _open(self) -> _Launch:
        """Begin a new generation of the run, which also finishes what previous ones had sealed."""
        options, sealed = self.options, _sealed_in_journal(self.options)
        with contextlib.ExitStack() as opened:
            uploader = _uploader(options)
            opened.callback(uploader.close, 0.0)
            writes = options.num_nodes > 1
            remote = Remote(uploader.remote, options.store_options, uploader.settings, writes=writes)
            opened.pop_all()
        logger.info(
            "watching folder=%s remote=%s state=%s generation=%d",
            *(options.folder, uploader.remote, options.state, uploader.generation),
        )
        nodes = Nodes(options, self.entries, uploader, remote)
        return _Launch(uploader, remote, nodes, sealed, time.monotonic())

    def _close(self, timeout_s: float) -> None:
        launch, self._current = self._current, None
        self._reporter.count_in(None)
        if launch is not None:
            launch.close(timeout_s)

    def _reopen(self, close_s: float = REOPEN_S) -> None:
        self._close(close_s)
        while True:
            try:
                return self._open_while_linking()
            except StoreError as error:  # retried: it was open before
                self._reporter.trouble(error)
            self._close(0.0)
            self.waker.wait(self.options.interval_s)

    # --- rounds --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            was_stopping, is_whole = self._stopping.is_set(), False
            began_s = time.thread_time()
            self.entries.check_there()
            try:
                self._round()
                is_whole = True
                is_ending = was_stopping or self.options.is_once
                if is_ending and self._is_idle(was_stopping) and self._launch.nodes.is_over():
                    return
            except FencedError:
                if self.options.num_nodes == 1:
                    raise
                node = f"{self.options.node}/{self.options.num_nodes}"
                logger.warning(
                    "launch_joined: another node has begun a new launch; joining it. If this goes on, does another"
                    " watcher also use --node %s, or a different number of nodes?",
                    node,
                )
                self._reopen(0.0)  # nothing more is committed in this generation
                continue
            except (StoreError, NoSpaceError, OSError) as error:
                self._reporter.trouble(error)
            is_idle = is_whole and self._is_idle(was_stopping)
            if self._stopping.is_over(self.options.drain_timeout_s):
                self._is_cut_short = not is_idle
                return
            self._say_what_the_end_waits_for()
            soon_s = max(0.1, self.options.rules.settle_s / 2)
            pause_s = self.options.interval_s if is_idle and not was_stopping else soon_s
            # With thousands of files, judging them may take longer than listing them.
            took_s = max(self._scanner.took_s, time.thread_time() - began_s)
            self.waker.wait(min(pause_s, self.options.interval_s), rest_s=REST * took_s)

    def _is_idle(self, is_stopping: bool) -> bool:
        """Return whether nothing is left to do. When stopping, what only another node can continue is left to the next
        launch.
        """
        left = [each for each in self.entries.open() if not (is_stopping and plan.awaits_others(each))]
        return not (left or self._scanner.num_left or self._launch.nodes.has_heard)

    def _say_what_the_end_waits_for(self) -> None:
        """Report what a watcher that was told to end still waits for, once for each such wait."""
        timeout_s = self.options.drain_timeout_s
        if self._stopping.is_over(min(QUIET_S, timeout_s)) and (what := self._waits_for()):
            left = age(self._stopping.left_s(timeout_s))
            self._reporter.say("watch_ending", what, f"waiting for {what}, at most {left} longer")

    def _waits_for(self) -> str:
        left, launch = self.entries.open(), self._current
        if not left and self._scanner.num_left:
            return "recently written files to stop changing"
        if launch is None:
            steps = named("step", sorted(each.step for each in left))
            return f"the store to answer, or another node to start: {steps} not handed in yet" if left else ""
        left = [each for each in left if not plan.awaits_others(each)]  # the next launch continues them
        if not left and launch.nodes.awaited:
            return f"{named('node', launch.nodes.awaited)} to finish, since more may be announced"
        return _decision_on(left, launch.uploader) if left else ""

    def _round(self) -> None:
        self._scanner.scan()
        self._scanner.review()
        self._scanner.take()
        self._learn()
        nodes, tree = self._launch.nodes, self._scanner.tree
        nodes.listen()
        self._hand_over()
        nodes = self._launch.nodes  # of a new launch, perhaps
        nodes.follow(tree, self._hand_in, self._cannot_follow)
        nodes.let_go(self._reporter.refuse)
        _retire(self.options, self.entries, tree)
        self.entries.forget_gone(tree)

    def _hand_over(self) -> None:
        now_ns, settle_s = self._scanner.tree.now_ns, self.options.rules.settle_s
        num_nodes = self.options.num_nodes
        for due in plan.due(self.entries.all.values(), now_ns, settle_s):
            entry = due
            handed = [each for each in self.entries.open() if each.state is State.HANDED]
            size_bytes = sum(each.size_bytes for each in (*handed, entry))
            # What the uploader has in hand occupies its space until it is committed, however long that takes.
            has_room = not handed or not self._room.lacking_bytes(size_bytes)
            if not has_room or plan.are_many(len(handed), size_bytes):
                return
            if not self.entries.is_intact(entry):
                self.entries.drop(entry)
                continue
            if entry.says_sums and not entry.is_checked:
                if not self._scanner.is_whole(entry, self._go_on):
                    continue
                entry = self.entries.note_checked(entry)
            known = self.entries.all.values()
            if num_nodes == 1 and plan.awaits_akin(entry, known):
                return
            if (same := find_same(self._launch.remote, self.entries, entry)) is not None:
                self._settle_same(entry, same)
                continue
            if before := plan.predecessors(entry, known, self._launch.generation, num_nodes=num_nodes):
                self._reporter.note_held_up(entry, _decision_on(before, self._launch.uploader))
                return
            has_gone_back = plan.has_gone_back(entry, known)
            if plan.needs_new_generation(entry, known, self._launch.generation):
                self._reopen()
            generation = self._launch.generation
            if reason := plan.passed_over(entry, known, generation):
                self._settle_refused(entry, Refusal.OUTDATED, reason)
                continue
            if num_nodes == 1 and (missing := sorted({*entry.expected} - {*entry.shards.values()})):
                self._settle_refused(entry, Refusal.INCOMPLETE, plan.lacking(missing))
                continue
            if has_gone_back:
                self._reporter.say("trainer_went_back", entry.path, plan.gone_back(entry))
            try:
                ours = self._launch.nodes.announce(entry)
            except InvalidRecordError as error:  # written by another node, perhaps of another version
                self._settle_refused(entry, Refusal.UNSUPPORTED, str(error))
                continue
            self._hand_in(replace(ours, state=State.HANDED, generation=generation))

    def _hand_in(self, entry: Entry) -> None:
        """Record the entry as handed in, then seal it.

        The record comes first: after a kill, the journal tells whether the entry was sealed.
        """
        self.entries.put(entry)
        try:
            reason = _seal(self._launch.uploader, self.entries, entry)
        except (NoSpaceError, FencedError):
            self.entries.put(replace(entry, state=State.STAGED, generation=0))
            raise
        if reason:  # other nodes would wait for our part
            self._launch.uploader.give_up(entry.step, reason, name=entry.name)
            self._settle_refused(entry, Refusal.GIVEN_UP, reason)

    def _cannot_follow(self, announced: Announcement, reason: str) -> None:
        self._launch.uploader.give_up(announced.checkpoint.step, reason, name=announced.name)
        self._reporter.refuse(announced, Refusal.GIVEN_UP, reason)

    # --- what became of it ---------------------------------------------------------------------------------

    def _learn(self) -> None:
        launch = self._launch
        handed = [each for each in self.entries.open() if each.generation]
        ours = [
            each for each in handed if each.generation == launch.generation and each.state is State.HANDED
        ]
        old = [each for each in handed if each.generation != launch.generation]
        for entry in ours:
            try:
                if launch.uploader.is_committed(entry.step):
                    self._settle_committed(entry)
            except CheckpointAbortedError as error:
                launch.nodes.check_newest()  # a newer launch has given it up, and there it comes again
                self._given_up(entry, str(error))
        decided = launch.remote.decisions([each.id for each in old]) if old else {}
        for entry in old:
            decision = decided.get(entry.id)
            if decision is not None and decision.outcome is not Outcome.ABORT:
                self._settle_committed(entry)
            elif entry.state is State.STAGED:
                continue  # handed in again when its turn comes
            elif decision is not None or not self._may_be_finished(entry):
                self._given_up(entry, decision.reason if decision else "it was not sealed", may_repeat=True)

    def _may_be_finished(self, entry: Entry) -> bool:
        """Return whether a checkpoint of a previous launch, which is not decided, may still be committed there.

        It may if this node had sealed it: its uploader finishes that. Of several nodes, each may be gone for good.
        """
        is_alone = entry.num_nodes == self.options.num_nodes == 1
        is_early = time.monotonic() - self._launch.began_s <= PREDECESSOR_S
        return entry.id in self._launch.sealed and (is_alone or is_early)

    def _refuse_lost(self) -> None:
        """Refuse what the store has lost since it was committed: somebody may have deleted it, so it is not sent
        again.
        """
        committed = [
            each for each in self.entries.all.values() if each.state is State.COMMITTED and each.generation
        ]
        lost = {*self._launch.remote.lost({each.id for each in committed})} if committed else set()
        for entry in (each for each in committed if each.id in lost):
            reason = (
                "it was committed, and the store has lost it: it was wiped or put back, or a rule of the bucket deletes"
                f" objects. To upload it again, delete {self.entries.place}"
            )
            self._settle_refused(entry, Refusal.OUTDATED, reason)

    def _given_up(self, entry: Entry, reason: str, *, may_repeat: bool = False) -> None:
        """Hand the entry in again if that can help (a kill interrupted it and its bytes are still here), else refuse
        it.
        """
        if may_repeat and self.entries.is_intact(entry):
            # Its generation is kept, because other nodes may still finish it there.
            self.entries.put(replace(entry, state=State.STAGED))
        else:
            self._settle_refused(entry, Refusal.GIVEN_UP, reason)

    def _settle_same(self, entry: Entry, same: Same) -> None:
        """Settle an entry whose content was committed before, perhaps under another name."""
        if same.is_in_store:
            self._reporter.stored("there", self.entries.settle(same.known_as(entry), State.COMMITTED))
        else:
            self._settle_refused(entry, Refusal.OUTDATED, same.why_outdated)

    def _settle_committed(self, entry: Entry) -> None:
        self.entries.settle(entry, State.COMMITTED)
        self._reporter.stored("committed", entry)

    def _settle_refused(self, entry: Entry, refusal: Refusal, reason: str) -> None:
        self.entries.settle(entry, State.REFUSED, reason, refusal)
        self._reporter.refuse(entry, refusal, reason)

    def _report(self) -> Report:
        reporter = self._reporter
        return Report(
            reporter.counts["committed"],
            reporter.counts["there"] + self._num_there_before,
            reporter.refused,
            dict(reporter.incomplete),
            tuple(dict.fromkeys(each.path or "." for each in self.entries.open())),
            is_cut_short=self._is_cut_short,
            is_empty=not (self.entries.all or reporter.incomplete or reporter.refused),
            unknown=dict(reporter.unknown),
        )


def _close_unused(opened: Future[_Launch]) -> None:
    """Close a launch that was opened when nobody waited for it any more."""
    if opened.exception() is None:
        opened.result().close(0.0)


def _sealed_in_journal(options: Options) -> frozenset[CheckpointId]:
    try:
        found = status.load(options.state).get(options.kind or "")
    except NoJournalError:
        return frozenset()
    return frozenset(each.id for each in found.checkpoints if each.state != "open") if found else frozenset()


def _uploader(options: Options) -> Uploader:
    return Uploader(
        options.state,
        options.remote,
        kind=options.kind,
        rank=options.node,
        world_size=options.num_nodes,
        launch_id=options.launch_id,
        store_options=options.store_options,
        settings_file=options.settings_file,
        **{
            **options.settings,
            "on_error": "warn",
            # What is handed in is never delayed: the watcher leaves room by what it stages.
            "min_free_bytes": 0,
            # Staged links are removed when their entry is settled, and the trainer's files are not the
            # uploader's to delete.
            "num_checkpoints_to_keep": -1,
            "latest_filename": "",
        },
    )


def _decision_on(entries: list[Entry], uploader: Uploader) -> str:
    """Describe what the decision on these entries waits for."""
    ours = [each for each in entries if each.generation == uploader.generation]
    handed = [each.step for each in ours if each.state is State.HANDED]
    nodes = {node for step in handed for node in uploader.missing_ranks(step)} - {uploader.rank}
    steps = named("step", sorted(each.step for each in entries))
    return f"{named('node', sorted(nodes))} to hand in {steps}" if nodes else f"{steps} to be committed"


def _seal(uploader: Uploader, entries: Entries, entry: Entry) -> str:
    """Enqueue and seal an entry. Return why that is impossible, or "" on success.

    From `enqueue` on, the uploader notices files that are changed in place.
    """
    try:
        if shards := sorted(entry.shards.values()):
            uploader.enqueue(entries.staged(entry), entry.step, entry.name, files=shards)
        if not entries.is_intact(entry):
            return "it was written in place while it was being handed in"
        uploader.seal(entry.step, name=entry.name, expected=entry.expected)
    except (InvalidNameError, InvalidShardError) as error:
        return str(error)
    return ""


def _retire(options: Options, entries: Entries, tree: Tree) -> None:
    """Delete the trainer's older checkpoints, if that was asked for.

    Only checkpoints that are committed and have not changed are deleted. One that has more files than were committed
    stays, because it is whole nowhere else.
    """
    if options.keep_local is None:
        return
    for entry in plan.to_remove(entries.all.values(), options.keep_local):
        if entry.path in entry.files or files_of(entry.path, tree).keys() <= entry.files.keys():
            remove_files(options.folder, entry)
