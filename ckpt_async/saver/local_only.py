"""Saving without a remote: files are only made durable, linked and pruned on this node."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Unpack

from ckpt_async.core import arguments, keys, launch, naming, retention
from ckpt_async.core.model import CheckpointId, FileIdentity, Sealed, Shard
from ckpt_async.core.retention import Candidate
from ckpt_async.core.settings_options import SettingsOptions
from ckpt_async.errors import (
    CheckpointConflictError,
    CommitTimeoutError,
    FolderInUseError,
    InvalidNameError,
    SealedError,
    SettingsError,
)
from ckpt_async.local import sealed
from ckpt_async.local.durable import fsync_path, point_symlink, with_those_above
from ckpt_async.local.folder import Folder, identity_of
from ckpt_async.local.journal import RankLock
from ckpt_async.local.sealed import Note
from ckpt_async.local.settings_file import load_settings
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.trainer.checkpoints import metric_values
from ckpt_async.trainer.handle import LOCK_WAIT_S, deadline_in
from ckpt_async.trainer.waits import FlushReport

logger = logging.getLogger(__name__)

_locks: weakref.WeakSet[RankLock] = weakref.WeakSet()  # those that savers of this process hold
_savers: weakref.WeakSet[LocalOnly] = weakref.WeakSet()  # those of this process that have begun to save
# The launches of this process, with its id: a fork has another one.
_launches: set[tuple[int, str]] = set()


class LocalOnly:
    """The part of `Uploader` that a saver uses, for `remote=None`.

    Each rank saves on its own: a checkpoint counts as committed on a rank when that rank's files are fsynced. Nothing
    outlives the node, and no rank waits for another.
    """

    remote = ""

    def __repr__(self) -> str:
        return f"<without a remote: {str(self.folder)!r}>"

    def __init__(
        self,
        folder: Path,
        *,
        run: str = "run",
        kind: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        settings_file: str | os.PathLike[str] | None = None,
        launch_id: str | None = None,  # noqa: ARG002  an operator's own may come again
        clock: Callable[[], float] = time.time,
        **settings: Unpack[SettingsOptions],
    ) -> None:
        self.rank, self.world_size = launch.rank_and_world_size(os.environ, rank, world_size)
        self.settings = load_settings(settings, os.environ, settings_file)
        self.kind = naming.check_kind(kind)
        self._latest = naming.fill(self.settings.latest_filename, rank=self.rank)
        if self.settings.num_checkpoints_to_keep == 0:
            raise SettingsError(
                "num_checkpoints_to_keep=0 keeps checkpoints only in the store, and with remote=None there is none",
                hint="keep at least 1, or pass a remote",
            )
        is_trusted = self.settings.allow_unknown_filesystem
        self._folder = Folder(folder, kind=self.kind, allows_unknown_filesystem=is_trusted)
        self.folder = self._folder.path
        self.checkpoints_folder = self.folder / self.kind
        self.metrics = Metrics("", self._folder)
        self.before_sigterm_flush: Callable[[float], None] = lambda _: None
        self.before_exit: Callable[[float], bool] = lambda _: True  # whether all that was begun is written
        self._clock, self._run = clock, run
        self._policy = retention.keep_local(
            self.settings.num_checkpoints_to_keep, self.settings.local_retention
        )
        self._shards: dict[int, list[Shard]] = {}  # of the steps that are not sealed yet
        self._names: dict[int, str] = {}  # the same
        self._sealed: set[int] = set()
        self._kept: dict[CheckpointId, Note] = {}  # what was sealed and is not pruned
        self._earlier = self._read()
        self._seen = {each.mark for each in self._earlier.values()}
        self._continues = False
        self.generation = self._next_generation()
        self.launch = uuid.uuid4().hex
        self.has_joined = False
        self._lock = RankLock(self._folder, self.rank, run=run)
        with contextlib.suppress(OSError):  # a full disk: notes will fail, too
            sealed.begin(self._folder, run, self.rank)

    def lock(self) -> None:
        """From now on, until `close`, no other process may save for this rank of the run here.

        Raises FolderInUseError, which names the other one, if it has not ended within 15 s; also if that has a remote.
        Savers of this process share the lock: nobody may have closed the one before, in a notebook for example.
        """
        if self._lock.is_held:
            return
        try:
            same = [each for each in list(_locks) if each.path == self._lock.path]
            if not any(self._lock.share(each) for each in same):
                self._lock.acquire(wait_s=LOCK_WAIT_S)
            _locks.add(self._lock)
            # A launch with a remote does the same, in the other order: see `refuse_beside_local`. This lock is not
            # held: `drain` and the sweeper go on uploading what a dead launch has left.
            _refuse_if_held(RankLock(self._folder, self.rank), is_trainer=True)
        except OSError as error:  # a full disk: saving fails by itself, or not
            told = "not_locked folder=%s error=%s; nothing stops another launch from saving here at the same time"
            logger.warning(told, self.folder, error)
        except BaseException:
            self._lock.release()
            raise
        _savers.add(self)

    def look_again(self) -> None:
        """Read what other launches have noted in the meantime. Call it only if this one has saved nothing yet."""
        self._kept, self._earlier = {}, self._read()
        self._seen = {each.mark for each in self._earlier.values()}
        self.generation = max(self.generation, self._next_generation())
        if self._continues:
            self.continue_run()

    def refuse_if_gone_on(self) -> None:
        """Raise CheckpointConflictError if another process has saved for this rank of the run since this one looked.

        With the lock held, it stays like this. Savers of this process know of each other.
        """
        since = [each for each in self._read().values() if each.mark not in self._seen]
        others = [each.name for each in since if (os.getpid(), each.launch) not in _launches]
        if others:
            raise CheckpointConflictError(
                f"in {str(self.folder)!r} another launch has saved {', '.join(others[-8:])} since this one looked"
                " there, so this one would go on from an older state and replace what is newer",
                hint="nothing was changed. Load again: restart this launch, or call load_latest before the next step",
            )

    def _read(self) -> dict[CheckpointId, Note]:
        return {each.id: each for each in sealed.read(self._folder.private, self._run, self.rank)}

    def _next_generation(self) -> int:
        """Count launches, so that a step that is saved again is newer than what an earlier launch saved."""
        return max((each.generation for each in self._earlier), default=0) + 1

    def join(self, generation: int, launch: str) -> None:
        """From now on this rank counts and notes what it seals as all ranks of this launch do."""
        self.generation, self.launch, self.has_joined = generation, launch, True
        _launches.add((os.getpid(), launch))

    def take_part(self) -> None:
        """This rank is to save in this launch, and nothing that was saved before can be complete."""
        with contextlib.suppress(OSError):  # a full disk: the next launch will refuse to start from scratch
            sealed.take_part(self._folder, self._run, self.rank, self.launch)

    def unsealed(self) -> frozenset[str]:
        return unsealed(self._folder.private, self._run, self.rank)

    def continue_run(self) -> None:
        """What earlier launches saved belongs to this run, so retention counts it and prunes it, too."""
        self._continues = True
        self._kept.update(self._earlier)
        self._earlier = {}

    def noted(self) -> list[Note]:
        """What this and earlier launches of the run have sealed on this rank and not pruned, newest first."""
        noted = self._earlier | self._kept
        return [noted[id_] for id_ in sorted(noted, reverse=True)]

    def skips(self, step: int, name: str | None = None) -> bool:  # noqa: ARG002  as `Uploader.skips`
        """Return False: without a remote nothing waits for upload, so nothing can be given up for it."""
        return False

    def check_takes(self, step: int, name: str | None = None) -> None:
        naming.checkpoint_name(name, step)
        if step in self._sealed:
            raise SealedError(f"step {step} was already saved")

    def begin_file(self, path: Path) -> None:
        """Called before a checkpoint's file is written."""
        with contextlib.suppress(OSError):  # a full disk
            sealed.begin_file(self._folder, self._run, self.rank, self._folder.relative(path))

    def enqueue(
        self,
        path: str | os.PathLike[str],
        step: int,
        name: str | None = None,
        *,
        files: Collection[str] = (),
        publish_as: str | None = None,  # noqa: ARG002  there is no store
    ) -> None:
        self.check_takes(step, name)
        root = self._folder.relative(path)
        sources = self._folder.walk(*([f"{root}/{each}" for each in files] or [root]))
        for source in sources:
            facts = os.stat(self.folder / source, follow_symlinks=False)
            shard = Shard(source, source, identity_of(facts), is_linked=False)
            self._shards.setdefault(step, []).append(shard)
        if name is not None:
            self._names[step] = name

    def seal(self, step: int, *, name: str | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Fsync the files of the step; they are durable on return."""
        self.check_takes(step, name)
        id_ = CheckpointId(self.generation, arguments.whole(step, "step", 0, keys.MAX_STEP))
        values = metric_values(metrics or {}, step)
        shards = tuple(self._shards.get(step, []))
        paths = [self.folder / each.source for each in shards]
        for path in paths:
            fsync_path(path)
        for folder in with_those_above({str(path.parent) for path in paths}, str(self.folder)):
            fsync_path(folder)
        self._sealed.add(step)
        self._shards.pop(step, None)
        name = naming.checkpoint_name(name or self._names.pop(step, None), step)
        self._note(
            Note(Sealed(id_, name, self.world_size, values, sealed_at=self._clock()), shards, self.launch)
        )
        if self._link(paths):
            self._prune()

    def give_up(self, step: int, reason: str, *, name: str | None = None) -> None:
        """Do nothing: no other rank waits for this one."""

    def _note(self, note: Note) -> None:
        """Note what is sealed, for later launches. Where that fails, on a full disk for example, the checkpoint is good
        all the same, and later launches leave its files alone.
        """
        for id_ in self._earlier:  # `continue_run` was not called: they are another run's, and stay for good
            sealed.drop(self._folder, self._run, self.rank, id_)
        self._earlier = {}
        self._kept[note.id] = note
        _launches.add((os.getpid(), self.launch))
        try:
            try:
                if note.shards:
                    sealed.put(self._folder, self._run, self.rank, note)
            finally:
                sealed.end_file(self._folder, self._run, self.rank)
                sealed.has_sealed(self._folder, self._run, self.rank, self.launch)
        except OSError as error:
            told = "not_noted name=%s error=%s; no later launch will prune it"
            logger.warning(told, note.name, error)

    def _link(self, paths: list[Path]) -> bool:
        """Point the local symlink at a checkpoint. If that fails, the checkpoint is good all the same. Returns whether
        older ones may be pruned now: not if the symlink may still point at one of them.
        """
        if not (paths and self._latest):
            return True
        target = paths[0] if len(paths) == 1 else paths[0].parent
        try:
            point_symlink(self.folder / self._latest, target, self._folder.private)
        except (InvalidNameError, OSError) as error:
            logger.warning("local_latest_skipped error=%s", error)
            return isinstance(error, InvalidNameError)
        return True

    def _prune(self) -> None:
        # A path belongs to the newest checkpoint that was saved there; of the others nothing is left.
        owners = {each.source: id_ for id_ in sorted(self._kept) for each in self._kept[id_].shards}
        here: dict[CheckpointId, list[tuple[str, FileIdentity]]] = {}
        for id_, note in list(self._kept.items()):
            own = (
                (each.source, sealed.identity_now(self.folder, each))
                for each in note.shards
                if owners[each.source] == id_
            )
            here[id_] = [(source, identity) for source, identity in own if identity is not None]
            if not here[id_]:
                self._forget(id_)  # deleted by the user, or replaced
        candidates = [_candidate(self._kept[id_].sealed) for id_ in sorted(self._kept)]
        for id_ in sorted(self._kept.keys() - self._policy.keep(candidates).keys()):
            # This launch will come to that step again, and may just have made an empty folder for it.
            is_ahead = id_.generation < self.generation and id_.step >= max(self._sealed)
            for source, identity in here[id_]:
                self._folder.remove_source(source, identity, keeps_folders=is_ahead)
            self._forget(id_)
            self.metrics.checkpoint_pruned("local")

    def _forget(self, id_: CheckpointId) -> None:
        """Called when its files are gone. A kill before this leaves a note of nothing, which is forgotten later."""
        del self._kept[id_]
        sealed.drop(self._folder, self._run, self.rank, id_)

    def is_committed(self, step: int) -> bool:
        return step in self._sealed

    def wait(self, step: int, timeout_s: float | None = None) -> None:
        if step not in self._sealed:
            raise CommitTimeoutError(f"step {step} was not saved within {timeout_s} s")

    def wait_for_predecessor(self, timeout_s: float) -> bool:
        """Wait until other savers of this process, in a notebook for example, have written what they have begun."""
        deadline = deadline_in(timeout_s)
        others = [each for each in list(_savers) if each is not self and each.saves_as(self)]
        if all(each.before_exit(0.0) for each in others):
            return True
        logger.info("waits_for_predecessor folder=%s timeout_s=%g", self.folder, timeout_s)
        is_over = all(each.before_exit(max(0.0, deadline - time.monotonic())) for each in others)
        if not is_over:
            logger.warning("previous_launch_unfinished folder=%s waited_s=%g", self.folder, timeout_s)
        return is_over

    def saves_as(self, other: LocalOnly) -> bool:
        """Return whether this one saves for the same rank and run as another one."""
        return self._lock.is_held and self._lock.path == other._lock.path

    def flush(self, timeout_s: float) -> FlushReport:  # noqa: ARG002  nothing is ever under way
        return FlushReport(True, 0, 0, 0, ())

    def close(self, timeout_s: float | None = None) -> None:  # noqa: ARG002  nothing is ever under way
        """Let others save here."""
        self._lock.release()


def unsealed(private: Path, run: str, rank: int) -> frozenset[str]:
    """The launches of other processes in which this rank was to save, and has sealed nothing: none of their
    checkpoints is complete, and none was there when they began.
    """
    sealed_in = {each.launch for each in sealed.read(private, run, rank)}
    here = {launch for pid, launch in _launches if pid == os.getpid()}  # may still seal something
    return sealed.not_yet(private, run, rank) - sealed_in - here


def refuse_beside_local(folder: Folder, run: str, rank: int) -> None:
    """Raise FolderInUseError if another process saves for the rank of the run without a remote, and has not ended
    within 15 s; at once if this process does. Called by a launch with a remote, when it has the rank's other lock.
    """
    lock = RankLock(folder, rank, run=run)
    if any(each.is_held and each.path == lock.path for each in list(_locks)):
        raise FolderInUseError(
            f"a saver of this process saves for rank {rank} in {str(folder.path)!r}, without a remote",
            hint="call its `close` first",
        )
    with contextlib.suppress(OSError):  # a full disk
        _refuse_if_held(lock, is_trainer=False)


def _refuse_if_held(lock: RankLock, *, is_trainer: bool) -> None:
    if lock.path.exists():
        lock.acquire(wait_s=LOCK_WAIT_S, is_trainer=is_trainer)
        lock.release()


def _candidate(checkpoint: Sealed) -> Candidate:
    sealed_at = checkpoint.sealed_at or 0.0
    return Candidate(checkpoint.checkpoint, checkpoint.name, sealed_at, dict(checkpoint.metrics))
