"""What a kind of store says of itself before one is opened: which URLs name one, and what they mean."""

# ruff: noqa: ARG002 - most kinds need less than what they are given

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckpt_async.core.model import RemoteAddress
from ckpt_async.core.naming import MAX_KEY_LENGTH
from ckpt_async.errors import SettingsError

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store
    from ckpt_async.stores.options import StoreOptions

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # a lone surrogate has no UTF-8

_COLON_NO_PORT = re.compile(r":(?![0-9]+$)")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed store URL. For `file` the bucket is "" and the prefix the absolute path."""

    scheme: str
    bucket: str
    prefix: str


class Backend:
    """One kind of store. Cheap to import: whatever talks to the store is imported by `open`."""

    schemes: ClassVar[tuple[str, ...]]
    example: ClassVar[str]  # of a URL, for messages
    credentials_hint: ClassVar[str] = "credentials come from the environment"
    makes_folder: ClassVar[bool] = False  # what is not there yet is made when it is opened for writing
    path_is_literal: ClassVar[bool] = False  # `?` and `#` are characters of it, as `%` is everywhere
    put_args_hint: ClassVar[str] = "leave them out"
    max_key_bytes: ClassVar[int] = MAX_KEY_LENGTH  # of a whole key, the prefix in the bucket included

    def claims(self, url: str) -> bool:
        """Whether `url` is one of this kind's. The first in the table that claims it has it."""
        return url.partition("://")[0] in self.schemes

    def locate(self, url: str) -> Location:
        """Parse `url`, rejecting anything that could mean a different place than it seems to. Raises SettingsError."""
        scheme, bucket, path = self.split(url)
        if not _BUCKET.fullmatch(bucket):
            raise SettingsError(f"{url!r} names no valid bucket", hint=self.example)
        return Location(scheme, bucket, path)

    def split(self, url: str) -> tuple[str, str, str]:
        """Scheme, authority and path of a URL that holds neither credentials nor a query. Raises SettingsError."""
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        # A password may have a slash, which ends what is before the host.
        if "@" in authority or (_COLON_NO_PORT.search(authority) and "@" in path):
            raise SettingsError(f"a {scheme}:// URL must not hold credentials", hint=self.credentials_hint)
        if ("?" in rest or "#" in rest) and not self.path_is_literal:  # a signature, it may be: not repeated
            raise SettingsError(f"a {scheme}:// URL has no query or fragment", hint=self.credentials_hint)
        if UNPRINTABLE.search(rest) or "\\" in rest:
            raise SettingsError(f"{url!r} has a control character or backslash")
        path = path.removesuffix("/")
        if path and any(segment in ("", ".", "..") for segment in path.split("/")):
            raise SettingsError(f"{url!r} has an empty, '.' or '..' segment")
        return scheme, authority, path

    def check_options(self, options: StoreOptions) -> None:
        """Raise SettingsError for options that this kind of store cannot take. Here, `put_args`: they may ask for
        encryption, which must not be left out in silence.
        """
        if options.put_args:
            raise SettingsError(
                f"{self.example.partition('/')[0]}// takes no put_args", hint=self.put_args_hint
            )

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        """What another process needs to reach the same store with credentials of its own. Raises SettingsError."""
        return RemoteAddress(url, options.endpoint_url)

    def web_url(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
        """Where its requests go, to tell whether a proxy lies between; None if that is no web server."""
        return None

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        """The store, not connected yet. Raises SettingsError, with what to install where a package is missing."""
        raise NotImplementedError
