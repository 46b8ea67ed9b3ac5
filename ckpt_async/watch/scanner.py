"""Scans the watched folder, and stages the complete checkpoints. Nothing here waits for the store.

Of each checkpoint that a scan finds, `plan.judge` says one thing:

    known        it is linked, being uploaded or in the store as it is    nothing to do
    take         it is complete                                           linked; handed in once it settles
    incomplete   its marker or a part is missing                          reported if it stays so, or is removed
    refused      it can never be taken as it is                           reported
    late         a file came after it was handed in                       the file is reported if it stays
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ckpt_async.core.refusal import Refusal
from ckpt_async.core.units import few
from ckpt_async.formats import Found, Identity, Tree, find, not_taken
from ckpt_async.local.zip_records import wrong_record
from ckpt_async.watch import plan
from ckpt_async.watch.background import attend, begin
from ckpt_async.watch.disk import Disk
from ckpt_async.watch.entries import Entries, Entry, State, VanishedError, entry_of
from ckpt_async.watch.options import Options
from ckpt_async.watch.reporter import Reporter
from ckpt_async.watch.room import Room, pinned_bytes
from ckpt_async.watch.wake import Waker

logger = logging.getLogger(__name__)

DISK_LOW = "its trainer has deleted it, and needs the space: the disk was nearly full before it could be sent"
# The trainer's next checkpoint is expected to be as large as the largest of this many most recent ones.
NUM_RECENT = 16
# If nothing was written to a checkpoint for this long, its marker may never come.
STALE_S = 600.0
# How long a late file must stay before it is reported: it may be the first of a save to the same place.
LATE_S = 10.0
# A file whose bytes contradict its own checksums is read again after this time, since the kernel's clock is coarse and
# the last of several quick writes may leave its time as it was. Then it is refused until it changes.
CORRUPT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Corrupt:
    version: Identity
    reason: str
    since: float
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A checkpoint that has its marker, and is incomplete all the same.

    `is_torn`: one of its files was removed while it was being linked. Times do not show that any more, since our own
    links have changed them.
    """

    found: Found
    marker: Identity | None
    why: str
    is_mixed: bool = False
    is_torn: bool = False


class FolderScanner:
    """Scans one folder. Its calls block, and it is not thread-safe.

    `num_left` counts what is complete, or nearly so, and not staged yet. `took_s` is how long the newest scan took.
    """

    def __init__(
        self,
        options: Options,
        entries: Entries,
        reporter: Reporter,
        waker: Waker,
        room: Room,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._entries, self._room, self._clock = options, entries, room, clock
        self._reporter, self._waker = reporter, waker
        self._disk = Disk(options.folder)
        self._began_ns, self._has_scanned = time.time_ns(), False
        self._first: Mapping[str, Identity] | None = None  # plain files of the first scan; None: none yet
        self._lacking: dict[str, _Lacking] = {}  # by path
        self._corrupt: dict[str, _Corrupt] = {}  # by path
        self._late: dict[tuple[int, str], tuple[Entry, float]] = {}  # by entry number and file: since when
        self.num_left, self.took_s = 0, 0.0
        self.tree = Tree({}, lambda *_: b"")  # the newest scan

    def scan(self) -> None:
        began_s = time.monotonic()
        self.tree = self._disk.scan()
        self._waker.follow(self._options.folder, self.tree.folders_below(""))
        self.took_s = time.monotonic() - began_s

    def scan_and_take(self) -> None:
        """Do what cannot wait for the store."""
        self.scan()
        self.take()

    def review(self) -> None:
        """Drop what has changed since it was linked and is not handed in yet; the next scan decides about it."""
        for entry in self._entries.open():
            is_fetched = entry.path not in entry.files and self.tree.fetched_to(entry.path)
            is_changed = not self._entries.is_intact(entry) or (is_fetched and not entry.generation)
            if entry.state is State.STAGED and is_changed:
                self._entries.drop(entry)
                logger.info("changed_while_settling path=%s", entry.path)

    def take(self) -> None:
        """Stage what is complete, and release links where the trainer runs short of space."""
        self._reporter.incomplete, self.num_left = {}, 0
        self._reporter.note_unreadable(self.tree.unreadable)
        files = self.tree.files
        self._corrupt = {
            path: each for path, each in self._corrupt.items() if files.get(path) == each.version
        }
        candidates = self._wanted(find(self.tree, self._options.rules))
        late: dict[tuple[int, str], Entry] = {}
        for found in map(self._untorn, candidates):
            verdict = plan.judge(
                found, self.tree, self._entries.akin_to(found), num_nodes=self._options.num_nodes
            )
            if verdict is None:
                self._refuse_again(found)
            elif verdict.of is not None:
                late |= {(verdict.of.number, path): verdict.of for path in verdict.late}
            elif verdict.refusal is not None and self._disk.is_so(found.files, self.tree):
                self._withdraw(found)
                self._reporter.refuse(found, verdict.refusal, verdict.reason)
            elif verdict.refusal is not None:
                self.num_left += 1  # judged by data written since this scan
            elif verdict.take:
                self._report_left_out(found)
                self._lacking.pop(found.path, None)  # it is whole by now
                self._stage(found)
            else:
                self.num_left += verdict.is_waiting
                self._note_incomplete(found, verdict)
        self._report_late(late)
        self._report_removed({each.path for each in candidates})
        self._report_unknown(candidates)
        self._has_scanned = True
        self._make_room()

    def _wanted(self, candidates: list[Found]) -> list[Found]:
        """Return the candidates without plain files that were there before the first watcher, which may be anything."""
        if self._options.rules.formats or self._options.is_once:
            return candidates
        plain = [path for each in candidates if each.is_plain for path in each.files]
        files = self.tree.files
        if self._first is None:
            self._first = self._entries.there_before(plain, self.tree, self._began_ns)
            left = [path for path, was in self._first.items() if files.get(path) == was]
            if left := [path for path in left if not self._entries.of_path(path)]:
                what = (
                    f"{few(left)}: there before the first watcher, and not uploaded. If they are checkpoints, end this"
                    " watcher and run it with --once first"
                )
                self._reporter.say("there_before", "", what)
        first = self._first
        return [
            each
            for each in candidates
            if not each.is_plain or any(first.get(path) != files[path] for path in each.files)
        ]

    def _untorn(self, found: Found) -> Found:
        """Return `found`, with a reason if one of its files was removed while it was being linked."""
        seen = self._lacking.get(found.path)
        is_torn = seen is not None and seen.is_torn and seen.marker == self.tree.files.get(found.mark)
        return replace(found, reason=found.reason or seen.why) if seen is not None and is_torn else found

    # --- what is reported -----------------------------------------------------------------------------------

    def _note_incomplete(self, found: Found, verdict: plan.Verdict) -> None:
        entries = self._entries.of_path(found.path)
        if any(each.state is State.STAGED for each in entries):
            return  # it was complete, and is sent as it was then
        why, marker, seen = verdict.reason, self.tree.files.get(found.mark), self._lacking.get(found.path)
        self._reporter.incomplete[found.path or "."] = why
        if marker is not None:
            is_torn = seen is not None and seen.is_torn and seen.marker == marker
            self._lacking[found.path] = _Lacking(found, marker, why, verdict.is_mixed, is_torn)
        newest_ns = max((self.tree.files[path].mtime_ns for path in found.files), default=self.tree.now_ns)
        if self.tree.now_ns - newest_ns > STALE_S * 1e9:
            self._reporter.note_incomplete(found, why, is_finished=found.path in self._lacking)

    def _report_removed(self, there: Collection[str]) -> None:
        """Report checkpoints that the trainer finished and removed, but that we never saw complete.

        Without this, a wrong option would silently lose everything.
        """
        for path, each in list(self._lacking.items()):
            marker = each.found.mark
            is_taken = any(entry.files.get(marker) == each.marker for entry in self._entries.of_path(path))
            if is_taken or path not in there:
                del self._lacking[path]
            if not is_taken and path not in there:
                self._reporter.note_incomplete(
                    each.found, f"{each.why}; it has been removed", is_finished=True
                )

    def _report_late(self, late: Mapping[tuple[int, str], Entry]) -> None:
        """Report the files that came after their checkpoint was handed in, once they have stayed."""
        now = self._clock()
        self._late = {key: self._late.get(key, (entry, now)) for key, entry in late.items()}
        for (_, path), (entry, since) in self._late.items():
            if now - since >= LATE_S:
                self._reporter.refuse(entry, Refusal.CHANGED, _late_reason(entry, path))

    def _report_unknown(self, candidates: Collection[Found], settle_s: float | None = None) -> None:
        """Report tensor files that no known format takes, as soon as they have settled."""
        rules = self._options.rules
        if rules.formats or rules.done or rules.pattern:
            return
        settle_ns = int((rules.settle_s if settle_s is None else settle_s) * 1e9)
        for folder, (path, advice) in not_taken(self.tree, candidates).items():
            at_ns = max(self.tree.files[path].mtime_ns, self.tree.ctime_ns.get(path, 0))
            if self._began_ns < at_ns <= self.tree.now_ns - settle_ns:
                reason = f"{path} is not uploaded, since its format is unknown: {advice}"
                self._reporter.note_unknown(folder, reason)

    def _refuse_again(self, found: Found) -> None:
        """Repeat the refusal of a previous launch for as long as the checkpoint is there.

        Otherwise somebody might believe that it was uploaded.
        """
        entry = plan.refused_as(found, self.tree, self._entries.akin_to(found))
        if entry is not None and entry.refusal is not None:
            self._reporter.refuse(entry, entry.refusal, entry.reason)

    def _report_left_out(self, found: Found) -> None:
        """Report what is left out of a checkpoint, which loses nothing but must not happen silently."""
        if found.of_other_ranks:
            some = few(found.of_other_ranks)
            self._reporter.say(
                "ranks_left_out", some, f"{some}: not named by the marker of {found.path}, and left out"
            )

    def end(self) -> None:
        """Report what is still open; called when no further scan will follow."""
        for (_, path), (entry, _) in self._late.items():
            self._reporter.refuse(entry, Refusal.CHANGED, _late_reason(entry, path))
        for each in self._lacking.values():
            if each.is_mixed and self.tree.files.get(each.found.mark) == each.marker:
                self._reporter.incomplete.pop(each.found.path or ".", None)
                self._reporter.refuse(each.found, Refusal.INCOMPLETE, each.why)
        self._report_unknown(self._wanted(find(self.tree, self._options.rules)), 0.0)
        self._reporter.note_unreadable(self.tree.unreadable, is_last=True)

    # --- what is staged -------------------------------------------------------------------------------------

    def _stage(self, found: Found) -> None:
        if found.is_file and self._is_corrupt(found):
            return
        expected = tuple(sorted({*found.inner, *found.missing})) if self._options.num_nodes > 1 else ()
        is_plain = found.is_plain and not self._options.rules.formats
        try:
            entry = entry_of(found, self.tree, self._entries.next_number(), expected=expected)
            sent = [each for each in self._entries.of_path(found.path) if each.generation]
            is_doubtful = not (self._has_scanned and sent)
            entry = replace(entry, is_plain=is_plain, is_doubtful=is_doubtful)
            entry = self._entries.stage(entry, self._options.folder)
        except VanishedError as error:
            self.num_left += 1
            logger.info("vanished path=%s: %s", found.path, error)
            if error.gone and (error.gone in found.state_files or not found.names_its_files):
                marker, why = self.tree.files.get(found.mark), f"{error.gone} was removed from it"
                self._lacking[found.path] = _Lacking(found, marker, why, is_torn=True)
            return
        except OSError as error:
            self._cannot_link(found, f"it can be neither linked nor copied: {error}")
            return
        for less in self._entries.of_path(entry.path):
            if (
                less.state is State.STAGED
                and less.files.items() < entry.files.items()
                and not less.generation
            ):
                self._entries.drop(less)
        logger.info("complete path=%s step=%d format=%s", entry.path, entry.step, entry.format)

    def _withdraw(self, refused: Found) -> None:
        """Drop what was staged of it before the rest was there: it would be a part as a checkpoint."""
        there = {(path, self.tree.files[path]) for path in refused.files}
        for entry in self._entries.open():
            is_new = entry.state is State.STAGED and not entry.generation
            if is_new and not there.isdisjoint(entry.files.items()):
                self._entries.drop(entry)

    def is_whole(self, entry: Entry, while_waiting: Callable[[], None]) -> bool:
        """Return whether a torch.save file has the checksums that it records; if not, drop the entry and scan again.

        The end of the file proves nothing if an earlier file was overwritten, or if a download writes the end first.
        """
        (shard,) = entry.shards.values()
        staged = self._entries.staged(entry) / shard
        wrong = attend(begin(lambda: wrong_record(staged), "ckpt-async-check"), while_waiting)
        if self._entries.all.get(entry.number) != entry or not self._entries.is_intact(entry):
            return False  # the next scan decides
        if wrong:
            before, version = self._corrupt.get(entry.path), entry.files[entry.path]
            reason = (
                f"{entry.path} is not intact: {wrong}: it is partly overwritten, or damaged: have the trainer write it"
                " again, or delete it"
            )
            logger.info("corrupt path=%s: %s", entry.path, reason)
            self._corrupt[entry.path] = _Corrupt(version, reason, self._clock(), is_final=before is not None)
            self._entries.drop(entry)
            self.num_left += 1  # the next scan decides about it
        return not wrong

    def _is_corrupt(self, found: Found) -> bool:
        """Return whether the file was found corrupt and has not changed since. At first it may still become whole."""
        if (seen := self._corrupt.get(found.path)) is None:
            return False
        if seen.is_final:
            self._reporter.refuse(found, Refusal.INCOMPLETE, seen.reason)
            return True
        is_early = self._clock() - seen.since < CORRUPT_S
        self.num_left += is_early
        return is_early

    def _make_room(self) -> None:
        """Release data that only our links keep on the disk, oldest first, because training has priority.

        What has been handed in is kept: it is being uploaded, and small enough to leave room.
        """
        recent = sorted(self._entries.all.items())[-NUM_RECENT:]
        self._room.save_bytes = max((each.size_bytes for _, each in recent), default=0)
        lacking_bytes = self._room.lacking_bytes()
        staged = [each for each in self._entries.open() if each.state is State.STAGED]
        for entry in sorted(staged, key=lambda each: each.written_ns):
            if lacking_bytes <= 0:
                return
            if freed_bytes := pinned_bytes(self._entries.staged(entry)):
                lacking_bytes -= freed_bytes
                # If only our copy goes, it is made again once there is room.
                if entry.files.items() <= self.tree.files.items():
                    self._entries.drop(entry)
                else:
                    self._reporter.refuse(entry, Refusal.NO_SPACE, DISK_LOW)
                    self._entries.settle(entry, State.REFUSED, DISK_LOW, Refusal.NO_SPACE)

    def _cannot_link(self, found: Found, reason: str) -> None:
        if not self._entries.open():
            self._reporter.refuse(found, Refusal.NO_SPACE, reason)  # for now; the next round tries again
            return
        # Finishing those may free space. If it is removed while it waits, that is reported.
        self._reporter.say("link_failed", found.path, f"{found.path}: {reason}; trying again")
        self.num_left += 1
        if found.mark in self.tree.files:
            self._lacking[found.path] = _Lacking(found, self.tree.files[found.mark], reason)


def _late_reason(entry: Entry, path: str) -> str:
    what = "was written again" if path in entry.files else "appeared"
    return (
        f"{path} {what} after the checkpoint was handed in, and is not in the committed checkpoint: raise"
        " --settle-s, or have the trainer write a marker file last and give its name with --done"
    )
