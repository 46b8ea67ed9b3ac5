"""Background upload of files that are not checkpoints, such as logs, traces and configurations, as they are."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self, Unpack

from ckpt_async.core import naming
from ckpt_async.core.settings_options import SettingsOptions
from ckpt_async.errors import (
    InvalidShardError,
    ObjectNotFoundError,
    StoreError,
    UploaderClosedError,
)
from ckpt_async.local.folder import identity_of
from ckpt_async.local.settings_file import load_settings
from ckpt_async.runners.loop import new_loop
from ckpt_async.stores import StoreOptions, check_key_length
from ckpt_async.threads import LoopThread, outcome
from ckpt_async.transfer.patient import connect
from ckpt_async.transfer.source import Source
from ckpt_async.transfer.upload import upload

logger = logging.getLogger(__name__)

# As long as an `Uploader` waits for a store that is being restarted.
OPEN_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Staged:
    """A copy of a file as it was when it was passed to `put`."""

    path: Path
    may_replace: bool


class PlainUploader:
    """Uploads ordinary files in the background, each to exactly the key that it is given, replacing what is there.

        with PlainUploader("s3://bucket/run-a") as files:
            files.put("logs/rank0.txt", "logs/rank0.txt")

    Nothing is committed, journalled or pruned: a file that was not sent when the process was killed is lost, and a
    reader may find new files beside old ones. Use `Uploader` for checkpoints.

    A file that cannot be uploaded is logged as an error (`plain_file_not_uploaded`) and listed in `failures`; the
    caller only gets exceptions for wrong arguments. May be used from any thread of the process that opened it.

    Args:
        remote: `s3://bucket/prefix` or `file:///folder`; the keys are below it.
        staging_folder: Where copies wait to be sent. Default: a temporary folder.
        settings: Any field of `ckpt_async.Settings`; requests are retried for `upload_timeout_s`.

    Opening blocks until the store was reached, for a minute at most; it raises StoreError or SettingsError.
    """

    def __init__(
        self,
        remote: str,
        *,
        store_options: StoreOptions | None = None,
        staging_folder: str | os.PathLike[str] | None = None,
        **settings: Unpack[SettingsOptions],
    ) -> None:
        self.remote = remote
        self._settings = load_settings(settings, os.environ)
        self._store = connect(remote, store_options, self._settings)
        self._staging = tempfile.TemporaryDirectory(prefix="ckpt-async-plain-", dir=staging_folder)
        self._lock = threading.RLock()  # taken directly: Ctrl-C may come within a condition's `__enter__`
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[str, _Staged] = {}
        self._sending: set[str] = set()
        self._num_staged = 0
        self._is_closed = False
        self.failures: dict[str, Exception] = {}
        self._thread = LoopThread("ckpt-async-plain", new_loop())
        try:
            outcome(self._thread.begin(self._store.open(OPEN_TIMEOUT_S)))
        except BaseException:
            self._stop()
            raise

    def put(self, path: str | os.PathLike[str], key: str, *, overwrite: bool = True) -> None:
        """Upload a file as it is now. The file is copied first, so it may be changed or deleted on return. A newer
        file under the same key replaces an older one that is not being sent yet. Without `overwrite`, an existing
        object stays, and the file counts as failed.

        Raises InvalidNameError for a key that is not safe in every store, InvalidShardError if `path` is not a
        file.
        """
        naming.check_publish_as(key)
        check_key_length(self.remote, key)
        if not Path(path).is_file():
            raise InvalidShardError(f"{os.fspath(path)!r} is not a file")
        with self._lock:
            if self._is_closed:
                raise UploaderClosedError("the uploader of plain files is closed")
            self._num_staged += 1
            staged = _Staged(Path(self._staging.name, str(self._num_staged)), overwrite)
        try:
            shutil.copyfile(path, staged.path)
        except OSError as error:  # a full disk, for example
            staged.path.unlink(missing_ok=True)
            self._failed(key, error)
            return
        with self._lock:
            older = self._waiting.get(key)
            self._waiting[key] = staged
            if key not in self._sending:
                self._sending.add(key)
                self._thread.begin(self._send(key))
        if older is not None:
            older.path.unlink(missing_ok=True)

    def flush(self, timeout_s: float) -> list[str]:
        """Wait until all files passed to `put` are sent or have failed. Returns the keys that are still being sent
        after `timeout_s`.
        """
        with self._lock:
            self._changed.wait_for(lambda: not self._sending, timeout_s)
            return sorted(self._sending)

    def close(self, timeout_s: float = 60.0) -> None:
        """Flush, log which files are lost, and stop. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for key in self.flush(timeout_s):
            self._failed(key, TimeoutError(f"closed after {timeout_s:.0f} s"))
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- within --------------------------------------------------------------------------------------------

    def _next(self, key: str) -> _Staged | None:
        with self._lock:
            staged = self._waiting.pop(key, None)
            if staged is None:
                self._sending.discard(key)
                self._changed.notify_all()
            return staged

    async def _send(self, key: str) -> None:
        """Send the files that wait under a key, one after the other: the newest is sent last."""
        while (staged := self._next(key)) is not None:
            try:
                await self._send_one(key, staged)
            except Exception as error:  # noqa: BLE001  whatever it is, later files under this key can be sent
                self._failed(key, error)
            else:
                self.failures.pop(key, None)
            finally:
                staged.path.unlink(missing_ok=True)

    def _failed(self, key: str, error: Exception) -> None:
        self.failures[key] = error
        logger.error("plain_file_not_uploaded key=%s error=%s", key, error)

    async def _send_one(self, key: str, staged: _Staged) -> None:
        if not staged.may_replace and await self._is_there(key):
            raise InvalidShardError("the object already exists, and overwrite is off")
        descriptor = os.open(staged.path, os.O_RDONLY | os.O_CLOEXEC)
        source = Source(descriptor, identity_of(os.fstat(descriptor)), str(staged.path))
        try:
            await upload(
                self._store,
                source,
                key,
                smallest_part_bytes=self._settings.part_size_bytes,
                resume=None,
                opened=lambda _: None,
                sent=lambda _: None,
            )
        finally:
            source.close()

    async def _is_there(self, key: str) -> bool:
        try:
            await self._store.head(key)
        except ObjectNotFoundError:
            return False
        return True

    def _stop(self) -> None:
        async def close() -> None:
            await self._store.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.get_running_loop().shutdown_default_executor()

        try:
            self._thread.begin(close()).result(_STOP_TIMEOUT_S)
        except (TimeoutError, StoreError) as error:
            logger.warning("plain_uploader_not_stopped error=%r", error)
        finally:
            self._thread.close()
            self._staging.cleanup()
