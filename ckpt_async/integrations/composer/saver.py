"""Composer's `CheckpointSaver`, with uploads through ckpt_async."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_async import Uploader
from ckpt_async.errors import SettingsError
from ckpt_async.integrations.composer.uploads import SaverUploads
from ckpt_async.integrations.managed import CLOSE_TIMEOUT_S, DRAIN_TIMEOUT_S

from composer.callbacks import CheckpointSaver as ComposersSaver  # isort: skip  uploads says what to install
from composer.utils import PartialFilePath, dist  # isort: skip
from composer.utils.checkpoint import get_save_filename  # isort: skip

if TYPE_CHECKING:
    from composer.core import Event, State, Time
    from composer.loggers import Logger

logger = logging.getLogger(__name__)


class CheckpointSaver(ComposersSaver):
    """Saves as Composer's own saver does, with the same arguments, and uploads.

        Trainer(
            callbacks=[CheckpointSaver("checkpoints", remote="s3://bucket/{run_name}")], run_name=…, autoresume=True
        )

    Each save is sealed before training goes on: from then on SIGKILL cannot lose it. It is uploaded in the background,
    verified, and committed; only then do the remote names move. `Trainer(autoresume=True)` resumes on any node from the
    newest committed checkpoint, which `init` fetches and links. Without `remote` this is Composer's own saver.

    Composer's arguments that change if there is a `remote`:
        folder: On a local disk.
        remote_file_name, latest_remote_file_name: The exact names in the bucket still work: they are copies that the
            store makes after the commit, and Composer's text pointer. Where they begin with what `remote` ends with,
            that part is dropped (`{run_name}/…` below `s3://bucket/{run_name}`). With None there are no copies, which
            would take space.
        num_checkpoints_to_keep: Applies locally; for the store see `remote_retention=`.
        overwrite: As in Composer, except for files that killed launches of this same run have left in `folder`.
        num_concurrent_uploads, upload_timeout_in_seconds: As in the settings of `Uploader`; 1 concurrent upload means
            our default.

    Args:
        remote: As for `Uploader`; may have `{run_name}`. Each run needs a remote of its own.
        kind: For a second saver of the run, for example "weights".
        drain_timeout_s: How long the start may take to finish what a killed one was uploading on this node.
        close_timeout_s: How long the end of training may wait for uploads. The rest stays in the journal.
        settings: Settings of `Uploader`, including `store_options`.
    """

    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}.pt",
        remote_file_name: str | Path | None = "{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}.pt",
        latest_filename: str | Path | None = "latest-rank{rank}.pt",
        latest_remote_file_name: str | Path | None = "{run_name}/checkpoints/latest-rank{rank}.pt",
        save_interval: Time[Any] | str | int | Callable[[State, Event], bool] = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: list[str] | Callable[[dict[str, Any]], None] | None = None,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: int = 3600,
        remote: str | None = None,
        kind: str | None = None,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        super().__init__(
            folder,
            filename,
            remote_file_name,
            latest_filename,
            latest_remote_file_name,
            save_interval,
            overwrite=overwrite,
            num_checkpoints_to_keep=num_checkpoints_to_keep,
            weights_only=weights_only,
            ignore_keys=ignore_keys,
            num_concurrent_uploads=num_concurrent_uploads,
            upload_timeout_in_seconds=upload_timeout_in_seconds,
        )
        self.uploads: SaverUploads | None = None
        self._has_no_pointer = False
        if remote is None:
            if settings or kind is not None:
                raise SettingsError(
                    f"these need remote=: {', '.join([*settings, *(['kind'] if kind else [])])}"
                )
            return
        if self.remote_uploader is not None:
            logger.warning("uploads_twice folder=%s remote=%s; give a local folder", folder, remote)
        self._has_no_pointer = self.latest_remote_file_name is None
        self._name_a_pointer()
        self.uploads = SaverUploads(
            self,
            remote,
            kind=kind,
            drain_timeout_s=drain_timeout_s,
            close_timeout_s=close_timeout_s,
            settings=settings,
        )

    @property
    def uploader(self) -> Uploader | None:
        """The open uploader, for its metrics or `wait`; None while it is closed, and on ranks that do not upload."""
        return None if self.uploads is None else self.uploads.uploader

    def _name_a_pointer(self) -> None:
        """Give the saver a remote pointer name.

        With `autoresume` the Trainer, which then looks at the local link, asserts that there is one.
        """
        if self._has_no_pointer and self.latest_filename is not None:
            self.latest_remote_file_name = PartialFilePath(self.latest_filename.filename)

    def init(self, state: State, logger: Logger) -> None:
        super().init(state, logger)
        if self._has_no_pointer:  # the Trainer has checked it by now
            self.latest_remote_file_name = None
        if self.uploads is not None:
            self.uploads.open(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.uploads is not None:
            self.uploads.clear_leftovers(state)
        super().fit_start(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        super().fit_end(state, logger)
        if self.uploads is not None:
            self.uploads.flush()

    def post_close(self) -> None:
        try:
            super().post_close()
        finally:
            if self.uploads is not None:
                self._name_a_pointer()  # for the next Trainer
                self.uploads.close()

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        if self.uploads is None:
            super()._save_checkpoint(state, logger)
            return
        # Composer would write into the same file that may still be uploading under this name. Only the rank
        # that writes may unlink it: another rank that comes late would delete what the writer has written.
        if state.fsdp_sharded_state_dict_enabled or dist.get_global_rank() == 0:
            path = get_save_filename(state, self.filename.format(state, keep_placeholders=True))
            Path(path).unlink(missing_ok=True)
        before = len(self.saved_checkpoints)
        super()._save_checkpoint(state, logger)
        is_writer = len(self.saved_checkpoints) > before
        self.uploads.save(state, self.saved_checkpoints[-1] if is_writer else None)
        if is_writer and self.num_checkpoints_to_keep >= 0:
            super()._rotate_checkpoints(sharding_enabled=state.fsdp_sharded_state_dict_enabled)

    def _rotate_checkpoints(self, sharding_enabled: bool = False) -> None:
        """Do nothing if we upload: files may be removed only once the save is handed over and its links are made."""
        if self.uploads is None:
            super()._rotate_checkpoints(sharding_enabled=sharding_enabled)
