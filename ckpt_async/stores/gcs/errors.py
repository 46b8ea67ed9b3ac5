"""What Google's error answers mean, in JSON, XML and plain text."""

from __future__ import annotations

import contextlib
import json
import re

import google.auth.exceptions

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.gcs.credentials import NO_CREDENTIALS
from ckpt_async.stores.http.failures import (
    SOMEBODY_ELSE,
    is_of_somebody_else,
    reason_of_somebody_else,
    reason_of_status,
)
from ckpt_async.stores.http.location import BucketLocation
from ckpt_async.stores.http.messages import Response


class GcsLocation(BucketLocation):
    """A prefix in a bucket of Google Cloud Storage."""

    __slots__ = ()
    scheme = "gs"
    listings = frozenset({"list", "list_multiparts"})

    def failure(self, error: Exception) -> tuple[FailureReason, str]:
        if not isinstance(error, google.auth.exceptions.GoogleAuthError):
            return super().failure(error)
        is_of_network = _is_of_network(error)
        return (FailureReason.TRANSIENT, "") if is_of_network else (FailureReason.AUTH, NO_CREDENTIALS)


def _is_of_network(error: google.auth.exceptions.GoogleAuthError) -> bool:
    return isinstance(error, google.auth.exceptions.TransportError) or error.retryable


def refusal(answer: Response, operation: str, key: str, location: GcsLocation) -> StoreError:
    """Return the error that an error answer means."""
    code, said = _what_it_says(answer)
    message = f"{answer.status} {code}: {said}" if code else f"{answer.status}: {said}"
    reason = _reason_of(answer.status, code, said)
    is_unknown = not code and reason is not FailureReason.CHECKSUM
    if answer.status < 400 or (is_unknown and is_of_somebody_else(answer.status)):
        message = f"{answer.status}, but the answer does not look like one of a store"
        reason = reason_of_somebody_else(answer.status)
        return location.error(message, reason=reason, operation=operation, key=key, hint=SOMEBODY_ELSE)
    if answer.status == 404:
        return _missing(code, said, message, operation, key, location)
    if reason is FailureReason.PRECONDITION:
        return location.unmet(message, operation=operation, key=key)
    if reason is FailureReason.CHECKSUM:
        return location.spoilt(message, operation=operation, key=key)
    hint = (
        _hint_for(answer.status, code, operation, location) if reason is not FailureReason.THROTTLED else ""
    )
    return location.error(message, reason=reason, operation=operation, key=key, hint=hint)


def _missing(
    code: str, said: str, message: str, operation: str, key: str, location: GcsLocation
) -> StoreError:
    is_of_bucket = operation in location.listings or "bucket does not exist" in said.lower()
    if code == "NoSuchBucket" or is_of_bucket:
        hint = f"there is no bucket {location.bucket} at {location.endpoint_url}: create it"
        return location.error(
            message, reason=FailureReason.NOT_FOUND, operation=operation, key=key, hint=hint
        )
    return location.not_found(message, operation=operation, key=key)


_JSON = re.compile(rb"\s*\{")
_XML = {name: re.compile(rb"<%b>([^<]*)</%b>" % (name, name)) for name in (b"Code", b"Message")}


def _what_it_says(answer: Response) -> tuple[str, str]:
    """Return code and message; the code is "" unless the answer has one of Google's forms."""
    text = answer.error
    if _JSON.match(text):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):
            error = json.loads(text)["error"]
            reasons = error.get("errors") or [{}]
            return str(reasons[0].get("reason") or error["code"]), str(error.get("message", ""))
    if (code := _XML[b"Code"].search(text)) is not None:
        said = _XML[b"Message"].search(text)
        return code[1].decode("utf-8", "replace"), said[1].decode("utf-8", "replace") if said else ""
    return "", text[:200].decode("utf-8", "replace").strip()


# https://cloud.google.com/storage/docs/json_api/v1/status-codes, https://cloud.google.com/storage/docs/xml-api/reference-status
_THROTTLED = frozenset(
    "rateLimitExceeded userRateLimitExceeded quotaExceeded SlowDown RequestRateTooHigh".split()
)
_SPOILT = frozenset("BadDigest CrcMismatch InvalidDigest InvalidPart".split())
# The JSON API has no error code for this: "Provided CRC32C "..." doesn't match calculated CRC32C "..."".
_SPOILT_TEXT = re.compile(r"(crc32c|md5|hash).*(match|mismatch)", re.IGNORECASE | re.DOTALL)


def _reason_of(status: int, code: str, said: str) -> FailureReason:
    if code in _THROTTLED:
        return FailureReason.THROTTLED
    if code in _SPOILT or (status == 400 and _SPOILT_TEXT.search(said)):
        return FailureReason.CHECKSUM
    return reason_of_status(status)


def _hint_for(status: int, code: str, operation: str, location: GcsLocation) -> str:
    """Return what to do about an error, or ""."""
    match status, code:
        case _, "userProjectMissing" | "UserProjectMissing":
            return "the bucket's requester pays: set GOOGLE_CLOUD_QUOTA_PROJECT"
        case 401, _:
            return NO_CREDENTIALS
        case 403, _:
            return (
                f"the credentials lack permission for {operation} in {location}; roles/storage.objectUser on"
                " the bucket has it"
            )
        case _:
            return ""
