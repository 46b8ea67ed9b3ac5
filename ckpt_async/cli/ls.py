"""Lists a run's checkpoints and their files, or the runs below a prefix: `ls`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from ckpt_async import threads
from ckpt_async.cli.looking import Found, Run, is_wanted, look, size_bytes
from ckpt_async.cli.output import Exit, Json, id_json, print_json, print_table
from ckpt_async.cli.parsing import WHERE, add_generation, add_kind, add_store_options, as_which
from ckpt_async.cli.stderr import say
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.units import age, in_units, one_line
from ckpt_async.errors import InvalidRecordError, ObjectNotFoundError
from ckpt_async.protocol.overview import STATES
from ckpt_async.restore.checkpoint import RemoteFile, files_of

Shown = tuple[Found, Decision]


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("remote", metavar="REMOTE", help=f"{WHERE}, or a prefix with runs below it")
    parser.add_argument(
        "checkpoint",
        metavar="STEP|STEP@gN|NAME",
        nargs="?",
        type=as_which,
        help="only this checkpoint; 100@g2 is step 100 of generation 2",
    )
    add_kind(parser)
    add_generation(parser)
    parser.add_argument(
        "--all", action="store_true", help="also list checkpoints that were given up or pruned"
    )
    parser.add_argument(
        "-l", "--long", action="store_true", help="list every file with its ranks, size and checksum"
    )


def ls(options: argparse.Namespace) -> Exit:
    """Print what is committed in a remote, of all kinds or one, or in the runs below it.

    INCOMPLETE if a record cannot be read.
    """
    wanted = partial(is_wanted, which=options.checkpoint, generation=options.generation)
    url, runs = threads.run(look(options, wanted if options.long else None))
    if [run.url for run in runs] != [url]:
        return _runs(options, url, runs)
    (run,) = runs
    code = Exit.INCOMPLETE if run.unreadable else Exit.OK
    shown = [
        (of_kind, each)
        for of_kind in run.kinds
        for each in of_kind.decisions
        if (options.all or each.outcome is Outcome.COMMIT) and wanted(each)
    ]
    if not shown and (options.checkpoint or options.generation) and not run.unreadable:
        raise ObjectNotFoundError(f"{url} has no committed checkpoint{_which(options)}")
    if options.json:
        print_json(_json(run, shown, is_long=options.long))
        return code
    _tell_unreadable(run.unreadable)
    num_given_up = sum(each.outcome is Outcome.ABORT for of_kind in run.kinds for each in of_kind.decisions)
    if num_given_up and not options.all:
        say(f"{num_given_up} given up; `ckpt-async ls {url} --all` shows why", "given_up", num=num_given_up)
    if not shown:
        if not run.unreadable:
            print("no checkpoint is committed yet")
        return code
    titles, rows = (FILE, _file_rows(shown)) if options.long else (CHECKPOINT, _checkpoint_rows(shown))
    first = 0 if any(of_kind.kind for of_kind in run.kinds) else 1  # no column for kinds where there are none
    print_table(titles[first:], [row[first:] for row in rows])
    return code


def _which(options: argparse.Namespace) -> str:
    step = f" with the step or name {options.checkpoint.text!r}" if options.checkpoint else ""
    return step + (f" of generation {options.generation}" if options.generation else "")


def _tell_unreadable(unreadable: Sequence[InvalidRecordError]) -> None:
    for error in unreadable:
        say(f"cannot be read: {error}", "record_unreadable", key=error.key)


# --- a run ---------------------------------------------------------------------------------------------------


CHECKPOINT = ("KIND", "STEP", "NAME", "GENERATION", "RANKS", "SHARDS", "SIZE", "AGE", "")
FILE = ("KIND", "STEP", "GENERATION", "RANK", "SIZE", "CHECKSUM", "KEY")


def _checkpoint_rows(shown: Sequence[Shown]) -> list[tuple[str, ...]]:
    return [
        (
            of_kind.kind or "-",
            str(each.checkpoint.step),
            each.name,
            str(each.checkpoint.generation),
            str(each.world_size),
            str(each.num_shards),
            in_units(each.size_bytes),
            age(of_kind.server_time - each.decided_at),
            ", ".join(_remarks(each, of_kind.newest)),
        )
        for of_kind, each in shown
    ]


def _file_rows(shown: Sequence[Shown]) -> list[tuple[str, ...]]:
    return [
        (
            of_kind.kind or "-",
            str(each.checkpoint.step),
            str(each.checkpoint.generation),
            ",".join(map(str, file.ranks)),
            in_units(file.size_bytes),
            f"{file.checksum.algorithm}:{file.checksum.value}" if file.checksum else "",
            of_kind.prefix + file.key,
        )
        for of_kind, each in shown
        for file in _files_of(of_kind, each)
    ]


def _files_of(of_kind: Found, decision: Decision) -> list[RemoteFile]:
    files = files_of(of_kind.receipts.get(decision.checkpoint, ()))
    return [files[name] for name in sorted(files)]


def _json(run: Run, shown: Sequence[Shown], *, is_long: bool) -> Json:
    newest = {of_kind.kind: of_kind.newest and id_json(of_kind.newest) for of_kind in run.kinds}
    return {
        "remote": run.url,
        "latest": newest.pop("", None),
        "kinds": {kind: {"latest": latest} for kind, latest in newest.items()},
        "checkpoints": [
            {
                "kind": of_kind.kind or None,
                **_decision_json(each, of_kind.newest, of_kind.server_time),
                **(
                    {"files": [_file_json(file, of_kind.prefix) for file in _files_of(of_kind, each)]}
                    if is_long
                    else {}
                ),
            }
            for of_kind, each in shown
        ],
        "unreadable": [error.key for error in run.unreadable],
    }


def _decision_json(each: Decision, newest: CheckpointId | None, server_time: float) -> Json:
    return {
        **id_json(each.checkpoint),
        "name": each.name,
        "state": STATES[each.outcome],
        "is_latest": each.checkpoint == newest,
        "is_pinned": each.is_pinned,
        "ranks": each.world_size,
        "shards": each.num_shards,
        "size_bytes": each.size_bytes,
        "decided_at": each.decided_at,
        "age_s": max(0.0, server_time - each.decided_at),
        "metrics": dict(each.metrics),
        "reason": each.reason or None,
    }


def _file_json(file: RemoteFile, prefix: str) -> Json:
    checksum = file.checksum and {"algorithm": file.checksum.algorithm, "value": file.checksum.value}
    return {
        "name": file.name,
        "key": prefix + file.key,
        "ranks": list(file.ranks),
        "size_bytes": file.size_bytes,
        "checksum": checksum,
    }


def _remarks(each: Decision, newest: CheckpointId | None) -> Iterator[str]:
    if each.checkpoint == newest:
        yield "latest"
    if each.is_pinned:
        yield "pinned"
    said = {"abort": "given up", "pruning": "being pruned", "pruned": "pruned"}.get(each.outcome.value)
    if said:
        yield f"{said}: {one_line(each.reason)}" if each.reason else said


# --- runs below a prefix -------------------------------------------------------------------------------------


def _runs(options: argparse.Namespace, url: str, runs: Sequence[Run]) -> Exit:
    if options.checkpoint or options.long or options.all or options.generation:
        raise ObjectNotFoundError(
            f"{url} itself holds no run of ckpt_async, but there are runs below it: name one of them"
        )
    unreadable = [error for run in runs for error in run.unreadable]
    if options.json:
        print_json({"remote": url, "runs": [_run_json(run) for run in runs]})
    else:
        _tell_unreadable(unreadable)
        rows = [_run_row(run) for run in runs]
        print_table(("RUN", "CHECKPOINTS", "STEP", "SIZE", "AGE", "KINDS"), rows)
    return Exit.INCOMPLETE if unreadable else Exit.OK


def _run_row(run: Run) -> tuple[str, ...]:
    told = _run_json(run)
    newest = told["latest"] or {}
    return (
        run.url,
        str(told["checkpoints"]),
        str(newest.get("step", "-")),
        in_units(told["size_bytes"]),
        "-" if told["age_s"] is None else age(told["age_s"]),
        ", ".join(told["kinds"]),
    )


def _run_json(run: Run) -> Json:
    """Return a run as JSON. `latest` and the age are those of the newest commit of any kind."""
    committed = [(each, of_kind) for of_kind in run.kinds for each in of_kind.committed]
    newest = max(committed, key=lambda each: each[0].checkpoint, default=None)
    return {
        "remote": run.url,
        "latest": newest and id_json(newest[0].checkpoint),
        "age_s": newest and max(0.0, newest[1].server_time - newest[0].decided_at),
        "checkpoints": len(committed),
        "size_bytes": size_bytes(each for each, _ in committed),
        "kinds": [of_kind.kind for of_kind in run.kinds if of_kind.kind],
        "unreadable": [error.key for error in run.unreadable],
    }
