"""torchtitan: its DCP `CheckpointManager`, with checkpoints that are uploaded and can be fetched on a fresh node."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from ckpt_async import Uploader
from ckpt_async.errors import SettingsError
from ckpt_async.integrations.managed import CLOSE_TIMEOUT_S, DRAIN_TIMEOUT_S, ManagedUploader, fetch_newest
from ckpt_async.torch import CkptAsyncWriter

try:
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
except ImportError as error:
    raise ImportError(
        "ckpt_async.integrations.torchtitan needs torchtitan 0.3: pip install torchtitan"
    ) from error


class CkptAsyncManager(CheckpointManager):  # type: ignore[misc]  # where torchtitan is not installed
    """torchtitan's manager with uploads: set `checkpoint=CkptAsyncManager.Config(remote=…, …)` in the trainer's config.

    Writes to the local `folder` as torchtitan does, in all its async modes. Each rank hands over its own files as soon
    as they are written, and rank 0 also `.metadata`: from then on SIGKILL does not lose them. The rank that finishes
    its uploads last commits.

    `load` fetches the newest committed checkpoint (or the one at `load_step`), the same on all ranks. It never uses a
    local folder that was not committed, and raises FileNotFoundError if the store does not have the step. It also opens
    the uploader, so invalid settings, credentials and buckets raise before training. `keep_latest_k` applies to local
    folders.

    Closing waits for uploads, and raises UploadFailedError if the newest checkpoint is not committed by then. If
    training has failed, it waits for 10 s and does not raise.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        remote: str = ""
        """Where checkpoints go: `s3://bucket/prefix/run`. Required."""

        uploader: dict[str, Any] = field(default_factory=dict)
        """Settings of `ckpt_async.Uploader`, and `store_options`. `on_error` is "warn" unless it is given."""

    def __init__(self, config: Config, **parts: Any) -> None:
        if config.enable and (not config.remote or config.last_save_in_hf):
            wrong = "last_save_in_hf=True is not supported" if config.remote else "remote= is missing"
            raise SettingsError(f"CkptAsyncManager: {wrong}", hint="convert a DCP checkpoint afterwards")
        super().__init__(config, **parts)
        self._newest = -1
        if config.enable:
            self._managed = ManagedUploader(config.remote, None, CLOSE_TIMEOUT_S, config.uploader)

    def _load(self, step: int = -1) -> bool:
        os.makedirs(self.folder, exist_ok=True)
        which = None if step == -1 else step
        remote, options = self._managed.remote or "", self._managed.store_options
        found = fetch_newest(self.folder, remote, DRAIN_TIMEOUT_S, options, step=which)
        if found is None and step != -1:
            raise FileNotFoundError(
                f"load_step={step}: no committed checkpoint of this step is in {self._managed.remote};"
                f" a local folder in {self.folder} that was never committed is not loaded"
            )
        self._newest = -1 if found is None else found[0].step
        is_loaded = bool(super()._load(step))
        if not self.load_only:
            self._open()
        return is_loaded

    def _open(self) -> Uploader:
        return self._managed.open(self.folder, dist.get_rank(), dist.get_world_size())

    def _find_load_step(self, folder: str = "") -> int:
        return self._newest if folder in ("", self.folder) else int(super()._find_load_step(folder))

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        *args: Any,
        **options: Any,
    ) -> Any:
        step = int(checkpoint_id.rpartition("-")[2])
        writer = CkptAsyncWriter(self._open(), step)
        self._managed.newest_step = step
        if async_mode == AsyncMode.DISABLED:
            return state_dict_saver.save(state_dict, storage_writer=writer)
        how: dict[str, Any] = {}
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            process = state_dict_saver.AsyncCheckpointerType.PROCESS
            how = {"async_checkpointer_type": process, "async_stager": self.stager}
        return state_dict_saver.async_save(state_dict, storage_writer=writer, process_group=self.pg, **how)

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "_managed"):  # torchtitan also closes a manager that failed to open
            self._managed.close()
