"""The conclusions that `doctor` draws: each fact that makes a run untrustworthy gets a line that says what to do."""

from dataclasses import replace
from typing import Any

import pytest

from ckpt_async.doctor.diagnosis import (
    Facts,
    Finding,
    Host,
    JournalState,
    Level,
    LocalFolder,
    Remote,
    Speed,
    Tried,
    diagnose,
)
from ckpt_async.stores.interface import Capabilities

GIB = 1 << 30
SOUND = Facts(
    host=Host({"python": "3.11.7", "torch": None}, max_open_files=1024, num_requests=48),
    folder=LocalFolder("/data", "/data", filesystem="ext4", free_bytes=100 * GIB, fsync_s=0.005),
    journal=JournalState(
        summary="last committed step 7, 9 min ago; nothing is pending", remote="s3://b/run/"
    ),
    remote=Remote(
        "s3://b/run",
        (Tried("list", "it answers"),),
        capabilities=Capabilities(conditional_put=True, multipart=True, checksum_algorithm="crc64nvme"),
        is_checksum_compared=True,
        clock_ahead_s=-1.0,
        round_trip_s=0.02,
    ),
    speed=Speed(64 << 20, upload_s=0.5, download_s=0.25),
    checkpoint_bytes=40 * GIB,
)


def findings_with(part: str, **changes: Any) -> list[Finding]:
    return diagnose(replace(SOUND, **{part: replace(getattr(SOUND, part), **changes)}))


def test_sound_facts_give_no_advice() -> None:
    found = diagnose(SOUND)
    assert {each.level for each in found} == {Level.OK}
    assert {each.hint for each in found} == {""}
    told = {each.check: each.message for each in found}
    assert told["versions"] == "python 3.11.7, torch not installed"
    assert told["upload"] == "64.0 MiB at 128.0 MiB/s"
    assert told["checkpoint"] == "40.0 GiB take about 5 min to upload: do not save more often than that"
    assert told["free space"] == "100.0 GiB free: room for 2 of 40.0 GiB"


def test_unchecked_facts_give_no_findings() -> None:
    checks = {each.check for each in diagnose(Facts(SOUND.host))}
    assert checks == {"versions", "open files", "settings"}


@pytest.mark.parametrize(
    ("part", "changes", "check", "level", "says"),
    [
        ("host", {"max_open_files": 256}, "open files", Level.WARN, "352 may be needed"),
        ("host", {"settings_error": "X=9 must be"}, "settings", Level.FAIL, "X=9"),
        ("host", {"unknown_variables": ("CKPT_ASYNC_X",)}, "settings", Level.WARN, "CKPT_ASYNC_X is no"),
        ("folder", {"error": "on nfs4"}, "folder", Level.FAIL, "on nfs4"),
        ("folder", {"filesystem": "tmpfs"}, "file system", Level.WARN, "memory"),
        ("folder", {"filesystem": "overlay"}, "file system", Level.WARN, "container"),
        ("folder", {"can_link": False}, "hard links", Level.WARN, "do not work"),
        ("folder", {"other_mounts": ("/data/a",)}, "hard links", Level.WARN, "/data/a is on another"),
        ("folder", {"free_bytes": 39 * GIB}, "free space", Level.FAIL, "room for 0"),
        ("folder", {"free_bytes": 79 * GIB}, "free space", Level.WARN, "room for 1"),
        ("folder", {"min_free_bytes": 101 * GIB}, "free space", Level.FAIL, "min_free_bytes"),
        ("folder", {"fsync_s": 0.3}, "fsync", Level.WARN, "300 ms"),
        ("journal", {"error": "has format 9"}, "journal", Level.FAIL, "format 9"),
        ("journal", {"is_writable": False}, "journal", Level.FAIL, "cannot be written"),
        ("journal", {"num_pending": 1}, "backlog", Level.WARN, "step 7"),
        ("journal", {"num_failed": 1, "running_ranks": (0,)}, "backlog", Level.WARN, "step 7"),
        ("journal", {"remote": "s3://b/other"}, "remote", Level.WARN, "s3://b/other, not to s3://b/run"),
        (
            "journal",
            {"remote": "s3://b/x", "num_pending": 1, "running_ranks": (0,)},
            "remote",
            Level.FAIL,
            "s3://b/x, not",
        ),
        ("remote", {"tried": (Tried("write", "", "403", "x"),)}, "write", Level.FAIL, "403"),
        ("remote", {"tried": (Tried("abort", "", "403", "x", "y"),)}, "abort", Level.WARN, "403"),
        ("remote", {"has_proxy": True}, "proxy", Level.WARN, "proxy"),
        ("remote", {"is_checksum_compared": False}, "checksums", Level.WARN, "without comparing"),
        ("remote", {"clock_ahead_s": 31.0}, "clock", Level.WARN, "31 s behind"),
        ("remote", {"clock_ahead_s": -31.0}, "clock", Level.WARN, "31 s ahead"),
        ("remote", {"clock_ahead_s": 900.0}, "clock", Level.FAIL, "900 s behind"),
        ("remote", {"left_behind": ("a",)}, "clean-up", Level.WARN, "left behind: a"),
        ("speed", {"error": "no progress"}, "speed", Level.FAIL, "no progress"),
        (
            "remote",
            {"capabilities": Capabilities(False, True, "crc32c")},
            "conditional writes",
            Level.WARN,
            "rank 0",
        ),
    ],
)
def test_each_weakness_gives_exactly_its_own_finding(
    part: str, changes: dict[str, Any], check: str, level: Level, says: str
) -> None:
    blamed = [each for each in findings_with(part, **changes) if each.level is not Level.OK]
    assert [(each.check, each.level) for each in blamed] == [(check, level)]
    assert says in blamed[0].message
    is_told_by_its_maker = any(name.endswith("error") for name in changes)
    assert blamed[0].hint or is_told_by_its_maker


def test_findings_name_the_folder_that_was_tried() -> None:
    """If the folder does not exist yet, the uploader creates it, so that is not a fault."""
    told = {each.check: each for each in findings_with("folder", path="/data/run/a")}
    assert told["folder"] == Finding("folder", Level.OK, "/data/run/a can be created in /data")


def test_a_backlog_with_a_running_uploader_is_ok() -> None:
    running = findings_with("journal", num_pending=3, running_ranks=(0, 1))
    assert {each.level for each in running} == {Level.OK}
    assert "ranks running: 0, 1" in next(each.message for each in running if each.check == "journal")


def test_a_missing_journal_is_not_a_fault() -> None:
    found = diagnose(replace(SOUND, journal=JournalState()))
    assert "none yet" in next(each.message for each in found if each.check == "journal")
    assert {each.level for each in found} == {Level.OK}


def test_of_many_unreadable_records_the_first_are_named_and_the_rest_are_counted() -> None:
    found = findings_with("remote", unreadable=tuple(f"key-{n}" for n in range(12)))
    told = [each.message for each in found if each.check == "records"]
    assert told == [*(f"cannot be read: key-{n}" for n in range(10)), "2 more cannot be read"]


def test_a_backlog_of_a_watcher_is_finished_in_its_own_folder() -> None:
    found = findings_with("journal", num_pending=1, watched_from="/data/.run.ckpt-async")
    (backlog,) = (each for each in found if each.check == "backlog")
    assert "`ckpt-async drain /data/.run.ckpt-async`" in backlog.hint


def test_space_that_is_just_enough_is_enough() -> None:
    found = findings_with("folder", min_free_bytes=SOUND.folder.free_bytes if SOUND.folder else 0)
    assert {each.level for each in found} == {Level.OK}
