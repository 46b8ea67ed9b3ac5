"""OLMo 0.6: its `Trainer` and checkpointers, with uploads in the background, and resuming from what was committed.

    from ckpt_async.integrations.olmo import Trainer, find_latest_checkpoint  # in place of olmo.train's and olmo.util's

`remote_save_folder` of the configuration is the remote of the run: `s3://bucket/prefix/run-a`. OLMo's own code writes
and reads local files; ckpt_async uploads, commits, finds and fetches them. Sharded checkpoints belong to the run
itself, unsharded ones to its kind "unsharded".
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_async import restore
from ckpt_async.errors import SettingsError, UnknownKindError
from ckpt_async.integrations.managed import CLOSE_TIMEOUT_S, ManagedUploader
from ckpt_async.integrations.olmo_names import FOLDER, UNSHARDED, fetch_of, newest_name, run_of
from ckpt_async.torch import fetch_together, run_on_one

try:
    from olmo import checkpoint as theirs
    from olmo import train, util
    from olmo.config import CheckpointType, DistributedStrategy, ShardedCheckpointerType, TrainConfig
    from olmo.torch_util import get_global_rank, get_world_size
except ImportError as error:
    raise ImportError(
        "ckpt_async.integrations.olmo needs OLMo and what it trains with: pip install 'ai2-olmo[train]'"
    ) from error

logger = logging.getLogger(__name__)


# --- adapting OLMo 0.6 to current torch --------------------------------------------------------------------------


class RemoteFileSystemReader(theirs.RemoteFileSystemReader):
    """OLMo's reader, with the two methods that have been abstract in torch since 2.3."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = str(checkpoint_id).rstrip("/")
        self._metadata = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(str(checkpoint_id))


def _handles(_: Any, module: Any) -> list[Any]:
    """Return the flat parameters of FSDP.

    OLMo knows them up to torch 2.2 and refuses newer versions, but they are the same up to 2.13.
    """
    handle = getattr(module, "_handle", None)
    return [] if handle is None else [handle]


@contextlib.contextmanager
def _todays_torch() -> Iterator[None]:
    """Let OLMo's own code read with current torch. Read only files that you trust.

    OLMo was written for a `torch.load` that accepts any class. Torch's environment variable also reaches the processes
    that unsharding starts.
    """
    variable = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable), theirs.RemoteFileSystemReader
    local = theirs.LocalShardedCheckpointer
    handles = local._fsdp_handles  # noqa: SLF001  there is no other way to it
    os.environ[variable] = "1"
    theirs.RemoteFileSystemReader, local._fsdp_handles = RemoteFileSystemReader, _handles  # noqa: SLF001
    try:
        yield
    finally:
        local._fsdp_handles = handles  # noqa: SLF001
        theirs.RemoteFileSystemReader = before[1]
        if before[0] is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before[0]


# --- uploads ----------------------------------------------------------------------------------------------------


_open: dict[tuple[Path, str, str | None], ManagedUploader] = {}


def _managed(
    folder: str | os.PathLike[str], remote: str, kind: str | None, settings: Mapping[str, Any]
) -> ManagedUploader:
    """Return the uploader of a run and kind; the first call opens it.

    OLMo makes a new checkpointer for every save.
    """
    key = Path(folder).resolve(), remote, kind
    if key not in _open:
        managed = ManagedUploader(remote, None, CLOSE_TIMEOUT_S, {**settings, "kind": kind})
        managed.open(folder, get_global_rank(), get_world_size())
        _open[key] = managed
    return _open[key]


def close_uploads() -> None:
    """Finish what was handed over, for at most 600 s each, and close the uploaders; the rest stays in the journal.

    `Trainer.close` calls it. Raises UploadFailedError if the newest checkpoint of an uploader is not committed by then.
    """
    with contextlib.ExitStack() as closing:  # close all of them before raising
        while _open:
            closing.callback(_open.popitem()[1].close)


class _Uploading(theirs.Checkpointer):
    """The code that our five checkpointers share. It comes before OLMo's class in the method resolution order.

    `save_checkpoint` returns when, on every rank, the local folder is complete and, with `upload_to`, handed over: from
    then on SIGKILL does not lose it. It is uploaded and committed in the background. The last part of `upload_to` must
    be the folder's name; the part before it is the run. With the setting `publish_copies=True` the store also copies a
    sharded checkpoint to `upload_to` itself, `config.yaml` last; an unsharded one to `<run>/kinds/unsharded/step<N>-…`.
    """

    kind: str | None = None

    def __init__(self, cfg: TrainConfig, *args: Any, **settings: Any) -> None:
        how = {
            name: settings.pop(name) for name in ("thread_count", "use_shared_mem_impl") if name in settings
        }
        super().__init__(cfg, *args, **how)
        self.settings = settings

    def save_checkpoint(
        self,
        dir: str | os.PathLike[str],  # noqa: A002  as OLMo's
        dist_model: Any,
        optim: Any,
        train_state: dict[str, Any],
        *,
        upload_to: str | None = None,
    ) -> None:
        folder = Path(dir)
        match = FOLDER.fullmatch(folder.name)
        remote = "" if upload_to is None else run_of(upload_to, folder)
        with _todays_torch():
            super().save_checkpoint(folder, dist_model, optim, train_state)
        if match is not None and upload_to is not None:
            managed = _managed(folder.parent, remote, self.kind, self.settings)
            assert managed.uploader is not None
            exact = folder.name if managed.uploader.settings.publish_copies else None
            files = managed.own_files(folder)
            managed.hand_over(folder, int(match[1]), folder.name, files=files, publish_as=exact)

    def restore_checkpoint(self, load_path: Any, dist_model: Any, optim: Any, **how: Any) -> dict[str, Any]:
        with _todays_torch():
            state: dict[str, Any] = super().restore_checkpoint(
                self._local(load_path, how), dist_model, optim, **how
            )
        return state

    def unshard_checkpoint(self, load_path: Any, **how: Any) -> Any:
        with _todays_torch():
            return super().unshard_checkpoint(self._local(load_path, how), **how)

    def _local(self, load_path: str | os.PathLike[str], how: dict[str, Any]) -> str:
        return local_checkpoint(load_path, self.cfg, _taken_cache(load_path, how))


class FullCheckpointer(_Uploading, theirs.FullCheckpointer):
    kind = UNSHARDED

    def load_checkpoint(self, load_path: Any, **how: Any) -> Any:
        with _todays_torch():
            return super().load_checkpoint(self._local(load_path, how), **how)


class TorchNewStyleShardedCheckpointer(_Uploading, theirs.TorchNewStyleShardedCheckpointer):
    pass


class TorchLegacyShardedCheckpointer(_Uploading, theirs.TorchLegacyShardedCheckpointer):
    pass


class LocalShardedCheckpointer(_Uploading, theirs.LocalShardedCheckpointer):
    pass


class OlmoCoreCheckpointer(_Uploading, theirs.OlmoCoreCheckpointer):
    def restore_checkpoint(self, load_path: Any, dist_model: Any, optim: Any, **how: Any) -> dict[str, Any]:
        # OLMo-core 0.1 initializes a fresh optimizer with a step without gradients after it has loaded the
        # weights, and weight decay then changes them. So we take that step first.
        from olmo_core.distributed.checkpoint import init_optimizer_state

        if how.get("load_optimizer_state", True):
            init_optimizer_state(optim)
        return super().restore_checkpoint(load_path, dist_model, optim, **how)


_OURS: dict[type, type[_Uploading]] = {
    theirs.FullCheckpointer: FullCheckpointer,
    theirs.TorchNewStyleShardedCheckpointer: TorchNewStyleShardedCheckpointer,
    theirs.TorchLegacyShardedCheckpointer: TorchLegacyShardedCheckpointer,
    theirs.LocalShardedCheckpointer: LocalShardedCheckpointer,
    theirs.OlmoCoreCheckpointer: OlmoCoreCheckpointer,
}


def build_sharded_checkpointer(
    cfg: TrainConfig,
    *,
    name: ShardedCheckpointerType | None = None,
    use_shared_mem_impl: bool = False,
    **settings: Any,
) -> _Uploading:
    """Build OLMo's sharded checkpointer, but one that uploads in the background.

    `settings` are those of `Uploader`; those of the first save to a run apply. Call `close_uploads` at the end.
    """
    plain = theirs.build_sharded_checkpointer(cfg, name=name)
    if isinstance(plain, theirs.TorchLegacyShardedCheckpointer):
        settings["use_shared_mem_impl"] = use_shared_mem_impl
    return _ours(plain, settings)


def _ours(plain: theirs.Checkpointer, settings: Mapping[str, Any]) -> _Uploading:
    if type(plain) not in _OURS:
        raise SettingsError(f"{type(plain).__name__} is not one of OLMo's five checkpointers")
    return _OURS[type(plain)](plain.cfg, **settings)


@dataclass
class Trainer(train.Trainer):
    """OLMo's trainer, with uploads in the background if `remote_save_folder` is set.

    Checkpoints are also restored from there: `load_path` may be the run, a checkpoint in it (`find_latest_checkpoint`),
    or one that OLMo itself has uploaded.

    The uploaders are opened by `fit`, which raises at once for invalid settings, credentials and buckets. Later
    failures are logged and counted, and training continues; with `on_error="raise"` the next save raises. `close` (the
    end of the `with` block) waits for uploads, at most 600 s.
    """

    upload_settings: dict[str, Any] = field(default_factory=dict)

    def fit(self) -> None:
        cfg = self.cfg
        if cfg.remote_save_folder is not None:
            remote = cfg.remote_save_folder.rstrip("/")
            kinds: list[str | None] = [None] if cfg.distributed_strategy != DistributedStrategy.ddp else []
            kinds += [UNSHARDED] if cfg.save_interval_unsharded is not None else []
            for kind in kinds:
                _managed(cfg.save_folder, remote, kind, self.upload_settings)
        super().fit()

    def _save_checkpoint(self, checkpointer: theirs.Checkpointer, checkpoint_type: CheckpointType) -> Any:
        return super()._save_checkpoint(_ours(checkpointer, self.upload_settings), checkpoint_type)

    def restore_checkpoint(self, load_path: str | os.PathLike[str], **how: Any) -> None:
        local = local_checkpoint(load_path, self.cfg, _taken_cache(load_path, how))
        with _todays_torch():
            super().restore_checkpoint(local, **how)

    def close(self, exit_code: int = 0) -> None:
        super().close(exit_code)
        close_uploads()


# --- finding and fetching -----------------------------------------------------------------------------------------


def find_latest_checkpoint(dir: str | os.PathLike[str]) -> str | os.PathLike[str] | None:  # noqa: A002  as OLMo's
    """Return the newest committed checkpoint of a run, or None for a fresh start.

    The result, `<run>/step<N>` or `<run>/step<N>-unsharded`, is for `load_path` and `Trainer.restore_checkpoint`. If
    both kinds have a checkpoint of the newest step, the sharded one is returned. For a local folder, the result is that
    of OLMo's own function. Call it on all ranks; one of them looks.

    Raises the errors of `restore.find`, also if there are checkpoints but none is usable.
    """
    if not util.is_url(dir):
        local: Path | None = util.find_latest_checkpoint(dir)
        return local
    remote = str(dir).rstrip("/")

    def newest() -> str | None:
        name = newest_name(_find(remote, None), _find(remote, UNSHARDED))
        return None if name is None else f"{remote}/{name}"

    return run_on_one(newest)


def _find(remote: str, kind: str | None) -> restore.Checkpoint | None:
    try:
        return restore.find(remote, kind=kind)
    except UnknownKindError:  # only the other kind was ever saved
        return None


def _taken_cache(load_path: str | os.PathLike[str], how: dict[str, Any]) -> str | os.PathLike[str] | None:
    """Take OLMo's `local_cache` out of the arguments if we fetch: what `fetch` uses of it is verified."""
    return how.pop("local_cache", None) if util.is_url(load_path) else None


def local_checkpoint(
    load_path: str | os.PathLike[str], cfg: TrainConfig, local_cache: str | os.PathLike[str] | None = None
) -> str:
    """Return a checkpoint as a local folder. All ranks must call it if `load_path` is a URL.

    A path is returned as it is. A URL is fetched and verified, by all ranks together: into `save_folder` if the URL
    belongs to the run that is being saved to, otherwise into `loaded/` in it. The URL of a run means its newest
    checkpoint. `local_cache` is that of `restore.fetch`: a copy of the checkpoint on this node.

    Raises FileNotFoundError if there is no such checkpoint, and the errors of `fetch_together`.
    """
    if not util.is_url(load_path):
        return str(load_path)
    url = str(load_path).rstrip("/")
    how = fetch_of(url, cfg.save_folder, cfg.remote_save_folder)
    if how is None:
        newest = find_latest_checkpoint(url)
        if newest is None:
            raise FileNotFoundError(f"{url} has no checkpoint")
        url = str(newest)
        how = fetch_of(url, cfg.save_folder, cfg.remote_save_folder)
    assert how is not None
    for run, which in how.ways:
        found = fetch_together(
            run,
            how.folder,
            folder=cfg.save_folder if how.is_own else None,
            overwrite=True,
            local_cache=local_cache,
            **which,
        )
        if found is not None:
            return str(how.folder)
    raise FileNotFoundError(f"{url} is not a checkpoint of ckpt_async or OLMo")
