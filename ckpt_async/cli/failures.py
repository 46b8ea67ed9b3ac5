"""Reports an error to the user: one line, an exit code, and with `--json` an object."""

from __future__ import annotations

import json
import logging
import os

from ckpt_async.cli.output import Exit
from ckpt_async.cli.parsing import UsageError
from ckpt_async.cli.stderr import say
from ckpt_async.errors import (
    CkptAsyncError,
    DamagedCheckpointError,
    FailureReason,
    FolderInUseError,
    IntegrityError,
    InvalidNameError,
    InvalidRecordError,
    NoJournalError,
    NoUsableCheckpointError,
    ObjectNotFoundError,
    SettingsError,
    StoreError,
    UnknownKindError,
    UnreliableReadError,
)


def tell(error: Exception, *, is_json: bool) -> Exit:
    """Print one line to stderr, with --json also an object to stdout; a traceback only if asked for."""
    code, message, hint = _explain(error)
    name = type(error).__name__
    shown = error if os.environ.get("CKPT_ASYNC_DEBUG") == "1" else None
    say(
        f"ckpt-async: {_one_line(message, hint)}",
        "command_failed",
        level=logging.ERROR,
        exception=shown,
        error=name,
        exit_code=int(code),
    )
    if is_json:
        value = {"kind": name, "message": message, "hint": hint or None, "exit_code": int(code)}
        print(json.dumps({"error": value}))  # in one line: `watch` prints one object per line
    return code


def told(error: Exception) -> str:
    """Return an error in one line, with what to do."""
    _, message, hint = _explain(error)
    return _one_line(message, hint)


def _one_line(message: str, hint: str) -> str:
    return " ".join(f"{message} ({hint})".split() if hint else message.split())


def code_of(error: Exception) -> Exit:
    """Return the exit code of a command that ends with this error."""
    return _explain(error)[0]


def _explain(error: Exception) -> tuple[Exit, str, str]:
    """Return exit code, message and hint."""
    if isinstance(error, UsageError):
        return Exit.USAGE, str(error), error.hint
    if isinstance(error, CkptAsyncError):
        return _code(error), error.without_hint, error.hint
    if isinstance(error, PermissionError) and error.filename:
        what = f"{os.fsdecode(error.filename)!r} cannot be used: {error.strerror}"
        return Exit.ERROR, what, "run this as the user whose trainer created it"
    hint = "CKPT_ASYNC_DEBUG=1 shows the traceback"
    if isinstance(error, OSError):
        return Exit.ERROR, str(error), hint
    return Exit.ERROR, f"this is a bug: {error!r}", hint


def _code(error: CkptAsyncError) -> Exit:
    match error:
        case SettingsError() | InvalidNameError() | UnknownKindError():
            return Exit.USAGE
        case ObjectNotFoundError() if (
            error.operation
        ):  # gone in the middle: a script may start from scratch after 3
            return Exit.ERROR
        case NoJournalError() | StoreError(reason=FailureReason.NOT_FOUND):
            return Exit.NOT_FOUND
        case InvalidRecordError() | IntegrityError() | DamagedCheckpointError() | NoUsableCheckpointError():
            return Exit.INCOMPLETE
        case UnreliableReadError():
            return Exit.UNRELIABLE
        case FolderInUseError():
            return Exit.TEMPORARY
        case StoreError(reason=FailureReason.THROTTLED | FailureReason.TRANSIENT | FailureReason.TIMEOUT):
            return Exit.TEMPORARY
        case _:
            return Exit.ERROR
