"""Works on single records of a remote, or checks all of them: `pin`, `unpin`, `unmark`, `verify`."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeVar

from ckpt_async import threads
from ckpt_async.cli.metrics_file import add_metrics_file, tally_of
from ckpt_async.cli.output import (
    ANY,
    Exit,
    Json,
    Which,
    id_json,
    print_line,
    store_options,
    telling_of_silence,
)
from ckpt_async.cli.parsing import (
    WHERE,
    add_generation,
    add_kind,
    add_store_options,
    as_step,
    as_which,
    generation_of,
)
from ckpt_async.core import keys
from ckpt_async.core.boundary import NOTHING_COLLECTED
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import counted
from ckpt_async.errors import FailureReason, InvalidRecordError, ObjectNotFoundError, StoreError
from ckpt_async.protocol import steps
from ckpt_async.protocol import verify as verification
from ckpt_async.protocol.cas import if_readable
from ckpt_async.protocol.runs import check_known
from ckpt_async.sweep.remote import open_run
from ckpt_async.transfer.patient import PatientStore, connect

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Someone is waiting at a terminal, or a script retries by itself.
COMMAND_TIMEOUT_S = 120.0


# --- pin, unpin --------------------------------------------------------------------------------------------


def pin_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("url", metavar="REMOTE", help=WHERE)
    add_kind(parser)
    parser.add_argument(
        "checkpoint",
        metavar="STEP|STEP@gN|NAME",
        type=as_which,
        help="as `ckpt-async ls` shows it; 100@g2 is step 100 of generation 2",
    )


unpin_arguments = unmark_arguments = pin_arguments


def pin(options: argparse.Namespace) -> Exit:
    """Keep a committed checkpoint whatever the policy says."""
    return _set_pin(options, is_pinned=True)


def unpin(options: argparse.Namespace) -> Exit:
    """Leave a checkpoint to the policy again."""
    return _set_pin(options, is_pinned=False)


def _set_pin(options: argparse.Namespace, *, is_pinned: bool) -> Exit:

    async def work(store: PatientStore) -> Decision:
        id_ = await _find(store, options.checkpoint)
        decision = await steps.set_pin(store, id_, is_pinned)
        if decision is None or decision.outcome is not Outcome.COMMIT:
            state = decision.outcome.value if decision else "gone"
            raise ObjectNotFoundError(
                f"{id_} is {state}; it is too late to change its pin", key=keys.decision_key(id_)
            )
        return decision

    decision = with_store(options, work)
    if options.json:
        print(json.dumps({**id_json(decision.checkpoint), "is_pinned": decision.is_pinned}))
    else:
        print(f"step {decision.checkpoint.step} ({decision.name}) is {'' if is_pinned else 'not '}pinned")
    return Exit.OK


def unmark(options: argparse.Namespace) -> Exit:
    """Remove a checkpoint's damage mark, so that readers try the checkpoint again."""

    async def work(store: PatientStore) -> tuple[CheckpointId, str]:
        marks = await steps.read_damages(store)
        id_ = await _find(store, options.checkpoint, among=marks)
        await steps.unmark(store, id_)
        return id_, marks[id_]

    id_, reason = with_store(options, work)
    if options.json:
        print(json.dumps({**id_json(id_), "was_marked": reason}))
    else:
        print_line(
            f"step {id_.step} of generation {id_.generation} is no longer marked; the mark said: {reason}"
        )
    return Exit.OK


async def _find(
    store: PatientStore, wanted: Which, *, among: Collection[CheckpointId] | None = None
) -> CheckpointId:
    """Return the newest committed checkpoint with this step (and generation) or name.

    If `among` is given (those that are marked as damaged), only these count.
    """
    listing = await store.list(keys.DECISIONS)
    boundary = await if_readable(steps.read_boundary(store)) or NOTHING_COLLECTED
    unreadable: InvalidRecordError | None = None
    for each in reversed(listing.objects):
        id_ = keys.parse_decision_key(each.key)
        if id_ is None or boundary.voids(id_) or (among is not None and id_ not in among):
            continue
        if wanted.step is not None and not wanted.is_of(id_):
            continue
        try:
            decision = await steps.read_decision(store, id_)
        except InvalidRecordError as error:
            unreadable = unreadable or error
            continue
        if decision is None or decision.outcome is not Outcome.COMMIT:
            continue
        if wanted.is_of(id_) or wanted.text == decision.name:
            return id_
    if unreadable is not None:
        raise unreadable  # it may be the one
    which = "committed checkpoint" if among is None else "checkpoint that is marked as damaged"
    raise ObjectNotFoundError(f"no {which} has the step or name {wanted.text!r}")


# --- verify ------------------------------------------------------------------------------------------------


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_options(parser)
    parser.add_argument("url", metavar="REMOTE", help=WHERE)
    add_kind(parser)
    parser.add_argument(
        "--step",
        metavar="S[@gN]",
        type=as_step,
        default=ANY,
        help="verify only checkpoints of this step (and generation)",
    )
    add_generation(parser)
    parser.add_argument(
        "--read-data",
        metavar="PERCENT",
        type=_percent,
        default=0.0,
        help="read this share of the shards in full",
    )
    add_metrics_file(parser, "url")
    parser.add_argument("--seed", type=int, default=0, help="seed that selects which shards are read")


def verify(options: argparse.Namespace) -> Exit:
    """Check a remote; INCOMPLETE if anything is not as it must be."""
    generation = generation_of(options.step, options.generation)

    async def work(store: PatientStore) -> Any:
        return await verification.verify(
            store,
            step=options.step.step,
            generation=generation,
            read_percent=options.read_data,
            seed=options.seed,
            connect=lambda: _opened(options),
        )

    result = with_store(options, work, is_read_only=True)
    is_for_some = options.step.step is not None or generation is not None
    if is_for_some and not result.num_committed and not result.findings:
        step = f" has step {options.step.text}" if options.step.text else f" is of generation {generation}"
        raise ObjectNotFoundError(f"no committed checkpoint{step}: nothing to verify")
    code = Exit.INCOMPLETE if result.violations else Exit.UNRELIABLE if result.unread else Exit.OK
    tally = tally_of(options)
    tally.checkpoints["checked"] = result.num_committed
    tally.size_bytes, tally.violations = result.size_bytes, len(result.violations)
    if options.json:
        print(json.dumps(_verification_json(result)))
        return code
    for each in result.findings:
        print_line(finding_line(each))
    for what in result.not_looked_at:
        print_line(f"not checked: {what}")
    for mark in result.marks:
        print_line(f"{mark.checkpoint} is marked as damaged: {mark.reason}")
        if mark.is_sound:
            name = mark.checkpoint.short
            where = f"{options.url} --kind {options.kind}" if options.kind else options.url
            print_line(
                f"  every byte of it is as committed; `ckpt-async unmark {where} {name}` removes the mark"
            )
    how = (
        f"{result.num_shards_read} of them read in full"
        if result.num_shards_read
        else "by the store's checksums"
    )
    wrong = counted(len(result.violations), "problem") if result.violations else "nothing is wrong"
    num_committed = counted(result.num_committed, "committed checkpoint")
    print(f"{num_committed}, {counted(result.num_shards, 'shard')} ({how}): {wrong}")
    return code


def _verification_json(result: verification.Verification) -> Json:
    return {
        "committed": result.num_committed,
        "shards": result.num_shards,
        "shards_read": result.num_shards_read,
        "size_bytes": result.size_bytes,
        "violations": [finding_json(each) for each in result.violations],
        "unread": [finding_json(each) for each in result.unread],
        "leftovers": [finding_json(each) for each in result.findings if each.is_leftover],
        "marked": [
            {**id_json(each.checkpoint), "reason": each.reason, "is_sound": each.is_sound}
            for each in result.marks
        ],
        "not_looked_at": result.not_looked_at,
    }


def _percent(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 100:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")


_FOUND = {
    "missing": "missing",
    "size": "wrong size",
    "checksum": "wrong checksum",
    "record": "wrong record",
    "leftover": "left over",
    "unread": "could not be read",
}


def finding_line(each: verification.Finding) -> str:
    return f"{_FOUND[each.kind]}: {each.key}: {each.message} (rule {each.rule})"


def finding_json(each: verification.Finding) -> Json:
    return {"rule": each.rule, "kind": each.kind, "key": each.key, "message": each.message}


# --- the store ---------------------------------------------------------------------------------------------


def with_store(
    options: argparse.Namespace, work: Callable[[PatientStore], Awaitable[T]], *, is_read_only: bool = False
) -> T:
    async def main() -> T:
        settings = Settings(upload_timeout_s=COMMAND_TIMEOUT_S)
        url = keys.kind_remote(options.url, options.kind or "")
        store = connect(url, store_options(options), settings, is_patient=False)
        try:
            with telling_of_silence(store.url, patience_s=COMMAND_TIMEOUT_S):
                is_there = await open_run(store, is_read_only=is_read_only, timeout_s=COMMAND_TIMEOUT_S)
            if not is_there:
                await _check_kind(options, settings)
                raise ObjectNotFoundError(f"{store.url} holds no run of ckpt_async")
            return await work(store)
        finally:
            await store.close()

    return threads.run(main())


@contextlib.asynccontextmanager
async def _opened(options: argparse.Namespace) -> AsyncIterator[PatientStore]:
    """Open the store once more, over connections of its own."""
    url = keys.kind_remote(options.url, options.kind or "")
    settings = Settings(upload_timeout_s=COMMAND_TIMEOUT_S)
    store = connect(url, store_options(options), settings, is_patient=False)
    try:
        await store.open(is_read_only=True)
        yield store
    finally:
        await store.close()


async def _check_kind(options: argparse.Namespace, settings: Settings) -> None:
    """Raise UnknownKindError if the run has other kinds than the one that was asked for."""
    run = connect(options.url, store_options(options), settings, is_patient=False)
    try:
        await run.open(is_read_only=True)
        await check_known(run, options.kind or "")
    except StoreError as error:
        if error.reason is not FailureReason.NOT_FOUND:
            raise
    finally:
        await run.close()
