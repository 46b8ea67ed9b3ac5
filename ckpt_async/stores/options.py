"""Options for connecting to a store of any kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ckpt_async.core.arguments import is_whole
from ckpt_async.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How to connect to a store. A backend ignores options that mean nothing to it, but refuses `put_args` that it
    cannot take.

    Args:
        endpoint_url: Endpoint of an S3-compatible store or an emulator. Default: from the environment, else the
            service itself.
        region: The bucket's region. Default: as the AWS SDK finds it.
        profile: Profile in the AWS configuration files.
        addressing_style: "path", "virtual", or "auto": path-style with an endpoint, the SDK's default without one.
        put_args: Passed unchanged to every PutObject and CreateMultipartUpload, e.g. `{"StorageClass": "STANDARD_IA"}`.
        connect_timeout_s: Time limit for opening a connection.
        read_timeout_s: Longest time a socket may be silent; not a deadline for a request. Every request has a deadline
            of its own, which is usually shorter; behind a proxy that accepts all bytes at once, it may be minutes.
        max_connections: Size of the connection pool.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: str = "auto"
    put_args: Mapping[str, object] = field(default_factory=dict)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 300.0
    max_connections: int = 64

    def __post_init__(self) -> None:
        if self.addressing_style not in ("auto", "path", "virtual"):
            raise SettingsError(f"addressing_style is {self.addressing_style!r}, not auto, path or virtual")
        for name in ("endpoint_url", "region", "profile"):
            if (text := getattr(self, name)) is not None and not (isinstance(text, str) and text):
                raise SettingsError(f"{name} is {text!r}, but must be a string or left out")
        if not (0 < self.connect_timeout_s < math.inf and 0 < self.read_timeout_s < math.inf):
            raise SettingsError("connect_timeout_s and read_timeout_s must be positive and finite")
        if not is_whole(self.max_connections) or self.max_connections < 1:
            raise SettingsError(f"max_connections is {self.max_connections!r}, but must be at least 1")
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)


def check_endpoint(endpoint_url: str) -> None:
    """Raise SettingsError unless this is `http(s)://host[:port]`, perhaps with a path. What may hold a secret is not
    repeated: anything before an `@`, however it is written, and a query.
    """
    if "@" in endpoint_url:
        raise SettingsError("an endpoint URL must not hold credentials", hint="use AWS_* variables")
    if "?" in endpoint_url or "#" in endpoint_url:
        raise SettingsError("an endpoint URL has no query or fragment", hint="https://host:port")
    try:
        parts = urlsplit(endpoint_url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and "\\" not in endpoint_url
    except ValueError:  # a bracket that is not closed
        is_url = False
    if not is_url:
        raise SettingsError(f"endpoint {endpoint_url!r} is not a URL", hint="https://host:port")
