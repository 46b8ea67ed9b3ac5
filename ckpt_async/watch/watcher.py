"""The watcher: scans a folder periodically and hands complete checkpoints to an `Uploader`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.refusal import Refusal
from ckpt_async.core.units import named
from ckpt_async.errors import (
    CheckpointAbortedError,
    FencedError,
    FolderInUseError,
    InvalidNameError,
    InvalidRecordError,
    InvalidShardError,
    NoSpaceError,
    StoreError,
)
from ckpt_async.formats import Tree, files_of
from ckpt_async.local.settings_file import load_settings
from ckpt_async.watch import earlier, ending, plan
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.background import REST, OutOfTimeError, Stop, attend, begin, keep_on
from ckpt_async.watch.earlier import Earlier
from ckpt_async.watch.ending import Ending
from ckpt_async.watch.entries import Entries, Entry, State, remove_files
from ckpt_async.watch.lock import FolderLock
from ckpt_async.watch.nodes import Nodes
from ckpt_async.watch.options import Options
from ckpt_async.watch.recognise import Same, samples_of, there, with_sums
from ckpt_async.watch.refusals import Refusals
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.room import Room
from ckpt_async.watch.scanner import FolderScanner
from ckpt_async.watch.telling import Report, Teller, Told
from ckpt_async.watch.wake import Waker

logger = logging.getLogger(__name__)

# How often a checkpoint that no launch could finish is handed in again while its bytes are still there.
MAX_ATTEMPTS = 20
# How long the uploader may finish what it has in hand before a new launch begins; the journal keeps the rest.
REOPEN_S = 5.0
STANDBY_S = 2.0


class Watcher:
    """Watches one folder for one remote.

    `run` blocks. The other methods are called by `run` or by tests.
    """

    def __init__(
        self, options: Options, tell: Callable[[Told], None] = lambda _: None, waker: Waker | None = None
    ) -> None:
        self.options = options
        place = options.state / (f"kinds/{options.kind}" if options.kind else "run")
        self.entries = Entries(options.folder, place, keys.kind_remote(options.remote, options.kind or ""))
        self.entries.num_nodes = options.num_nodes
        self.waker = Waker() if waker is None else waker
        self._teller = Teller(tell)
        self._room = self.entries.room = Room(options.folder, place)
        self._scanner = FolderScanner(options, self.entries, self._teller, self.waker, self._room)
        self._attempts: Counter[int] = Counter()
        self._uploader: Uploader | None = None
        self._remote: Remote | None = None
        self._nodes: Nodes | None = None
        self._refusals: Refusals | None = None
        self._earlier: Earlier | None = None
        self._stopping = Stop()
        self._ending = Ending(self._stopping, options.drain_timeout_s)
        self._is_cut_short, self._num_there_before = False, 0

    def run(self, stopping: Stop, again: Callable[[Exception], float] = lambda _: 0.0) -> Report:
        """Watch until `stopping` is set, then finish what was handed in.

        With `is_once`, end as soon as everything that is complete is committed. Raises whatever keeps the watcher
        from working; nothing is lost then, because the next launch continues. `again` is called with the error first,
        and the folder is still scanned for as many seconds as it returns.
        """
        self._stopping = stopping
        self._ending = Ending(stopping, self.options.drain_timeout_s)
        lock = FolderLock(self.options.lock, self.options.state / "watch.lock", self.entries.remote)
        try:
            while not lock.try_take():
                if self.options.is_once or lock.is_for_another_remote():
                    to = ", which sends it to another remote" if lock.is_for_another_remote() else ""
                    raise FolderInUseError(f"{self.options.folder} is watched by {lock.holder()}{to}")
                self._teller.say("standing_by", lock.holder(), f"{lock.holder()} is watching the folder")
                if stopping.is_set():
                    return replace(self._report(), stood_by=True)
                self.waker.wait(STANDBY_S)
            self._settle_in()
            close_s = REOPEN_S
            try:
                self._open_while_linking()
                if self.options.is_once:
                    self._num_there_before = self.entries.num_committed_in(self._scanner.tree)
                self.entries.bind()
                self._work()
                if self._is_cut_short:
                    close_s = 0.0
            except OutOfTimeError:
                close_s = 0.0
                # With nothing to finish, the only answers that can be missed are those of other nodes.
                self._is_cut_short = self.options.num_nodes > 1 or self._has_left()
            except KeyboardInterrupt:
                close_s = 0.0
                raise
            except Exception as error:
                keep_on(self._scanner.scan_and_take, again(error), stopping)
                raise
            finally:
                self._end(close_s)
            return self._report()
        finally:
            lock.release()

    def _settle_in(self) -> None:
        """Load state and settings; called once the lock on the folder is held."""
        if not self.options.folder.is_dir():
            logger.warning(
                "folder_awaited folder=%s: it does not exist yet; waiting for it", self.options.folder
            )
        self.entries.load()
        options = self.options
        settings = load_settings(options.settings, os.environ, options.settings_file)
        self._room.min_free_bytes = max(0, settings.min_free_bytes)
        self._refusals = Refusals(self.entries.remote, options.node, self.entries.place, settings)
        self._teller.on_refused = self._refusals.add

    def _end(self, close_s: float) -> None:
        assert self._refusals is not None
        with contextlib.ExitStack() as ending:  # the last first, and all of them
            ending.callback(self._refusals.close, at_once=close_s == 0.0)
            ending.callback(self._close, close_s)
            ending.callback(self._teller.end)
            ending.callback(self._scanner.end)

    # --- a launch of the run --------------------------------------------------------------------------------

    def _open_while_linking(self) -> None:
        """Open the remote on another thread and keep scanning the folder: the store may be slow or unreachable."""
        opened = begin(self._open, "ckpt-async-open")
        self._scanner.scan_and_take()
        attend(opened, self._go_on)
        assert self._remote is not None
        self._remote.while_waiting = self._go_on
        earlier.refuse_lost(self.entries, self._remote, self._settle_refused)

    def _go_on(self) -> None:
        """Do the work that cannot wait for the store.

        Raises OutOfTimeError once the watcher has to stop waiting, too.
        """
        self._scanner.scan_and_take()
        has_nothing = self._nodes is None and not self._has_left()
        if (has_nothing and self._stopping.is_set()) or self._stopping.is_over(self.options.drain_timeout_s):
            raise OutOfTimeError
        self._ending.tell(self._waits_for)

    def _has_left(self) -> bool:
        return bool(self._scanner.num_left or self.entries.open())

    def _open(self) -> None:
        """Begin a new generation of the run, which also finishes what earlier ones had sealed."""
        options = self.options
        journal = earlier.in_journal(options)
        uploader = self._uploader = _uploader(options)
        writes = options.num_nodes > 1
        self._remote = Remote(uploader.remote, options.store_options, uploader.settings, writes=writes)
        assert self._refusals is not None
        self._refusals.count_in(self._uploader.metrics)
        self._nodes = Nodes(options, self.entries, self._uploader, self._remote)
        self._earlier = Earlier(options, journal)
        logger.info(
            "watching folder=%s remote=%s state=%s generation=%d",
            *(options.folder, self._uploader.remote, options.state, self._uploader.generation),
        )

    def _close(self, timeout_s: float) -> None:
        uploader, remote = self._uploader, self._remote
        self._uploader = self._remote = None
        if self._refusals is not None:
            self._refusals.count_in(None)
        with contextlib.ExitStack() as closing:  # the last first, and all of them
            if uploader is not None:
                closing.callback(uploader.close, timeout_s)
            if remote is not None:
                closing.callback(remote.close)

    def _reopen(self, close_s: float = REOPEN_S) -> None:
        self._close(close_s)
        while (error := _failure_of(self._open_while_linking)) is not None:  # retried: it was open before
            self._teller.trouble(error)
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
            except FencedError:
                if self.options.num_nodes == 1:
                    raise
                logger.warning("start_joined: another node has begun a new launch; joining it")
                self._teller.note_joined(self.options.node, self.options.num_nodes)
                self._reopen(0.0)  # nothing more is committed in this generation
                continue
            except (StoreError, NoSpaceError, OSError) as error:
                self._teller.trouble(error)
            # When stopping, checkpoints that only another node can continue are left to the next launch.
            left = [each for each in self.entries.open() if not (was_stopping and plan.awaits_others(each))]
            assert self._nodes is not None
            is_idle = is_whole and not (left or self._scanner.num_left or self._nodes.has_heard)
            if is_idle and (was_stopping or self.options.is_once) and self._nodes_are_done():
                return
            if self._stopping.is_over(self.options.drain_timeout_s):
                self._is_cut_short = not is_idle
                return
            self._ending.tell(self._waits_for)
            soon_s = max(0.1, self.options.rules.settle_s / 2)
            pause_s = self.options.interval_s if is_idle and not was_stopping else soon_s
            # With thousands of files, judging them may take longer than listing them.
            took_s = max(self._scanner.took_s, time.thread_time() - began_s)
            self.waker.wait(min(pause_s, self.options.interval_s), rest_s=REST * took_s)

    def _waits_for(self) -> str:
        left = self.entries.open()
        if not left and self._scanner.num_left:
            return "recently written files to stop changing"
        if self._uploader is None or self._nodes is None:
            return ending.parts({}, [each.step for each in left], is_open=False)
        left = [each for each in left if not plan.awaits_others(each)]  # the next launch continues them
        if not left and self._nodes.awaited:
            return f"{named('node', self._nodes.awaited)} to finish, since more may be announced"
        return _decision_on(left, self._uploader)

    def _round(self) -> None:
        self._scanner.scan()
        self._scanner.review()
        self._scanner.take()
        self._learn()
        if self.options.num_nodes == 1:
            earlier.release_followed(self.entries)
        assert self._nodes is not None
        self._nodes.listen()
        self._hand_over()
        self._nodes.follow(self._scanner.tree, self._hand_in, self._cannot_follow)
        self._nodes.let_go(self._teller.refuse)
        _retire(self.options, self.entries, self._scanner.tree)
        self.entries.forget_gone(self._scanner.tree)

    def _hand_over(self) -> None:
        assert self._uploader is not None
        assert self._remote is not None
        now_ns, settle_s = self._scanner.tree.now_ns, self.options.rules.settle_s
        for due in plan.due(self.entries.all.values(), now_ns, settle_s):
            entry = due
            handed = [each for each in self.entries.open() if each.state is State.HANDED]
            size_bytes = sum(each.size_bytes for each in (*handed, entry))
            # What the uploader has in hand occupies its space until it is committed, however long that takes.
            has_room = not handed or self._room.is_enough_without(size_bytes)
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
            if self.options.num_nodes == 1:  # several nodes: each has only a part
                entry = replace(entry, samples=samples_of(self.entries, entry))
                if plan.awaits_akin(entry, known, self._uploader.generation):
                    return
            if (same := there(self._remote, self.entries, entry, self._uploader.generation)) is not None:
                self._settle_same(entry, same)
                continue
            generation, num_nodes = self._uploader.generation, self.options.num_nodes
            if before := plan.predecessors(entry, known, generation, num_nodes=num_nodes):
                self._teller.hold_up(entry, _decision_on(before, self._uploader))
                return
            warning = plan.gone_back(entry, known)
            if plan.needs_new_generation(entry, known, self._uploader.generation):
                self._reopen()
            generation = self._uploader.generation
            if reason := plan.passed_over(entry, known, generation):
                self._settle_refused(entry, Refusal.OUTDATED, reason)
                continue
            if num_nodes == 1 and (missing := sorted({*entry.expected} - {*entry.shards.values()})):
                self._settle_refused(entry, Refusal.INCOMPLETE, plan.lacking(missing))
                continue
            if warning:
                self._teller.say("trainer_went_back", entry.path, warning)
            assert self._nodes is not None
            try:
                ours = self._nodes.announce(entry)
            except InvalidRecordError as error:  # written by another node, perhaps of another version
                self._settle_refused(entry, Refusal.UNSUPPORTED, str(error))
                continue
            self._hand_in(replace(ours, state=State.HANDED, generation=generation))

    def _hand_in(self, entry: Entry) -> None:
        """Record the entry as handed in, then seal it.

        The record comes first: after a kill, the journal tells whether the entry was sealed.
        """
        assert self._uploader is not None
        self.entries.put(entry)
        try:
            reason = _seal(self._uploader, self.entries, entry)
        except (NoSpaceError, FencedError):
            self.entries.put(replace(entry, state=State.STAGED, generation=0))
            raise
        if reason:
            self._uploader.give_up(entry.step, reason, name=entry.name)  # other nodes would wait for our part
            self._settle_refused(entry, Refusal.GIVEN_UP, reason)

    def _cannot_follow(self, announced: Announcement, reason: str) -> None:
        assert self._uploader is not None
        self._uploader.give_up(announced.checkpoint.step, reason, name=announced.name)
        self._teller.refuse(announced, Refusal.GIVEN_UP, reason)

    def _nodes_are_done(self) -> bool:
        assert self._nodes is not None
        try:
            return self._nodes.is_over()
        except FencedError:
            return False
        except StoreError as error:
            self._teller.trouble(error)
            return False

    # --- what became of it ---------------------------------------------------------------------------------

    def _learn(self) -> None:
        assert self._uploader is not None
        assert self._remote is not None
        assert self._nodes is not None
        assert self._earlier is not None
        ours, num_nodes = self._uploader.generation, self.options.num_nodes
        handed = [each for each in self.entries.open() if each.generation]
        old = [each for each in handed if each.generation != ours]
        outcomes: list[tuple[Entry, str]] = []  # with the reason if it was given up
        for entry in handed:
            if entry.generation != ours or entry.state is not State.HANDED:
                continue
            try:
                if self._uploader.is_committed(entry.step):
                    outcomes.append((entry, ""))
            except CheckpointAbortedError as error:
                outcomes.append((entry, str(error)))
        for entry, reason in with_sums(self._remote, outcomes, num_nodes=num_nodes):
            if reason:
                self._nodes.check_newest()  # a newer launch has given it up, and there it comes again
                self._given_up(entry, reason)
            else:
                self._settle_committed(entry)
        ids = [CheckpointId(each.generation, each.step) for each in old]
        decided = self._remote.decisions(ids) if ids else {}
        for entry in old:
            id_ = CheckpointId(entry.generation, entry.step)
            decision = decided.get(id_)
            if decision is not None and decision.outcome is not Outcome.ABORT:
                self._settle_committed(with_sums(self._remote, [(entry, "")], num_nodes=num_nodes)[0][0])
            elif entry.state is State.STAGED:
                continue  # handed in again when its turn comes
            elif decision is not None or not self._earlier.may_be_finished(id_):
                self._given_up(entry, decision.reason if decision else "it was not sealed", may_repeat=True)

    def _given_up(self, entry: Entry, reason: str, *, may_repeat: bool = False) -> None:
        """Hand the entry in again if that can help (a kill interrupted it and its bytes are still here), else refuse
        it.
        """
        self._attempts[entry.number] += 1
        if may_repeat and self._attempts[entry.number] <= MAX_ATTEMPTS and self.entries.is_intact(entry):
            # Its generation is kept, because other nodes may still finish it there.
            self.entries.put(replace(entry, state=State.STAGED))
        else:
            self._settle_refused(entry, Refusal.GIVEN_UP, reason)

    def _settle_same(self, entry: Entry, same: Same) -> None:
        """Settle an entry whose content was committed before, perhaps under another name."""
        if same.is_in_store:
            self._teller.settled("there", self.entries.settle(same.known_as(entry), State.COMMITTED))
        else:
            self._settle_refused(entry, Refusal.OUTDATED, same.why_outdated)

    def _settle_committed(self, entry: Entry) -> None:
        self.entries.settle(entry, State.COMMITTED)
        self._teller.settled("committed", entry)

    def _settle_refused(self, entry: Entry, refusal: Refusal, reason: str) -> None:
        self.entries.settle(entry, State.REFUSED, reason, refusal)
        self._teller.refuse(entry, refusal, reason)

    def _report(self) -> Report:
        return Report(
            self._teller.counts["committed"],
            self._teller.counts["there"] + self._num_there_before,
            self._teller.refused | self._teller.unreadable,
            dict(self._teller.incomplete),
            tuple(dict.fromkeys(each.path or "." for each in self.entries.open())),
            is_cut_short=self._is_cut_short,
            is_empty=not (self.entries.all or self._teller.incomplete or self._teller.refused),
            unknown=dict(self._teller.unknown),
        )


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
    nodes = {step: uploader.missing_ranks(step) for step in handed}
    return ending.parts(ending.others(nodes, uploader.rank), [each.step for each in entries], is_open=True)


def _failure_of(opening: Callable[[], None]) -> StoreError | None:
    try:
        opening()
    except StoreError as error:
        return error
    return None


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
