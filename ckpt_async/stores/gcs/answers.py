"""What Google's answers mean, or why one is not believed. Pure: answers in, values or MalformedResponseError out.

An answer has to show that it belongs to the request, because proxies, login pages and caches answer 200 too. It must be
the right kind of document, with the store's own time, and must not name another object than the request.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

from ckpt_async.core.model import Checksum
from ckpt_async.stores.checksums import stated
from ckpt_async.stores.http.bucket import Page
from ckpt_async.stores.http.messages import (
    MalformedResponseError,
    Response,
    check_advances,
    check_age,
    check_below,
    http_date,
    seconds_of,
    server_time,
    xml_document,
)
from ckpt_async.stores.interface import MultipartInfo, ObjectInfo, StoredPart

ALGORITHM = "crc32c"
Resource = Mapping[str, Any]

_HASH = re.compile(r"(?:^|,)\s*crc32c=([A-Za-z0-9+/]{6}==)\s*(?=,|$)")


def document(answer: Response, kind: str) -> Resource:
    """Return the JSON document in an answer, which must say that it is of this kind."""
    try:
        found = json.loads(answer.error)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise MalformedResponseError(f"expected {kind}, got {answer.error[:80]!r}")
    check_age(answer.headers)
    return found


def info(key: str, name: str, resource: Resource) -> ObjectInfo:
    """Return what a resource says about the object `name` in the bucket. The ETag is the generation, which no other
    version ever has.
    """
    if resource.get("name") != name:
        raise MalformedResponseError(f"asked for {name!r}, but the answer is about {resource.get('name')!r}")
    checksum = stated(ALGORITHM, resource.get("crc32c"))
    # Headers have whole seconds, and all answers about one version must give the same time.
    at = float(int(_moment("updated", resource.get("updated")))) if "updated" in resource else None
    return ObjectInfo(key, _number(resource, "size"), _generation(resource.get("generation")), checksum, at)


def info_of_media(key: str, answer: Response, size_bytes: int) -> ObjectInfo:
    """Return what an answer says about the object whose content, or part of it, is its body."""
    modified = answer.headers.get("last-modified")
    return ObjectInfo(
        key,
        size_bytes,
        _generation(answer.headers.get("x-goog-generation")),
        hash_of(answer),
        None if modified is None else http_date("Last-Modified", modified),
    )


def hash_of(answer: Response) -> Checksum | None:
    """Return the checksum that the store states for the whole object or part."""
    found = _HASH.search(answer.headers.get("x-goog-hash", ""))
    return None if found is None else Checksum(ALGORITHM, found[1])


def page(answer: Response, prefix: str, asked_token: str) -> tuple[Page, str]:
    """Return one page, and the token of the next one, "" after the last."""
    listing = document(answer, "storage#objects")
    token, items = listing.get("nextPageToken", ""), listing.get("items", [])
    if not isinstance(token, str) or not isinstance(items, list):
        raise MalformedResponseError(f"the listing is malformed: {str(listing)[:80]}")
    check_advances(token, asked_token)
    found = []
    for item in items:
        name = check_below(item.get("name") if isinstance(item, dict) else None, prefix)
        if not name.endswith("/"):  # skip the folder markers that some consoles create
            found.append(info(name, name, item))
    return Page(found, server_time(answer.headers), not token), token


# --- XML: multipart uploads --------------------------------------------------------------------------------


def upload_id(answer: Response, name: str) -> str:
    begun = xml_document(answer.error, "InitiateMultipartUploadResult")
    _check_echo(begun, "Key", name)
    return _text(begun, "UploadId")


def parts(answer: Response, name: str, upload_id: str) -> tuple[list[StoredPart], str]:
    """Return the parts on one page, and the marker of the next page, "" after the last one. Their ETags are MD5s."""
    listing = xml_document(answer.error, "ListPartsResult")
    _check_echo(listing, "Key", name)
    _check_echo(listing, "UploadId", upload_id)
    found = [
        StoredPart(_digits("PartNumber", each), _digits("Size", each), _text(each, "ETag"), None)
        for each in listing.iter("Part")
    ]
    return found, _text(listing, "NextPartNumberMarker") if _is_truncated(listing) else ""


def uploads(answer: Response, prefix: str) -> tuple[list[MultipartInfo], dict[str, str]]:
    """Return the uploads on one page, and the query for the next page, empty after the last one."""
    listing = xml_document(answer.error, "ListMultipartUploadsResult")
    found = []
    for each in listing.iter("Upload"):
        name = check_below(_text(each, "Key"), prefix)
        at = _moment("Initiated", _text(each, "Initiated"))
        found.append(MultipartInfo(name, _text(each, "UploadId"), at))
    if not _is_truncated(listing):
        return found, {}
    key_marker = _text(listing, "NextKeyMarker")
    return found, {"key-marker": key_marker, "upload-id-marker": _text(listing, "NextUploadIdMarker")}


def _is_truncated(listing: ET.Element) -> bool:
    text = _text(listing, "IsTruncated")
    if text not in ("true", "false"):
        raise MalformedResponseError(f"the store answered with IsTruncated {text!r}")
    return text == "true"


def _check_echo(document: ET.Element, tag: str, asked: str) -> None:
    if (echo := _text(document, tag)) != asked:
        raise MalformedResponseError(f"the response belongs to another request: {tag} is {echo!r}")


def _text(each: ET.Element, tag: str) -> str:
    text = each.findtext(tag)
    if not text:
        raise MalformedResponseError(f"the store answered without {tag}")
    return text


def _digits(tag: str, each: ET.Element) -> int:
    return _number({tag: _text(each, tag)}, tag)


# --- fields ------------------------------------------------------------------------------------------------


def _number(resource: Resource, name: str) -> int:
    """Return a number from a JSON resource, where 64-bit numbers are strings."""
    text = resource.get(name)
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,19}", text):
        raise MalformedResponseError(f"the store answered with {name} {text!r}")
    return int(text)


def _generation(text: object) -> str:
    if not is_generation(text):
        raise MalformedResponseError(f"the store answered with generation {text!r}")
    return str(text)


def is_generation(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[1-9][0-9]{0,18}", text) is not None


def _moment(name: str, text: object) -> float:
    try:
        at = dt.datetime.fromisoformat(str(text))
    except ValueError:
        raise MalformedResponseError(f"the {name} of the answer is {str(text)[:80]!r}") from None
    return seconds_of(name, at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC))
