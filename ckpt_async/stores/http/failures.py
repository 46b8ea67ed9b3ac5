"""What HTTP statuses and connection failures mean, the same for every store."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec

import aiohttp

from ckpt_async.errors import CkptAsyncError, FailureReason
from ckpt_async.stores.http.messages import MalformedResponseError, http_date
from ckpt_async.stores.http.proxies import proxy_of

P = ParamSpec("P")

UNTRUSTED = (
    "is the endpoint's certificate trusted here? see SSL_CERT_FILE, REQUESTS_CA_BUNDLE, for S3 AWS_CA_BUNDLE"
)
SOMEBODY_ELSE = "did something other than the store respond: a proxy, a cache, a login page?"
# S3 and Azure refuse what was signed earlier, or will be later, than this.
MAX_SKEW_S = 15 * 60
_BROKEN_CONNECTIONS = (aiohttp.ClientError, http.client.HTTPException, asyncio.IncompleteReadError, OSError)


def reason_of_status(status: int) -> FailureReason:
    match status:
        case 401 | 403:
            return FailureReason.AUTH
        case 404:
            return FailureReason.NOT_FOUND
        case 408:
            return FailureReason.TIMEOUT
        case 409:
            return FailureReason.TRANSIENT
        case 412:
            return FailureReason.PRECONDITION
        case 429 | 503:
            return FailureReason.THROTTLED
        case 501:
            return FailureReason.OTHER
        case _:
            return FailureReason.TRANSIENT if status >= 500 else FailureReason.OTHER


def is_of_somebody_else(status: int) -> bool:
    """Return whether an answer with this status, and without a store's error code, comes from a middlebox such as a
    proxy, a load balancer or a login page. (A 404 of this kind says nothing about our objects.)
    """
    return 300 <= status < 400 or status in (400, 403, 404, 407)


def reason_of_somebody_else(status: int) -> FailureReason:
    """Return the reason for such an answer: the next attempt may get past it, unless it forbids the request."""
    return FailureReason.AUTH if status == 403 else FailureReason.TRANSIENT


def somebody_else_hint(endpoint: str) -> str:
    proxy = proxy_of(endpoint)
    return (
        f"did the proxy {proxy}, which is set in the environment, answer instead of the store?"
        if proxy
        else SOMEBODY_ELSE
    )


def is_clock_wrong(date: str) -> bool:
    """Return whether our clock is so far from the store's, by the Date of its answer, that it refuses our requests."""
    try:
        return abs(time.time() - http_date("Date", date)) > MAX_SKEW_S
    except MalformedResponseError:
        return False


def clock_hint(date: str) -> str:
    here = email.utils.formatdate(usegmt=True)
    return f"this machine's clock is wrong: it is {here} here and {date or '?'} at the store"


def reachable_hint(endpoint: str) -> str:
    proxy = proxy_of(endpoint)
    way = f"through the proxy {proxy}, which is set in the environment" if proxy else "from here"
    return f"is {endpoint} correct, and reachable {way}?"


def failure_of(error: Exception, endpoint: str) -> tuple[FailureReason, str]:
    """Return why a request to `endpoint` got no answer, and a hint what to do about it."""
    match error:
        case MalformedResponseError():
            return FailureReason.TRANSIENT, SOMEBODY_ELSE
        case TimeoutError():
            return FailureReason.TIMEOUT, reachable_hint(endpoint)
        case ssl.SSLCertVerificationError() | aiohttp.ClientConnectorCertificateError():
            return FailureReason.TRANSIENT, UNTRUSTED
        case ConnectionRefusedError() | socket.gaierror() | aiohttp.ClientConnectorError():
            return FailureReason.TRANSIENT, reachable_hint(endpoint)
        case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH):
            return FailureReason.TRANSIENT, reachable_hint(endpoint)
        case _ if isinstance(error, _BROKEN_CONNECTIONS):
            return FailureReason.TRANSIENT, ""
        case _:
            return FailureReason.OTHER, ""


class _SinkError(CkptAsyncError):
    """Carries an error of a sink past the translation of the store's own errors."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def telling_failures_of(sink: Callable[P, None]) -> Iterator[Callable[P, None]]:
    """Yield a wrapper of `sink` whose errors pass every translation within, and are raised unchanged."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            sink(*args, **kwargs)
        except Exception as error:
            raise _SinkError(error) from error

    try:
        yield guarded
    except _SinkError as error:
        raise error.cause from None
