"""Sharded checkpoints with torch.distributed.checkpoint: save on any number of ranks, load on any other number.

Every function is called on all ranks of the process group. Saving and loading use torch's own collectives; after a save
there is none (rule R9). The collectives of `async_save` run beside those of training: if both use gloo, give it a group
of its own.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from ckpt_async.core import naming
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import (
    CheckpointGoneError,
    DamagedCheckpointError,
    RankFailedError,
    SettingsError,
    StateMismatchError,
)
from ckpt_async.restore import Checkpoint
from ckpt_async.restore.fetching import use_newest
from ckpt_async.restore.options import FindOptions, check, part
from ckpt_async.torch.agreement import on_all_ranks
from ckpt_async.torch.dcp_reader import CkptAsyncReader
from ckpt_async.torch.dcp_writer import FolderWriter, discard, files_of_rank, hand_over, there
from ckpt_async.torch.options import DcpOptions, LoadLatestOptions
from ckpt_async.torch.resume import find_together
from ckpt_async.torch.snapshot import SnapshotBuffers
from ckpt_async.torch.states import matching
from ckpt_async.trainer.uploader import Uploader

logger = logging.getLogger(__name__)

Group = dist.ProcessGroup | None
# How torch's planners report that a checkpoint does not fit the state.
_NO_KEY = "Missing key in checkpoint state_dict: "
_OTHER_SIZE = "Size mismatch between saved "
_TORCH_SAYS = (_NO_KEY, _OTHER_SIZE)
# Errors after which an older checkpoint may be loaded instead.
UNUSABLE = (DamagedCheckpointError, CheckpointGoneError)


def save(
    state_dict: dict[str, Any],
    step: int,
    uploader: Uploader,
    *,
    name: str | None = None,
    metrics: Mapping[str, float] | None = None,
    publish_as: str | None = None,
    planner: SavePlanner | None = None,
    process_group: Group = None,
    thread_count: int = 1,
) -> Metadata:
    """Write the state into `<uploader's folder>/<name>/` as `torch.distributed.checkpoint.save` does, and hand it over.

    On return this rank's files are enqueued and sealed; `uploader.wait(step)` waits for the commit. All ranks of the
    uploader take part; a rank outside of the process group (for example a replica under HSDP) calls
    `uploader.seal(step)`. `publish_as`, the same on all ranks, is the folder to which the store copies the checkpoint's
    files once it is committed: see `Uploader.enqueue`.

    If an uploader does not accept this step (SealedError, FencedError, …), its rank raises that error and the others
    raise RankFailedError, before any file is touched. If any rank fails while it writes, all of them raise
    a RankFailedError that is also torch's CheckpointException; then nothing is enqueued, what was written is removed,
    and the step may be saved again. Later errors of `Uploader.enqueue` are raised on the rank concerned; then the
    checkpoint is never committed.
    """
    saving = _Saving(step, uploader, name, metrics, publish_as, process_group)
    saving.check()
    try:
        with _no_warning_of_one_process():
            metadata: Metadata = state_dict_saver.save(
                state_dict,
                storage_writer=saving.writer(thread_count),
                planner=planner,
                process_group=process_group,
            )
    except CheckpointException as error:
        saving.discard()
        raise _catchable(error, process_group) from error
    except BaseException:
        saving.discard()
        raise
    saving.hand_over(metadata)
    return metadata


def async_save(
    state_dict: dict[str, Any],
    step: int,
    uploader: Uploader,
    *,
    name: str | None = None,
    metrics: Mapping[str, float] | None = None,
    publish_as: str | None = None,
    planner: SavePlanner | None = None,
    process_group: Group = None,
    thread_count: int = 1,
    mode: Literal["thread", "process"] = "thread",
    buffers: SnapshotBuffers | None = None,
) -> Future[Metadata]:
    """Save like `save`, but return as soon as the state is copied to CPU memory.

    The rest is done by torch's own thread, or by a process that torch starts at the first call and keeps; the process
    only writes files, and this process hands them over.

    The copy goes into `buffers`, if given: keep them for all saves, because to allocate memory takes several times as
    long as to copy (and they hold it between saves). Not with `mode="process"`, for which torch moves the copy. If a
    rank cannot copy its state, all ranks raise before anything is written, as for a step that is not accepted.

    The future is done when this rank's files are enqueued and sealed; it holds what `save` returns or raises. Wait for
    it before the next save and before the uploader is closed.
    """
    options = _in_process(buffers) if mode == "process" else {}
    saving, kept, copied = (
        _Saving(step, uploader, name, metrics, publish_as, process_group),
        buffers or SnapshotBuffers(),
        {},
    )

    def copy() -> None:
        state = {
            key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state_dict.items()
        }
        copied.update(kept.take(state, keeps_sharing=False))

    saving.check(then=copy)
    written: Any = state_dict_saver.async_save(
        copied,
        storage_writer=saving.writer(thread_count),
        planner=planner,
        process_group=process_group,
        **options,
    )
    kept.reader = written
    handed_over: Future[Metadata] = Future()
    handed_over.set_running_or_notify_cancel()  # torch's collectives cannot be cancelled, so neither can this

    def finish(written: Future[Metadata]) -> None:
        try:
            try:
                metadata = written.result()
            except CheckpointException as error:
                saving.discard()
                raise _catchable(error, process_group) from error
            except BaseException:
                saving.discard()
                raise
            saving.hand_over(metadata)
        except BaseException as error:  # noqa: BLE001  the future carries it
            handed_over.set_exception(error)
        else:
            handed_over.set_result(metadata)

    written.add_done_callback(finish)
    return handed_over


def _in_process(buffers: SnapshotBuffers | None) -> dict[str, Any]:
    if buffers is not None:
        raise SettingsError("buffers= cannot be kept with mode='process'", hint="leave it out")
    if not hasattr(state_dict_saver, "AsyncCheckpointerType"):
        raise SettingsError(f"mode='process' needs a newer torch than {torch.__version__}")
    return {"async_checkpointer_type": state_dict_saver.AsyncCheckpointerType.PROCESS}


class _Saving:
    """One checkpoint on its way from this rank's memory to the uploader."""

    def __init__(
        self,
        step: int,
        uploader: Uploader,
        name: str | None,
        metrics: Mapping[str, float] | None,
        publish_as: str | None,
        process_group: Group,
    ) -> None:
        self._step, self._uploader, self._metrics = step, uploader, metrics
        self._publish_as = publish_as
        self._name = naming.checkpoint_name(name, step)
        self._path = uploader.checkpoints_folder / self._name
        self._process_group = process_group
        self._rank = dist.get_rank(process_group) if dist.is_initialized() else 0
        self._before = there(self._path, self._rank)

    def check(self, then: Callable[[], None] = lambda: None) -> None:
        """Check that the uploaders of all ranks accept the step, and do what is to be done before torch begins.

        A collective, because a rank that raised alone would leave the others waiting.
        """

        def work() -> None:
            self._uploader.check_takes(self._step, self._name)
            then()

        on_all_ranks(work, group=self._process_group)

    def writer(self, thread_count: int) -> FolderWriter:
        return FolderWriter(self._path, thread_count=thread_count)

    def hand_over(self, metadata: Metadata) -> None:
        """Hand over this rank's files. Every rank has succeeded: torch reports success to all ranks or to none."""
        files = files_of_rank(metadata, self._rank)
        hand_over(self._uploader, self._step, self._name, files, self._metrics, self._publish_as)

    def discard(self) -> None:
        discard(self._path, self._rank, self._before)


def load_latest(
    state_dict: dict[str, Any],
    remote: str,
    *,
    planner: LoadPlanner | None = None,
    process_group: Group = None,
    **options: Unpack[LoadLatestOptions],
) -> Checkpoint | None:
    """Load the newest complete checkpoint of a run, or that of `step`, into the state, in place.

    Works on any number of ranks. Returns None and leaves the state as it was if there is no checkpoint. The run may be
    another tool's (see `restore.find`): of OLMo and OLMo-core what is in `model_and_optim` is loaded, `{"model": …,
    "optim": …}`. The options are those of `restore.find` and of `CkptAsyncReader`.

    One rank looks for the checkpoint and tells the others. If it turns out to be damaged on any rank, or was pruned in
    the meantime, all ranks go on to the next older one together, unless that lacks something that was already loaded
    from the damaged one (StateMismatchError).

    Raises on all ranks InvalidNameError if the checkpoint was not saved by torch.distributed.checkpoint;
    RankFailedError, whose cause is what `restore.find` raised (without a process group, that error itself);
    StateMismatchError, naming the key or the shape, if the checkpoint does not fit the state or has NaN; and
    RankFailedError with every rank's failure, for example a refused validation or a store that does not answer. (The
    last two are also torch's CheckpointException.) If a rank cannot even open the checkpoint, it raises its own
    error, and the others RankFailedError. Ctrl-C ends the reads of its rank, which then raises KeyboardInterrupt. The
    state is undefined after an error.
    """
    check("load_latest", options, LoadLatestOptions)
    choice, how = part(options, FindOptions), part(options, DcpOptions)
    # One that was asked for has no older one in its place.
    may_pass_over = options.get("step") is None and not remote.endswith(naming.POINTER_SUFFIX)
    loaded: set[str] = set()

    def newest(passing_over: Collection[CheckpointId]) -> Checkpoint | None:
        choice["passing_over"] = passing_over
        return find_together(remote, process_group, **choice)

    def use(checkpoint: Checkpoint) -> None:
        with CkptAsyncReader(checkpoint, **how) as reader:
            reader.check_is_dcp()  # the answer is the same on all ranks
            reader.loaded = loaded
            planning = _Planner(options.get("ignore_keys", ())) if planner is None else planner
            _load(state_dict, reader, planning, process_group, may_pass_over=may_pass_over)

    found = use_newest(newest, use, may_pass_over=may_pass_over)
    return None if found is None else found[0]


class _Planner(DefaultLoadPlanner):
    """torch's planner, except that it does not ask for ignored keys, which the checkpoint need not have, and compares
    shapes: older versions of torch (2.4) load what two shapes have in common, and say nothing.
    """

    def __init__(self, ignore_keys: Sequence[str]) -> None:
        super().__init__(allow_partial_load=bool(ignore_keys))
        self._ignore_keys = ignore_keys

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if (
                isinstance(saved, TensorStorageMetadata)
                and hasattr(value, "size")
                and saved.size != value.size()
            ):
                raise ValueError(f"{_OTHER_SIZE}{saved.size} and current: {value.size()} for {name}")
        plan = super().create_local_plan()
        if not self._ignore_keys:
            return plan
        absent = self.state_dict.keys() - self.metadata.state_dict_metadata.keys()
        paths = {name: self.mappings.get(name, (name,)) for name in absent}
        if wanted := absent - matching(paths, self._ignore_keys, warns=False):
            raise StateMismatchError(f"the checkpoint has no {min(wanted)!r}", hint="add it to ignore_keys")
        return plan


def _load(
    state_dict: dict[str, Any],
    reader: CkptAsyncReader,
    planner: LoadPlanner | None,
    process_group: Group,
    *,
    may_pass_over: bool,
) -> None:
    try:
        on_all_ranks(
            reader.open, group=process_group
        )  # torch would send only the text of an error to the others
        with _no_warning_of_one_process():
            state_dict_loader.load(
                state_dict, storage_reader=reader, planner=planner, process_group=process_group
            )
    except CheckpointException as error:
        if not isinstance(failed := _catchable(error, process_group), Exception):
            raise failed from error
        # Every rank sees the same failures, so either all go on or none does.
        is_unusable = any(isinstance(each, UNUSABLE) for each, _ in error.failures.values())
        if not may_pass_over or not is_unusable:
            raise _mismatch(reader.checkpoint.name, error) or failed from error
        told = (f"rank {rank}: {each}" for rank, (each, _) in sorted(error.failures.items()))
        raise DamagedCheckpointError("; ".join(told)) from error


@contextlib.contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """Torch warns whenever there is no process group, which is one way to use this module."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class _OfTorch(CheckpointException):
    """Of torch's class, for callers that catch that, but one sentence instead of every rank's traceback.

    torch's own error is not even an Exception.
    """

    def __init__(self, message: str, failures: dict[int, Any], *, hint: str = "") -> None:
        Exception.__init__(self, f"{message} ({hint})" if hint else message)
        self.hint, self._failures = hint, failures

    def __str__(self) -> str:
        return str(self.args[0])


class _OtherStateError(_OfTorch, StateMismatchError):
    pass


class _FailedError(_OfTorch, RankFailedError):
    pass


def _catchable(error: CheckpointException, group: Group) -> _FailedError | KeyboardInterrupt:
    """Return what to raise for torch's error: an Exception or, after Ctrl-C on this rank, that."""
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    if isinstance(error.failures.get(rank, (None,))[0], KeyboardInterrupt):
        return KeyboardInterrupt()  # torch takes it for a failure like any other
    causes = ((rank, cause) for rank, (cause, _) in sorted(error.failures.items()))
    told = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes)
    return _FailedError(told, error.failures)


def _mismatch(name: str, error: CheckpointException) -> _OtherStateError | None:
    """Return an error naming the first key or shape that does not fit, if nothing but that failed; else None."""
    told = [(each, str(each)) for _, (each, _) in sorted(error.failures.items())]
    if not all(isinstance(each, StateMismatchError) or text.startswith(_TORCH_SAYS) for each, text in told):
        return None
    first, text = told[0]
    if isinstance(first, StateMismatchError):
        return _OtherStateError(first.without_hint, error.failures, hint=first.hint)
    what, hint = text, "has the model changed?"
    if text.startswith(_NO_KEY):
        key = text.removeprefix(_NO_KEY).removesuffix(".")
        what, hint = (
            f"the checkpoint has no {key!r}",
            "add it to ignore_keys if the state may keep its own value",
        )
    return _OtherStateError(f"{name} does not fit the state: {what}", error.failures, hint=hint)
