"""Guessing what a text that is not a store URL was meant to be. Pure."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection

from ckpt_async.errors import SettingsError

# Every form of an S3 object's web address that AWS documents: bucket.s3[.-]region.…, and s3[.-]region.…/bucket.
_AWS = re.compile(
    r"https?://(?:(?P<host>[a-z0-9.-]+)\.)?s3[.-](?:[a-z0-9.-]+\.)?amazonaws\.com/(?P<path>.*)", re.IGNORECASE
)
_WEB = re.compile(r"(?P<endpoint>https?://[^/]+)/(?P<path>.+)", re.IGNORECASE)
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)(?::/*|//+)(?P<rest>[^/].*)", re.IGNORECASE)
_RELATIVE = re.compile(r"(?:file:)?(?P<path>\.{1,2}(?:/.*)?)|file:(?P<rest>[^/].*)", re.IGNORECASE)


def meant(url: str, schemes: Collection[str], folder: str = "") -> str:
    """Return what to write instead, as the end of the question "did you mean …?", or "" if nothing fits. A relative
    path is one below `folder`, if that is known.
    """
    if folder and (found := _RELATIVE.fullmatch(url)):
        return f"file://{os.path.normpath(os.path.join(folder, found['path'] or found['rest']))}"
    if found := _AWS.fullmatch(url):
        bucket = f"{found['host']}/" if found["host"] else ""
        return f"s3://{bucket}{found['path']}".rstrip("/")
    if found := _WEB.fullmatch(url):
        return f"s3://{found['path']} with the endpoint {found['endpoint']}"
    if url.startswith("/"):
        return f"file://{url}"
    if found := _SCHEME.fullmatch(url):
        known = difflib.get_close_matches(found["scheme"].lower(), sorted(schemes), n=1)
        slashes = ":///" if known == ["file"] else "://"
        return f"{known[0]}{slashes}{found['rest']}" if known else ""
    return f"s3://{url}" if re.fullmatch(r"[a-z0-9][a-z0-9.-]*/.+", url) else ""


def read_only(url: str) -> SettingsError:
    """Return the error about uploading to a web server."""
    better = meant(url, ())
    hint = f"did you mean {better}?" if better else "upload to a store: s3://, gs://, az:// and others"
    return SettingsError(f"{url!r} is a web server, which can only be read", hint=hint)
