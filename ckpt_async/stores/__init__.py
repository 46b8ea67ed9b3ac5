"""Object stores: the URL that selects one, its options, and what all kinds share. One attempt per call, no retries.

Nobody above `interface.Store` knows which kind it is; the few differences are its `Capabilities`. A new kind is a
`Backend` with a line in `backends.BACKENDS` (or an entry point `ckpt_async.stores` of another package). It promises:

- a key holds all of an object or nothing, and what an answer has confirmed survives the store's own crash;
- reading after a write, and listing after one, see it; a listing that is cut short raises;
- `put` with `Create` or `Match` has one winner among any number of writers (`conditional_put`), or says it cannot;
- what arrived is compared with the checksum that was sent, by the store or by reading back, never by the sender alone;
- an answer that is not understood raises StoreError: it never reads as "nothing there";
- one attempt per call, with a reason that says whether another may help; cancelled anywhere, it lets go of the body.

`tests/stores/test_conformance.py` holds every kind to this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_async.core.keys import longest_keys
from ckpt_async.core.model import RemoteAddress
from ckpt_async.core.naming import check_key_length as check_length
from ckpt_async.stores.backend import Backend, Location
from ckpt_async.stores.backends import backend_of
from ckpt_async.stores.options import StoreOptions

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store

__all__ = [
    "Backend",
    "Location",
    "StoreOptions",
    "address_of",
    "check_key_length",
    "makes_folder",
    "open_store",
    "options_of",
    "parse_url",
    "web_url",
]


def parse_url(url: str) -> Location:
    """Parse a store URL, rejecting anything that could mean a different place than it seems to (SettingsError)."""
    return backend_of(url).locate(url)


def open_store(
    url: str, options: StoreOptions | None = None, *, env: Mapping[str, str] | None = None
) -> Store:
    """Create the store for `url`; `await store.open()` connects it.

    `env` (default: this process's environment) is used for endpoints only; the SDK finds the credentials.

    Raises SettingsError; InvalidNameError if the prefix leaves too little for the keys of a run.
    """
    backend, options = backend_of(url), options or StoreOptions()
    location = backend.locate(url)
    backend.check_options(options)
    for key in longest_keys():
        check_key_length(url, key)
    return backend.open(location, options, url, os.environ if env is None else env)


def check_key_length(url: str, key: str) -> None:
    """Raise InvalidNameError if the store could not hold an object under this key of a run. Pure."""
    backend = backend_of(url)
    check_length(backend.locate(url).prefix, key, most=backend.max_key_bytes)


def address_of(url: str, options: StoreOptions | None, *, env: Mapping[str, str]) -> RemoteAddress:
    """What another process needs to reach the same store with its own credentials. Raises SettingsError."""
    backend, options = backend_of(url), options or StoreOptions()
    backend.locate(url)
    backend.check_options(options)
    return backend.address(url, options, env)


def options_of(address: RemoteAddress, *, profile: str | None = None) -> StoreOptions:
    """The inverse of `address_of`."""
    return StoreOptions(
        endpoint_url=address.endpoint_url,
        region=address.region,
        profile=profile,
        addressing_style=address.addressing_style,
        put_args=address.put_args,
    )


def makes_folder(url: str) -> bool:
    """Whether the place need not be there yet: opening it for writing makes it."""
    return backend_of(url).makes_folder


def web_url(url: str, options: StoreOptions, *, env: Mapping[str, str]) -> str | None:
    """Where the store's requests go, or None if that is no web server."""
    return backend_of(url).web_url(url, options, env)
