"""A drop-in replacement for Composer's `RemoteUploaderDownloader`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_async import PlainUploader, StoreOptions
from ckpt_async.errors import CkptAsyncError, SettingsError
from ckpt_async.integrations.composer.saver import CheckpointSaver
from ckpt_async.integrations.composer.uploads import SaverUploads
from ckpt_async.integrations.managed import CLOSE_TIMEOUT_S, DRAIN_TIMEOUT_S
from ckpt_async.restore.objects import look
from ckpt_async.torch import fetch_file, on_all_ranks

from composer.callbacks import CheckpointSaver as ComposersSaver  # isort: skip  uploads says what to install
from composer.loggers import LoggerDestination  # isort: skip
from composer.utils import format_name_with_dist  # isort: skip
from composer.utils.checkpoint import get_save_filename  # isort: skip

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

logger = logging.getLogger(__name__)

_POINTER = ".symlink"
_METADATA = ".metadata"


class RemoteUploaderDownloader(LoggerDestination):
    """Uploads what loggers and callbacks pass to `Logger.upload_file`, and downloads it again.

        Trainer(loggers=[RemoteUploaderDownloader("s3://bucket"), FileLogger(…)])

    - Checkpoints of Composer's own savers (`Trainer(save_folder=…)`, on a local disk) are uploaded, verified and
      committed below `remote`, and are sealed before training goes on; `autoresume` finds the newest. A saver of
      ckpt_async that has a `remote` of its own handles its checkpoints itself.
    - Any other file is a plain upload: it is copied, uploaded in the background under its exact name, and retried. A
      failed upload is logged as an error and never ends training.
    - `download_file` fetches either by Composer's names: for `load_path=` with `load_object_store=`, whether or not
      this object is in `loggers`.

    Args:
        bucket_uri: `s3://bucket`, optionally with a prefix, or `file:///folder`.
        file_path_format_string: Template for the names of plain files; may have `{run_name}`, `{remote_file_name}` and
            others.
        upload_staging_folder: Where copies of plain files wait for their upload.
        num_concurrent_uploads: As in the settings of `Uploader`; 1, Composer's default, means our default.
        backend_kwargs: Only None or `{}`: see `store_options`.
        use_procs, num_attempts: No effect: uploads are retried for `upload_timeout_s`, and `runner="process"` moves
            those of checkpoints into a process.
        remote: Where the run's checkpoints go. Default: `<bucket_uri>/{run_name}`.
        drain_timeout_s, close_timeout_s, settings: As for `CheckpointSaver`.
    """

    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: dict[str, Any] | None = None,
        file_path_format_string: str = "{remote_file_name}",
        num_concurrent_uploads: int = 1,
        upload_staging_folder: str | None = None,
        use_procs: bool = True,
        num_attempts: int = 3,
        *,
        remote: str | None = None,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        del use_procs, num_attempts
        if backend_kwargs:
            raise SettingsError(
                f"backend_kwargs={sorted(backend_kwargs)} apply only to Composer's own object stores",
                hint="pass store_options=ckpt_async.StoreOptions(endpoint_url=…, region=…, put_args=…)",
            )
        self.bucket_uri = bucket_uri.rstrip("/")
        self.file_path_format_string = file_path_format_string
        self._remote = f"{self.bucket_uri}/{{run_name}}" if remote is None else remote
        self._staging_folder = upload_staging_folder
        self._drain_timeout_s, self._close_timeout_s = drain_timeout_s, close_timeout_s
        if num_concurrent_uploads > 1:
            settings.setdefault("num_concurrent_uploads", num_concurrent_uploads)
        self._settings = settings
        self._store_options: StoreOptions | None = settings.get("store_options")
        self._run_name: str | None = None
        self._plain: PlainUploader | None = None
        self._savers: list[ComposersSaver] = []
        self._uploads: dict[ComposersSaver, SaverUploads] = {}

    # --- events --------------------------------------------------------------------------------------------

    def init(self, state: State, logger: Logger) -> None:
        """Open the uploaders, and fetch the newest checkpoint to this node, where Composer's autoresume will look."""
        self.post_close()  # an earlier trainer may not have been closed
        self._run_name = state.run_name
        self._savers = [each for each in state.callbacks if isinstance(each, ComposersSaver)]
        on_all_ranks(self._open_plain)
        for number, saver in enumerate(self._savers):
            has_own = isinstance(saver, CheckpointSaver) and saver.uploads is not None
            if has_own or saver.remote_uploader is not None or saver.remote_file_name is None:
                continue
            _refuse_replicas(state)
            self._uploads[saver] = SaverUploads(
                saver,
                self._remote,
                kind=f"saver{number}" if self._uploads else None,
                drain_timeout_s=self._drain_timeout_s,
                close_timeout_s=self._close_timeout_s,
                settings=self._settings,
            )
            self._uploads[saver].open(state)

    def _open_plain(self) -> None:
        settings = {each: value for each, value in self._settings.items() if each not in ("on_error", "kind")}
        self._plain = PlainUploader(self.bucket_uri, staging_folder=self._staging_folder, **settings)

    def fit_start(self, state: State, logger: Logger) -> None:
        for uploads in self._uploads.values():
            uploads.clear_leftovers(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        for uploads in self._uploads.values():
            uploads.flush()
        self._wait_for_plain()

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._wait_for_plain()

    def predict_end(self, state: State, logger: Logger) -> None:
        self._wait_for_plain()

    def _wait_for_plain(self) -> None:
        if self._plain is not None and (left := self._plain.flush(self._close_timeout_s)):
            logger.warning("plain_files_still_under_way keys=%s", left)

    def post_close(self) -> None:
        """Close the uploaders. Runs after all loggers have closed, because some upload their last file then."""
        try:
            for uploads in self._uploads.values():
                uploads.close()
        finally:
            self._uploads = {}
            if self._plain is not None:
                self._plain.close(self._close_timeout_s)

    # --- files ---------------------------------------------------------------------------------------------

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Accept a file, which is part of a checkpoint or any other. It may be changed or deleted on return."""
        for saver in self._savers:
            if Path(file_path).parent == Path(saver.tmp_dir_for_symlink.name):
                return  # we write a pointer ourselves, after the commit
            if not _is_saving(saver, state):
                continue
            saved = Path(get_save_filename(state, saver.filename.format(state, keep_placeholders=True)))
            if Path(file_path) == saved:  # the last file that Composer passes for a save
                if saver in self._uploads:
                    self._uploads[saver].save(state, str(file_path))
                return
            if Path(file_path) == saved.with_name(_METADATA):
                return
        self._upload_plain(remote_file_name, Path(file_path), overwrite)

    def _upload_plain(self, remote_file_name: str, path: Path, overwrite: bool) -> None:
        key = self._key(remote_file_name)
        try:
            if self._plain is None:
                raise SettingsError("no trainer has run the event INIT of this logger")
            self._plain.put(path, key, overwrite=overwrite)
        except CkptAsyncError as error:
            logger.error("plain_file_not_uploaded key=%s error=%s", key, error)  # noqa: TRY400  the message suffices

    def _key(self, remote_file_name: str) -> str:
        key = format_name_with_dist(
            self.file_path_format_string, run_name=self._run_name or "", remote_file_name=remote_file_name
        )
        return str(key).lstrip("/")

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Fetch the object of this name below `bucket_uri`, or the file that a pointer of this name leads to.

        Raises FileExistsError if the destination exists and `overwrite` is off, FileNotFoundError if nothing is found.
        """
        name = remote_file_name.lstrip("/")
        if name.endswith(_POINTER):  # Composer reads the pointer and then asks for the name in it
            Path(destination).write_text(self._pointed(name))
            return
        if not overwrite and Path(destination).exists():
            raise FileExistsError(f"{destination} already exists, and overwrite is off")
        self._fetch(name, destination, progress_bar)

    def _pointed(self, name: str) -> str:
        """Return the name that a pointer leads to."""
        url = f"{self.bucket_uri}/{name}"
        found = look(url, self._store_options)
        if found.url == url or not found.url.startswith(f"{self.bucket_uri}/"):
            raise FileNotFoundError(f"{url} is not a pointer to something below {self.bucket_uri}")
        return found.url.removeprefix(f"{self.bucket_uri}/")

    def _fetch(self, name: str, destination: str, progress_bar: bool) -> None:
        fetch = partial(
            fetch_file,
            destination=destination,
            store_options=self._store_options,
            overwrite=True,
            progress=None if progress_bar else False,
        )
        try:
            fetch(f"{self.bucket_uri}/{name}")
        except FileNotFoundError:
            fetch(f"{self.bucket_uri}/{name}{_POINTER}")

    def get_uri_for_file(self, remote_file_name: str) -> str:
        """Return where a plain file of this name goes."""
        return f"{self.bucket_uri}/{self._key(remote_file_name)}"


def _is_saving(saver: ComposersSaver, state: State) -> bool:
    return bool(saver.last_checkpoint_batch == state.timestamp.batch)


def _refuse_replicas(state: State) -> None:
    """Raise SettingsError for HSDP: replicas pass no file to a logger, so it cannot see that they have saved."""
    config = state.fsdp_config
    if config is not None and (getattr(config, "data_parallel_replicate_degree", None) or 1) > 1:
        raise SettingsError(
            "with data_parallel_replicate_degree > 1, some ranks pass no file of a save to a logger",
            hint="use ckpt_async.integrations.composer.CheckpointSaver(…, remote=…)",
        )
