"""The uploads of one Composer `CheckpointSaver`: opened at `init`, given each save, and closed at the end."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ckpt_async import Uploader
from ckpt_async.integrations.managed import ManagedUploader, fetch_newest
from ckpt_async.saver import Timestamp, names
from ckpt_async.saver.files import is_of_run
from ckpt_async.torch import on_all_ranks, run_on_one

try:
    from composer.callbacks import CheckpointSaver
    from composer.utils import dist, format_name_with_dist, format_name_with_dist_and_time
except ImportError as error:
    raise ImportError(
        "ckpt_async.integrations.composer needs Composer: pip install mosaicml==0.32.1 (torch 2.7)"
    ) from error

if TYPE_CHECKING:
    from composer.core import State

logger = logging.getLogger(__name__)

# The open uploads of this process: in notebooks a trainer may follow one that nobody has closed.
_open: weakref.WeakSet[SaverUploads] = weakref.WeakSet()


class SaverUploads:
    """Uploads the saves of one Composer saver.

    Composer saves whole checkpoints on rank 0. Then only that rank uploads, as a run with one rank, and a save is
    sealed when it returns, whatever happens to the other ranks. Of sharded checkpoints every rank has a part.

    Errors of the store are raised (`on_error="raise"`), as Composer raises those of its own uploads.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        remote: str,
        *,
        kind: str | None,
        drain_timeout_s: float,
        close_timeout_s: float,
        settings: Mapping[str, Any],
    ) -> None:
        self.saver, self._kind = saver, kind
        self._remote, self._drain_timeout_s, self._close_timeout_s = remote, drain_timeout_s, close_timeout_s
        self._settings = {
            "on_error": "raise",
            "upload_timeout_s": float(saver.upload_timeout_in_seconds),
            **settings,
        }
        self._managed: ManagedUploader | None = None
        self._folder = Path()
        self._is_sharded = False
        self._is_continued = False
        self._newest_batch = 0

    @property
    def uploader(self) -> Uploader | None:
        """This rank's uploader while it is open; None on ranks that do not upload, because rank 0 has all files."""
        return None if self._managed is None else self._managed.uploader

    # --- the start -----------------------------------------------------------------------------------------

    def open(self, state: State) -> None:
        """Fetch the newest checkpoint, link it where Composer's autoresume will look, and open the uploader.

        A collective. An error on one rank is raised on all.
        """
        name = state.run_name
        self.remote = self._remote.replace("{run_name}", name).rstrip("/")
        self._folder = Path(os.path.abspath(format_name_with_dist(self.saver.folder, name)))
        config = state.fsdp_config
        self._is_sharded = config is not None and config.state_dict_type == "sharded"
        self._close_earlier()
        self._is_continued = run_on_one(lambda: is_of_run(self._folder, self.remote, self._kind or ""))
        savers = [each for each in state.callbacks if isinstance(each, CheckpointSaver)]
        if savers[0] is self.saver:  # Composer resumes from the first saver
            self._fetch(name)
        on_all_ranks(lambda: self._open(name))

    def _close_earlier(self) -> None:
        """Close uploads that another trainer of this process, or this saver itself, still has open in the folder."""
        for each in list(_open):
            if (each._folder, each._kind) == (self._folder, self._kind):  # noqa: SLF001  its own class
                logger.warning("earlier_trainer_not_closed folder=%s; closing its uploads", self._folder)
                each.close()

    def _fetch(self, run_name: str) -> None:
        folder, latest = self._folder, self.saver.latest_filename
        found = fetch_newest(
            folder,
            self.remote,
            self._drain_timeout_s,
            self._settings.get("store_options"),
            kind=self._kind,
            has_bare_files=True,
        )
        if found is None:
            return
        checkpoint, target = found
        self._newest_batch = checkpoint.step
        if latest is None:
            return
        # All ranks look for rank 0's link, which then points to what all of them have.
        link = folder / dist.all_gather_object(format_name_with_dist(latest.filename, run_name))[0]
        if dist.get_local_rank() == 0:
            _link(link, target)
            logger.info("resume_from step=%d link=%s", checkpoint.step, link)
        dist.barrier()

    def _open(self, run_name: str) -> None:
        saver, rank, world_size = self.saver, dist.get_global_rank(), dist.get_world_size()
        if not self._is_sharded:
            if rank != 0:
                return
            world_size = 1
        settings = {"latest_filename": "", **self._settings}
        if self._kind:
            settings["kind"] = self._kind
        if saver.remote_file_name is not None:
            settings.setdefault("publish_copies", True)
            if saver.latest_remote_file_name is not None and saver.latest_filename is not None:
                pointer = format_name_with_dist(saver.latest_remote_file_name.filename, run_name)
                settings.setdefault("composer_symlink", f"{names.below(self.remote, pointer)}.symlink")
        if saver.num_concurrent_uploads > 1:  # Composer's default of 1 does not refer to parts of files
            settings.setdefault("num_concurrent_uploads", saver.num_concurrent_uploads)
        self._managed = ManagedUploader(self.remote, None, self._close_timeout_s, settings)
        self._managed.open(self._folder, rank, world_size)
        _open.add(self)

    def clear_leftovers(self, state: State) -> None:
        """Remove what killed launches of this run have left of later saves, complete or not. Called at `fit_start`.

        If training does not continue from the newest checkpoint they stay, and Composer refuses the folder.
        """
        if not self._is_continued or state.timestamp.batch.value < self._newest_batch:
            return
        now = _timestamp(state)
        values = ((each, format_name_with_dist(f"{{{each}}}", state.run_name)) for each in names.OF_RUN)
        run = {each: int(text) if each != "run_name" else text for each, text in values}
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and names.is_ahead(path.name, self.saver.filename.filename, run, now):
                logger.warning(
                    "left_over_save_removed path=%s: an earlier launch was killed after writing it", path
                )
                path.unlink(missing_ok=True)
        dist.barrier()

    # --- saves ---------------------------------------------------------------------------------------------

    def save(self, state: State, saved_path: str | None) -> None:
        """Enqueue what this rank has written and seal it: on return SIGKILL cannot lose it."""
        uploader = self.uploader
        if uploader is None or self._managed is None:
            return
        now = state.timestamp
        step, name = now.batch.value, f"ep{now.epoch.value}-ba{now.batch.value}"
        files, publish_as = None, self._exact_key(state)
        if self._is_sharded:
            folder = self._folder if saved_path is None else Path(saved_path).parent
            files = [] if saved_path is None else self._managed.own_files(folder)
            saved_path = str(folder)
        assert saved_path is not None, "rank 0 saves what is not sharded"
        self._managed.hand_over(saved_path, step, name, files=files, publish_as=publish_as)

    def _exact_key(self, state: State) -> str | None:
        template = self.saver.remote_file_name
        if template is None or self.uploader is None or not self.uploader.settings.publish_copies:
            return None
        key = template.format(state)
        if self._is_sharded:
            prefix = state.fsdp_config.sharded_ckpt_prefix_dir
            folder = format_name_with_dist_and_time(prefix, state.run_name, state.timestamp)
            key = str(PurePosixPath(key).parent / folder)
        return names.below(self.remote, key)

    # --- the end -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Upload what was saved, within `close_timeout_s`.

        Raises UploadFailedError if the newest save is not committed by then: Composer only logs failures while it
        closes, and exits with 0.
        """
        uploader = self.uploader
        if uploader is None or self._managed is None:
            return
        deadline = time.monotonic() + self._close_timeout_s
        self._managed.wait_for_newest()
        report = uploader.flush(max(0.0, deadline - time.monotonic()))
        uploader.raise_failures()
        if not report.is_done:
            left = list(report.steps_left)
            logger.warning("not_flushed steps=%s within_s=%g", left, self._close_timeout_s)

    def close(self) -> None:
        """Finish what was saved, within `close_timeout_s`. Idempotent."""
        _open.discard(self)
        if self._managed is not None:
            self._managed.close()


def _timestamp(state: State) -> Timestamp:
    now = state.timestamp
    counts = (
        "batch",
        "epoch",
        "batch_in_epoch",
        "sample",
        "sample_in_epoch",
        "token",
        "token_in_epoch",
        "iteration",
    )
    return Timestamp(**{each: int(getattr(now, each).value) for each in counts})


def _link(link: Path, target: Path) -> None:
    """Set a symlink atomically: a reader finds either the old or the new one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(target, link.parent))
    os.replace(new, link)
