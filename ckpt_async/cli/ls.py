"""Lists a run's checkpoints and their files, or the runs below a prefix: `ls`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ckpt_async import threads
from ckpt_async.cli.output import (
    Exit,
    Json,
    Which,
    id_json,
    print_json,
    print_table,
    say,
    saying_later,
    store_options,
    telling_of_silence,
)
from ckpt_async.cli.parsing import WHERE, add_generation, add_kind, add_store_options, as_which
from ckpt_async.core import keys
from ckpt_async.core.boundary import NOTHING_COLLECTED
from ckpt_async.core.model import CheckpointId, Decision, Outcome, Receipt
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import age, in_units, one_line
from ckpt_async.errors import InvalidRecordError, ObjectNotFoundError
from ckpt_async.protocol import steps
from ckpt_async.protocol.overview import STATES
from ckpt_async.protocol.runs import check_known, kinds_below, runs_below
from ckpt_async.restore.checkpoint import RemoteFile, files_of
from ckpt_async.transfer.budgets import Budgets
from ckpt_async.transfer.patient import PatientStore, connect
from ckpt_async.transfer.together import all_or_none

T = TypeVar("T")

# How long requests to a failing store are retried, and the longest pause in between: someone is waiting.
LS_TIMEOUT_S, LS_PAUSE_S = 20.0, 2.0
NUM_RUNS_AT_ONCE = 8
# All decisions are read at once, and there is no training to leave room for.
NUM_RECORDS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Found:
    """The decisions on the run itself, or on one `kind` of its checkpoints, with the store's time.

    They are in order, oldest first, without those that the boundary voids. `unreadable` are records that cannot be
    read, `receipts` those that were asked for.
    """

    kind: str
    decisions: list[Decision]
    server_time: float
    unreadable: list[InvalidRecordError]
    receipts: dict[CheckpointId, list[Receipt]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The prefix of its keys within the run."""
        return f"{keys.kind_place(self.kind)}/" if self.kind else ""

    @property
    def newest(self) -> CheckpointId | None:
        committed = (each.checkpoint for each in self.decisions if each.outcome is Outcome.COMMIT)
        return max(committed, default=None)

    @property
    def committed(self) -> list[Decision]:
        return [each for each in self.decisions if each.outcome is Outcome.COMMIT]


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and what was found of each kind; `kinds` is empty if nobody ever opened the run."""

    url: str
    kinds: list[Found]

    @property
    def unreadable(self) -> list[InvalidRecordError]:
        return [error for of_kind in self.kinds for error in of_kind.unreadable]


@contextlib.asynccontextmanager
async def opened(
    url: str, options: argparse.Namespace
) -> AsyncIterator[tuple[PatientStore, Callable[[], None]]]:
    """Yield the store, and a function to call once it has answered."""
    settings = Settings(upload_timeout_s=LS_TIMEOUT_S, retry_max_s=LS_PAUSE_S)
    budgets = Budgets(settings, num_records=NUM_RECORDS_AT_ONCE)
    store = connect(url, store_options(options), settings, is_patient=False, budgets=budgets)
    try:
        with telling_of_silence(store.url, patience_s=LS_TIMEOUT_S) as heard:
            await store.open(is_read_only=True)
            yield store, heard
    finally:
        await store.close()
        budgets.close()


async def look(
    options: argparse.Namespace, wanted: Callable[[Decision], bool] | None = None
) -> tuple[str, list[Run]]:
    """Return the URL with the run that is there, or with the runs below it.

    With `wanted`, the receipts of such checkpoints are read as well. Only reads, so it needs no right to write.
    Raises ObjectNotFoundError if there was never a run here or below, UnknownKindError if there was never one of the
    requested kind.
    """
    run = await _look_at(options.remote, options, wanted)
    if run.kinds:
        return run.url, [run]
    async with opened(options.remote, options) as (store, heard):
        heard()  # the store has answered already
        text = f"still searching for runs below {store.url}"
        with saying_later(lambda: text, "still_looking", url=store.url):
            below = [] if options.kind else await runs_below(store)
    if not below:
        raise ObjectNotFoundError(f"{run.url} holds no run of ckpt_async, and there are none below it")
    at_once = asyncio.Semaphore(NUM_RUNS_AT_ONCE)

    async def one(place: str) -> Run:
        async with at_once:
            return await _look_at(f"{run.url.removesuffix('/')}/{place}", options, None)

    return run.url, await all_or_none(one(place) for place in below)


async def _look_at(url: str, options: argparse.Namespace, wanted: Callable[[Decision], bool] | None) -> Run:
    async with opened(url, options) as (run, heard):
        found = [] if options.kind else [await _decisions(run, "", heard, wanted)]
        kinds = await kinds_below(run)
        heard()
        if options.kind is not None and options.kind not in kinds:
            await check_known(run, options.kind)
            raise ObjectNotFoundError(f"{run.url} holds no checkpoints of kind {options.kind!r}")
    for kind in kinds:
        if options.kind in (None, kind):
            async with opened(keys.kind_remote(run.url, kind), options) as (store, heard):
                found.append(await _decisions(store, kind, heard, wanted))
    return Run(run.url, [each for each in found if each is not None])


async def _decisions(
    store: PatientStore, kind: str, heard: Callable[[], None], wanted: Callable[[Decision], bool] | None
) -> Found | None:
    """Return what was decided, or None if there was never a run here."""
    listing = await store.list(keys.DECISIONS)
    heard()
    if not listing.objects and not (await store.list(keys.GENERATIONS)).objects:
        return None
    unreadable: list[InvalidRecordError] = []
    boundary = await _or_note(steps.read_boundary(store), unreadable) or NOTHING_COLLECTED
    checkpoints = filter(None, (keys.parse_decision_key(each.key) for each in listing.objects))
    read = await all_or_none(_or_note(steps.read_decision(store, each), unreadable) for each in checkpoints)
    valid = (each for each in read if each is not None and not boundary.voids(each.checkpoint))
    decisions = sorted(valid, key=lambda each: each.checkpoint)
    found = Found(kind, decisions, listing.server_time, unreadable)
    for each in found.committed if wanted is not None else ():
        if wanted is not None and wanted(each):
            receipts = await all_or_none(
                _or_note(steps.bound_receipt(store, each, rank), unreadable)
                for rank in range(each.world_size)
            )
            found.receipts[each.checkpoint] = [receipt for receipt in receipts if receipt is not None]
    return found


async def _or_note(reading: Awaitable[T], unreadable: list[InvalidRecordError]) -> T | None:
    try:
        return await reading
    except InvalidRecordError as error:
        unreadable.append(error)
        return None


def is_wanted(each: Decision, which: Which | None, generation: int | None) -> bool:
    """Return whether a checkpoint has this step or name and this generation, where given. Pure."""
    if generation not in (None, each.checkpoint.generation):
        return False
    return which is None or which.is_of(each.checkpoint) or which.text == each.name


def size_bytes(decisions: Iterable[Decision]) -> int:
    return sum(each.size_bytes for each in decisions)


# --- the command --------------------------------------------------------------------------------------------

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
