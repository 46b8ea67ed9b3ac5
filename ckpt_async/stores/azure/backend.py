"""Which URLs name a container of Azure Blob Storage. Pure, except for `open`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import SettingsError
from ckpt_async.stores.azure.account import Account, find_account, web_host
from ckpt_async.stores.backend import Backend, Location
from ckpt_async.stores.options import StoreOptions

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store

_BY_NAME, _BY_HOST, _WEB = ("az", "azure"), ("abfs", "abfss"), ("http", "https")
_CONTAINER = re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]|\$root|\$web")


class AzureBackend(Backend):
    schemes = (*_BY_NAME, *_BY_HOST)
    example = "az://container/prefix"
    put_args_hint = "set encryption, access tier and tags for the account or the container instead"
    credentials_hint = "use AZURE_STORAGE_* variables, a managed identity or `az login`"

    def claims(self, url: str) -> bool:
        scheme, _, rest = url.partition("://")
        return scheme in self.schemes or (scheme in _WEB and bool(web_host(rest.partition("/")[0])))

    def locate(self, url: str) -> Location:
        """As specified. A signature in the URL is refused, and the error does not repeat it."""
        scheme, _, rest = url.partition("://")
        if "?" in rest or "#" in rest:
            raise SettingsError(
                "an Azure URL must not hold a query, a fragment or a signature",
                hint="put the SAS into AZURE_STORAGE_SAS_TOKEN",
            )
        if scheme in _BY_HOST:
            container, _, rest = rest.partition("@")
            if ":" in container:
                raise SettingsError("an Azure URL must not hold credentials", hint=self.credentials_hint)
            path = rest.partition("/")[2]
            url = f"{scheme}://{container}/{path}"
        elif scheme in _WEB:
            url = f"{scheme}://{rest.partition('/')[2]}"
        scheme, container, path = self.split(url)
        if not _CONTAINER.fullmatch(container):
            raise SettingsError(f"{url!r} names no valid container", hint=f"{self.example}, in small letters")
        return Location(scheme, container, path)

    def account(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> Account:
        scheme = url.partition("://")[0]
        host = ""
        if scheme not in _BY_NAME:
            written = urlsplit(url).netloc.rpartition("@")[2]
            host = web_host(written)
            if not host and scheme in _BY_HOST:
                raise SettingsError(
                    f"{url!r} names no storage account",
                    hint="abfss://container@account.dfs.core.windows.net/prefix",
                )
        return find_account(host, options.endpoint_url, env)

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        return RemoteAddress(url, self.account(url, options, env).endpoint_url)

    def is_safe_at(self, endpoint_url: str, env: Mapping[str, str]) -> bool:  # noqa: ARG002  as in `Backend`
        """Return whether it is Azure's, of any of its clouds, and encrypted."""
        parts = urlsplit(endpoint_url)
        return parts.scheme == "https" and bool(web_host(parts.netloc))

    def web_url(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
        return self.account(url, options, env).endpoint_url

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        from ckpt_async.stores.azure.client import AzureStore

        account = self.account(url, options, env)
        return AzureStore(account, location.bucket, location.prefix, options, url=url, env=env)
