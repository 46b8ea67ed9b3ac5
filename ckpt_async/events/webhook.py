"""Events delivered by HTTP POST.

TLS is verified, and redirects are not followed. Only the host of the URL is ever logged, because the rest may be a
secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import time
from urllib.parse import urlsplit

from ckpt_async.errors import SettingsError
from ckpt_async.events.delivery import DeliveryError
from ckpt_async.events.event import Event
from ckpt_async.stores.http.connections import trusted_for

TIMEOUT_S = 10.0


class Webhook:
    """Posts the JSON form of an event. It is delivered if a 2xx answer arrives within `TIMEOUT_S` in all."""

    name = "webhook"
    num_parallel = 1
    max_attempts = None

    def __init__(self, url: str, secret: bytes) -> None:
        self._url, self._secret = url, secret
        self.host = host_of(url, "event_webhook")
        self._posting: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def deliver(self, event: Event) -> None:
        asyncio.run(self._deliver(event))

    async def _deliver(self, event: Event) -> None:
        import aiohttp

        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(self._post(event))
        self._posting = loop, task
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await task
        except TimeoutError:
            raise DeliveryError(f"{self.host} has not answered within {TIMEOUT_S:.0f} s") from None
        except asyncio.CancelledError:
            raise DeliveryError("the delivery was cut short") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The texts of these errors may contain the URL.
            cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None)
            what = type(error).__name__ + (f": {cause}" if cause else "")
            is_answered = isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError)
            how = "sent an invalid HTTP response" if is_answered else "cannot be reached"
            raise DeliveryError(f"{self.host} {how}: {what}") from None
        finally:
            self._posting = None

    async def _post(self, event: Event) -> None:
        import aiohttp

        body = event.to_json().encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "ckpt-async",
            "Idempotency-Key": event.id,
            "Ckpt-Async-Event": event.kind,
        }
        if self._secret:
            headers[SIGNATURE_HEADER] = signature(body, self._secret, time.time())
        async with (
            aiohttp.ClientSession(trust_env=True) as session,
            session.post(
                self._url,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=trusted_for(self.host, None),
            ) as response,
        ):
            if response.status // 100 == 3:
                raise DeliveryError(f"{self.host} answered {response.status}: redirects are not followed")
            if response.status // 100 != 2:
                raise DeliveryError(f"{self.host} answered {response.status}")

    def stop(self) -> None:
        if (posting := self._posting) is not None:
            loop, task = posting
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)


def host_of(url: str, where: str) -> str:
    """Return the part of the URL that may be logged. Raises SettingsError, which does not show the URL either."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        raise SettingsError(f"{where} is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise SettingsError(f"{where} is not a URL such as https://example.com/hook")
    return f"{parts.scheme}://{parts.hostname}{port}"


# --- signatures: an HMAC over the time and the body, against forged and replayed requests -------------------


SIGNATURE_HEADER = "Ckpt-Async-Signature"
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
