"""Which URLs name a file system that fsspec knows. Pure, except for `claims` and `open`."""

# ruff: noqa: ARG002 - as in `Backend`
from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import SettingsError
from ckpt_async.stores.backend import Backend, Location, check_characters
from ckpt_async.stores.options import StoreOptions

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store

# Schemes that have a store of their own here, under every name that fsspec has for them.
_OWN = frozenset("abfs abfss adl asynclocal az file gcs gs http https local s3 s3a".split())
# Schemes that are only views of another file system, can only be read, or end with this process.
_NO_PLACE = frozenset(
    "async_wrapper asyncwrapper blockcache cached data dir filecache generic gist git github libarchive memory pyscript"
    " reference simplecache tar zip".split()
)
# Schemes that people may use without having installed fsspec; with it, these and more are known.
WELL_KNOWN = frozenset("dbfs dropbox ftp hdfs hf oci sftp smb ssh webdav webhdfs".split())
# A user name is no secret, and in `oci://bucket@namespace` the "@" does not mark one.
_AUTHORITY = re.compile(r"(?:[^@:]+@)?(?:[^@:]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")


class FsspecBackend(Backend):
    """The last backend that is asked, for schemes that no other backend claims."""

    schemes = ()  # whatever the installed fsspec knows
    example = "sftp://host/folder"
    makes_folder = True
    credentials_hint = (
        "set credentials in fsspec's own configuration, e.g. FSSPEC_SFTP_PASSWORD in the environment"
    )

    def claims(self, url: str) -> bool:
        scheme = url.partition("://")[0]
        if scheme in _OWN or scheme in _NO_PLACE or not has_fsspec():
            return False
        from fsspec.registry import known_implementations, registry

        return scheme in known_implementations or scheme in registry

    def locate(self, url: str) -> Location:
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        if not _AUTHORITY.fullmatch(authority):
            raise SettingsError(
                f"a {scheme}:// URL must not hold credentials, and its port must be a number",
                hint=self.credentials_hint,
            )
        if "?" in rest or "#" in rest:
            raise SettingsError(f"a {scheme}:// URL has no query or fragment", hint=self.credentials_hint)
        check_characters(url)
        path = path.removesuffix("/")
        if path and any(segment in ("", ".", "..") for segment in path.split("/")):
            raise SettingsError(f"{url!r} has an empty, '.' or '..' segment")
        if not path:
            raise SettingsError(f"{url!r} names no folder", hint=f"{scheme}://{authority}/folder")
        return Location(scheme, authority, path)

    def check_options(self, options: StoreOptions) -> None:
        if options.put_args:
            raise SettingsError("a store over fsspec takes no put_args", hint=self.credentials_hint)

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        return RemoteAddress(url)

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        from ckpt_async.stores.fsspec.store import FsspecStore

        return FsspecStore(url.removesuffix("/"), location.scheme, max_connections=options.max_connections)


def has_fsspec() -> bool:
    return find_spec("fsspec") is not None
