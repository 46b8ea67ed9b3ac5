"""What the adapters share: the uploader of one trainer, and fetching the newest checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_async import Settings, StoreOptions, Uploader, restore
from ckpt_async.errors import (
    CheckpointAbortedError,
    CkptAsyncError,
    InvalidNameError,
    SealedError,
    SettingsError,
    UploadFailedError,
)
from ckpt_async.integrations.files import files_of_rank
from ckpt_async.torch import fetch_together, launch_id

logger = logging.getLogger(__name__)

# How long a launch may take to upload what a killed one left on this node.
DRAIN_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 600.0
# Training has failed, and the user waits for its traceback: long enough to write receipts.
CLOSE_AFTER_ERROR_S = 10.0
MAX_KIND_LENGTH = 32
# A further kind is opened in the middle of training, which waits for so long if the store is away.
OPEN_KIND_S = 20.0
# Settings that name what the run has once; its further kinds have their own defaults.
_OF_THE_RUN = frozenset({"kind", "latest_filename", "composer_symlink", "remote_retention"})


class ManagedUploader:
    """The uploader of one trainer: either its own, opened when training starts and closed when it ends, or a lent one.

    The trainer's own uploader is opened with `on_error="warn"` unless told otherwise: failures after the start then
    reach only the log and the metrics, not the training loop. At the end it does raise, with either `on_error`, if the
    newest checkpoint is not committed by then, unless training itself has failed.
    """

    def __init__(
        self,
        remote: str | None,
        uploader: Uploader | None,
        close_timeout_s: float,
        settings: Mapping[str, Any],
    ) -> None:
        if (remote is None) == (uploader is None):
            raise SettingsError("pass either folder and remote, or an uploader")
        if uploader is not None and settings:
            raise SettingsError(f"pass these settings where you open the uploader: {', '.join(settings)}")
        _refuse_unknown(settings)
        self.remote = uploader.remote if uploader is not None else remote
        self.uploader = uploader  # None while it is not open
        self.store_options: StoreOptions | None = settings.get("store_options")
        self._is_lent = uploader is not None
        self._settings = {"on_error": "warn", **settings}
        self._close_timeout_s = close_timeout_s
        self.newest_step: int | None = None  # the last step that this launch handed over
        self._not_handed_over: Exception | None = None  # why the last step was not handed over
        self._has_raised = False
        self._has_handed_over = False  # in this launch
        self._launch: str | None = None  # what all ranks call this launch
        self._kinds: dict[str, ManagedUploader] = {}
        # Of a further kind, which is opened on a thread of its own, beside training.
        self._opening: Future[Uploader] | None = None

    @property
    def has_kinds(self) -> bool:
        return not self._is_lent

    def of_kind(self, kind: str) -> ManagedUploader | None:
        """Return the uploader of a further kind, open and with the same settings; None, which is logged, if it cannot
        be opened now: in warn mode that does not end training. Only if this one is not lent.

        It is opened at the first call, by every rank on its own, and closed with this one. There is no collective: one
        rank may have failed before, and the others would wait for it.
        """
        uploader = self.uploader
        assert uploader is not None
        if (managed := self._kinds.get(kind)) is None:
            settings = {name: value for name, value in self._settings.items() if name not in _OF_THE_RUN}
            own = self._settings.get("kind")
            settings["kind"] = cut_kind(f"{own}-{kind}") if own else kind
            managed = self._kinds[kind] = ManagedUploader(self.remote, None, self._close_timeout_s, settings)
        is_open = managed.uploader is not None or managed._open_in_background(
            uploader.folder, uploader.rank, uploader.world_size, self._launch
        )
        return managed if is_open else None

    def open(self, folder: str | os.PathLike[str] | None, rank: int, world_size: int) -> Uploader:
        """Open the uploader for a start of training, or check that the lent one fits.

        All ranks must call it: a collective, if there are several.
        """
        if self.uploader is None:
            self._launch = launch_id() if world_size > 1 else None
            self.uploader = self._opener(folder, rank, world_size, self._launch)()
        elif (self.uploader.rank, self.uploader.world_size) != (rank, world_size):
            raise SettingsError(
                f"the uploader was opened for rank {self.uploader.rank} of {self.uploader.world_size},"
                f" but this process saves as rank {rank} of {world_size}",
                hint=f"open it with rank={rank}, world_size={world_size}",
            )
        return self.uploader

    def _opener(
        self, folder: str | os.PathLike[str] | None, rank: int, world_size: int, launch: str | None
    ) -> Callable[[], Uploader]:
        assert self.remote is not None
        assert folder is not None
        self.newest_step, self._not_handed_over, self._has_raised = None, None, False
        self._has_handed_over = False
        settings = {"rank": rank, "world_size": world_size, "launch_id": launch, **self._settings}
        return partial(Uploader, folder, self.remote, **settings)

    def _open_in_background(
        self, folder: str | os.PathLike[str], rank: int, world_size: int, launch: str | None
    ) -> bool:
        """Return whether it is open, after OPEN_KIND_S at most. In warn mode, failures are logged."""
        wait_s = 0.0
        if self._opening is None:
            wait_s, self._opening = OPEN_KIND_S, Future()
            work = (self._opening, self._opener(folder, rank, world_size, launch))
            threading.Thread(target=_settle, args=work, name="ckpt-async-open", daemon=True).start()
        what = f"kind={self._settings['kind']} remote={self.remote}"
        if not wait({self._opening}, wait_s).done:
            logger.warning("kind_not_open %s; until it is open, its files are not uploaded", what)
            return False
        try:
            self.uploader = self._opening.result()
        except Exception:  # whatever it is, in warn mode training goes on
            self._opening = None  # the next file tries again
            if self._settings["on_error"] == "raise":
                raise
            logger.exception("kind_not_open %s; its files are not uploaded", what)
            return False
        return True

    def hand_over(
        self,
        path: str | os.PathLike[str],
        step: int,
        name: str,
        *,
        files: Collection[str] | None = None,
        metrics: Mapping[str, float] | None = None,
        publish_as: str | None = None,
    ) -> bool:
        """Enqueue this rank's part of a checkpoint and seal it.

        On return SIGKILL cannot lose it, and the files may be deleted. The checkpoint is committed to the store once
        all ranks have done so. Returns False if this step is sealed already: it stays as it is.

        In warn mode nothing is raised: a checkpoint that could not be handed over is reported in the log, given up on
        all ranks, and never committed. Only an unsafe name raises at the first save, because later ones would have
        such names, too.
        """
        uploader = self.uploader
        assert uploader is not None
        self.newest_step, self._not_handed_over, self._has_raised = step, None, False
        try:
            if files is None or files or uploader.rank == 0:  # without rank 0's files there is no checkpoint
                uploader.enqueue(path, step, name, files=files, publish_as=publish_as)
            uploader.seal(step, name=name, metrics=metrics)
            self._has_handed_over = True
        except SealedError:
            return False
        except CkptAsyncError as error:
            if isinstance(error, InvalidNameError) and not self._has_handed_over:
                self._has_raised = True
                raise InvalidNameError(
                    f"{os.fspath(path)} cannot be uploaded: {error.without_hint}",
                    hint=f"save it under another name: {error.hint}",
                ) from error
            if uploader.settings.on_error == "raise":
                self._has_raised = True
                raise
            self.fail(path, step, name, error)
        return True

    def own_files(self, folder: str | os.PathLike[str]) -> list[str]:
        """Return this rank's files of a folder to which all ranks write."""
        assert self.uploader is not None
        return files_of_rank(folder, self.uploader.rank, self.uploader.world_size)

    def fail(self, path: str | os.PathLike[str], step: int, name: str, why: Exception) -> None:
        """Log that a checkpoint cannot be handed over, and give it up: the other ranks need not wait for this one, and
        it counts as aborted.
        """
        assert self.uploader is not None
        logger.error("checkpoint_not_handed_over step=%d path=%s", step, path, exc_info=why)
        self.newest_step, self._not_handed_over = step, why
        try:
            self.uploader.give_up(step, str(why), name=name)
        except CkptAsyncError as error:
            logger.warning("not_given_up step=%d error=%s", step, error)

    def wait_for_newest(self) -> None:
        """Block until the newest checkpoint is committed with all ranks, at most `close_timeout_s`.

        Otherwise raises UploadFailedError, with either `on_error`: training is over, so this stops nothing.
        """
        self._wait_for_newest(self._close_timeout_s)

    def _wait_for_newest(self, timeout_s: float) -> None:
        uploader, step = self.uploader, self.newest_step
        if uploader is None or step is None or self._has_raised:
            return
        if (why := self._not_handed_over) is None:
            try:
                # At the interpreter's exit the uploader may be closed by now, and then `wait` refuses.
                if not uploader.is_committed(step):
                    uploader.wait(step, timeout_s)
                return
            except CkptAsyncError as error:
                why = error
        self._has_raised = True
        is_lost = self._not_handed_over is not None or isinstance(why, CheckpointAbortedError)
        raise UploadFailedError(
            f"the newest checkpoint, step {step}, is not committed to {self.remote}:"
            f" {why.without_hint if isinstance(why, CkptAsyncError) else why}",
            hint="see the log"
            if is_lost
            else "see the log; `ckpt-async drain` or the next launch on this node uploads what is left",
        ) from why

    def close(self) -> None:
        """Finish what was handed over, within `close_timeout_s`, and raise what `wait_for_newest` raises.

        A lent uploader stays open, and its owner hears of failures when closing it.
        """
        if self.uploader is None:
            return
        is_failing = sys.exc_info()[0] is not None  # the frameworks clean up inside their `except`
        is_brief = is_failing or self._has_raised
        timeout_s = min(CLOSE_AFTER_ERROR_S, self._close_timeout_s) if is_brief else self._close_timeout_s
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as closing:
            closing.callback(self._kinds.clear)
            for each in (*self._kinds.values(), self):  # the last one first
                closing.callback(each.finish, deadline, is_failing=is_failing)

    def finish(self, deadline: float, *, is_failing: bool) -> None:
        """Close this uploader alone, by `deadline`."""
        uploader = self.uploader
        if uploader is None:
            if self._opening is not None:
                self._opening.add_done_callback(_close_unused)
            return
        try:
            if not self._is_lent and not is_failing:
                self._wait_for_newest(max(0.0, deadline - time.monotonic()))
        finally:
            self._close(uploader, max(0.0, deadline - time.monotonic()), is_failing=is_failing)

    def _close(self, uploader: Uploader, timeout_s: float, *, is_failing: bool) -> None:
        try:
            if not self._is_lent:
                self.uploader = None
                uploader.close(timeout_s)
            elif not (report := uploader.flush(timeout_s)).is_done:
                logger.warning("not_flushed steps=%s within_s=%g", list(report.steps_left), timeout_s)
        except CkptAsyncError:
            if uploader.settings.on_error == "raise" and not is_failing:
                raise
            logger.exception("close_failed folder=%s", uploader.folder)


def cut_kind(name: str) -> str:
    """Return a name that is no longer than a kind's may be; two long ones are not cut to the same."""
    if len(name) <= MAX_KIND_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: MAX_KIND_LENGTH - len(digest) - 1]}-{digest}"


def _settle(future: Future[Uploader], work: Callable[[], Uploader]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  raised where it is waited for
        future.set_exception(error)


def _close_unused(opened: Future[Uploader]) -> None:
    if opened.exception() is None:
        opened.result().close(0.0)


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    """Raise SettingsError for a setting that `Uploader` does not know, because some frameworks open it much later."""
    known = {*inspect.signature(Uploader).parameters, *(each.name for each in dataclasses.fields(Settings))}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, {*known, "close_timeout_s"}, 1)
            raise SettingsError(
                f"unknown setting {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else "see docs/settings.md",
            )


def fetch_newest(
    folder: str | os.PathLike[str],
    remote: str,
    drain_timeout_s: float,
    store_options: StoreOptions | None,
    *,
    kind: str | None = None,
    step: int | None = None,
    has_bare_files: bool = False,
) -> tuple[restore.Checkpoint, Path] | None:
    """Fetch the newest good checkpoint (of this step) as a whole, and return it with its path, `<folder>/<its name>`.

    For trainers that save a checkpoint as one file without a folder of its own (`has_bare_files`), the path is that
    file in `folder`. With a process group, all ranks get the same checkpoint.
    """
    where = Path(folder)

    def destination(checkpoint: restore.Checkpoint) -> Path:
        return where if has_bare_files and len(checkpoint.files) == 1 else where / checkpoint.name

    has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    fetch = fetch_together if has_group else restore.fetch_latest
    found = fetch(
        remote,
        destination,
        kind=kind,
        step=step,
        folder=folder,
        drain_timeout_s=drain_timeout_s,
        store_options=store_options,
        overwrite=True,
    )
    if found is None:
        return None
    checkpoint, report = found
    path = destination(checkpoint)
    return checkpoint, next(iter(report.paths.values())) if path == where else path
