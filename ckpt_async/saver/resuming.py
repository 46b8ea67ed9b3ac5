"""Loads what a saver has saved, on all ranks together, and skips checkpoints that turn out to be damaged."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ckpt_async.torch as ckpt
from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import CheckpointConflictError, FormatError, NoUsableCheckpointError
from ckpt_async.local import sealed
from ckpt_async.restore import Checkpoint
from ckpt_async.restore.fetching import use_newest
from ckpt_async.saver.files import Files, conflicting
from ckpt_async.saver.local_only import LocalOnly
from ckpt_async.saver.resuming_here import ResumingHere, agree_on_launch, there
from ckpt_async.saver.saving import What
from ckpt_async.saver.timestamp import Timestamp

logger = logging.getLogger(__name__)


class Resuming:
    """Finds and loads the checkpoints of a saver's run."""

    def __init__(
        self, files: Files, uploader: Uploader | LocalOnly, what: What, store_options: StoreOptions | None
    ) -> None:
        self._files, self._uploader, self._store_options = files, uploader, store_options
        self._what = what
        # Whether files of earlier launches may be replaced from now on.
        self._is_checked = bool(files.remote) or what.overwrite or not what.is_writer
        self.has_begun = False  # otherwise `begin` must be called

    def continue_run(self) -> None:
        """This launch goes on where earlier ones were, so what they have saved is its own."""
        self._is_checked = True
        if isinstance(self._uploader, LocalOnly):
            self._uploader.continue_run()

    def find(self, passing_over: Collection[CheckpointId] = (), **options: Any) -> Checkpoint | None:
        if not self._files.remote:
            return None
        options = {"folder": self._uploader.folder, "store_options": self._store_options, **options}
        return ckpt.run_on_one(
            lambda: restore.find(
                self._files.remote, kind=self._files.kind or None, passing_over=passing_over, **options
            )
        )

    def load_latest(self, **options: Any) -> Any:
        if isinstance(self._uploader, LocalOnly):
            here = ResumingHere(
                self._files,
                self._uploader,
                is_writer=self._what.is_writer,
                is_sharded=self._what.is_sharded,
            )
            state = here.load_latest(**options)
            self._is_checked = True
            if state is not None:
                self.continue_run()
            return state

        def load(checkpoint: Checkpoint) -> Any:
            name = self._file_in(checkpoint)
            return ckpt.load_remote(checkpoint, name, **{"folder": self._uploader.folder, **options})

        found = use_newest(
            self.find, lambda checkpoint: ckpt.on_all_ranks(lambda: load(checkpoint)), may_pass_over=True
        )
        if found is not None:
            return found[1]
        ckpt.on_all_ranks(self._refuse_what_is_only_here)
        return None

    def begin(self, now: Timestamp) -> None:
        """Called at the first step, before anything is saved. Raises CheckpointConflictError."""
        if isinstance(self._uploader, LocalOnly):
            agree_on_launch(self._uploader)
        if not self._is_checked:
            self._check_step(now)
        self.has_begun = True

    def _check_step(self, now: Timestamp) -> None:
        """Refuse to replace what an earlier launch has saved, unless this one goes on from there.

        Only without a remote, where nothing else would be left of it. Raises CheckpointConflictError.
        """
        before = replace(now, batch=max(0, now.batch - 1))
        if (path := conflicting(self._files, before)) is not None:
            raise CheckpointConflictError(
                f"{path} was saved by an earlier launch, and this one does not continue the run: with overwrite=False"
                f" it may not be replaced by a checkpoint after batch {before.batch}",
                hint="call load_latest before the first step, use another folder, or pass resume_from= or"
                " overwrite=True",
            )
        self._is_checked = True

    def _refuse_what_is_only_here(self) -> None:
        """The store has no checkpoint; those that the run saved before it had a remote must not be forgotten."""
        names = there(self._files, sealed.read(self._files.private, self._files.run_id, self._uploader.rank))
        if names:
            raise NoUsableCheckpointError(
                f"{self._files.remote} has no checkpoint, but in {str(self._files.folder)!r} are those that this run"
                f" saved without a remote: {', '.join(names[-8:])}",
                hint='load the newest with a saver that has remote=None, see "Moving to a remote" in docs/saver.md, or'
                " use another folder to start from scratch",
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


def uploader_of(files: Files, kind: str | None, options: dict[str, Any]) -> Uploader | LocalOnly:
    """Return the uploader that saved files go to. A collective."""
    options = {
        "launch_id": ckpt.launch_id(),
        **options,
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
    found = ckpt.on_all_ranks(lambda: LocalOnly(files.folder, run=files.run_id, **options))
    agree_on_launch(found)
    return found
