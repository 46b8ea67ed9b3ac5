"""Finds out whether a trainer may rely on this node, folder and remote: `ckpt-async doctor`.

It tries things out as an uploader would, with the uploader's own code, in places of its own that it removes again;
`diagnosis` says what follows from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import aiofiles

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, RemoteAddress, Superseded
from ckpt_async.core.settings import ENVIRONMENT_PREFIX, Settings
from ckpt_async.core.units import in_units
from ckpt_async.doctor.diagnosis import Facts, Host, JournalState, LocalFolder, Remote, Speed, Tried
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    IntegrityError,
    JournalError,
    NoJournalError,
    SettingsError,
    StoreError,
)
from ckpt_async.local import journals
from ckpt_async.local.filesystems import filesystem_of
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.local.settings_file import load_settings
from ckpt_async.monitor.status import has_owner, load
from ckpt_async.protocol.verify import find_unreadable
from ckpt_async.runners.loop import new_loop
from ckpt_async.stores import StoreOptions, find_endpoint, open_store, options_of, parse_url
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, Store
from ckpt_async.transfer import upload
from ckpt_async.transfer.budgets import CONTROL_REQUESTS
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.upload import all_or_none

PACKAGES = ("ckpt-async", "aiobotocore", "botocore", "aiohttp", "awscrt", "uvloop", "torch")
# Variables of ours that are no settings.
OTHER_VARIABLES = frozenset({"DEBUG", "LAUNCH_ID", "SETTINGS_FILE"})
# One small request: the store is there, or it is not.
ANSWER_S = 15.0
# All records of a long run: a decision for each checkpoint.
RECORDS_S = 60.0
NUM_SAMPLES = 5
SPEED_BYTES, SPEED_RANGES = 64 << 20, 8
SPEED_TIMEOUT_S = 120.0


def examine(
    folder: str | os.PathLike[str] | None,
    remote: str | None,
    store_options: StoreOptions,
    environment: Mapping[str, str],
    *,
    measures_speed: bool = False,
    checkpoint_bytes: int | None = None,
) -> Facts:
    """Look at this machine, and at the folder and the remote if they are given; the remote is by default the one that
    the folder's journal names. Blocks for some seconds, longer with `measures_speed` (64 MiB there and back).

    Leaves nothing behind, neither in the folder nor in the remote. SIGKILL may leave objects below
    `.ckpt_async/probe/`, which the sweeper removes, a multipart upload there and a folder `.ckpt_async-doctor-*`.

    Raises SettingsError if the URL or the options make no sense. All other trouble is in what is returned.
    """
    host, settings = _look_at_host(environment)
    local, journal, recorded = None, None, None
    with contextlib.ExitStack() as scratch:
        workplace: Folder | None = None
        if folder is not None:
            path = Path(os.path.realpath(folder))
            local, workplace = _try_folder(path, settings, scratch)
            journal, recorded = _look_at_journal(path)
        address = (remote, store_options) if remote is not None else _as_recorded(recorded, store_options)
        if address is None:
            return Facts(host, local, journal, checkpoint_bytes=checkpoint_bytes)
        if measures_speed and workplace is None:
            workplace = Folder(scratch.enter_context(_scratch(None)))
        url, options = address
        try:
            store = open_store(_stand_in(url, scratch), options, env=environment)
        except OSError as error:
            refused = Tried("write", "", f"{url}: {error.strerror}", "this user must be able to write to it")
            return Facts(host, local, journal, Remote(url, (refused,)), checkpoint_bytes=checkpoint_bytes)
        # That is about the folder's file system; without a folder the file is written to the temporary one's.
        kept_bytes = settings.min_free_bytes if folder is not None else 0
        trial = _Trial(store, settings, workplace if measures_speed else None, kept_bytes)
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
        error, hint = _message(raised), raised.hint
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


def _message(error: CkptAsyncError) -> str:
    """Without the hint, which is told by itself; in one line."""
    return " ".join(str(error).removesuffix(f" ({error.hint})").split())


# --- the folder --------------------------------------------------------------------------------------------


def _try_folder(
    path: Path, settings: Settings, scratch: contextlib.ExitStack
) -> tuple[LocalFolder, Folder | None]:
    """Open a folder within it as an uploader would, and write to a journal there."""
    above = _existing(path)
    try:
        workplace = Folder(
            scratch.enter_context(_scratch(above)),
            allows_unknown_filesystem=settings.allow_unknown_filesystem,
        )
        fsync_s = _time_journal(workplace)
    except JournalError as error:
        return LocalFolder(str(path), str(above), _message(error), error.hint), None
    except OSError as error:
        hint = "the trainer's user must be able to write to it"
        return LocalFolder(str(path), str(above), f"{str(above)!r}: {error.strerror}", hint), None
    free_bytes, _ = workplace.space()
    return (
        LocalFolder(
            str(path),
            str(above),
            filesystem=filesystem_of(str(above), Path("/proc/self/mountinfo")),
            can_link=workplace.can_link,
            other_mounts=tuple(_other_mounts(above)) if above == path else (),
            free_bytes=free_bytes,
            min_free_bytes=settings.min_free_bytes,
            fsync_s=fsync_s,
        ),
        workplace,
    )


@contextlib.contextmanager
def _scratch(above: Path | None) -> Iterator[str]:
    """A folder of our own, gone afterwards."""
    path = tempfile.mkdtemp(prefix=f"{keys.PRIVATE}-doctor-", dir=above)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _existing(path: Path) -> Path:
    """It, or what is there above it."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _time_journal(folder: Folder) -> float:
    """How long it typically takes until a row would survive power loss."""
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
        found = load(path)
        recorded = [each.local().remote for each in journals.read(path).values()]
    except NoJournalError:
        return JournalState(), None
    except CkptAsyncError as error:
        return JournalState(error=_message(error), hint=error.hint), None
    except OSError as error:
        return JournalState(error=str(error), hint="run as the user whose trainer made it"), None
    private = path / keys.PRIVATE
    state = JournalState(
        summary=found.summary,
        remote=found.remote or "",
        is_writable=all(os.access(each, os.W_OK) for each in (private, *private.glob("journal*.sqlite"))),
        num_pending=len(found.pending),
        num_failed=found.queue["failed"][0],
        running_ranks=tuple(rank for rank in found.ranks if has_owner(path, rank)),
    )
    return state, next((each for each in reversed(recorded) if each is not None), None)


# --- the remote --------------------------------------------------------------------------------------------


def _as_recorded(recorded: RemoteAddress | None, given: StoreOptions) -> tuple[str, StoreOptions] | None:
    if recorded is None:
        return None
    options = dataclasses.replace(
        options_of(recorded, profile=given.profile),
        endpoint_url=given.endpoint_url or recorded.endpoint_url,
        region=given.region or recorded.region,
    )
    return recorded.url, options


def _has_proxy(url: str, options: StoreOptions, environment: Mapping[str, str]) -> bool:
    scheme = parse_url(url).scheme
    if scheme in ("file", "memory"):
        return False
    from ckpt_async.stores.http.connections import has_proxy

    return has_proxy(find_endpoint(scheme, options, env=environment) or "https://s3.amazonaws.com")


def _stand_in(url: str, scratch: contextlib.ExitStack) -> str:
    """A `file://` remote is made when it is opened. One that is not there yet is tried out beside where it will be."""
    location = parse_url(url)
    root = Path(location.prefix)
    if location.scheme != "file" or (root / keys.PRIVATE).exists():
        return url
    return f"file://{scratch.enter_context(_scratch(_existing(root)))}/run"


class _Trial:
    """Does in a store what uploaders, readers and sweepers do, one thing after another."""

    def __init__(
        self, store: Store, settings: Settings, workplace: Folder | None, min_free_bytes: int
    ) -> None:
        self._store, self._settings, self._workplace = store, settings, workplace
        self._min_free_bytes = min_free_bytes
        self._name = f"{keys.PROBES}doctor-{secrets.token_hex(8)}"
        self._tried: list[Tried] = []
        self._written: list[str] = []
        self._uploads: dict[str, str] = {}  # unfinished multipart uploads: id by key
        self._facts = Remote(store.url, ())
        self.speed: Speed | None = None

    @property
    def found(self) -> Remote:
        return dataclasses.replace(self._facts, tried=tuple(self._tried))

    async def run(self) -> None:
        try:
            if await self._reach():
                try:
                    if await self._try("write", "objects can be written", self._write):
                        await self._try_the_rest()
                finally:
                    await self._clean_up()
        finally:
            await self._store.close()

    def _note(self, **facts: object) -> None:
        self._facts = dataclasses.replace(self._facts, **facts)  # type: ignore[arg-type]

    async def _try(
        self,
        check: str,
        what: str,
        act: Callable[[], Awaitable[None]],
        *,
        is_needed: bool = True,
        timeout_s: float = ANSWER_S,
    ) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await act()
        except TimeoutError:
            self._tried.append(Tried(check, what, f"no answer within {timeout_s:.0f} s", "", is_needed))
            return False
        except StoreError as error:
            self._tried.append(Tried(check, what, _message(error), error.hint, is_needed))
            return False
        self._tried.append(Tried(check, what))
        return True

    async def _reach(self) -> bool:
        """Whether anything else makes sense. Credentials that may not list may still be good for the rest."""
        if parse_url(self._store.url).scheme == "file":
            return True  # it need not be there yet
        refusal: list[StoreError] = []

        async def listed() -> None:
            try:
                await self._store.open(is_read_only=True)
                began = time.time()
                listing = await self._store.list(self._name)
                # The time that is told has whole seconds, cut off.
                self._note(clock_ahead_s=listing.server_time + 0.5 - (began + time.time()) / 2)
            except StoreError as error:
                refusal.append(error)
                raise

        is_listed = await self._try("list", f"{self._store.url} answers and can be listed", listed)
        return is_listed or any(error.reason is FailureReason.AUTH for error in refusal)

    async def _write(self) -> None:
        """Open it as an uploader does, which probes what it can do, and see what it says to a wrong checksum."""
        store, right, wrong = self._store, f"{self._name}-a", f"{self._name}-b"
        await store.close()
        await store.open()
        self._note(capabilities=store.capabilities)
        checksum = checksum_of(b"a", store.capabilities.checksum_algorithm)
        self._written += right, wrong
        await store.put(right, BytesBody(b"a"), checksum)
        try:
            await store.put(wrong, BytesBody(b"b"), checksum)
        except IntegrityError:
            self._note(is_checksum_compared=True)
        else:
            self._note(is_checksum_compared=False)

    async def _try_the_rest(self) -> None:
        if await self._try("read", "objects can be read", self._read):
            what, timeout_s = "the run's records can be read", RECORDS_S
            await self._try("records", what, self._read_records, is_needed=False, timeout_s=timeout_s)
        if self._store.capabilities.multipart:
            await self._try("multipart", "multipart uploads can be completed", self._complete_multipart)
            await self._try(
                "abort", "multipart uploads can be aborted", self._abort_multipart, is_needed=False
            )
            await self._try(
                "list multiparts", "multipart uploads can be listed", self._list_multiparts, is_needed=False
            )
        if self._workplace is not None:
            self.speed = await self._measure_speed(self._workplace)
        await self._try("delete", "objects can be deleted again", self._delete, is_needed=False)

    async def _read(self) -> None:
        took_s = []
        for _ in range(NUM_SAMPLES):
            began = time.perf_counter()
            data, _ = await self._store.get(self._written[0], max_size_bytes=16)
            took_s.append(time.perf_counter() - began)
            if data != b"a":
                raise IntegrityError("other bytes came back", operation="get", key=self._written[0])
        self._note(round_trip_s=min(took_s))

    async def _read_records(self) -> None:
        """Of a run that is there already: one that cannot be read stops what it speaks of."""
        found = await find_unreadable(PatientStore(self._store, self._settings, is_patient=False))
        self._note(unreadable=tuple(f"{each.key}: {each.message}" for each in found))

    async def _complete_multipart(self) -> None:
        await self._complete(await self._begin_multipart("c"))

    async def _abort_multipart(self) -> None:
        key = await self._begin_multipart("d")
        try:
            await self._abort(key)
        except StoreError:
            await self._complete(key)  # so that it can be deleted
            raise

    async def _begin_multipart(self, which: str) -> str:
        key = f"{self._name}-{which}"
        self._uploads[key] = await self._store.create_multipart(key)
        self._written.append(key)
        return key

    async def _complete(self, key: str) -> None:
        store, data = self._store, b"part"
        checksum = checksum_of(data, store.capabilities.checksum_algorithm)
        part = await store.put_part(key, self._uploads[key], 1, BytesBody(data), checksum)
        await store.complete_multipart(key, self._uploads[key], [part], checksum, len(data))
        del self._uploads[key]

    async def _abort(self, key: str) -> None:
        await self._store.abort_multipart(key, self._uploads[key])
        del self._uploads[key]

    async def _list_multiparts(self) -> None:
        await self._store.list_multiparts(self._name)

    async def _delete(self) -> None:
        await self._store.delete(self._written)

    async def _clean_up(self) -> None:
        """What a check that failed half-way, or Ctrl-C, has left."""
        left: tuple[str, ...] = ()
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                left = tuple(each.key for each in (await self._store.list(self._name)).objects)
                await self._store.delete(left)
                left = ()
        for key in tuple(self._uploads):
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self._abort(key)
        self._note(left_behind=(*left, *self._uploads))

    async def _measure_speed(self, workplace: Folder) -> Speed:
        key, store = f"{self._name}-e", self._store
        if what := self._no_room(workplace):
            return Speed(SPEED_BYTES, left_out=what)
        settings = dataclasses.replace(
            self._settings, upload_timeout_s=SPEED_TIMEOUT_S, retry_max_s=self._settings.retry_initial_s
        )

        def opened(multipart: upload.Resume) -> None:
            self._uploads[key] = multipart.upload_id

        try:
            source = await _large_source(workplace)
            try:
                self._written.append(key)
                began = time.perf_counter()
                await upload.upload(
                    PatientStore(store, settings, is_patient=False),
                    source,
                    key,
                    smallest_part_bytes=settings.part_size_bytes,
                    resume=None,
                    opened=opened,
                    sent=lambda _: None,
                )
                upload_s = time.perf_counter() - began
                self._uploads.pop(key, None)
            finally:
                source.close()
            began = time.perf_counter()
            ranges = upload.plan_parts(SPEED_BYTES, SPEED_BYTES // SPEED_RANGES)
            async with asyncio.timeout(SPEED_TIMEOUT_S):
                await all_or_none(
                    store.get_range(key, each.offset, each.size_bytes, lambda _: None) for each in ranges
                )
            return Speed(SPEED_BYTES, upload_s, time.perf_counter() - began)
        except (CkptAsyncError, OSError) as error:
            return Speed(SPEED_BYTES, error=str(error) or f"nothing within {SPEED_TIMEOUT_S:.0f} s")

    def _no_room(self, workplace: Folder) -> str:
        """Why the file must not be written, or "": a trainer beside us may need the space."""
        free_bytes, _ = workplace.space()
        needed_bytes = SPEED_BYTES
        if parse_url(self._store.url).scheme == "file":
            needed_bytes *= 2  # what is sent may come to lie on the same disk
        if free_bytes - needed_bytes >= self._min_free_bytes:
            return ""
        what = f"{in_units(free_bytes)} are free, and it takes {in_units(needed_bytes)}"
        return f"{what} beside min_free_bytes={self._min_free_bytes}" if self._min_free_bytes else what


async def _large_source(folder: Folder) -> upload.Source:
    """A shard to be sent, of bytes that nothing on the way makes fewer of."""
    path = folder.path / "speed.bin"
    async with aiofiles.open(path, "wb") as file:
        for _ in range(SPEED_RANGES):
            await file.write(os.urandom(SPEED_BYTES // SPEED_RANGES))
    ((identity, _),) = folder.link([(path.name, path.name)], "spool/doctor")
    return upload.Source(folder.open_source(path.name, None, identity), identity, str(path))
