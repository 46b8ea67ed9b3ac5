"""What Azure's answers mean, or why one is not believed. Pure: answers in, values or MalformedResponseError out.

An answer has to show that it belongs to the request, because proxies and login pages answer 200 too. Every answer of
the service has an `x-ms-request-id`, its documents have the expected root elements, and a listing tells how it
continues.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from ckpt_async.core.model import Checksum
from ckpt_async.stores.azure.blocks import ALGORITHM, Block, block_of
from ckpt_async.stores.http.messages import (
    MalformedResponseError,
    Response,
    http_date,
    total_of_range,
    whole_number,
)
from ckpt_async.stores.interface import ObjectInfo

# Metadata names must be valid C# identifiers, so they have no dashes.
_METADATA = {"crc64nvme": "x-ms-meta-ckptcrc64nvme", "crc32c": "x-ms-meta-ckptcrc32c"}
_CHECKSUM_LENGTHS = {"crc64nvme": 12, "crc32c": 8}  # in base64


def check_origin(answer: Response) -> None:
    """Raise MalformedResponseError unless the answer comes from the service."""
    if "x-ms-request-id" not in answer.headers:
        raise MalformedResponseError("the answer has no x-ms-request-id, unlike every answer of Azure")


# --- checksums ---------------------------------------------------------------------------------------------


def metadata(checksum: Checksum) -> dict[str, str]:
    """Return the headers that store a checksum with a blob."""
    return {_METADATA[checksum.algorithm]: checksum.value}


def kept_checksum(answer: Response) -> Checksum | None:
    for algorithm, name in _METADATA.items():
        value = answer.headers.get(name, "")
        if len(value) == _CHECKSUM_LENGTHS[algorithm]:
            return Checksum(algorithm, value)
    return None


def crc64_header(checksum: Checksum) -> str:
    """Return a checksum as Azure's CRC64: CRC-64/NVME (polynomial 0x9A6C9329AC4BC9B5 in reflected notation) in reversed
    byte order.
    """
    return b64encode(b64decode(checksum.value)[::-1]).decode()


def told_crc64(answer: Response) -> Checksum | None:
    """Return the CRC64 that the service has computed of the bytes that arrived, if it reports one."""
    text = answer.headers.get("x-ms-content-crc64")
    if text is None:
        return None
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        raw = b""
    if len(raw) != 8:
        raise MalformedResponseError(f"the x-ms-content-crc64 of the answer is {text[:80]!r}")
    return Checksum(ALGORITHM, b64encode(raw[::-1]).decode())


# --- blobs -------------------------------------------------------------------------------------------------


def etag(answer: Response) -> str:
    if not (found := answer.headers.get("etag")):
        raise MalformedResponseError("the store answered without ETag")
    return _quoted(found)


def info(key: str, answer: Response) -> ObjectInfo:
    """Return what the answer to a HEAD, or to a GET of the whole blob, says about it."""
    if (length := answer.headers.get("content-length")) is None:
        raise MalformedResponseError("the store answered without Content-Length")
    return _info(key, answer, whole_number("Content-Length", length))


def info_of_range(key: str, answer: Response, offset: int, size_bytes: int) -> ObjectInfo:
    check_origin(answer)
    return _info(key, answer, total_of_range(answer, offset, size_bytes))


def _info(key: str, answer: Response, size_bytes: int) -> ObjectInfo:
    modified = answer.headers.get("last-modified")
    modified_at = None if modified is None else http_date("Last-Modified", modified)
    return ObjectInfo(key, size_bytes, etag(answer), kept_checksum(answer), modified_at)


# --- listings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a container's blobs. A blob that has only uncommitted blocks has size 0."""

    objects: tuple[ObjectInfo, ...]
    marker: str  # "" on the last page


def page(answer: Response, prefix: str, asked_marker: str) -> Page:
    """Parse one page of a listing, which must repeat the prefix and tell how it continues."""
    root = _document(answer, "EnumerationResults")
    if answer.headers.get("age", "0") != "0":  # a store does not state the age of its answer, but caches do
        raise MalformedResponseError(f"the listing is {answer.headers['age'][:20]} s old")
    if (said := root.findtext("Prefix") or "") != prefix:
        raise MalformedResponseError(
            f"the response belongs to another request: its prefix is {said!r}, not {prefix!r}"
        )
    blobs, following = root.find("Blobs"), root.find("NextMarker")
    if blobs is None or following is None:
        raise MalformedResponseError("the listing was cut short: it has no Blobs or no NextMarker")
    marker = following.text or ""
    if marker and marker == asked_marker:
        raise MalformedResponseError(f"the listing does not advance: NextMarker is again {marker[:80]!r}")
    return Page(tuple(_listed(blobs, prefix)), marker)


def server_time(answer: Response) -> float:
    """Return the store's own time. Ages are measured against it, so our clock must not stand in for it."""
    return http_date("Date", answer.headers.get("date", ""))


def _listed(blobs: ET.Element, prefix: str) -> Iterator[ObjectInfo]:
    for blob in blobs:
        if blob.tag != "Blob" or (properties := blob.find("Properties")) is None:
            raise MalformedResponseError(f"the listing has an unknown element {blob.tag[:80]!r}")
        if properties.findtext("ResourceType") == "directory":
            continue  # in accounts with a hierarchical namespace
        named = blob.find("Name")
        name = (named.text if named is not None else None) or ""
        if named is not None and named.get("Encoded") == "true":
            name = unquote(name)
        if not name or not name.startswith(prefix):
            raise MalformedResponseError(f"the store answered with {name!r}, a key outside of {prefix!r}")
        size_bytes = whole_number("Content-Length", properties.findtext("Content-Length") or "0")
        tag = properties.findtext("Etag") or ""
        modified = properties.findtext("Last-Modified")
        modified_at = None if modified is None else http_date("Last-Modified", modified)
        yield ObjectInfo(name, size_bytes, _quoted(tag) if tag else "", None, modified_at)


def uncommitted_blocks(answer: Response) -> tuple[Sequence[Block], bool]:
    """Parse a blob's block list. Return our blocks, and whether another program has sent some too."""
    root = _document(answer, "BlockList")
    if (listed := root.find("UncommittedBlocks")) is None:
        raise MalformedResponseError("the block list has no UncommittedBlocks")
    found = [
        block_of(each.findtext("Name") or "", whole_number("Size", each.findtext("Size") or ""))
        for each in listed
    ]
    ours = [block for block in found if block is not None]
    return ours, len(ours) < len(found)


def block_list(ids: Sequence[str]) -> bytes:
    """Return the document that commits these blocks in this order. It says "Uncommitted" rather than "Latest", with
    which completing an upload twice would write its object anew.
    """
    listed = "".join(f"<Uncommitted>{each}</Uncommitted>" for each in ids)
    return f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()


def _document(answer: Response, name: str) -> ET.Element:
    try:
        root = ET.fromstring(answer.error)  # noqa: S314  expat expands no external entities, and limits the others
    except ET.ParseError as error:
        raise MalformedResponseError(f"expected {name}, got {answer.error[:80]!r}: {error}") from error
    if root.tag != name:
        raise MalformedResponseError(f"expected {name}, got {answer.error[:80]!r}")
    return root


def _quoted(tag: str) -> str:
    """Add the quotation marks that listings leave out."""
    return tag if tag.startswith(('"', "W/")) else f'"{tag}"'
