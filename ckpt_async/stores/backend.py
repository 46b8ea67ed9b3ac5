"""What a kind of store declares before one is opened: which URLs name it, and what they mean."""

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

_SURROGATE = re.compile(r"[\ud800-\udfff]")  # has no UTF-8 encoding
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_COLON_NO_PORT = re.compile(r":(?![0-9]+$)")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def check_characters(url: str) -> None:
    """Raise SettingsError if the URL has characters that no kind of store takes."""
    if _SURROGATE.search(url):
        raise SettingsError(
            f"{url!r} is not valid UTF-8", hint="is the locale right? PYTHONUTF8=1 makes Python use UTF-8"
        )
    if UNPRINTABLE.search(url) or "\\" in url:
        raise SettingsError(f"{url!r} has a control character or backslash")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed store URL. For `file` the bucket is "" and the prefix is the absolute path."""

    scheme: str
    bucket: str
    prefix: str


class Backend:
    """One kind of store. It is cheap to import: `open` imports the code that talks to the store."""

    schemes: ClassVar[tuple[str, ...]]
    example: ClassVar[str]  # an example URL, for messages
    credentials_hint: ClassVar[str] = "credentials come from the environment"
    makes_folder: ClassVar[bool] = False  # opening it for writing creates what is missing
    # `?` and `#` are ordinary characters of the path, as `%` is for every kind.
    path_is_literal: ClassVar[bool] = False
    put_args_hint: ClassVar[str] = "leave them out"
    # Length limit of a whole key, including the prefix in the bucket.
    max_key_bytes: ClassVar[int] = MAX_KEY_LENGTH

    def claims(self, url: str) -> bool:
        """Return whether `url` belongs to this kind. The first backend in the table that claims a URL gets it."""
        return url.partition("://")[0] in self.schemes

    def locate(self, url: str) -> Location:
        """Parse `url`, rejecting anything that could mean a different place than it seems to. Raises SettingsError."""
        scheme, bucket, path = self.split(url)
        if not _BUCKET.fullmatch(bucket):
            raise SettingsError(f"{url!r} names no valid bucket", hint=self.example)
        return Location(scheme, bucket, path)

    def split(self, url: str) -> tuple[str, str, str]:
        """Split a URL without credentials or query into scheme, authority and path. Raises SettingsError."""
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        # A password may contain a slash, which ends the authority before its "@".
        if "@" in authority or (_COLON_NO_PORT.search(authority) and "@" in path):
            raise SettingsError(f"a {scheme}:// URL must not hold credentials", hint=self.credentials_hint)
        # It may be a signature: do not repeat it.
        if ("?" in rest or "#" in rest) and not self.path_is_literal:
            raise SettingsError(f"a {scheme}:// URL has no query or fragment", hint=self.credentials_hint)
        check_characters(url)
        path = path.removesuffix("/")
        if path and any(segment in ("", ".", "..") for segment in path.split("/")):
            raise SettingsError(f"{url!r} has an empty, '.' or '..' segment")
        return scheme, authority, path

    def check_options(self, options: StoreOptions) -> None:
        """Raise SettingsError for options that this kind of store cannot take. By default that is `put_args`: they may
        ask for encryption, which must not be dropped silently.
        """
        if options.put_args:
            raise SettingsError(
                f"{self.example.partition('/')[0]}// takes no put_args", hint=self.put_args_hint
            )

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        """Return what another process needs to reach the same store with its own credentials. Raises SettingsError."""
        return RemoteAddress(url, options.endpoint_url)

    def is_safe_at(self, endpoint_url: str, env: Mapping[str, str]) -> bool:
        """Return whether a server there learns nothing from a request by which it could act as its sender."""
        return True

    def web_url(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
        """Return where requests go, to tell whether a proxy is in between, or None if it is no web server."""
        return None

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        """Create the store, not yet connected. Raises SettingsError, saying what to install if a package is missing."""
        raise NotImplementedError
