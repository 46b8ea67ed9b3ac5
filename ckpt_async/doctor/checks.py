"""Finds out whether a trainer may rely on this node, folder and remote: `ckpt-async doctor`.

It tries things out as an uploader would, with the uploader's own code, in temporary places that it removes again;
`diagnosis` tells what follows from the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ckpt_async import private
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, RemoteAddress, Superseded
from ckpt_async.core.settings import ENVIRONMENT_PREFIX, Settings
from ckpt_async.doctor.diagnosis import Facts, Host, JournalState, LocalFolder, Remote, Tried
from ckpt_async.doctor.trial import NUM_SAMPLES, Trial, in_one_line
from ckpt_async.errors import CkptAsyncError, JournalError, NoJournalError, SettingsError
from ckpt_async.filesystems import filesystem_of
from ckpt_async.local import journals
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.local.settings_file import load_settings
from ckpt_async.monitor.status import has_owner, load
from ckpt_async.runners.loop import new_loop
from ckpt_async.stores import StoreOptions, check_apart, open_store, options_of, parse_url, web_url
from ckpt_async.transfer.budgets import CONTROL_REQUESTS

PACKAGES = ("ckpt-async", "aiobotocore", "botocore", "aiohttp", "awscrt", "uvloop", "torch")
# Our environment variables that are not settings.
OTHER_VARIABLES = frozenset(
    {
        "DEBUG",
        "LAUNCH_ID",
        "SETTINGS_FILE",
        "S3_REQUEST_PAYER",
        "S3_SSE_C_KEY",
        "S3_SSE_C_KEY_FILE",
        "TLS_PROCESSES",
        "WEBHOOK_SECRET",
    }
)


def examine(
    folder: str | os.PathLike[str] | None,
    remote: str | None,
    store_options: StoreOptions,
    environment: Mapping[str, str],
    *,
    measures_speed: bool = False,
    checkpoint_bytes: int | None = None,
) -> Facts:
    """Examine this machine, and the folder and the remote if given.

    The remote defaults to the one that the folder's journal names. Blocks for some seconds, longer with
    `measures_speed` (64 MiB there and back).

    Leaves nothing behind, neither in the folder nor in the remote. After SIGKILL there may be objects below
    `.ckpt-async/probe/`, which the sweeper removes, a multipart upload there, and a folder `.ckpt-async-doctor-*`.

    Raises SettingsError if the URL or the options make no sense. All other problems are part of the result.
    """
    if folder is not None and remote is not None:
        check_apart(Path(os.path.realpath(folder)), remote)
    host, settings = _look_at_host(environment)
    local, journal, recorded = None, None, None
    with contextlib.ExitStack() as scratch:
        workplace: Folder | None = None
        if folder is not None:
            path = Path(os.path.realpath(folder))
            local, workplace = _try_folder(path, settings, scratch)
            journal, recorded = _look_at_journal(path)
            if not journal.is_there and (watched_from := journals.watched_from(path)) is not None:
                journal, recorded = _look_at_journal(watched_from)
                journal = dataclasses.replace(journal, watched_from=str(watched_from))
        if remote is not None:
            url, options = remote, store_options
        elif recorded is not None:
            url, options = _as_recorded(recorded, store_options, environment)
        else:
            return Facts(host, local, journal, checkpoint_bytes=checkpoint_bytes)
        if measures_speed and workplace is None:
            workplace = Folder(scratch.enter_context(_scratch(None)))
        try:
            store = open_store(_stand_in(url, scratch), options, env=environment)
        except OSError as error:
            refused = Tried("write", "", f"{url}: {error.strerror}", "this user must be able to write to it")
            return Facts(host, local, journal, Remote(url, (refused,)), checkpoint_bytes=checkpoint_bytes)
        # `min_free_bytes` concerns the folder's file system. Without a folder, the file is written to the
        # temporary one.
        kept_bytes = max(0, settings.min_free_bytes) if folder is not None else 0
        trial = Trial(store, settings, workplace if measures_speed else None, kept_bytes)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(trial.run())
        found = dataclasses.replace(trial.found, url=url, has_proxy=_has_proxy(url, options, environment))
    return Facts(host, local, journal, found, trial.speed, checkpoint_bytes)


# --- the machine -------------------------------------------------------------------------------------------


def _look_at_host(environment: Mapping[str, str]) -> tuple[Host, Settings]:
    settings, error, hint = Settings(), "", ""
    try:
        settings = load_settings({}, environment)
    except SettingsError as raised:
        error, hint = in_one_line(raised), raised.hint
    known = {field.name.upper() for field in dataclasses.fields(Settings)}
    ours = {
        name: name.removeprefix(ENVIRONMENT_PREFIX)
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    host = Host(
        versions={
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: _version(name) for name in PACKAGES},
        },
        max_open_files=_max_open_files(),
        num_requests=max(settings.num_concurrent_uploads, settings.max_concurrent_uploads) + CONTROL_REQUESTS,
        settings_given=tuple(sorted(name for name, rest in ours.items() if rest in known)),
        unknown_variables=tuple(
            sorted(
                name
                for name, rest in ours.items()
                if rest not in known | OTHER_VARIABLES and not error.startswith(name)
            )
        ),
        settings_error=error,
        settings_hint=hint,
    )
    return host, settings


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _max_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


# --- the folder --------------------------------------------------------------------------------------------


def _try_folder(
    path: Path, settings: Settings, scratch: contextlib.ExitStack
) -> tuple[LocalFolder, Folder | None]:
    """Open a scratch folder in `path` as an uploader would, and write to a journal there."""
    above = _existing(path)
    try:
        workplace = Folder(
            scratch.enter_context(_scratch(above)),
            allows_unknown_filesystem=settings.allow_unknown_filesystem,
        )
        fsync_s = _time_journal(workplace)
    except JournalError as error:
        return LocalFolder(str(path), str(above), in_one_line(error), error.hint), None
    except OSError as error:
        hint = "the trainer's user must be able to write to it"
        return LocalFolder(str(path), str(above), f"{str(above)!r}: {error.strerror}", hint), None
    free_bytes, _ = workplace.space()
    return (
        LocalFolder(
            str(path),
            str(above),
            filesystem=filesystem_of(above),
            can_link=workplace.can_link,
            other_mounts=tuple(_other_mounts(above)) if above == path else (),
            free_bytes=free_bytes,
            min_free_bytes=max(0, settings.min_free_bytes),
            fsync_s=fsync_s,
        ),
        workplace,
    )


@contextlib.contextmanager
def _scratch(above: Path | None) -> Iterator[str]:
    """Yield a folder of our own, which is removed afterwards."""
    path = tempfile.mkdtemp(prefix=f"{keys.PRIVATE}-doctor-", dir=above)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _time_journal(folder: Folder) -> float:
    """Return how long it typically takes until a journal row would survive power loss."""
    journal = Journal(folder, 0)
    try:
        took_s = []
        for number in range(NUM_SAMPLES):
            began = time.perf_counter()
            journal.append([Superseded(CheckpointId(1, number), "tried out by doctor")])
            journal.sync()
            took_s.append(time.perf_counter() - began)
        return sorted(took_s)[NUM_SAMPLES // 2]
    finally:
        journal.close()


def _other_mounts(path: Path) -> Iterator[str]:
    here = path.stat().st_dev
    for each in os.scandir(path):
        with contextlib.suppress(OSError):
            if each.is_dir() and each.stat().st_dev != here:
                yield each.path


def _look_at_journal(path: Path) -> tuple[JournalState, RemoteAddress | None]:
    try:
        private.check(path / keys.PRIVATE)
        found = load(path)
        recorded = list(_recorded(path))
    except NoJournalError:
        return JournalState(), None
    except CkptAsyncError as error:
        return JournalState(error=in_one_line(error), hint=error.hint), None
    except OSError as error:
        return JournalState(error=str(error), hint="run as the user whose trainer created it"), None
    privates = [journals.private_of(path, kind) for kind in found]
    needed = [each for private in privates for each in (private, *private.glob("journal*.log"))]
    running = {rank for kind, each in found.items() for rank in each.ranks if has_owner(path, rank, kind)}
    state = JournalState(
        summary="; ".join(
            f"kind {kind}: {each.summary}" if kind else each.summary for kind, each in found.items()
        ),
        remote=recorded[-1].url if recorded else "",
        is_writable=all(os.access(each, os.W_OK) for each in needed),
        num_pending=sum(len(each.pending) for each in found.values()),
        num_failed=sum(each.queue["failed"][0] for each in found.values()),
        running_ranks=tuple(sorted(running)),
    )
    return state, recorded[-1] if recorded else None


def _recorded(path: Path) -> Iterator[RemoteAddress]:
    """Yield the run's remote as each journal of the folder names it, that of the run itself last."""
    for kind, states in reversed(journals.states(path).items()):
        for each in states:
            if (remote := each.local.remote) is not None:
                yield dataclasses.replace(remote, url=keys.run_remote(remote.url, kind))


# --- the remote --------------------------------------------------------------------------------------------


def _as_recorded(
    recorded: RemoteAddress, given: StoreOptions, environment: Mapping[str, str]
) -> tuple[str, StoreOptions]:
    address = dataclasses.replace(
        recorded,
        endpoint_url=given.endpoint_url or recorded.endpoint_url,
        region=given.region or recorded.region,
    )
    return recorded.url, options_of(address, given, env=environment)


def _has_proxy(url: str, options: StoreOptions, environment: Mapping[str, str]) -> bool:
    if (address := web_url(url, options, env=environment)) is None:
        return False
    from ckpt_async.stores.http.proxies import has_proxy

    return has_proxy(address)


def _stand_in(url: str, scratch: contextlib.ExitStack) -> str:
    """Return the URL to try out: for a `file://` remote that does not exist yet, one beside it.

    Opening such a remote would create it.
    """
    location = parse_url(url)
    root = Path(location.prefix)
    if location.scheme != "file" or (root / keys.PRIVATE).exists():
        return url
    return f"file://{scratch.enter_context(_scratch(_existing(root)))}/run"
