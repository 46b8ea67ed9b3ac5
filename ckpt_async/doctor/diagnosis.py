"""Derives findings from the facts that `ckpt-async doctor` collected. Pure.

This module must not know how a fact is found out (`checks`). It also has no rules of its own for what may be used:
that a folder or a store cannot be used is what these said themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_async.core.model import without_slash
from ckpt_async.core.units import age, in_units
from ckpt_async.stores.interface import Capabilities

# File systems that do not survive a reboot, or the end of the container.
VOLATILE_FILESYSTEMS = {"tmpfs": "memory", "ramfs": "memory", "overlay": "the container's own layer"}
# A disk is slow above this; only durability waits for it, never training.
SLOW_FSYNC_S = 0.1
# S3 refuses requests whose time is off by more than 15 minutes (S3 API reference, RequestTimeTooSkewed).
REFUSED_SKEW_S, ODD_SKEW_S = 900.0, 30.0
# How many unreadable records are listed.
MAX_LISTED = 10
# Descriptors that a trainer needs besides a socket and a file for each request.
OTHER_OPEN_FILES = 256


class Level(enum.Enum):
    """The level of a finding.

    FAIL: a run would fail, or lose what it promises. WARN: it works, but is weaker or slower than it could be.
    """

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `hint` says what to do."""

    check: str
    level: Level
    message: str
    hint: str = ""


# --- facts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """This machine and its environment. `versions` has None for packages that are not installed."""

    versions: Mapping[str, str | None]
    max_open_files: int
    num_requests: int  # most concurrent requests of an engine with these settings
    settings_given: tuple[str, ...] = ()  # names of variables that set something
    unknown_variables: tuple[str, ...] = ()
    settings_error: str = ""
    settings_hint: str = ""


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A trainer's folder. `tested` is where it was tried out: a parent, if the folder does not exist yet."""

    path: str
    tested: str
    error: str = ""
    hint: str = ""
    filesystem: str = ""
    can_link: bool = True
    other_mounts: tuple[str, ...] = ()  # folders in it on other file systems, where links cannot reach
    free_bytes: int = 0
    min_free_bytes: int = 0
    fsync_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JournalState:
    """What the journal of the folder says."""

    error: str = ""
    hint: str = ""
    summary: str = ""
    remote: str = ""
    is_writable: bool = True
    num_pending: int = 0
    num_failed: int = 0
    running_ranks: tuple[int, ...] = ()
    watched_from: str = ""  # the watcher's state folder, if this is its journal; "" if in the folder

    @property
    def is_there(self) -> bool:
        return bool(self.error or self.summary)


@dataclass(frozen=True, slots=True)
class Tried:
    """Something that was tried in the store. `otherwise`: what follows if it fails, or "" if a trainer cannot do
    without it.
    """

    check: str
    what: str
    error: str = ""
    hint: str = ""
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class Remote:
    """A store, and what was tried in it, up to the first failure after which nothing else makes sense."""

    url: str
    tried: tuple[Tried, ...]
    has_proxy: bool = False
    capabilities: Capabilities | None = None
    is_checksum_compared: bool | None = None
    clock_ahead_s: float | None = None  # the store's clock relative to ours
    round_trip_s: float | None = None
    left_behind: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # records of the run, each with its problem


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast `size_bytes` were uploaded and downloaded, or why that was not tried."""

    size_bytes: int
    upload_s: float = 0.0
    download_s: float = 0.0
    error: str = ""
    left_out: str = ""

    @property
    def is_measured(self) -> bool:
        return not (self.error or self.left_out)

    @property
    def upload_bytes_per_s(self) -> float:
        return self.size_bytes / max(self.upload_s, 1e-9)

    @property
    def download_bytes_per_s(self) -> float:
        return self.size_bytes / max(self.download_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts; None for what was not examined."""

    host: Host
    folder: LocalFolder | None = None
    journal: JournalState | None = None
    remote: Remote | None = None
    speed: Speed | None = None
    checkpoint_bytes: int | None = None  # size of this node's part of a checkpoint


# --- findings ----------------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Finding]:
    """Return every finding that the facts allow, in the order in which a person would check."""
    findings = [*_of_host(facts.host)]
    if facts.folder is not None:
        findings += _of_folder(facts.folder, facts.checkpoint_bytes)
    if facts.journal is not None:
        findings += _of_journal(facts.journal, facts.remote)
    if facts.remote is not None:
        findings += _of_remote(facts.remote)
    if facts.speed is not None:
        findings += _of_speed(facts.speed, facts.checkpoint_bytes)
    return findings


def _of_host(host: Host) -> Iterator[Finding]:
    told = ", ".join(f"{name} {version or 'not installed'}" for name, version in host.versions.items())
    yield Finding("versions", Level.OK, told)
    needed = 2 * host.num_requests + OTHER_OPEN_FILES
    yield _either(
        host.max_open_files >= needed,
        "open files",
        f"{host.max_open_files} allowed",
        f"{host.max_open_files} allowed, {needed} may be needed",
        f"`ulimit -n {needed}`, or LimitNOFILE= of the unit",
    )
    if host.settings_error:
        yield Finding("settings", Level.FAIL, host.settings_error, host.settings_hint)
    else:
        yield Finding("settings", Level.OK, ", ".join(host.settings_given) or "none in the environment")
    for name in host.unknown_variables:
        yield Finding("settings", Level.WARN, f"{name} is not a setting: ignored", "see docs/settings.md")


def _of_folder(folder: LocalFolder, checkpoint_bytes: int | None) -> Iterator[Finding]:
    if folder.error:
        yield Finding("folder", Level.FAIL, folder.error, folder.hint)
        return
    if folder.tested == folder.path:
        yield Finding("folder", Level.OK, f"{folder.path} can be written")
    else:
        yield Finding("folder", Level.OK, f"{folder.path} can be created in {folder.tested}")
    if (what := VOLATILE_FILESYSTEMS.get(folder.filesystem)) is not None:
        yield Finding(
            "file system",
            Level.WARN,
            f"{folder.filesystem}, {what}: what is not uploaded yet does not survive a restart of the node",
            "use a local disk",
        )
    else:
        yield Finding("file system", Level.OK, folder.filesystem or "of unknown type")
    yield _either(
        folder.can_link,
        "hard links",
        "work: shards survive the trainer's own rotation",
        "do not work: a shard that is rotated away before it is uploaded is lost",
        "use ext4 or xfs, or rotate a checkpoint only after `wait` has returned for it",
    )
    for path in folder.other_mounts:
        yield Finding(
            "hard links",
            Level.WARN,
            f"{path} is on another file system: shards there cannot be linked into the spool",
            "keep checkpoints and spool on one file system",
        )
    yield _space(folder, checkpoint_bytes)
    yield _either(
        folder.fsync_s <= SLOW_FSYNC_S,
        "fsync",
        f"{folder.fsync_s * 1000:.1f} ms",
        f"{folder.fsync_s * 1000:.0f} ms: enqueued shards survive a power loss only after this delay",
        "check whether the disk is busy or on the network; training does not wait for fsync",
    )


def _space(folder: LocalFolder, checkpoint_bytes: int | None) -> Finding:
    free = f"{in_units(folder.free_bytes)} free"
    if folder.free_bytes < folder.min_free_bytes:
        return Finding(
            "free space",
            Level.FAIL,
            f"{free}, less than min_free_bytes={folder.min_free_bytes}: `enqueue` would block",
            "free space, or lower min_free_bytes",
        )
    if not checkpoint_bytes:
        return Finding("free space", Level.OK, free)
    room = folder.free_bytes // checkpoint_bytes
    level = Level.FAIL if room < 1 else Level.WARN if room < 2 else Level.OK
    hint = (
        ""
        if room >= 2
        else "one checkpoint is written while another is still being uploaded: make room for two"
    )
    return Finding("free space", level, f"{free}: room for {room} of {in_units(checkpoint_bytes)}", hint)


def _of_journal(journal: JournalState, remote: Remote | None) -> Iterator[Finding]:
    if journal.error:
        yield Finding("journal", Level.FAIL, journal.error, journal.hint)
        return
    if not journal.is_there:
        yield Finding("journal", Level.OK, "none yet: no uploader has run here")
        return
    running = ", ".join(map(str, journal.running_ranks))
    owner = f"ranks running: {running}" if running else "no uploader is running"
    place = "can be read and written"
    if journal.watched_from:
        owner = "a watcher is running" if running else "no watcher is running"
        place = f"a watcher's, in {journal.watched_from!r}: {place}"
    yield _either(
        journal.is_writable,
        "journal",
        f"{place}; {owner}",
        "cannot be written by this user",
        "run as the user whose trainer created it",
        otherwise=Level.FAIL,
    )
    if journal.num_failed:
        level, hint = Level.WARN, "`ckpt-async status` shows why; each is retried automatically"
    elif journal.num_pending and not running:
        what = f" {journal.watched_from}" if journal.watched_from else ""
        level, hint = Level.WARN, f"`ckpt-async drain{what}` or the next launch finishes it"
    else:
        level, hint = Level.OK, ""
    yield Finding("backlog", level, journal.summary, hint)
    if remote is not None and journal.remote and without_slash(journal.remote) != without_slash(remote.url):
        yield Finding(
            "remote",
            Level.FAIL if journal.num_pending else Level.WARN,
            f"the journal's trainer uploads to {journal.remote}, not to {remote.url}",
            "unfinished checkpoints cannot be moved: finish them there first, or use another folder",
        )


def _of_remote(remote: Remote) -> Iterator[Finding]:
    for each in remote.tried:
        if not each.error:
            yield Finding(each.check, Level.OK, each.what)
        else:
            level = Level.WARN if each.otherwise else Level.FAIL
            yield Finding(each.check, level, each.error, each.otherwise or each.hint)
    if remote.has_proxy:
        yield Finding(
            "proxy",
            Level.WARN,
            "requests go through a proxy, which may be slower",
            "set NO_PROXY to exclude hosts",
        )
    if remote.capabilities is not None:
        yield from _of_capabilities(remote.capabilities, remote.is_checksum_compared)
    if remote.clock_ahead_s is not None:
        yield _clock(remote.clock_ahead_s)
    if remote.round_trip_s is not None:
        yield Finding("round trip", Level.OK, f"{remote.round_trip_s * 1000:.1f} ms")
    for record in remote.unreadable[:MAX_LISTED]:
        yield Finding(
            "records",
            Level.WARN,
            f"cannot be read: {record}",
            "what it describes is left alone; find out what wrote it, then delete or restore it",
        )
    if (more := len(remote.unreadable) - MAX_LISTED) > 0:
        yield Finding(
            "records", Level.WARN, f"{more} more cannot be read", "`ckpt-async verify` lists them all"
        )
    if remote.left_behind:
        yield Finding(
            "clean-up",
            Level.WARN,
            f"left behind: {', '.join(remote.left_behind)}",
            "these credentials may not remove it; the next sweep or the bucket's lifecycle rule will",
        )


def _of_capabilities(found: Capabilities, is_compared: bool | None) -> Iterator[Finding]:
    yield _either(
        found.conditional_put,
        "conditional writes",
        "enforced" + f", on {found.place}" * bool(found.place),
        "not enforced: only rank 0 decides, and two trainers that use one run name at the same time are not"
        " fenced",
        "see docs/design.md; never start a run twice at the same time",
    )
    for remark in found.remarks:
        yield Finding("store", Level.WARN, remark)
    if is_compared is not None and found.reads_back:
        yield Finding("checksums", Level.OK, f"{found.checksum_algorithm} is compared with what is read back")
    elif is_compared is not None:
        yield _either(
            is_compared,
            "checksums",
            f"{found.checksum_algorithm} is compared by the store with what arrives",
            f"the store echoes {found.checksum_algorithm} without comparing it: corruption in transit goes undetected",
            "run `ckpt-async verify --read-data 100` from time to time",
        )


def _clock(ahead_s: float) -> Finding:
    off = abs(ahead_s)
    if off < ODD_SKEW_S:
        return Finding("clock", Level.OK, f"within {max(1.0, off):.0f} s of the store's")
    level = Level.FAIL if off >= REFUSED_SKEW_S else Level.WARN
    which = "behind" if ahead_s > 0 else "ahead of"
    return Finding(
        "clock",
        level,
        f"{off:.0f} s {which} the store's; stores refuse requests at 15 min",
        "synchronize this machine's clock with NTP",
    )


def _of_speed(speed: Speed, checkpoint_bytes: int | None) -> Iterator[Finding]:
    if speed.error:
        yield Finding("speed", Level.FAIL, speed.error)
        return
    if speed.left_out:
        yield Finding("speed", Level.WARN, f"not measured: {speed.left_out}", "free some space")
        return
    size = in_units(speed.size_bytes)
    for check, rate in (("upload", speed.upload_bytes_per_s), ("download", speed.download_bytes_per_s)):
        yield Finding(check, Level.OK, f"{size} at {in_units(rate)}/s")
    if checkpoint_bytes:
        duration_s = checkpoint_bytes / speed.upload_bytes_per_s
        yield Finding(
            "checkpoint",
            Level.OK,
            f"{in_units(checkpoint_bytes)} take about {age(duration_s)} to upload: do not save more often"
            " than that",
        )


def _either(
    is_so: bool, check: str, good: str, bad: str, hint: str, *, otherwise: Level = Level.WARN
) -> Finding:
    return Finding(check, Level.OK, good) if is_so else Finding(check, otherwise, bad, hint)
