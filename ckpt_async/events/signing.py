"""Signatures of webhooks: an HMAC over the time and the body, against forged and replayed requests."""

from __future__ import annotations

import hashlib
import hmac
import re

HEADER = "Ckpt-Async-Signature"
# Allows for the difference between the clocks, and for the time a request takes.
TOLERANCE_S = 300.0

_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})", re.ASCII)


def signature(body: bytes, secret: bytes, now: float) -> str:
    """Return the value of the header."""
    return f"t={int(now)},v1={_digest(body, secret, int(now))}"


def is_signed(
    body: bytes, header: str, secret: bytes, now: float, *, tolerance_s: float = TOLERANCE_S
) -> bool:
    """Return whether `body` was signed with `secret` at most `tolerance_s` from `now` (Unix seconds). For receivers.

    `header` is the value of `Ckpt-Async-Signature`, or "" if there was none.
    """
    found = _SIGNATURE.fullmatch(header)
    if found is None:
        return False
    signed_at = int(found[1])
    is_right = hmac.compare_digest(found[2], _digest(body, secret, signed_at))
    return is_right and abs(now - signed_at) <= tolerance_s


def _digest(body: bytes, secret: bytes, signed_at: int) -> str:
    return hmac.new(secret, b"%d.%s" % (signed_at, body), hashlib.sha256).hexdigest()
