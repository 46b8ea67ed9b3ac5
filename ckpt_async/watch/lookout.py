"""Looks at the watched folder: stages complete checkpoints and holds those that may become complete.

Nothing here waits for the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_async.core.refusal import Refusal
from ckpt_async.core.units import few
from ckpt_async.local.zip_records import wrong_record
from ckpt_async.watch import added, plan
from ckpt_async.watch.added import (
    LeftOut,
    has_grown,
    has_outlived,
    known_of,
    smaller,
    version_of,
    versions_of,
    without_next_save,
)
from ckpt_async.watch.disk import Disk
from ckpt_async.watch.entries import Entries, Entry, State, UnwholeError, VanishedError, entry_of
from ckpt_async.watch.formats import Found, Known, find
from ckpt_async.watch.formats.checks import has_all_below
from ckpt_async.watch.formats.found import Version
from ckpt_async.watch.formats.ranks import left_out_of
from ckpt_async.watch.holds import Hold, Holds
from ckpt_async.watch.meanwhile import attend, begin
from ckpt_async.watch.options import Options
from ckpt_async.watch.past import Past
from ckpt_async.watch.room import Room, held_only_by
from ckpt_async.watch.telling import Incomplete, Teller
from ckpt_async.watch.tree import Identity, Tree, files_of
from ckpt_async.watch.unwhole import Unwhole
from ckpt_async.watch.wake import News, Waker

logger = logging.getLogger(__name__)

# How many checkpoints may be staged as copies at a time, since a copy takes the disk space a second time.
MAX_COPIED = 2
TOO_MANY = "it was removed before it had been quiet for long enough, and too many later ones are still waiting for that"
OVERTAKEN = "it was saved again to the same place before it had been quiet for long enough"
DISK_LOW = "its trainer has deleted it, and needs the space: the disk was nearly full before it could be sent"
# The trainer's next checkpoint is expected to be as large as the largest of this many most recent ones.
NUM_LATE = 16
# If nothing was written to a checkpoint for this long, its mark may never come.
STALE_S = 600.0


class Lookout:
    """Looks at one folder. Its calls block, and it is not thread-safe.

    `num_left` counts what is complete, or nearly so, and not staged yet. `took_s` is how long the newest look took.
    """

    def __init__(
        self, options: Options, entries: Entries, holds: Holds, teller: Teller, waker: Waker, room: Room
    ) -> None:
        self._options, self._entries, self._holds, self._room = options, entries, holds, room
        self._teller, self._waker = teller, waker
        self._disk = Disk(options.folder)
        holds.dropping = self._give_up
        self._has_looked, self._began_ns = False, 0  # when the first look was
        self._seen: dict[str, Mapping[str, Identity]] = {}  # by path: a candidate's files with its mark
        # By path: incomplete despite this mark, and why.
        self._lacking: dict[str, tuple[Found, Identity, Incomplete]] = {}
        self._past, self.num_left, self.took_s = Past(), 0, 0.0
        self.now: dict[str, Mapping[str, Identity]] = {}  # by path: the files of each candidate
        self._unwhole, self._left_out = Unwhole(), LeftOut(teller.leave_out)
        self.tree = Tree({}, lambda *_: b"")  # the newest look
        self._news = News()  # events since the previous look

    def look(self) -> None:
        began_s, self._news = time.monotonic(), self._waker.news()
        self.tree = self._disk.look()
        self._waker.follow(self._options.folder, self.tree.folders_below(""))
        self.took_s = time.monotonic() - began_s

    def look_and_take(self) -> None:
        """Do what cannot wait for the store."""
        self.look()
        self.take()

    def review(self) -> None:
        """Check whether anything that waits or is being uploaded has been changed."""
        versions = added.by_path(self._entries.all.values())
        for entry in self._entries.open():
            changed = plan.changed_in_place(entry, self.tree.files)
            is_staged = entry.state is State.STAGED and not entry.generation
            if added.is_superseded(entry, self.tree, versions[entry.path]):
                self._entries.drop(entry)
            elif is_staged and entry.path not in entry.files and self.tree.fetched_to(entry.path):
                self._entries.drop(entry)  # what is still being downloaded belongs to it
            elif entry.state is State.STAGED and not self._entries.is_intact(entry):
                self.forget(entry)
                logger.info("changed_while_settling path=%s", entry.path)
            elif changed and entry.state is State.HANDED and not entry.is_copied:
                self._teller.note_changed(entry, changed)

    def forget(self, entry: Entry) -> None:
        """Drop an entry, so that what the folder has is judged again, but not mistaken for a later save's."""
        self._entries.drop(entry)
        self._remember(entry, entry.files)

    def take(self) -> None:
        """Stage what is complete, and hold incomplete candidates that may become complete after they were rotated away.

        Release links where the trainer runs short of space.
        """
        self._teller.incomplete, self.num_left = {}, 0
        self._teller.pass_over(self.tree.unreadable)
        self._past.forget(self.tree)
        self._unwhole.forget_all_but(self.tree.files)
        known = known_of(self._entries.all.values(), self._past.all)
        candidates = find(self.tree, self._options.rules, known)
        self.now = {each.path: {path: self.tree.files[path] for path in each.files} for each in candidates}
        seen_before, self._seen = self._seen, {}
        for found in (self._unrotated(each, seen_before) for each in candidates):
            verdict = self._judge(found, self.tree)
            if verdict is None:
                self._refuse_again(found)
                continue
            self._tell_of_left_out(found)
            if verdict.refusal is not None and self._disk.is_so(found.files, self.tree):
                self._teller.refuse(found, verdict.refusal, verdict.reason)
            elif verdict.refusal is not None:
                self.num_left += 1  # judged by data written since this look
            elif verdict.take:
                # It is whole by now.
                self._lacking.pop(found.path, None)
                self._stage(found, self.tree, self._options.folder, is_in_place=verdict.is_in_place)
            else:
                self.num_left += verdict.is_waiting
                if not self._is_known_by_less(found.path):
                    self._tell_of_incomplete(found, verdict)
                is_held = plan.is_held(found, self._options.num_nodes) and self._holds.is_possible
                # Holding half of a checkpoint would be worse than holding nothing.
                if is_held and not self.tree.unreadable_below(found.path):
                    self._holds.see(found, self.tree)
        self._tell_of_unknown(candidates, STALE_S)
        grown = self._grown(candidates)
        for entry, files in grown.values():
            self._remember(entry, files)
        self._left_out.see(grown, self.tree)
        self._has_looked = True
        if self._options.num_nodes > 1:
            self._holds.seen.see(self.tree)
        self._holds.miss(self.tree, self._news)
        for hold in self._holds.gone(self.tree):
            self._take_held(hold)
        self._tell_of_removed({each.path for each in candidates})
        self._make_room()

    def _tell_of_incomplete(self, found: Found, verdict: plan.Verdict) -> None:
        why = _why_incomplete(found, verdict, self._entries.of_path(found.path), self.tree)
        self._teller.incomplete[found.path or "."] = why
        if found.mark in self.tree.files and not verdict.is_waiting:
            self._lacking[found.path] = found, self.tree.files[found.mark], why
        if _is_stale(found, self.tree):
            self._teller.tell_incomplete(found, why, is_finished=found.path in self._lacking)

    def _is_known_by_less(self, path: str) -> bool:
        """Return whether a smaller version of it was complete and has been staged or handed in."""
        files = self.now[path]
        alive = (each for each in self._entries.of_path(path) if each.is_alive)
        return any(has_grown(each, files) or has_outlived(each, files) for each in alive)

    def _grown(self, candidates: Collection[Found]) -> dict[int, tuple[Entry, Mapping[str, Identity]]]:
        """Return the entries that were handed in and whose folder has since gained files that will not be handed in."""
        waiting = {each.path for each in candidates if each.is_waiting or not has_all_below(each)}
        left = {each.path: {path: self.tree.files[path] for path in each.left_over} for each in candidates}
        alive = (each for each in self._entries.all.values() if each.path and each.is_alive)
        newest = {each.path: each for each in sorted(alive, key=lambda each: each.number)}
        found: dict[int, tuple[Entry, Mapping[str, Identity]]] = {}
        for path in newest.keys() - waiting:
            below = files_of(path, self.tree).items()
            files = self.now.get(path) or {each: was for each, was in below if not each.endswith(".tmp")}
            files = without_next_save(newest[path], {**files, **left.get(path, {})})
            if newest[path].state is not State.STAGED and has_outlived(newest[path], files):
                found[newest[path].number] = newest[path], files
        return found

    def end(self) -> None:
        """Report what is still open; called when no further look will follow."""
        self._left_out.end()
        for found, mark, why in self._lacking.values():
            if found.is_mixed and self.tree.files.get(found.mark) == mark:
                self._teller.incomplete.pop(found.path or ".", None)
                advice = "if it is not part of the new save, delete it"
                self._teller.refuse(found, Refusal.INCOMPLETE, f"{why.reason}: {advice}")
        self._tell_of_unknown(find(self.tree, self._options.rules), 0.0)

    def _tell_of_removed(self, there: Collection[str]) -> None:
        """Report checkpoints that the trainer finished and removed, but that we never saw complete.

        Without this, a wrong option would silently lose everything.
        """
        for path, (found, mark, why) in list(self._lacking.items()):
            is_taken = any(each.files.get(found.mark) == mark for each in self._entries.of_path(path))
            if is_taken or path not in there:
                del self._lacking[path]
            if not is_taken and path not in there:
                removed = replace(why, reason=f"{why.reason}; it has been removed")
                self._teller.tell_incomplete(found, removed, is_finished=True)

    def _tell_of_unknown(self, candidates: Collection[Found], quiet_s: float) -> None:
        """Report files in unknown formats, which would otherwise be missed silently.

        Files that were there before the first look are not reported: they may be anything, e.g. an initial model.
        """
        self._began_ns = self._began_ns or self.tree.now_ns
        rules = self._options.rules
        if rules.formats or rules.done or rules.pattern or rules.quiet_s:
            return
        until_ns = self.tree.now_ns - int(quiet_s * 1e9)
        for folder, path in plan.unknown(self.tree, candidates, self._began_ns, until_ns).items():
            self._teller.pass_by(folder, path)

    def _refuse_again(self, found: Found) -> None:
        """Repeat the refusal of an earlier launch for as long as the checkpoint is there.

        Otherwise somebody might believe that it was uploaded.
        """
        entry = plan.refused_as(found, self.tree, self._entries.akin_to(found))
        if entry is not None and entry.refusal is not None:
            self._teller.refuse(entry, entry.refusal, entry.reason)

    def _tell_of_left_out(self, found: Found) -> None:
        """Report what is left out of a checkpoint: special files without content, and files of ranks of an earlier
        save.

        Leaving them out loses nothing, but it must not happen silently. The same holds for files of an earlier save
        that are not left out.
        """
        if found.of_other_ranks and not found.reason:
            what = left_out_of(found.path, found.of_other_ranks)
            self._teller.say("ranks_left_out", what, what)
        if found.unwritten and not found.reason:
            some = few(found.unwritten)
            what = f"{some}: not written again since an earlier save to the same place, and sent with {found.path}"
            self._teller.say("files_unwritten", some, what)
        if not has_all_below(found):
            return
        for path in self.tree.special_below(found.path):
            what = f"{path} is {self.tree.special[path]}, which has no content: it is left out of {found.path or '.'}"
            self._teller.say("special_left_out", path, what)

    def _unrotated(self, found: Found, seen_before: Mapping[str, Mapping[str, Identity]]) -> Found:
        """Return `found`, with a reason if it had more files with the same mark before: its rotation has begun.

        Times cannot tell that where our own failed links have changed them.
        """
        has_mark, is_renamed = found.mark in self.tree.files, found.format == "pattern" and not found.is_file
        if not (has_mark or is_renamed) or self._options.rules.ignores_times:
            return found
        now = {path: self.tree.files[path] for path in {*found.files, found.mark} - {""}}
        had = seen_before.get(found.path, {})
        if any(had.get(path, now[path]) != now[path] for path in ([found.mark] if has_mark else now)):
            had = {}
        gone = had.keys() - now.keys() - self.tree.files.keys()
        self._seen[found.path] = {**had, **now}
        if not gone or found.reason:
            return found
        after = f"its marker {found.mark} was written" if has_mark else "it was renamed into place"
        return replace(found, reason=f"{min(gone)} was removed from it after {after}")

    def _judge(self, found: Found, tree: Tree) -> plan.Verdict | None:
        return plan.judge(found, tree, self._entries.akin_to(found), num_nodes=self._options.num_nodes)

    def _take_held(self, hold: Hold) -> None:
        """Judge by the same rules the links of a candidate that is no longer in the folder.

        If it has no mark, only other nodes can tell whether it was complete.
        """
        if not hold.is_waiting or self._take_marked(hold):
            return
        tree, found = self._held(hold)
        verdict = self._judge(found, tree) if found is not None else None
        written = self._holds.written(hold)
        versions = self._entries.of_path(hold.path)
        if found is None or verdict is None or plan.is_taken_otherwise(found, tree, versions):
            self._holds.drop(hold)
        elif plan.is_overtaken(found, tree, versions):
            self._teller.refuse(found, Refusal.INCOMPLETE, OVERTAKEN)
            self._holds.drop(hold)
        elif written or not (verdict.take or verdict.is_waiting):
            if not self._is_here(hold):
                reason = (
                    f"{min(written)} was still being written when its trainer removed it"
                    if written
                    else verdict.reason
                )
                self._teller.refuse(found, Refusal.INCOMPLETE, reason)
                self._holds.drop(hold)
        elif verdict.is_waiting:
            self.num_left += 1
        elif not plan.has_peer(found, tree, self._entries.all.values()):
            reason = (
                "it was removed before it had been quiet for long enough, and no later one has the same files"
            )
            self._teller.incomplete.setdefault(found.path or ".", Incomplete(reason))
        else:
            self._stage(found, tree, self._holds.folder(hold))

    def _take_marked(self, hold: Hold) -> bool:
        """Stage what a mark stood for after the trainer has removed it, even if an added file is still being written
        to.
        """
        if self._is_here(hold):
            return False
        tree, written = self._holds.as_seen(hold, self.tree), self._holds.written(hold)
        found = added.marked(tree, hold.path, written, self._options.rules, self._versions(hold.path))
        verdict = self._judge(found, tree) if found is not None else None
        if found is None or verdict is None or not verdict.take:
            return False
        self._stage(found, tree, self._holds.folder(hold))
        for entry in self._entries.of_path(hold.path):
            if written and entry.files.get(found.mark) == tree.files[found.mark]:
                reason = (
                    f"{min(written)} was still being written when its trainer removed it, and is not in the committed"
                    " checkpoint"
                )
                self._teller.leave_out(entry, reason)
        return True

    def _versions(self, path: str) -> list[Version]:
        return [*versions_of(self._entries.of_path(path)), *self._past.of(path)]

    def _remember(self, entry: Entry, files: Mapping[str, Identity]) -> None:
        self._past.remember(entry.path, entry.number, version_of(entry, files))

    def _is_here(self, hold: Hold) -> bool:
        return any(self.tree.files.get(path) == was for path, was in hold.files.items())

    def _held(self, hold: Hold) -> tuple[Tree, Found | None]:
        tree = self._holds.as_seen(hold, self.tree)
        known = Known(versions={hold.path: self._versions(hold.path)})
        candidates = find(tree, self._options.rules, known)
        return tree, next((each for each in candidates if each.path == hold.path), None)

    def _give_up(self, hold: Hold, refusal: Refusal = Refusal.INCOMPLETE, why: str = TOO_MANY) -> None:
        """Report that a held candidate is dropped, usually because too many are held.

        Nothing is lost, and nothing reported, if the folder still has it.
        """
        tree, found = self._held(hold)
        if not hold.is_waiting or self._is_here(hold) or found is None:
            return
        if (verdict := self._judge(found, tree)) is not None and verdict.refusal is None:
            self._teller.refuse(found, refusal, why)

    def _make_room(self) -> None:
        """Release data that only our links keep on the disk, oldest first, because training has priority.

        What has been handed in is kept: it is being uploaded, and small enough to leave room.
        """
        newest = dict(sorted(self._entries.all.items())[-NUM_LATE:])
        self._room.expect([*newest.values(), *self._holds.gone(self.tree)], self.tree)
        lacking_bytes = self._room.lacking_bytes()
        if not lacking_bytes:
            return
        staged = [each for each in self._entries.open() if each.state is State.STAGED]
        for less in {less.number: less for entry in staged for less in smaller(entry, staged)}.values():
            self._entries.drop(less)  # the larger one has links to the same files
            staged.remove(less)
        links: list[Entry | Hold] = [*staged, *self._holds.all.values()]
        for each in sorted(links, key=lambda each: each.written_ns):
            if lacking_bytes <= 0:
                return
            place = self._entries.staged(each) if isinstance(each, Entry) else self._holds.folder(each)
            if freed_bytes := held_only_by(place):
                self._let_go(each)
                lacking_bytes -= freed_bytes

    def _let_go(self, what: Entry | Hold) -> None:
        if isinstance(what, Hold):
            self._give_up(what, Refusal.NO_SPACE, DISK_LOW)
            self._holds.drop(what)
        # Only our copy goes: it is made again once there is room.
        elif what.files.items() <= self.tree.files.items():
            self._entries.drop(what)
        else:
            self._teller.refuse(what, Refusal.NO_SPACE, DISK_LOW)
            self._entries.settle(what, State.REFUSED, DISK_LOW, Refusal.NO_SPACE)

    def _stage(self, found: Found, tree: Tree, source: Path, *, is_in_place: bool = False) -> None:
        if len({each.path for each in self._entries.open() if each.is_copied} - {found.path}) >= MAX_COPIED:
            self._wait(found, f"it has to be copied, at most {MAX_COPIED} at a time")
            return
        if found.is_file and self._is_unwhole(found, tree.files[found.path]):
            return
        expected = tuple(sorted({*found.inner, *found.missing})) if self._options.num_nodes > 1 else ()
        try:
            entry = entry_of(found, tree, self._entries.next_number(), expected=expected)
            versions = smaller(entry, self._entries.of_path(entry.path))
            entry = replace(entry, is_doubtful=not self._has_looked)
            less = versions[-1] if versions else None
            entry = self._entries.stage(entry, source, less, is_in_place=is_in_place)
        except VanishedError as error:
            self.num_left += 1
            logger.info("vanished path=%s: %s", found.path, error)
            return
        except UnwholeError as error:
            self._note_unwhole(found.path, tree.files[found.path], str(error))
            self._is_unwhole(found, tree.files[found.path])
            return
        except OSError as error:
            self._cannot_link(found, f"it can be neither linked nor copied: {error}")
            return
        for each in versions[1:]:
            self._entries.drop(each)
        self._holds.drop_version(entry.path, entry.files)
        logger.info("complete path=%s step=%d format=%s", entry.path, entry.step, entry.format)

    def is_whole(self, entry: Entry, meanwhile: Callable[[], None]) -> bool:
        """Return whether a torch.save file has the checksums that it records; if not, drop the entry and look again.

        The end of the file proves nothing if an earlier file was overwritten, or if a download writes the end first.
        """
        (shard,) = entry.shards.values()
        staged = self._entries.staged(entry) / shard
        wrong = attend(begin(lambda: wrong_record(staged), "ckpt-async-check"), meanwhile)
        if self._entries.all.get(entry.number) != entry or not self._entries.is_intact(entry):
            return False  # the next look decides
        if wrong:
            self._note_unwhole(entry.path, entry.files[entry.path], f"{entry.path} is not intact: {wrong}")
            self._entries.drop(entry)
            self.num_left += 1  # the next look decides about it
        return not wrong

    def _note_unwhole(self, path: str, version: Identity, reason: str) -> None:
        """Note that a file's bytes do not match the checksums that it records."""
        logger.info("unwhole path=%s: %s", path, reason)
        self._unwhole.note(path, version, reason)

    def _is_unwhole(self, found: Found, version: Identity) -> bool:
        """Return whether the file was found damaged and has not changed since.

        At first it may still become whole; later it is refused.
        """
        if reason := self._unwhole.refused(found.path, version):
            advice = "it is partly overwritten, or damaged: have the trainer write it again, or delete it"
            self._teller.refuse(found, Refusal.INCOMPLETE, f"{reason}: {advice}")
        elif self._unwhole.waits(found.path, version):
            self.num_left += 1
        return self._unwhole.waits(found.path, version)

    def _cannot_link(self, found: Found, reason: str) -> None:
        if self._entries.open():  # finishing those may free space
            self._teller.say("link_failed", found.path, f"{found.path}: {reason}; trying again")
            self._wait(found, reason)
        else:
            # Refused for now; the next round tries again.
            self._teller.refuse(found, Refusal.NO_SPACE, reason)

    def _wait(self, found: Found, reason: str) -> None:
        """Count it as left to do. If it is removed while it waits, that is reported."""
        self.num_left += 1
        if found.mark in self.tree.files:
            self._lacking[found.path] = found, self.tree.files[found.mark], Incomplete(reason)


def _why_incomplete(found: Found, verdict: plan.Verdict, known: Iterable[Entry], tree: Tree) -> Incomplete:
    """Return why it is not complete here; the store may have it, if some files are still as they were then."""
    committed = (each for each in known if each.state is State.COMMITTED and each.step == found.step)
    has_some = any(tree.files.get(path) == was for each in committed for path, was in each.files.items())
    return Incomplete(verdict.reason, has_changed_since=has_some)


def _is_stale(found: Found, tree: Tree) -> bool:
    newest_ns = max((tree.files[path].mtime_ns for path in found.files), default=tree.now_ns)
    return tree.now_ns - newest_ns > STALE_S * 1e9
