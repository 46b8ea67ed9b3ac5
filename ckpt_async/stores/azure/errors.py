"""What the errors of Azure, the HTTP clients and the system mean, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.azure.account import Account
from ckpt_async.stores.http.failures import (
    SOMEBODY_ELSE,
    clock_hint,
    is_clock_wrong,
    is_of_somebody_else,
    reason_of_somebody_else,
    reason_of_status,
)
from ckpt_async.stores.http.location import BucketLocation
from ckpt_async.stores.http.messages import Response


@dataclass(frozen=True, slots=True)
class AzureLocation(BucketLocation):
    """A prefix in a container of a storage account."""

    scheme: ClassVar[str] = "az"
    listings: ClassVar[frozenset[str]] = frozenset({"list_blobs", "open"})

    account: Account


def code_of(answer: Response) -> str:
    """Return the service's own name for an error. The answer to a HEAD has it only as a header."""
    if code := answer.headers.get("x-ms-error-code"):
        return code
    found = re.search(rb"<Code>([^<]*)</Code>", answer.error)
    return found[1].decode("utf-8", "replace") if found else ""


def refusal(
    answer: Response, operation: str, key: str, location: AzureLocation, *, is_conditional: bool = False
) -> StoreError:
    """Return the error that an HTTP error answer means."""
    code, status = code_of(answer), answer.status
    message = f"{status} {code}: {_said(answer)}".rstrip(": ")
    if is_of_somebody_else(status) and not code and "x-ms-request-id" not in answer.headers:
        return location.error(
            f"{status}, but the answer does not look like one of Azure",
            reason=reason_of_somebody_else(status),
            operation=operation,
            key=key,
            hint=SOMEBODY_ELSE,
        )
    reason = _reason_of(code, status, message)
    if code == "ContainerNotFound":
        hint = f"there is no container {location.bucket} in the account {location.account.name}: create it"
        return location.error(message, reason=reason, operation=operation, key=key, hint=hint)
    if is_conditional and (
        reason is FailureReason.PRECONDITION
        or (reason is FailureReason.NOT_FOUND and "copy" not in operation)
    ):
        return location.unmet(message, operation=operation, key=key)
    if reason is FailureReason.CHECKSUM:
        return location.spoilt(message, operation=operation, key=key)
    if reason is FailureReason.NOT_FOUND:
        return location.not_found(message, operation=operation, key=key)
    hint = _HINTS.get(code, "")
    if code in ("BlobArchived", "BlobBeingRehydrated"):
        return location.archived(message, operation=operation, key=key, hint=hint)
    if reason is FailureReason.AUTH and not hint:
        hint = _hint_for_auth(answer, operation, location)
    return location.error(message, reason=reason, operation=operation, key=key, hint=hint)


def _said(answer: Response) -> str:
    """Return the first line of the service's message; the rest only identifies the request."""
    found = re.search(rb"<Message>([^<]*)</Message>", answer.error)
    return found[1].decode("utf-8", "replace").strip().partition("\n")[0] if found else ""


def _hint_for_auth(answer: Response, operation: str, location: AzureLocation) -> str:
    detail = answer.error.decode("utf-8", "replace")
    if is_clock_wrong(date := answer.headers.get("date", "")):
        return clock_hint(date)
    if "time frame" in detail or "expired" in detail.lower():
        return f"the SAS or token has expired: it is {date or '?'} at the store"
    if "ignature" in detail:
        return f"the key or SAS does not belong to the account {location.account.name}: is that the right account?"
    return f"the credentials lack permission for {operation} in {location.bucket} of {location.account.name}"


# "Common REST API error codes" and "Blob Storage error codes" of Microsoft's REST reference. Other codes are judged by
# the HTTP status.
_REASONS = {
    "ServerBusy": FailureReason.THROTTLED,
    "OperationTimedOut": FailureReason.TRANSIENT,
    "ContainerBeingDeleted": FailureReason.TRANSIENT,
    "PendingCopyOperation": FailureReason.TRANSIENT,
    "InvalidAuthenticationInfo": FailureReason.AUTH,
    "NoAuthenticationInformation": FailureReason.AUTH,
    "PublicAccessNotPermitted": FailureReason.AUTH,
    "InvalidBlockList": FailureReason.NOT_FOUND,  # 400: a block is missing, perhaps no longer there
    "BlobAlreadyExists": FailureReason.PRECONDITION,
    "ConditionNotMet": FailureReason.PRECONDITION,
    "SourceConditionNotMet": FailureReason.PRECONDITION,
    "TargetConditionNotMet": FailureReason.PRECONDITION,
    "Md5Mismatch": FailureReason.CHECKSUM,
    "Crc64Mismatch": FailureReason.CHECKSUM,
    "FeatureNotSupported": FailureReason.OTHER,  # Azurite, with status 500
    # These come with 409 or 412, but are not about our condition.
    "BlobArchived": FailureReason.OTHER,
    "BlobBeingRehydrated": FailureReason.OTHER,
    "BlobImmutableDueToPolicy": FailureReason.OTHER,
    "InvalidBlobType": FailureReason.OTHER,
    "LeaseIdMissing": FailureReason.OTHER,
    "SnapshotsPresent": FailureReason.OTHER,
}

_HINTS = {
    "BlobArchived": "the blob is in the archive tier: rehydrate it first",
    "BlobBeingRehydrated": "the blob is being rehydrated from the archive tier: try again when that is done",
    "BlobImmutableDueToPolicy": "the container has an immutability policy: retention cannot delete or replace blobs",
    "InvalidBlobType": "there is an append or page blob of this name: delete it",
    "KeyBasedAuthenticationNotPermitted": "the account does not accept keys: use an identity, see docs/stores.md",
    "LeaseIdMissing": "there is a lease on the blob: break it",
    "SnapshotsPresent": "the blob has snapshots, which ckpt_async never deletes: delete them yourself",
    "AccountIsDisabled": "the storage account is disabled",
}


def _reason_of(code: str, status: int, message: str) -> FailureReason:
    """Classify by error code, else by HTTP status."""
    if code in _REASONS:
        return _REASONS[code]
    if status == 400 and "MD5" in message:
        return FailureReason.CHECKSUM  # Azurite calls it InvalidOperation
    return FailureReason.TRANSIENT if status < 400 else reason_of_status(status)
