"""What the errors of the SDK, the HTTP client and the system mean. The only module that knows them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import botocore.exceptions
import botocore.parsers

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.http.failures import (
    UNTRUSTED,
    clock_hint,
    failure_of,
    is_of_somebody_else,
    reachable_hint,
    reason_of_somebody_else,
    reason_of_status,
    somebody_else_hint,
)
from ckpt_async.stores.http.location import BucketLocation
from ckpt_async.stores.http.proxies import has_proxy
from ckpt_async.stores.s3.standing import KEY, KEY_FILE


class S3Location(BucketLocation):
    """A prefix in a bucket of S3 or a compatible service."""

    __slots__ = ()
    scheme = "s3"
    listings = frozenset({"list_objects_v2", "list_multipart_uploads"})

    @contextlib.contextmanager
    def translating(self, operation: str, key: str, unmet: frozenset[int] = frozenset()) -> Iterator[None]:
        """As specified, for the SDK's errors too. `unmet` holds the HTTP statuses with which the condition of this
        request may be refused.
        """
        with super().translating(operation, key):
            try:
                yield
            except botocore.exceptions.ClientError as error:
                raise refusal(error.response, operation, key, self, unmet) from error
            except botocore.exceptions.FlexibleChecksumError as error:
                raise self.spoilt(str(error), operation=operation, key=key) from error
            except botocore.exceptions.ProxyConnectionError as error:
                reason, hint = self.failure(error)
                status = getattr(error.kwargs.get("error"), "status", "")
                message = f"the proxy answered {status}" if status else "the proxy did not connect"
                # The original error has the proxy's URL with its password.
                raise self.error(message, reason=reason, operation=operation, key=key, hint=hint) from None

    def failure(self, error: Exception) -> tuple[FailureReason, str]:
        reachable = is_reachable_hint(self)
        match error:
            case botocore.exceptions.ConnectTimeoutError():
                return FailureReason.TIMEOUT, reachable
            case botocore.exceptions.ReadTimeoutError():
                return FailureReason.TIMEOUT, ""
            case botocore.exceptions.ProxyConnectionError():
                return FailureReason.TRANSIENT, reachable
            case botocore.exceptions.SSLError():
                return FailureReason.TRANSIENT, UNTRUSTED
            case botocore.exceptions.EndpointConnectionError():
                return FailureReason.TRANSIENT, reachable
            case _ if isinstance(error, _MISSING_CREDENTIALS):
                return FailureReason.AUTH, "no usable credentials: set AWS_* variables, a profile or a role"
            case _ if isinstance(error, _BROKEN_CONNECTIONS):
                return FailureReason.TRANSIENT, ""
            case _:
                return failure_of(error, self.endpoint_url or "AWS")


def refusal(
    response: Mapping[str, Any],
    operation: str,
    key: str,
    location: S3Location,
    unmet: frozenset[int] = frozenset(),
) -> StoreError:
    """Return the error that an HTTP error answer means, given in the form in which the SDK reports one."""
    said = response.get("Error", {})
    metadata = response.get("ResponseMetadata", {})
    code, status = said.get("Code", ""), metadata.get("HTTPStatusCode", 0)
    message = f"{status} {code}: {said.get('Message') or ''}".rstrip(": ")
    if operation == "head_object" and status == 400:
        code = "ExpiredToken"  # HEAD answers have no body; S3 sends 400 for an expired token
        message += f" (or: {_NEEDS_KEY})"
    elif status == 400 and "Server Side Encryption" in message:
        return location.error(
            message, reason=FailureReason.OTHER, operation=operation, key=key, hint=_NEEDS_KEY
        )
    reason, hint = meaning_of(code, status, operation, location)
    has_no_code = operation != "head_object" and (not code or code.isdecimal())
    if status == 407 or (is_of_somebody_else(status) and has_no_code):
        return location.error(
            f"{status}, but the answer does not look like one of a store",
            reason=reason_of_somebody_else(status),
            operation=operation,
            key=key,
            hint=somebody_else_hint(location.endpoint_url or _AWS),
        )
    if status in unmet and code != "NoSuchBucket":
        return location.unmet(message, operation=operation, key=key)
    if reason is FailureReason.CHECKSUM:
        return location.spoilt(message, operation=operation, key=key)
    if reason is FailureReason.NOT_FOUND and code != "NoSuchBucket":
        return location.not_found(message, operation=operation, key=key)
    if code == "InvalidObjectState":
        return location.archived(message, operation=operation, key=key, hint=hint)
    if code == "RequestTimeTooSkewed":
        hint = clock_hint(metadata.get("HTTPHeaders", {}).get("date", ""))
    elif reason is FailureReason.AUTH and not hint:
        hint = f"the credentials lack permission for {operation} in {location}"
    return location.error(message, reason=reason, operation=operation, key=key, hint=hint)


_AWS = "https://s3.amazonaws.com"
_AWS_REACHABLE = "is AWS reachable from here, and is the region (AWS_REGION) that of the bucket?"
_NEEDS_KEY = f"if it was stored with a customer's key (SSE-C), set {KEY} or {KEY_FILE}"
_RENEW = "the session token has expired: renew the credentials"
_ELSEWHERE = "is {bucket} in another region? If so, set that region"
_FULL = "the bucket's or the user's quota is used up, or the store is full: free space or raise the quota"

# What each error code means, and what to do about it; a code that is not here means what its status does. From the S3
# API reference, "List of error codes", and from other stores, which are named.
_MEANINGS: dict[str, tuple[FailureReason | None, str]] = {
    # Away, or too busy: the same request may succeed later.
    "SlowDown": (FailureReason.THROTTLED, ""),
    "ServiceUnavailable": (FailureReason.THROTTLED, ""),
    "Throttling": (FailureReason.THROTTLED, ""),
    "ThrottlingException": (FailureReason.THROTTLED, ""),
    "RequestLimitExceeded": (FailureReason.THROTTLED, ""),
    "TooManyRequests": (FailureReason.THROTTLED, ""),
    "RequestTimeout": (FailureReason.TIMEOUT, ""),
    "InternalError": (FailureReason.TRANSIENT, ""),
    "complete_multipart_upload InternalError": (  # Ceph, too, for as long as the same is sent
        FailureReason.TRANSIENT,
        "if the store is Ceph: was the upload aborted meanwhile? Then the next attempt begins a new one",
    ),
    "IncompleteBody": (FailureReason.TRANSIENT, ""),
    "OperationAborted": (FailureReason.TRANSIENT, ""),
    "TemporaryRedirect": (FailureReason.TRANSIENT, ""),
    "ConditionalRequestConflict": (FailureReason.TRANSIENT, ""),
    # Full: somebody may free space.
    "QuotaExceeded": (FailureReason.DISK, _FULL),  # Ceph
    "XMinioStorageFull": (FailureReason.DISK, _FULL),  # MinIO
    # Refused: other credentials may arrive.
    "AccessDenied": (FailureReason.AUTH, "the credentials lack permission for {operation} in {location}"),
    "ExpiredToken": (FailureReason.AUTH, _RENEW),
    "ExpiredTokenException": (FailureReason.AUTH, _RENEW),
    "TokenRefreshRequired": (FailureReason.AUTH, _RENEW),
    "InvalidToken": (FailureReason.AUTH, "the session token is invalid: renew the credentials"),
    "InvalidAccessKeyId": (
        FailureReason.AUTH,
        "the store does not know this access key: is the endpoint correct?",
    ),
    "SignatureDoesNotMatch": (FailureReason.AUTH, "the secret key does not belong to the access key"),
    "RequestTimeTooSkewed": (FailureReason.AUTH, ""),
    # Refused for ever, or by this place.
    "InvalidObjectState": (FailureReason.OTHER, "the object is in an archive class: restore it first"),
    "InvalidArgument": (None, "if the store is Ceph: is the session token one of its own, and valid?"),
    "PermanentRedirect": (None, _ELSEWHERE),
    "AuthorizationHeaderMalformed": (None, _ELSEWHERE),
    "IllegalLocationConstraintException": (None, _ELSEWHERE),
    # Exists, or is another than the condition says.
    "PreconditionFailed": (FailureReason.PRECONDITION, ""),
    # Gone.
    "NoSuchBucket": (FailureReason.NOT_FOUND, "there is no bucket {bucket} at {endpoint}: create it"),
    "NoSuchKey": (FailureReason.NOT_FOUND, ""),
    "NoSuchUpload": (FailureReason.NOT_FOUND, ""),
    # Damaged on the way.
    "BadDigest": (FailureReason.CHECKSUM, ""),
    "InvalidDigest": (FailureReason.CHECKSUM, ""),
    "InvalidPart": (FailureReason.CHECKSUM, ""),
    "XAmzContentChecksumMismatch": (FailureReason.CHECKSUM, ""),
    "XAmzContentSHA256Mismatch": (FailureReason.CHECKSUM, ""),
}
# The statuses that refuse a condition: S3 answers 409 to concurrent requests, and 404 to an If-Match if there is no
# object (S3 user guide, "Conditional writes").
_UNMET = {
    "IfNoneMatch": frozenset({409, 412}),
    "IfMatch": frozenset({404, 409, 412}),
    "CopySourceIfMatch": frozenset({412}),
}


def unmet(parameters: Mapping[str, Any]) -> frozenset[int]:
    """Return the statuses that refuse the condition of a request with these parameters."""
    return next((statuses for name, statuses in _UNMET.items() if name in parameters), frozenset())


_MISSING_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.SSOError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.ProfileNotFound,
)
_BROKEN_CONNECTIONS = (
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.parsers.ResponseParserError,
)


def meaning_of(code: str, status: int, operation: str, location: S3Location) -> tuple[FailureReason, str]:
    """Return what an error code, else an HTTP status (HEAD answers have no code), means, and what to do about it or
    "".
    """
    reason, hint = _MEANINGS.get(f"{operation} {code}") or _MEANINGS.get(code, (None, ""))
    endpoint = location.endpoint_url or "AWS"
    told = hint.format(operation=operation, location=location, bucket=location.bucket, endpoint=endpoint)
    return reason or reason_of_status(status), told


def is_reachable_hint(location: S3Location) -> str:
    """Return what to check if the store does not answer."""
    endpoint = location.endpoint_url or _AWS
    is_direct_aws = endpoint == _AWS and not has_proxy(_AWS)
    return _AWS_REACHABLE if is_direct_aws else reachable_hint(endpoint)
