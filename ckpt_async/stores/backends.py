"""The table of all kinds of stores. To add one, list its backend here, or register it from another package."""

# ruff: noqa: ARG002 - most kinds need less than what they are given

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import SettingsError
from ckpt_async.stores.azure.backend import AzureBackend
from ckpt_async.stores.backend import Backend, Location
from ckpt_async.stores.fsspec.backend import WELL_KNOWN, FsspecBackend, has_fsspec
from ckpt_async.stores.gcs.backend import GcsBackend
from ckpt_async.stores.meant import meant
from ckpt_async.stores.options import StoreOptions
from ckpt_async.stores.s3.backend import S3Backend
from ckpt_async.stores.web.backend import WebBackend

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store

ENTRY_POINTS = "ckpt_async.stores"  # maps a scheme to a Backend

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_MAY_BE_SECRET = re.compile(r":.*@|\?")  # not repeated in an error: a password, a signature
_EXAMPLES = "s3://bucket/prefix or file:///folder"


class FileBackend(Backend):
    schemes = ("file",)
    example = "file:///folder"
    makes_folder = True
    path_is_literal = True
    max_key_bytes = 4095  # PATH_MAX on Linux, without the NUL

    def locate(self, url: str) -> Location:
        scheme, host, path = self.split(url)
        if host or not path:
            hint = "write file:///folder, with three slashes"
            if host == "~":
                hint = "`~` has no meaning in a URL: write file:// and the whole path, as in file:///home/me/folder"
            raise SettingsError(f"{url!r} does not name an absolute folder", hint=hint)
        return Location(scheme, "", f"/{path}")

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        return RemoteAddress(url)

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        from ckpt_async.stores.directory import DirectoryStore

        return DirectoryStore(location.prefix, url=url)


BACKENDS: tuple[Backend, ...] = (
    FileBackend(),
    S3Backend(),
    GcsBackend(),
    AzureBackend(),
    WebBackend(),
)
# For schemes that are neither in the table nor registered by another package.
OTHERS = FsspecBackend()


def backend_of(url: str) -> Backend:
    """Return the kind of store that `url` names. Raises SettingsError, with what was probably meant."""
    if not isinstance(url, str):
        raise SettingsError(f"the store URL {url!r} must be a string", hint=_EXAMPLES)
    schemes = [scheme for backend in BACKENDS for scheme in backend.schemes]
    scheme, separator, _ = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        if _MAY_BE_SECRET.search(url):
            raise SettingsError(
                "what was given is not a store URL, and must not hold credentials", hint=_EXAMPLES
            )
        here = ""
        with contextlib.suppress(OSError):  # the working directory may have been deleted
            here = os.getcwd()
        hint = f"did you mean {better}?" if (better := meant(url, schemes, here)) else _EXAMPLES
        raise SettingsError(f"{url!r} is not a store URL", hint=hint)
    for backend in BACKENDS:
        if backend.claims(url):
            return backend
    if (registered := _registered(scheme)) is not None:
        return registered
    if OTHERS.claims(url):
        return OTHERS
    if scheme in WELL_KNOWN and not has_fsspec():
        raise SettingsError(
            f"{scheme}:// needs the package fsspec",
            hint="run pip install '.[fsspec]' in the clone of ckpt_async",
        )
    others = (
        "and every scheme that fsspec supports"
        if has_fsspec()
        else "and, with fsspec installed, every scheme that it supports"
    )
    known = f"known schemes are {', '.join(schemes)}, {others}"
    hint = f"did you mean {better}? {known}" if (better := meant(url, schemes)) else known
    raise SettingsError(f"{scheme}:// is not a known kind of store", hint=hint)


@cache
def _registered(scheme: str) -> Backend | None:
    """Return the backend that another package has registered for `scheme`, if any. Looks once: it reads the metadata
    of all installed packages.
    """
    for entry in metadata.entry_points(group=ENTRY_POINTS, name=scheme):
        try:
            backend = entry.load()
        except Exception as error:
            raise SettingsError(
                f"{scheme}:// is registered as {entry.value}, which cannot be imported: {error!r}",
                hint="repair or remove the package that registers it",
            ) from error
        if not isinstance(backend, Backend):
            raise SettingsError(f"{scheme}:// is registered as {entry.value}, which is not a Backend")
        return backend
    return None
