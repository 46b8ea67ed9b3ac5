"""Which URLs name a bucket of Google Cloud Storage, and where its requests go. Pure, except for `open`."""

# ruff: noqa: ARG002 - needs less than what it is given

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import SettingsError
from ckpt_async.stores.backend import Backend, Location
from ckpt_async.stores.options import StoreOptions, check_endpoint

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store

_GOOGLE = "https://storage.googleapis.com"
_EMULATOR = "STORAGE_EMULATOR_HOST"  # as Google's own libraries call it

# As Google names them (https://cloud.google.com/storage/docs/json_api/v1/objects#resource).
_TEXTS = ("cacheControl", "contentType", "kmsKeyName", "predefinedAcl", "storageClass")
_PUT_ARGS = (*_TEXTS, "metadata")


class GcsBackend(Backend):
    schemes = ("gs",)
    example = "gs://bucket/prefix"
    credentials_hint = "use GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`"

    def check_options(self, options: StoreOptions) -> None:
        if unknown := sorted(set(options.put_args) - set(_PUT_ARGS)):
            raise SettingsError(
                f"put_args has {', '.join(unknown)}", hint=f"allowed are {', '.join(sorted(_PUT_ARGS))}"
            )
        for name in _TEXTS:
            if not _is_line(options.put_args.get(name, "x")):
                raise SettingsError(f"put_args: {name} is {options.put_args[name]!r}, must be a string")
        metadata = options.put_args.get("metadata", {})
        if not isinstance(metadata, Mapping) or not all(map(_is_line, [*metadata, *metadata.values()])):
            raise SettingsError(f"put_args: metadata is {metadata!r}, must be a dictionary of strings")

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        return RemoteAddress(url, find_endpoint(options, env), put_args=dict(options.put_args))

    def is_safe_at(self, endpoint_url: str, env: Mapping[str, str]) -> bool:
        """Return whether it is Google's; over plain HTTP no token is sent."""
        parts = urlsplit(endpoint_url)
        return parts.scheme == "http" or (parts.hostname or "").endswith(".googleapis.com")

    def web_url(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
        return find_endpoint(options, env) or _GOOGLE

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        try:
            from ckpt_async.stores.gcs.client import GcsStore
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("google", "requests"):
                raise
            raise SettingsError(
                f"gs:// needs the package google-auth: {error}",
                hint="run pip install '.[gcs]' in the clone of ckpt_async",
            ) from error
        endpoint_url = find_endpoint(options, env) or _GOOGLE
        return GcsStore(location.bucket, location.prefix, options, endpoint_url=endpoint_url, url=url)


def find_endpoint(options: StoreOptions, env: Mapping[str, str]) -> str | None:
    """Return the options' endpoint, else the environment's for an emulator, else None: Google. Raises SettingsError."""
    if options.endpoint_url is not None:
        return options.endpoint_url
    if not (emulator := env.get(_EMULATOR)):
        return None
    endpoint = emulator if "://" in emulator else f"http://{emulator}"
    check_endpoint(endpoint)
    return endpoint


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable() and value.isascii()
