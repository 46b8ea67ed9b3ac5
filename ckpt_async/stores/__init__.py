"""Object stores: the URL that selects one, its options, and what all kinds share. One attempt per call, no retries.

Each kind is a module that is imported when a URL asks for it: aiobotocore alone takes half a second.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ckpt_async.core.arguments import is_whole
from ckpt_async.core.keys import longest_keys
from ckpt_async.core.model import RemoteAddress
from ckpt_async.core.naming import MAX_KEY_LENGTH
from ckpt_async.core.naming import check_key_length as check_length
from ckpt_async.errors import FailureReason, SettingsError, StoreError
from ckpt_async.stores.meant import meant

if TYPE_CHECKING:
    from ckpt_async.stores.interface import SmallGet, Store

# S3-compatible services that people name by scheme; `<NAME>_ENDPOINT_URL` says where one is.
_ALIASES = frozenset({"b2", "ceph", "coreweave", "minio", "r2", "tigris", "wasabi", "weka"})
_SCHEMES = _ALIASES | {"s3", "file", "memory"}
_EXAMPLES = "s3://bucket/prefix or file:///folder"
_GENERIC_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")

# Accepted by both PutObject and CreateMultipartUpload and needed by no other request (SSECustomerKey is missing because
# every part and every read would need the key too).
_PUT_ARGS = frozenset(
    "ACL BucketKeyEnabled CacheControl ContentType GrantFullControl GrantRead GrantReadACP GrantWriteACP Metadata"
    " SSEKMSEncryptionContext SSEKMSKeyId ServerSideEncryption StorageClass Tagging".split()
)
# Objects of these classes cannot be read at once, and neither could the decisions and receipts.
_OFFLINE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})

_MAX_PATH_LENGTH = 4095  # PATH_MAX of Linux, without the NUL

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # a lone surrogate has no UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How to connect to an S3 or S3-compatible store; other stores ignore these options.

    Args:
        endpoint_url: Endpoint of an S3-compatible store. Default: from the environment, else AWS.
        region: The bucket's region. Default: as the AWS SDK finds it.
        profile: Profile in the AWS configuration files.
        addressing_style: "path", "virtual", or "auto": path-style with an endpoint, the SDK's default without one.
        put_args: Passed unchanged to every PutObject and CreateMultipartUpload, e.g. `{"StorageClass": "STANDARD_IA"}`.
        connect_timeout_s: Time limit for opening a connection.
        read_timeout_s: Longest time a socket may be silent; not a deadline for a request.
        max_connections: Size of the connection pool.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: str = "auto"
    put_args: Mapping[str, object] = field(default_factory=dict)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_connections: int = 64

    def __post_init__(self) -> None:
        if self.addressing_style not in ("auto", "path", "virtual"):
            raise SettingsError(f"addressing_style is {self.addressing_style!r}, not auto, path or virtual")
        if unknown := sorted(set(self.put_args) - _PUT_ARGS):
            raise SettingsError(
                f"put_args has {', '.join(unknown)}", hint=f"allowed are {', '.join(sorted(_PUT_ARGS))}"
            )
        if self.put_args.get("StorageClass") in _OFFLINE_CLASSES:
            raise SettingsError(
                f"StorageClass {self.put_args['StorageClass']} cannot be read back at once",
                hint="use STANDARD_IA or GLACIER_IR, or move old checkpoints by a lifecycle rule",
            )
        for name in ("endpoint_url", "region", "profile"):
            if (text := getattr(self, name)) is not None and not (isinstance(text, str) and text):
                raise SettingsError(f"{name} is {text!r}, must be a string or left out")
        if not (0 < self.connect_timeout_s < math.inf and 0 < self.read_timeout_s < math.inf):
            raise SettingsError("connect_timeout_s and read_timeout_s must be positive and finite")
        if not is_whole(self.max_connections) or self.max_connections < 1:
            raise SettingsError(f"max_connections is {self.max_connections!r}, must be at least 1")
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed store URL. For `file` the bucket is "" and the prefix the absolute path."""

    scheme: str
    bucket: str
    prefix: str


def parse_url(url: str) -> Location:
    """Parse a store URL, rejecting anything that could mean a different place than it seems to. Pure.

    Raises SettingsError.
    """
    if not isinstance(url, str):
        raise SettingsError(f"the store URL {url!r} must be a string", hint=_EXAMPLES)
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        hint = f"did you mean {better}?" if (better := meant(url, _SCHEMES)) else _EXAMPLES
        raise SettingsError(f"{url!r} is not a store URL", hint=hint)
    if scheme not in _SCHEMES:
        known = f"known are s3, file, memory, {', '.join(sorted(_ALIASES))}"
        hint = f"did you mean {better}? {known}" if (better := meant(url, _SCHEMES)) else known
        raise SettingsError(f"{scheme}:// is not a known kind of store", hint=hint)
    bucket, _, path = rest.partition("/")
    if "@" in bucket:
        raise SettingsError(
            f"a {scheme}:// URL must not hold credentials", hint="use AWS_* variables or a profile"
        )
    if "?" in rest or "#" in rest:
        raise SettingsError(f"{url!r} has a query or fragment", hint="use StoreOptions")
    if _UNPRINTABLE.search(rest) or "\\" in rest:
        raise SettingsError(f"{url!r} has a control character or backslash")
    path = path.removesuffix("/")
    if path and any(segment in ("", ".", "..") for segment in path.split("/")):
        raise SettingsError(f"{url!r} has an empty, '.' or '..' segment")
    if scheme == "file":
        if bucket or not path:
            raise SettingsError(f"{url!r} names no absolute folder", hint="file:///folder, three slashes")
        return Location(scheme, "", f"/{path}")
    if not _BUCKET.fullmatch(bucket):
        raise SettingsError(f"{url!r} names no valid bucket", hint=f"{scheme}://bucket/prefix")
    return Location(scheme, bucket, path)


def find_endpoint(scheme: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
    """The endpoint for an S3 scheme: from the options, else the alias's own variable, else a generic one. Pure.

    None means AWS. Raises SettingsError if an alias has no endpoint: its requests would silently go to AWS.
    """
    if options.endpoint_url is not None:
        return options.endpoint_url
    own = f"{scheme.upper()}_ENDPOINT_URL"
    names = (own, *_GENERIC_ENDPOINTS) if scheme in _ALIASES else _GENERIC_ENDPOINTS
    endpoint = next((env[name] for name in names if env.get(name)), None)
    if endpoint is not None:
        check_endpoint(endpoint)
    elif scheme in _ALIASES:
        raise SettingsError(f"{scheme}:// needs an endpoint", hint=f"set endpoint_url or {own}")
    return endpoint


def check_endpoint(endpoint_url: str) -> None:
    """Raises SettingsError unless this is `http(s)://host[:port]` with perhaps a path."""
    parts = urlsplit(endpoint_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"endpoint {endpoint_url!r} is not a URL", hint="https://host:port")
    if parts.username or parts.password:
        raise SettingsError("an endpoint URL must not hold credentials", hint="use AWS_* variables")
    if parts.query or parts.fragment:
        raise SettingsError(f"endpoint {endpoint_url!r} has a query or fragment")


def open_store(
    url: str, options: StoreOptions | None = None, *, env: Mapping[str, str] | None = None
) -> Store:
    """Create the store for `url`; `await store.open()` connects it.

    `env` (default: this process's environment) is used for endpoints only; the SDK finds the credentials.

    Raises SettingsError; InvalidNameError if the prefix leaves too little for the keys of a run.
    """
    location = parse_url(url)
    options = options or StoreOptions()
    for key in longest_keys():
        check_key_length(url, key)
    match location.scheme:
        case "file":
            from ckpt_async.stores.directory import DirectoryStore

            return DirectoryStore(location.prefix, url=url)
        case "memory":
            from ckpt_async.stores.memory import MemoryStore, shared_bucket

            return MemoryStore(shared_bucket(location.bucket), prefix=location.prefix, url=url)
        case _:
            from ckpt_async.stores.s3.client import S3Store

            return S3Store(
                location.bucket,
                location.prefix,
                options,
                endpoint_url=find_endpoint(location.scheme, options, env=os.environ if env is None else env),
                url=url,
            )


def check_key_length(url: str, key: str) -> None:
    """Raise InvalidNameError if the store could not hold an object under this key of a run. Pure."""
    location = parse_url(url)
    most = _MAX_PATH_LENGTH if location.scheme == "file" else MAX_KEY_LENGTH
    check_length(location.prefix, key, most=most)


# --- what a journal may keep of it ------------------------------------------------------------------------


def address_of(url: str, options: StoreOptions | None, *, env: Mapping[str, str]) -> RemoteAddress:
    """What another process needs to reach the same store with its own credentials. Pure.

    Raises SettingsError.
    """
    options = options or StoreOptions()
    scheme = parse_url(url).scheme
    if scheme in ("file", "memory"):
        return RemoteAddress(url)
    return RemoteAddress(
        url,
        find_endpoint(scheme, options, env=env),
        options.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None,
        options.addressing_style,
        dict(options.put_args),
    )


def options_of(address: RemoteAddress, *, profile: str | None = None) -> StoreOptions:
    """The inverse of `address_of`."""
    return StoreOptions(
        endpoint_url=address.endpoint_url,
        region=address.region,
        profile=profile,
        addressing_style=address.addressing_style,
        put_args=address.put_args,
    )


# --- for the stores ----------------------------------------------------------------------------------------


def check_key(key: str, operation: str) -> str:
    """Return `key` if it can only name an object below the root (invariant I10), else raise StoreError."""
    if any(segment in ("", ".", "..") for segment in key.split("/")) or "\\" in key:
        raise StoreError(
            "the key has an empty, '.' or '..' segment or a backslash",
            reason=FailureReason.OTHER,
            operation=operation,
            key=key,
        )
    if _UNPRINTABLE.search(key):
        raise StoreError(
            "the key has a control character or a lone surrogate",
            reason=FailureReason.OTHER,
            operation=operation,
            key=key,
        )
    return key


def check_prefix(prefix: str, operation: str) -> str:
    """Like `check_key` for the start of a key: it may be empty and may end in '/'."""
    if prefix:
        check_key(prefix.removesuffix("/"), operation)
    return prefix


def check_size(size_bytes: int, get: SmallGet) -> None:
    """Raise StoreError unless an object has the size that was asked for."""
    if size_bytes != get.size_bytes:
        raise StoreError(
            f"has {size_bytes} bytes, not {get.size_bytes}",
            reason=FailureReason.OTHER,
            operation="get",
            key=get.key,
        )
