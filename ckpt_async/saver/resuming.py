"""Loads what a saver has saved, on all ranks together, and skips checkpoints that turn out to be damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

import ckpt_async.torch as ckpt
from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import FormatError, NoUsableCheckpointError
from ckpt_async.restore import Checkpoint
from ckpt_async.restore.fetching import use_newest
from ckpt_async.saver.files import Files
from ckpt_async.saver.local_only import LocalOnly

logger = logging.getLogger(__name__)


class Resuming:
    """Finds and loads the checkpoints of a saver's run."""

    def __init__(
        self, files: Files, uploader: Uploader | LocalOnly, store_options: StoreOptions | None
    ) -> None:
        self._files, self._uploader, self._store_options = files, uploader, store_options

    def continue_run(self) -> None:
        """This launch goes on where earlier ones were, so what they have saved is its own."""
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
        if not self._files.remote:
            return self._load_local(**options)

        def load(checkpoint: Checkpoint) -> Any:
            name = self._file_in(checkpoint)
            return ckpt.load_remote(checkpoint, name, **{"folder": self._uploader.folder, **options})

        found = use_newest(
            self.find, lambda checkpoint: ckpt.on_all_ranks(lambda: load(checkpoint)), may_pass_over=True
        )
        return None if found is None else found[1]

    def _load_local(self, **options: Any) -> Any:
        """Load what the local symlink points to. If only the first rank writes, it exists only on that rank's node."""
        link = self._files.folder / self._files.latest_filename
        if not self._files.latest_filename or not os.path.lexists(link):
            return None
        if not link.exists():
            raise NoUsableCheckpointError(
                f"{str(link)!r} points to {os.readlink(link)!r}, which is gone",
                hint="load an older checkpoint yourself and pass it to `load_state_dict`, or delete the link to start"
                " from scratch",
            )
        state = ckpt.load(link, **options)
        self.continue_run()
        return state

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
    return LocalOnly(files.folder, run=files.run_id, **options)
