"""Object stores: selecting one by its URL, its options, and the contract that every kind of store keeps.

Code above `interface.Store` does not know which kind of store it talks to; the few differences are declared in
`Capabilities`. To add a kind, write a `Backend` and list it in `backends.BACKENDS`, or register it from another package
under the entry point `ckpt_async.stores`. Every kind of store promises:

- an object is stored whole or not at all, and a write that the store has confirmed survives a crash of the store;
- reads and listings that follow a write see it; a listing that is cut short raises;
- `put` with `Create` or `Match` has one winner among any number of writers (`conditional_put`), or the store says
  that it cannot promise this;
- the bytes that arrived are compared with the checksum that was sent, by the store itself or by reading them back;
  the sender's own word never suffices;
- an answer that is not understood raises StoreError; it is never taken to mean "nothing there";
- each call is one attempt, without retries; its error has a reason that says whether another attempt may help, and
  a call that is cancelled, at whatever point, lets go of the body.

`tests/stores/test_conformance.py` checks every kind against this list.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_async.core.keys import longest_keys
from ckpt_async.core.model import RemoteAddress
from ckpt_async.core.naming import check_key_length as check_length
from ckpt_async.errors import SettingsError
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
    "check_allowed",
    "check_apart",
    "check_key_length",
    "folder_of",
    "makes_folder",
    "open_store",
    "options_of",
    "parse_url",
    "web_url",
]


def parse_url(url: str) -> Location:
    """Parse a store URL, rejecting what could mean another place than it seems to. Raises SettingsError."""
    return backend_of(url).locate(url)


def folder_of(url: str) -> Path | None:
    """Return the folder that a store URL names, without symbolic links, or None. Raises SettingsError."""
    location = parse_url(url)
    return Path(location.prefix).resolve() if location.scheme == "file" else None


def check_apart(folder: Path, url: str) -> None:
    """Raise SettingsError if the store would be the trainer's own folder. `folder` has no symbolic links."""
    if folder_of(url) == folder:
        raise SettingsError(
            f"the folder {str(folder)!r} is also the remote",
            hint="uploads need a place of their own, best on another disk or machine",
        )


def open_store(
    url: str, options: StoreOptions | None = None, *, env: Mapping[str, str] | None = None
) -> Store:
    """Create the store for `url`; `await store.open()` connects it.

    `env` (default: this process's environment) is where the endpoint and the settings that this package reads itself
    are looked up, such as Azure keys or the key for SSE-C; the AWS and Google SDKs find their credentials on their own.

    Raises SettingsError, or InvalidNameError if the prefix leaves too little room for the keys of a run.
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
    """Return what another process needs to reach the same store with its own credentials. Raises SettingsError."""
    backend, options = backend_of(url), options or StoreOptions()
    backend.locate(url)
    backend.check_options(options)
    return backend.address(url, options, env)


def options_of(address: RemoteAddress, given: StoreOptions, *, env: Mapping[str, str]) -> StoreOptions:
    """Return the options that `address_of` put into an address: its inverse, for one that a journal has recorded.

    `given` is what the operator says, of which the profile is added. Raises SettingsError if credentials would go to an
    endpoint that neither `given` nor `env` names: whoever may write the journal could have put it there.
    """
    is_named = _is_named(address, given, env)
    if not is_named and not backend_of(address.url).is_safe_at(address.endpoint_url or "", env):
        raise SettingsError(
            f"only the journal names the endpoint {address.endpoint_url}, so no credentials for {address.url} go there",
            hint=f"if it is yours, pass --endpoint-url {address.endpoint_url}, or name it in the environment",
        )
    return StoreOptions(
        endpoint_url=address.endpoint_url,
        region=address.region,
        profile=given.profile,
        addressing_style=address.addressing_style,
        put_args=address.put_args,
    )


def check_allowed(address: RemoteAddress, only: str, given: StoreOptions, *, env: Mapping[str, str]) -> None:
    """Raise SettingsError if `only`, URLs separated by blanks, is not empty and has none that the remote is at or
    below, or if the remote is at an endpoint that neither `given` nor `env` names.
    """
    if not only:
        return
    if not any(_is_below(address.url, each) for each in only.split()):
        raise SettingsError(
            f"{address.url} is not among the remotes that may be touched",
            hint="if it may be, name it with --only-remote, too",
        )
    if not _is_named(address, given, env):
        raise SettingsError(
            f"only the journal names the endpoint {address.endpoint_url} of {address.url}, so it is not touched",
            hint=f"if it is yours, pass --endpoint-url {address.endpoint_url}, or name it in the environment",
        )


def _is_named(address: RemoteAddress, given: StoreOptions, env: Mapping[str, str]) -> bool:
    """Return whether somebody else than a journal says that the remote is at this endpoint."""
    if address.endpoint_url in (None, given.endpoint_url):
        return True
    with contextlib.suppress(SettingsError):  # the environment names no endpoint, or none that is valid
        named = backend_of(address.url).address(address.url, StoreOptions(), env)
        return named.endpoint_url == address.endpoint_url
    return False


def _is_below(url: str, top: str) -> bool:
    here, there = parse_url(url), parse_url(top)
    if (here.scheme, here.bucket, _host_in(url)) != (there.scheme, there.bucket, _host_in(top)):
        return False
    if here.scheme == "file":  # a link could lead elsewhere
        return Path(here.prefix).resolve().is_relative_to(Path(there.prefix).resolve())
    return f"{here.prefix}/".startswith(f"{there.prefix}/" if there.prefix else "")


def _host_in(url: str) -> str:
    """Return what is between the scheme and the path: for Azure it has the account, which the bucket has not."""
    return url.partition("://")[2].partition("/")[0]


def makes_folder(url: str) -> bool:
    """Return whether the place may be missing at first, because opening it for writing creates it."""
    return backend_of(url).makes_folder


def web_url(url: str, options: StoreOptions, *, env: Mapping[str, str]) -> str | None:
    """Return the URL that the store's requests go to, or None if the store is not a web server."""
    return backend_of(url).web_url(url, options, env)
