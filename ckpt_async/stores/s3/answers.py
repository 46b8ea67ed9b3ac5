"""What S3's answers mean, or why one is not believed. Pure: answers in, values or MalformedResponseError out.

An answer has to show that it belongs to the request. Proxies, login pages and caches answer 200 too, and the SDK turns
a document that it does not know into an empty dictionary, which would be a complete listing of nothing. So an answer
must be the right kind of document, say whether it is the last page, have the store's own time, and must not contain an
echo that differs from the request. Some echoes may be missing, if another one is present: S3-compatible stores differ
in which they send.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

from ckpt_async.core.model import Checksum
from ckpt_async.stores.checksums import stated
from ckpt_async.stores.http.bucket import Page
from ckpt_async.stores.http.messages import (
    MalformedResponseError,
    Response,
    check_age,
    check_below,
    http_date,
    seconds_of,
    server_time,
    whole_number,
)
from ckpt_async.stores.interface import MultipartInfo, ObjectInfo, StoredPart

# The SDK's results are untyped: dictionaries in the form given by the service model.
SdkResponse = Mapping[str, Any]

# Names of full-object checksums, the preferred one first. CRC64NVME always covers the full object; CRC32C can also be a
# composite "…-N", which says nothing about the whole (S3 user guide, "Checking object integrity").
CHECKSUM_FIELDS = {"crc64nvme": "ChecksumCRC64NVME", "crc32c": "ChecksumCRC32C"}
_HEADERS = (
    ("ETag", "etag"),
    ("ChecksumType", "x-amz-checksum-type"),
    *((field, f"x-amz-checksum-{algorithm}") for algorithm, field in CHECKSUM_FIELDS.items()),
)

# What an answer must contain; a middlebox may answer 200 without it.
_NEEDED = {
    "put_object": ("ETag",),
    "get_object": ("ETag", "ContentLength"),
    "head_object": ("ETag", "ContentLength"),
    "create_multipart_upload": ("UploadId",),
    "upload_part": ("ETag",),
    "complete_multipart_upload": ("ETag",),
    "copy_object": ("CopyObjectResult",),
    "upload_part_copy": ("CopyPartResult",),
}
# The root elements of answers, by the SDK's name of the shape: AWS's own name first, then those of other stores. The
# SDK itself reports an error in a 200.
_DOCUMENTS = {
    "CompleteMultipartUploadOutput": ("CompleteMultipartUploadResult",),
    "CopyObjectOutput": ("CopyObjectResult",),
    "CreateMultipartUploadOutput": ("InitiateMultipartUploadResult",),
    "DeleteObjectsOutput": ("DeleteResult",),
    "ListMultipartUploadsOutput": ("ListMultipartUploadsResult", "ListMultipartUploadResult"),
    "ListObjectsV2Output": ("ListBucketResult",),
    "ListPartsOutput": ("ListPartsResult", "ListPartsResponse", "ListMultipartUploadResult"),
    "UploadPartCopyOutput": ("CopyPartResult",),
}
_ROOT = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?.*?\?>\s*)*(?:<!--.*?-->\s*)*<(?:[\w.-]+:)?([\w.-]+)", re.DOTALL
)
# The alias or ARN of an access point stands for a bucket, which may have another name.
_ALIAS = re.compile(r".*--?(s3alias|ol-s3|op-s3|xa-s3)")


@dataclass(frozen=True, slots=True)
class Pages:
    """How to call an operation that lists, and which parameters its answers echo."""

    operation: str
    echoes: Mapping[str, str]  # name of each echo: the parameter that it repeats
    essential: tuple[str, ...]  # at least one of these echoes must be present
    # Field in an answer: the parameter for the next page that takes its value. The first field is required.
    following: Mapping[str, str]


OBJECTS = Pages(
    "list_objects_v2",
    {name: name for name in ("Prefix", "StartAfter", "ContinuationToken")} | {"Name": "Bucket"},
    ("Name", "Prefix"),
    {"NextContinuationToken": "ContinuationToken"},
)
PARTS = Pages(
    "list_parts",
    {name: name for name in ("Bucket", "Key", "UploadId", "PartNumberMarker")},
    ("Key", "UploadId"),
    {"NextPartNumberMarker": "PartNumberMarker"},
)
UPLOADS = Pages(
    "list_multipart_uploads",
    {name: name for name in ("Bucket", "Prefix", "KeyMarker")},
    ("Bucket", "Prefix"),
    {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"},
)


def check_document(shape: str, body: bytes) -> None:
    """Raise unless `body` begins as the document that the SDK is about to parse."""
    if (wanted := _DOCUMENTS.get(shape)) is not None:
        root = _ROOT.match(body)
        if root is None or root[1].decode() not in wanted:
            raise MalformedResponseError(f"expected {wanted[0]}, got {body[:80]!r}")


def check_needed(operation: str, response: SdkResponse) -> None:
    if missing := [name for name in _NEEDED.get(operation, ()) if name not in response]:
        raise MalformedResponseError(f"the store answered without {', '.join(missing)}")


# --- listings ----------------------------------------------------------------------------------------------


def next_page(pages: Pages, asked: Mapping[str, Any], page: SdkResponse) -> dict[str, Any] | None:
    """Return the parameters for the next page, or None after the last one. Raises unless this page answers `asked`."""
    _check_echoes(pages, asked, page)
    check_age(page["ResponseMetadata"]["HTTPHeaders"])
    if not _field(page, "IsTruncated", bool):
        return None
    following = {parameter: page[name] for name, parameter in pages.following.items() if page.get(name)}
    needed, parameter = next(iter(pages.following.items()))
    if parameter not in following:
        raise MalformedResponseError(f"the listing was cut short: truncated, but without {needed}")
    if all(asked.get(name) == value for name, value in following.items()):
        raise MalformedResponseError(f"the listing does not advance: {needed} is again {page[needed]!r}")
    return following


def _check_echoes(pages: Pages, asked: Mapping[str, Any], page: SdkResponse) -> None:
    if not any(name in page for name in pages.essential):
        raise MalformedResponseError(f"the store answered without {' and '.join(pages.essential)}")
    for echo, parameter in pages.echoes.items():
        if echo in page and not _is_same(parameter, str(asked.get(parameter, "")), str(page[echo])):
            raise MalformedResponseError(
                f"the response belongs to another request: {parameter} is {page[echo]!r}, not {asked.get(parameter)!r}"
            )


def _is_same(parameter: str, asked: str, echo: str) -> bool:
    if parameter == "Bucket":
        # Ceph puts the tenant in front.
        is_bucket = not asked.startswith("arn:") and not _ALIAS.fullmatch(asked)
        return not is_bucket or echo.rpartition(":")[2].lower() in ("", asked.lower())
    if parameter == "PartNumberMarker" and not asked:
        asked = "0"
        echo = echo or "0"
    # Some stores URL-encode echoes without saying so, or say so but do not (SeaweedFS 4.48; then the SDK decodes them).
    return not {asked, unquote_plus(asked)}.isdisjoint((echo, unquote_plus(echo)))


def page_of(page: SdkResponse, prefix: str) -> Page:
    """Return a page of OBJECTS."""
    at = server_time(page["ResponseMetadata"]["HTTPHeaders"])
    return Page(objects(page, prefix), at, not page["IsTruncated"])


def objects(page: SdkResponse, prefix: str) -> Iterable[ObjectInfo]:
    """Yield a page's objects, prefix included in their keys, without the folder markers that some consoles create."""
    for each in page.get("Contents", ()):
        key = _key(each, prefix)
        if not key.endswith("/"):
            size_bytes, etag = _size(each), _field(each, "ETag", str)
            yield ObjectInfo(key, size_bytes, etag, None, _moment(each, "LastModified"))


def uploads(page: SdkResponse, prefix: str) -> Iterable[MultipartInfo]:
    """Yield the uploads on a page, whose keys include the prefix."""
    for each in page.get("Uploads", ()):
        yield MultipartInfo(_key(each, prefix), _field(each, "UploadId", str), _moment(each, "Initiated"))


def parts(listed: Iterable[SdkResponse]) -> list[StoredPart]:
    """Return the parts by number. SeaweedFS 4.48 lists a part twice if it was sent twice; then the newer one counts."""
    newest: dict[int, tuple[float, StoredPart]] = {}
    for each in listed:
        number = _size(each, "PartNumber")
        at = _moment(each, "LastModified")
        if number not in newest or newest[number][0] <= at:
            newest[number] = at, StoredPart(number, _size(each), _field(each, "ETag", str), checksum(each))
    return [part for _, (_, part) in sorted(newest.items())]


def check_deleted(response: SdkResponse, names: Iterable[str]) -> SdkResponse | None:
    """Return the first error in an answer of DeleteObjects. Raises unless the answer tells what became of each name."""
    deleted: list[SdkResponse] = response.get("Deleted", [])
    errors: list[SdkResponse] = response.get("Errors", [])
    told = {each.get("Key") for each in (*deleted, *errors)}
    error = next((each for each in errors if each.get("Code") != "NoSuchKey"), None)
    missing = [name for name in names if name not in told]
    if missing and (error is None or error.get("Key")):
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise MalformedResponseError(f"the store did not say what became of {missing[0]!r}{others}")
    return error


# --- objects -----------------------------------------------------------------------------------------------


def past_sdk(answer: Response) -> SdkResponse:
    """Convert an answer that bypassed the SDK to the form in which the SDK parses it."""
    return {field: value for field, name in _HEADERS if (value := answer.headers.get(name))}


def info(key: str, response: SdkResponse, size_bytes: int | None = None) -> ObjectInfo:
    """Return what the answer to a GET or HEAD says. `size_bytes`: that of the whole object, if the answer is a part."""
    size_bytes = _size(response, "ContentLength") if size_bytes is None else size_bytes
    modified_at = _moment(response, "LastModified") if "LastModified" in response else None
    return ObjectInfo(key, size_bytes, _field(response, "ETag", str), checksum(response), modified_at)


def info_of_part(key: str, answer: Response, size_bytes: int) -> ObjectInfo:
    return ObjectInfo(key, size_bytes, answer.headers["etag"], None, _modified_at(answer))


def is_plain(answer: Response) -> bool:
    """Return whether an answer to a GET is the whole object, with no checksums except of the kinds that we know."""
    ours = {f"x-amz-checksum-{name}" for name in (*CHECKSUM_FIELDS, "type")}
    others = {name for name in answer.headers if name.startswith("x-amz-checksum-")} - ours
    is_whole = answer.status == 200 and "content-length" in answer.headers
    return is_whole and not others and "content-encoding" not in answer.headers


def info_of_whole(key: str, answer: Response) -> ObjectInfo:
    """Return what a plain answer says (see `is_plain`)."""
    size_bytes = whole_number("Content-Length", answer.headers["content-length"])
    told = past_sdk(answer)
    return ObjectInfo(key, size_bytes, _field(told, "ETag", str), checksum(told), _modified_at(answer))


def _modified_at(answer: Response) -> float | None:
    modified = answer.headers.get("last-modified")
    return None if modified is None else http_date("Last-Modified", modified)


def copied_part(number: int, size_bytes: int, response: SdkResponse) -> StoredPart:
    """Return the part that UploadPartCopy has made."""
    result = response["CopyPartResult"]
    return StoredPart(number, size_bytes, _field(result, "ETag", str), checksum(result))


def checksum(response: SdkResponse) -> Checksum | None:
    """Return the checksum of the whole object or part, if the store has one. A value of the wrong length is not of that
    kind (moto without a library for CRC64NVME puts a CRC32 there): it counts as missing, and the bytes are read back.
    """
    if response.get("ChecksumType") == "COMPOSITE":
        return None
    values = ((algorithm, response.get(name, "")) for algorithm, name in CHECKSUM_FIELDS.items())
    told = (
        stated(algorithm, value) for algorithm, value in values if "-" not in value
    )  # a composite has "-"
    return next(filter(None, told), None)


# --- fields ------------------------------------------------------------------------------------------------


def _field(each: SdkResponse, name: str, kind: type[Any]) -> Any:
    value = each.get(name)
    if type(value) is not kind or value == "":
        raise MalformedResponseError(
            f"the store answered with {name} {value!r}" if name in each else _without(name)
        )
    return value


def _without(name: str) -> str:
    return f"the store answered without {name}"


def _size(each: SdkResponse, name: str = "Size") -> int:
    size_bytes: int = _field(each, name, int)
    if size_bytes < 0:
        raise MalformedResponseError(f"the store answered with {name} {size_bytes}")
    return size_bytes


def _key(each: SdkResponse, prefix: str) -> str:
    return check_below(_field(each, "Key", str), prefix)


def _moment(each: SdkResponse, name: str) -> float:
    at: dt.datetime = _field(each, name, dt.datetime)
    return seconds_of(name, at)
