"""Which storage account a URL means, where it answers, and which environment variables decide that. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckpt_async.errors import SettingsError
from ckpt_async.stores.options import check_endpoint

# The name that the Azure CLI uses, then that of adlfs and object_store.
ACCOUNT_NAMES = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
KEY_NAMES = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
SAS_NAMES = ("AZURE_STORAGE_SAS_TOKEN",)
CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"

# Hosts of the public cloud and of the sovereign ones: account.blob.core.windows.net,
# account.z12.blob.storage.azure.net.
_HOST = re.compile(
    r"(?P<account>[a-z0-9]{3,24})(?:-secondary)?(?:\.z[0-9]+)?\.(?:blob|dfs)\.(?P<cloud>[a-z0-9.-]+)"
)
_CLOUDS = ("core.windows.net", "core.chinacloudapi.cn", "core.usgovcloudapi.net", "storage.azure.net")

# Published by Microsoft for its emulator, and no secret:
# https://learn.microsoft.com/azure/storage/common/storage-use-azurite#well-known-storage-account-and-key
_EMULATOR = {
    "AccountName": "devstoreaccount1",
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}


@dataclass(frozen=True, slots=True)
class Account:
    """A storage account. The path of a blob follows `endpoint_url`."""

    name: str
    endpoint_url: str  # without a trailing slash


def account_of(endpoint_url: str, env: Mapping[str, str]) -> Account:
    """Return the account that answers at an endpoint. An emulator has its name in the path and Azure in the host; for a
    custom domain the environment must state it. Raises SettingsError.
    """
    parts = urlsplit(endpoint_url)
    found = _HOST.fullmatch(parts.hostname or "")
    name = parts.path.strip("/") or (found["account"] if found else _name_of(env))
    if not name or "/" in name:
        raise SettingsError(
            f"the endpoint {endpoint_url!r} does not name the storage account",
            hint="https://account.blob.core.windows.net, or for an emulator http://host:port/account",
        )
    return Account(name, endpoint_url.rstrip("/"))


def find_account(host: str, endpoint_url: str | None, env: Mapping[str, str]) -> Account:
    """Find the account by `endpoint_url`, else `host` if given, else the environment. Raises SettingsError."""
    if endpoint_url is not None:
        return account_of(endpoint_url, env)
    if host:
        return account_of(f"https://{host}", env)
    given = connection_string(env)
    if endpoint := given.get("BlobEndpoint"):
        check_endpoint(endpoint)
        return account_of(endpoint, env)
    if name := _name_of(env):
        protocol, suffix = (
            given.get("DefaultEndpointsProtocol", "https"),
            given.get("EndpointSuffix", _CLOUDS[0]),
        )
        return Account(name, f"{protocol}://{name}.blob.{suffix}")
    raise SettingsError(
        "it is not known which storage account an az:// URL refers to",
        hint=f"set {ACCOUNT_NAMES[0]} or {CONNECTION_STRING}, or write https://account.blob.core.windows.net/container",
    )


def _name_of(env: Mapping[str, str]) -> str:
    return connection_string(env).get("AccountName") or first_of(env, ACCOUNT_NAMES)


def web_host(host: str) -> str:
    """Return the host of the blob service for a host that people may write, or "" if it is not one of Azure's."""
    found = _HOST.fullmatch(host.lower())
    if found is None or found["cloud"] not in _CLOUDS:
        return ""
    return host.lower().replace(".dfs.", ".blob.", 1)


def connection_string(env: Mapping[str, str]) -> dict[str, str]:
    """Return the connection string's fields, if it is set. Raises SettingsError, which quotes nothing of it."""
    fields = {}
    for each in env.get(CONNECTION_STRING, "").split(";"):
        name, separator, value = each.strip().partition("=")
        if name and not separator:
            raise SettingsError(
                f"{CONNECTION_STRING} is not a list of name=value pairs", hint="copy it from the Azure portal"
            )
        fields[name] = value
    fields.pop("", None)
    if fields.get("UseDevelopmentStorage", "").lower() == "true":
        return {**_EMULATOR, **fields}
    return fields


def first_of(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((env[name] for name in names if env.get(name)), "")
