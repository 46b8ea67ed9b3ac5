"""Where requests go, for use in error messages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ckpt_async.core.keys import PROBES
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    IntegrityError,
    ObjectArchivedError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.stores.http.answers import LargeBodyError
from ckpt_async.stores.http.failures import failure_of
from ckpt_async.stores.http.messages import MalformedResponseError, OtherRangeError

_PADDING = re.compile("0{16,}")
# URLs may hold signatures, and a library may put its URL into a message.
_SIGNATURE = re.compile(r"(?:\bsig|Signature)=[^&\s'\"]+")


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """A prefix in a bucket at an endpoint, which also makes the errors about what is there. Their messages have an
    object's full name, for people; their `key` is relative to the root, as everywhere else.
    """

    scheme: ClassVar[str]
    listings: ClassVar[frozenset[str]]  # operations whose key is a prefix, and may be empty

    bucket: str
    root: str
    endpoint_url: str | None

    def __str__(self) -> str:
        return f"{self.bucket}/{self.root}"

    def name(self, key: str) -> str:
        """Return the name by which people find an object in any other tool, or "" for an empty key."""
        return f"{self.scheme}://{self}{legible(key, key)}" if key else ""

    @contextlib.contextmanager
    def translating(self, operation: str, key: str) -> Iterator[None]:
        """Turn every error of the HTTP clients and the system into a StoreError. Cancellation and this package's own
        errors pass unchanged.
        """
        try:
            yield
        except CkptAsyncError:
            raise
        except LargeBodyError as error:
            raise self.too_large(error.size_bytes, error.most_bytes, operation=operation, key=key) from error
        except Exception as error:
            reason, hint = self.failure(error)
            message = str(error)
            if not isinstance(error, MalformedResponseError | OtherRangeError):
                message = f"{type(error).__name__}: {_SIGNATURE.sub('sig=...', legible(message, key))}"
            raise self.error(message, reason=reason, operation=operation, key=key, hint=hint) from error

    def failure(self, error: Exception) -> tuple[FailureReason, str]:
        """Return why a request got no answer, and a hint what to do about it."""
        return failure_of(error, self.endpoint_url or "")

    def error(
        self, message: str, *, reason: FailureReason, operation: str = "", key: str = "", hint: str = ""
    ) -> StoreError:
        """Make an error about an object here."""
        name = self.name(key) or (f"{self.scheme}://{self}" if operation in self.listings else "")
        return self.about(key, StoreError(message, reason=reason, operation=operation, key=name, hint=hint))

    def unmet(self, message: str, *, operation: str, key: str) -> StoreError:
        return self.about(key, PreconditionFailedError(message, operation=operation, key=self.name(key)))

    def spoilt(self, message: str, *, operation: str, key: str) -> StoreError:
        return self.about(key, IntegrityError(message, operation=operation, key=self.name(key)))

    def not_found(self, message: str, *, operation: str, key: str) -> StoreError:
        return self.about(key, ObjectNotFoundError(message, operation=operation, key=self.name(key)))

    def archived(self, message: str, *, operation: str, key: str, hint: str) -> StoreError:
        error = ObjectArchivedError(message, operation=operation, key=self.name(key), hint=hint)
        return self.about(key, error)

    def too_large(self, size_bytes: int, max_size_bytes: int, *, operation: str, key: str) -> StoreError:
        message = f"has {size_bytes} bytes, more than {max_size_bytes}"
        return self.about(key, ObjectTooLargeError(message, operation=operation, key=self.name(key)))

    def about(self, key: str, error: StoreError) -> StoreError:
        error.key = key
        return error


def legible(text: str, key: str) -> str:
    """Shorten the padding in the probe's keys, which appear in the first error message that a new user may get."""
    return _PADDING.sub("...", text) if key.startswith(PROBES) else text
