"""What the errors of file systems mean. They may be of any class, so this looks at features that many share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ckpt_async.core import errnos
from ckpt_async.errors import CkptAsyncError, FailureReason, ObjectNotFoundError, StoreError

_STATUS = {
    401: FailureReason.AUTH,
    403: FailureReason.AUTH,
    404: FailureReason.NOT_FOUND,
    408: FailureReason.TIMEOUT,
    429: FailureReason.THROTTLED,
    503: FailureReason.THROTTLED,
    507: FailureReason.DISK,
}
# Mistakes in this code or in the file system: another attempt would not help.
_FINAL = (TypeError, ValueError, NotImplementedError, AttributeError, ImportError)
_MISSING = re.compile(r"missing \d+ required [a-z-]+ arguments?: '(\w+)'")


@contextlib.contextmanager
def translating(operation: str, key: str) -> Iterator[None]:
    """Turn every error into a StoreError with the right reason. This package's own errors pass unchanged."""
    try:
        yield
    except CkptAsyncError:
        raise
    except FileNotFoundError as error:
        raise ObjectNotFoundError(operation=operation, key=key) from error
    except Exception as error:
        reason = reason_of(error)
        if reason is FailureReason.NOT_FOUND:
            raise ObjectNotFoundError(operation=operation, key=key) from error
        raise StoreError(
            f"{type(error).__name__}: {error}",
            reason=reason,
            operation=operation,
            key=key,
            hint=_hint(error, reason, operation, key),
        ) from error


def reason_of(error: Exception) -> FailureReason:
    """Return the reason for the failure of one attempt. An unknown error counts as transient: it is retried until the
    time is up.
    """
    name = type(error).__name__
    if isinstance(error, PermissionError) or _is_refusal(error):
        return FailureReason.AUTH
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return FailureReason.TIMEOUT
    if (status := _status(error)) is not None:
        if status in _STATUS:
            return _STATUS[status]
        return FailureReason.TRANSIENT if status >= 500 else FailureReason.OTHER
    if isinstance(error, OSError):
        return errnos.meaning_of(error)[0].reason
    return FailureReason.OTHER if isinstance(error, _FINAL) else FailureReason.TRANSIENT


def _is_refusal(error: Exception) -> bool:
    if "transport shut down" in str(error):  # paramiko: the connection broke during login
        return False
    # Base classes count too: only that of paramiko's error for a key with a passphrase tells what it means.
    names = [each.__name__ for each in type(error).__mro__]
    words = ("Auth", "Forbidden", "Unauthorized", "PermissionDenied", "BadHostKey")
    # Paramiko has no class of its own for a login without any credentials.
    return any(word in name for word in words for name in names) or "No authentication methods" in str(error)


def _status(error: Exception) -> int | None:
    """Return the status of an HTTP answer, as errors of requests, httpx and aiohttp carry it."""
    response = getattr(error, "response", None)
    for status in (getattr(response, "status_code", None), getattr(error, "status", None)):
        if isinstance(status, int) and 300 <= status < 600:
            return status
    return None


def missing_option(error: Exception) -> str:
    """Return the name of a required option that was missing when the file system was made, or "" for other errors."""
    found = _MISSING.search(str(error)) if isinstance(error, TypeError) else None
    return found[1] if found is not None else ""


def options_hint(url: str, option: str = "") -> str:
    scheme = url.partition("://")[0].upper()
    if option:
        return f"set FSSPEC_{scheme}_{option.upper()}"
    return (
        f"set options and credentials in fsspec's configuration: FSSPEC_{scheme}_<OPTION> in the environment"
    )


def _hint(error: Exception, reason: FailureReason, operation: str, key: str) -> str:
    if reason is FailureReason.AUTH and operation == "open":
        return options_hint(key)
    if operation == "open" and reason in (FailureReason.TRANSIENT, FailureReason.TIMEOUT):
        return f"is {key} correct, and reachable from here?"
    if isinstance(error, ImportError):
        return "install the package that fsspec needs for this kind of file system"
    return ""
