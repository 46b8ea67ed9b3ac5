"""Checks whether a run may rely on this node and remote: `doctor`."""

from __future__ import annotations

import argparse
import os
import signal

from ckpt_async.cli.output import Exit, Json, present, store_options
from ckpt_async.cli.parsing import add_store_options, as_path, as_size
from ckpt_async.doctor.checks import examine
from ckpt_async.doctor.diagnosis import Facts, Level, diagnose
from ckpt_async.errors import SettingsError


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument(
        "places",
        metavar="FOLDER|REMOTE",
        nargs="*",
        type=as_path,
        help="the folder that the trainer will write to, and the remote that it will upload to (default: the"
        " remote in the folder's journal)",
    )
    parser.add_argument(
        "--speed", action="store_true", help="also measure the speed by uploading and downloading 64 MiB"
    )
    parser.add_argument(
        "--checkpoint-bytes",
        metavar="SIZE",
        type=as_size,
        help="size of this node's part of a checkpoint, e.g. 40GiB; checks free space and upload time (implies"
        " --speed)",
    )


def doctor(options: argparse.Namespace) -> Exit:
    """Try everything out and print each finding on a line."""
    folder, remote = _places(options)
    # Treat SIGTERM like Ctrl-C, which asyncio's runner turns into a cancellation, so that nothing is left
    # behind.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        facts = examine(
            folder,
            remote,
            store_options(options),
            os.environ,
            measures_speed=options.speed or options.checkpoint_bytes is not None,
            checkpoint_bytes=options.checkpoint_bytes,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    findings = diagnose(facts)
    num_failed = sum(each.level is Level.FAIL for each in findings)
    code = Exit.ERROR if num_failed else Exit.OK
    value = {
        "folder": facts.folder.path if facts.folder else None,
        "remote": facts.remote.url if facts.remote else None,
        "is_ok": not num_failed,
        "findings": [
            {
                "check": each.check,
                "level": each.level.value,
                "message": each.message,
                "hint": each.hint or None,
            }
            for each in findings
        ],
        "measured": _measured(facts),
    }
    width = max(len(each.check) for each in findings)
    lines = [
        f"{each.level.value:4}  {each.check:{width}}  {each.message}"
        + (f" ({each.hint})" if each.hint else "")
        for each in findings
    ]
    lines.append(f"{num_failed} of {len(findings)} checks failed" if num_failed else "nothing failed")
    present(value, lines, is_json=options.json)
    return code


def _places(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """Return the folder and the remote, if given. Only a remote is a URL."""
    folders = [each for each in options.places if "://" not in each]
    remotes = [each for each in options.places if "://" in each]
    if len(folders) > 1 or len(remotes) > 1:
        raise SettingsError("give at most one folder and one remote", hint="see `ckpt-async doctor --help`")
    return next(iter(folders), None), next(iter(remotes), None)


def _measured(facts: Facts) -> Json:
    remote, speed = facts.remote, facts.speed
    is_measured = speed is not None and speed.is_measured
    return {
        "fsync_s": facts.folder.fsync_s if facts.folder and not facts.folder.error else None,
        "free_bytes": facts.folder.free_bytes if facts.folder and not facts.folder.error else None,
        "round_trip_s": remote.round_trip_s if remote else None,
        "clock_ahead_s": remote.clock_ahead_s if remote else None,
        "upload_bytes_per_s": speed.upload_bytes_per_s if speed and is_measured else None,
        "download_bytes_per_s": speed.download_bytes_per_s if speed and is_measured else None,
    }
