"""What Azure's answers mean, or why one is not believed. Pure: answers in, values or MalformedResponseError out.

An answer has to show that it belongs to the request, because proxies and login pages answer 200 too. Every answer of
the service has an `x-ms-request-id`, its documents have the expected root elements, and a listing tells how it
continues.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from ckpt_async.core.model import Checksum
from ckpt_async.stores.azure.blocks import ALGORITHM, Block, block_of
from ckpt_async.stores.checksums import stated
from ckpt_async.stores.http.bucket import Page
from ckpt_async.stores.http.messages import (
    MalformedResponseError,
    Response,
    check_advances,
    check_age,
    check_below,
    http_date,
    server_time,
    whole_number,
    xml_document,
)
from ckpt_async.stores.interface import ObjectInfo

# Metadata names must be valid C# identifiers, so they have no dashes.
_METADATA = {"crc64nvme": "x-ms-meta-ckptcrc64nvme", "crc32c": "x-ms-meta-ckptcrc32c"}


def check_origin(answer: Response) -> None:
    """Raise MalformedResponseError unless the answer comes from the service."""
    if "x-ms-request-id" not in answer.headers:
        raise MalformedResponseError("the answer has no x-ms-request-id, unlike every answer of Azure")


# --- checksums ---------------------------------------------------------------------------------------------


def metadata(checksum: Checksum) -> dict[str, str]:
    """Return the headers that store a checksum with a blob."""
    return {_METADATA[checksum.algorithm]: checksum.value}


def kept_checksum(answer: Response) -> Checksum | None:
    told = (stated(algorithm, answer.headers.get(name)) for algorithm, name in _METADATA.items())
    return next(filter(None, told), None)


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


def info_of_part(key: str, answer: Response, size_bytes: int) -> ObjectInfo:
    return _info(key, answer, size_bytes)


def _info(key: str, answer: Response, size_bytes: int) -> ObjectInfo:
    modified = answer.headers.get("last-modified")
    modified_at = None if modified is None else http_date("Last-Modified", modified)
    return ObjectInfo(key, size_bytes, etag(answer), kept_checksum(answer), modified_at)


# --- listings ----------------------------------------------------------------------------------------------


def page(answer: Response, prefix: str, asked_marker: str) -> tuple[Page, str]:
    """Parse one page of a listing, which must repeat the prefix and tell how it continues. Return it and the marker of
    the next one. A blob that has only uncommitted blocks has size 0.
    """
    root = xml_document(answer.error, "EnumerationResults")
    check_age(answer.headers)
    if (said := root.findtext("Prefix") or "") != prefix:
        raise MalformedResponseError(
            f"the response belongs to another request: its prefix is {said!r}, not {prefix!r}"
        )
    blobs, following = root.find("Blobs"), root.find("NextMarker")
    if blobs is None or following is None:
        raise MalformedResponseError("the listing was cut short: it has no Blobs or no NextMarker")
    marker = following.text or ""
    check_advances(marker, asked_marker)
    return Page(tuple(_listed(blobs, prefix)), server_time(answer.headers), not marker), marker


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
        check_below(name, prefix)
        size_bytes = whole_number("Content-Length", properties.findtext("Content-Length") or "0")
        tag = properties.findtext("Etag") or ""
        modified = properties.findtext("Last-Modified")
        modified_at = None if modified is None else http_date("Last-Modified", modified)
        yield ObjectInfo(name, size_bytes, _quoted(tag) if tag else "", None, modified_at)


def uncommitted_blocks(answer: Response) -> tuple[Sequence[Block], bool]:
    """Parse a blob's block list. Return our blocks, and whether another program has sent some too."""
    root = xml_document(answer.error, "BlockList")
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


def _quoted(tag: str) -> str:
    """Add the quotation marks that listings leave out."""
    return tag if tag.startswith(('"', "W/")) else f'"{tag}"'
