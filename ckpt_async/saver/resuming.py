"""Loads what a saver has saved, on all ranks together, and skips checkpoints that turn out to be damaged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import ckpt_async.torch as ckpt
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import CheckpointConflictError, FormatError, NoUsableCheckpointError
from ckpt_async.local import sealed
from ckpt_async.local.folder import Folder
from ckpt_async.restore import Checkpoint
from ckpt_async.restore.fetching import use_newest
from ckpt_async.restore.options import FindOptions, part
from ckpt_async.saver.earlier import Earlier, missing_parts, parts_in
from ckpt_async.saver.files import Files, conflicting
from ckpt_async.saver.local_only import LocalOnly, refuse_beside_local
from ckpt_async.saver.resuming_here import ResumingHere, agree_on_launch
from ckpt_async.saver.saving import What
from ckpt_async.saver.timestamp import Timestamp
from ckpt_async.stores import StoreOptions
from ckpt_async.torch.agreement import is_alone, spell, told_by_all
from ckpt_async.torch.options import LoadOptions, LoadRemoteOptions
from ckpt_async.torch.resume import find_together
from ckpt_async.trainer.uploader import Uploader

logger = logging.getLogger(__name__)

_FROM_HERE = (
    'load the newest with a saver that has remote=None, see "Moving to a remote" in docs/saver.md; or delete those'
    " that you do not want, or use another folder"
)


class Resuming:
    """Finds and loads the checkpoints of a saver's run."""

    def __init__(
        self, files: Files, uploader: Uploader | LocalOnly, what: What, store_options: StoreOptions | None
    ) -> None:
        self._files, self._uploader, self._store_options = files, uploader, store_options
        self._what = what
        if not isinstance(uploader, LocalOnly):
            ckpt.on_all_ranks(lambda: _begin_with_remote(files, uploader))
        self._earlier = ckpt.on_all_ranks(lambda: Earlier(files, uploader.rank, is_writer=what.is_writer))
        self._agree()
        self._may_replace = what.overwrite  # what earlier launches have saved without a remote
        self.has_begun = False  # otherwise `begin` must be called

    def continue_run(self) -> None:
        """This launch goes on where earlier ones were, so what they have saved is its own."""
        if isinstance(self._uploader, LocalOnly):
            self._may_replace = True
            self._uploader.continue_run()

    def find(self, **options: Unpack[FindOptions]) -> Checkpoint | None:
        if not self._files.remote:
            return None
        options.setdefault("kind", self._files.kind or None)
        options.setdefault("folder", self._uploader.folder)
        options.setdefault("store_options", self._store_options)
        return find_together(self._files.remote, **options)

    def load_latest(self, *, may_start_over: bool, **options: Unpack[LoadRemoteOptions]) -> Any:
        if isinstance(local := self._uploader, LocalOnly):
            ckpt.on_all_ranks(lambda: None if self.has_begun else local.look_again())
            local.has_joined = False  # on all ranks alike, also if only some have read anything new
        self._agree()
        if isinstance(self._uploader, LocalOnly):
            here = ResumingHere(
                self._files,
                self._uploader,
                is_writer=self._what.is_writer,
                is_sharded=self._what.is_sharded,
            )
            state = here.load_latest(part(options, LoadOptions))
            self.continue_run()  # also if nothing was complete: what is left of that is pruned
            return state

        options.setdefault("folder", self._uploader.folder)

        def load(checkpoint: Checkpoint) -> Any:
            name = self._file_in(checkpoint)
            return ckpt.load_remote(checkpoint, name, **options)

        def use(checkpoint: Checkpoint) -> Any:
            self._refuse_older_than_here(checkpoint)
            return ckpt.on_all_ranks(lambda: load(checkpoint))

        found = use_newest(lambda bad: self.find(passing_over=bad), use, may_pass_over=True)
        if found is None:
            self._refuse_older_than_here(None)
            self._refuse_while_sealed(may_start_over)
            return None
        self._may_replace = True  # what is left of an incomplete one
        logger.info("resumed from step %d name=%s", found[0].step, found[0].name)
        return found[1]

    def begin(self, now: Timestamp) -> None:
        """Called at the first step, before anything is saved.

        Refuses to save again what an earlier launch has saved without a remote, unless this one goes on from there:
        nothing else would be left of it. Raises CheckpointConflictError, if possible on all ranks. Without a remote, it
        raises FolderInUseError on the ranks for which another process is saving here, and CheckpointConflictError on
        those for which one has saved since this launch looked, whatever may be replaced.
        """
        if is_local := isinstance(self._uploader, LocalOnly):
            self._uploader.lock()  # not earlier: a saver that only loads may be opened beside another one
            self._uploader.refuse_if_gone_on()
        if is_local and self._uploader.world_size > 1 and not self._earlier.is_told and not is_alone():
            self._agree(ckpt.own_group())  # the default group may be unable to move CPU tensors
        if not self._may_replace:
            check = self._check_launch if is_local else self._check_what_is_only_here
            check(now)
        self.has_begun = True

    def _agree(self, group: Any = None) -> None:
        """Let all ranks know which launch this is, and what each of them has. A collective of the constructor or, if
        torch.distributed was not initialized then, of a later call.
        """
        if isinstance(self._uploader, LocalOnly):
            agree_on_launch(self._uploader, group, is_writer=self._what.is_writer)
        self._earlier.tell(group)

    def _check_launch(self, now: Timestamp) -> None:
        before = replace(now, batch=max(0, now.batch - 1))
        again: object = ", ".join(self._earlier.names(now.step)[-8:])
        if not again and self._what.is_writer:
            again = next(iter(conflicting(self._files, before)), None)
        if again:
            raise CheckpointConflictError(
                f"in {str(self._files.folder)!r} an earlier launch has saved {again}, and this one does not continue"
                f" the run: with overwrite=False a checkpoint after batch {before.batch} may not replace it",
                hint="call load_latest before the first step, use another folder, or pass resume_from= or"
                " overwrite=True",
            )

    def _check_what_is_only_here(self, now: Timestamp) -> None:
        if names := self._earlier.complete(now.step):
            raise CheckpointConflictError(
                f"this launch begins with batch {now.batch}, but in {str(self._files.folder)!r} are later checkpoints,"
                f" which this run has saved without a remote and may not replace: {', '.join(names[-8:])}",
                hint=_FROM_HERE,
            )

    def _refuse_older_than_here(self, found: Checkpoint | None) -> None:
        """Raise NoUsableCheckpointError, on all ranks, if the newest checkpoint is not in the store."""
        names = self._earlier.names() if found is None else self._earlier.complete(found.step + 1)
        if names and found is None and (killed := self._earlier.never_complete()):
            self._earlier.warn_of_incomplete(killed)
        elif names:
            there = "no checkpoint" if found is None else f"no newer checkpoint than {found.name}"
            raise NoUsableCheckpointError(
                f"{self._files.remote} has {there}, but in {str(self._files.folder)!r} are those that this run"
                f" saved without a remote: {', '.join(names[-8:])}",
                hint=_FROM_HERE,
            )

    def _refuse_while_sealed(self, may_start_over: bool) -> None:
        """Raise NoUsableCheckpointError, on all ranks, if nothing is committed, but something that an earlier launch
        has sealed can be: each part is in the store, or in a folder of this launch. A part that went with a lost node
        does not come back, so that is only logged.
        """
        files, folder, generation = self._files, self._uploader.folder, self._uploader.generation
        remote = keys.kind_remote(files.remote, files.kind)
        own = ckpt.on_all_ranks(lambda: parts_in(folder, files.kind, remote, generation))
        parts = [part for each in told_by_all(own) for part in each]
        missing = ckpt.run_on_one(lambda: missing_parts(remote, parts, self._store_options))
        whole = [id_ for id_, ranks in sorted(missing.items()) if not ranks]
        if whole and not may_start_over:
            raise NoUsableCheckpointError(
                f"{remote} has no committed checkpoint, but what earlier launches have sealed can still be committed"
                f" from the folders of this one: {_shown(whole)}",
                hint="load_latest(wait_s=…) waits for that, and `ckpt-async drain FOLDER`, on each node while nothing"
                " trains there, does it; to start from scratch all the same, pass may_start_over=True",
            )
        if self._uploader.rank and not is_alone():
            return  # once is enough
        for id_ in whole[-8:]:
            logger.warning("starts_from_scratch although %s can still be committed", id_.short)
        for id_, ranks in sorted(missing.items())[-8:]:
            if ranks:
                logger.warning(
                    "starts_from_scratch although %s was sealed; the part of %s is in no folder of this launch, nor in"
                    " the store",
                    *(id_.short, spell(ranks)),
                )

    def _file_in(self, checkpoint: Checkpoint) -> str:
        """Return the name of this rank's file in the checkpoint, or of its only file."""
        found = sorted(checkpoint.files)
        if len(found) > 1:
            found = [each for each in found if self._files.is_own(each)]
        if len(found) != 1:
            raise FormatError(
                f"checkpoint {checkpoint.name} has {len(checkpoint.files)} files, {len(found)} of them this rank's:"
                f" {', '.join(sorted(checkpoint.files)[:8])}",
                hint="load it with `ckpt_async.torch.load_remote`, or a sharded one with `load_latest`",
            )
        return found[0]


def _shown(ids: Sequence[CheckpointId]) -> str:
    return (f"{len(ids) - 8} more, " if ids[8:] else "") + ", ".join(each.short for each in ids[-8:])


def uploader_of(files: Files, kind: str | None, given: Mapping[str, Any]) -> Uploader | LocalOnly:
    """Return the uploader that saved files go to. A collective."""
    options = {
        "launch_id": ckpt.launch_id(),
        **given,
        "kind": kind,
        "latest_filename": files.latest_filename,
    }
    if files.publish:
        options["publish_copies"] = True
    if files.pointer:
        options["composer_symlink"] = files.pointer
    if files.remote:
        return Uploader(files.folder, files.remote, **options)
    logger.warning(
        "local_only folder=%s; remote=None: nothing is uploaded, and nothing outlives this node", files.folder
    )
    return ckpt.on_all_ranks(lambda: LocalOnly(files.folder, run=files.run_id, **options))


def _begin_with_remote(files: Files, uploader: Uploader) -> None:
    """Raise FolderInUseError if a launch without a remote is saving here: both would replace each other's files."""
    is_trusted = uploader.settings.allow_unknown_filesystem
    folder = Folder(files.folder, kind=files.kind, allows_unknown_filesystem=is_trusted)
    refuse_beside_local(folder, files.run_id, uploader.rank)
    sealed.end_file(folder, files.run_id, uploader.rank)  # from now on, this launch may write it
    with contextlib.suppress(OSError):  # a full disk: one without a remote will refuse to go on from here
        sealed.begin_with_remote(files.private, files.run_id, uploader.rank)
