"""What Azure's answers say, or why one is not believed. Pure: answers in, values or MalformedResponseError out.

An answer has to show that it is what was asked for: proxies and login pages answer 200 too. Every answer of the service
has an `x-ms-request-id`; its documents have their names, and a listing says how it goes on.
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

# Names of metadata are those of C#'s variables, so without dashes.
_METADATA = {"crc64nvme": "x-ms-meta-ckptcrc64nvme", "crc32c": "x-ms-meta-ckptcrc32c"}
_CHECKSUM_LENGTHS = {"crc64nvme": 12, "crc32c": 8}  # in base64


def check_origin(answer: Response) -> None:
    """Raise unless it is the service that has answered."""
    if "x-ms-request-id" not in answer.headers:
        raise MalformedResponseError("the answer has no x-ms-request-id, as all of Azure's have")


# --- checksums ---------------------------------------------------------------------------------------------


def metadata(checksum: Checksum) -> dict[str, str]:
    """The headers that keep a checksum with a blob."""
    return {_METADATA[checksum.algorithm]: checksum.value}


def kept_checksum(answer: Response) -> Checksum | None:
    for algorithm, name in _METADATA.items():
        value = answer.headers.get(name, "")
        if len(value) == _CHECKSUM_LENGTHS[algorithm]:
            return Checksum(algorithm, value)
    return None


def crc64_header(checksum: Checksum) -> str:
    """Azure's CRC64 is CRC-64/NVME (polynomial 0x9A6C9329AC4BC9B5 in reflected notation), with its bytes the other way
    round.
    """
    return b64encode(b64decode(checksum.value)[::-1]).decode()


def told_crc64(answer: Response) -> Checksum | None:
    """What the service has computed of the bytes that arrived, if it says."""
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
    """Of a HEAD, or a GET of all of it."""
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
    """Of a container's blobs. `uncommitted` holds the names of those that may have blocks and nothing else."""

    objects: tuple[ObjectInfo, ...]
    marker: str  # "" after the last one


def page(answer: Response, prefix: str, asked_marker: str) -> Page:
    """Of a listing: it says which prefix it is of, and how it goes on."""
    root = _document(answer, "EnumerationResults")
    if answer.headers.get("age", "0") != "0":  # a store does not say how old its answer is; caches do
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
    """The store's own, by which ages are measured: so ours must not stand in for it."""
    return http_date("Date", answer.headers.get("date", ""))


def _listed(blobs: ET.Element, prefix: str) -> Iterator[ObjectInfo]:
    for blob in blobs:
        if blob.tag != "Blob" or (properties := blob.find("Properties")) is None:
            raise MalformedResponseError(f"the listing has a {blob.tag[:80]!r} that is not understood")
        if properties.findtext("ResourceType") == "directory":
            continue  # accounts with a hierarchical namespace have them
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
    """Of a blob's block list: ours, and whether another program has sent some too."""
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
    """What commits these blocks in this order. "Uncommitted" and not "Latest": else an upload that is completed twice
    would write its object anew.
    """
    listed = "".join(f"<Uncommitted>{each}</Uncommitted>" for each in ids)
    return f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()


def _document(answer: Response, name: str) -> ET.Element:
    try:
        root = ET.fromstring(answer.error)  # noqa: S314  expat expands no external entities, and limits the others
    except ET.ParseError as error:
        raise MalformedResponseError(f"the answer is no {name} but {answer.error[:80]!r}: {error}") from error
    if root.tag != name:
        raise MalformedResponseError(f"the answer is no {name} but {answer.error[:80]!r}")
    return root


def _quoted(tag: str) -> str:
    """Listings leave the quotation marks away."""
    return tag if tag.startswith(('"', "W/")) else f'"{tag}"'
