"""URLs of web servers, which can only be read."""

# ruff: noqa: ARG002 - as in `Backend`
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import SettingsError
from ckpt_async.stores.backend import Backend, Location
from ckpt_async.stores.meant import read_only
from ckpt_async.stores.options import StoreOptions

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store

_HOST = re.compile(r"[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")


class WebBackend(Backend):
    schemes = ("http", "https")
    example = "https://host/folder"
    credentials_hint = "files that need credentials cannot be read over http(s)"

    def locate(self, url: str) -> Location:
        scheme, host, path = self.split(url)
        if not _HOST.fullmatch(host):
            raise SettingsError(f"{url!r} names no web server", hint=self.example)
        return Location(scheme, host, path)

    def check_options(self, options: StoreOptions) -> None:
        """Accept everything: nothing is ever put."""

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        """Refuse: only writers ask for an address."""
        raise read_only(url)

    def web_url(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
        return url

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        from ckpt_async.stores.web.store import WebStore

        return WebStore(url, options, ca_file=env.get("REQUESTS_CA_BUNDLE") or env.get("SSL_CERT_FILE"))
