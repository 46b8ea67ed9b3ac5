"""Which URLs name a bucket of S3 or a compatible service, and where its requests go. Pure, except for `open`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import SettingsError
from ckpt_async.stores.backend import Backend, Location
from ckpt_async.stores.options import StoreOptions, check_endpoint
from ckpt_async.stores.s3.standing import KEY, KEY_FILE, check_standing, find_standing

if TYPE_CHECKING:
    from ckpt_async.stores.interface import Store

# S3-compatible services that people name by scheme; `<NAME>_ENDPOINT_URL` says where one is.
_ALIASES = ("b2", "ceph", "coreweave", "minio", "r2", "tigris", "wasabi", "weka")
_GENERIC_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")
_AWS = "https://s3.amazonaws.com"

# Arguments that both PutObject and CreateMultipartUpload accept and no other request needs (for a key that every part
# and every read needs too, see standing.py).
_PUT_ARGS = frozenset(
    "ACL BucketKeyEnabled CacheControl ContentType GrantFullControl GrantRead GrantReadACP GrantWriteACP Metadata"
    " SSEKMSEncryptionContext SSEKMSKeyId ServerSideEncryption StorageClass Tagging".split()
)
# Objects of these classes cannot be read immediately, which decisions and receipts must be.
_OFFLINE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})

_ARN = re.compile(
    r"(?P<arn>arn:[a-z-]+:(?P<service>[a-z0-9-]*):(?P<region>[a-z0-9-]*):[0-9]+:(?P<kind>[a-z]+)[:/][A-Za-z0-9._-]+)"
    r"(?P<more>[:/].*)?"
)
_ARN_HINT = "s3://arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME/prefix"


class S3Backend(Backend):
    schemes = ("s3", *_ALIASES)
    example = "s3://bucket/prefix"
    credentials_hint = "use AWS_* variables or a profile"

    def locate(self, url: str) -> Location:
        if not url.startswith("s3://arn:"):
            return super().locate(url)
        found = _ARN.fullmatch(url.removeprefix("s3://"))
        if found is None or (found["service"], found["kind"]) != ("s3", "accesspoint") or not found["region"]:
            raise SettingsError(
                "only access-point ARNs with a region are accepted, not those of buckets (use the bucket's"
                " name), Outposts, Object Lambda or multi-Region access points (where two writers could win"
                " one conditional write)",
                hint=_ARN_HINT,
            )
        path = super().locate(f"s3://access-point{found['more'] or ''}").prefix
        return Location("s3", found["arn"], path)

    def check_options(self, options: StoreOptions) -> None:
        if unknown := sorted(set(options.put_args) - _PUT_ARGS):
            raise SettingsError(
                f"put_args has {', '.join(unknown)}", hint=f"allowed are {', '.join(sorted(_PUT_ARGS))}"
            )
        if options.put_args.get("StorageClass") in _OFFLINE_CLASSES:
            raise SettingsError(
                f"StorageClass {options.put_args['StorageClass']} cannot be read back immediately",
                hint="use STANDARD_IA or GLACIER_IR, or move old checkpoints by a lifecycle rule",
            )

    def address(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> RemoteAddress:
        return RemoteAddress(
            url,
            find_endpoint(self.locate(url).scheme, options, env=env),
            options.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None,
            options.addressing_style,
            dict(options.put_args),
        )

    def is_safe_at(self, endpoint_url: str, env: Mapping[str, str]) -> bool:  # noqa: ARG002  as in `Backend`
        """Return whether no customer's key (SSE-C) is sent. A signature is valid for one host only, and a session token
        is worth nothing without the secret key, which is never sent.
        """
        return not (env.get(KEY) or env.get(KEY_FILE))

    def web_url(self, url: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
        return find_endpoint(self.locate(url).scheme, options, env=env) or _AWS

    def open(self, location: Location, options: StoreOptions, url: str, env: Mapping[str, str]) -> Store:
        from ckpt_async.stores.s3.client import S3Store

        endpoint_url = find_endpoint(location.scheme, options, env=env)
        standing = find_standing(env)
        check_standing(standing, location.bucket, options.put_args, endpoint_url)
        return S3Store(
            location.bucket, location.prefix, options, endpoint_url=endpoint_url, url=url, standing=standing
        )


def find_endpoint(scheme: str, options: StoreOptions, env: Mapping[str, str]) -> str | None:
    """Return the endpoint for an S3 scheme: from the options, else from the alias's own variable, else from a generic
    one. Pure.

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
