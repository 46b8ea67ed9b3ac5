"""Hand-made XML documents as S3 returns them, with whatever content the test wants."""

from xml.sax.saxutils import escape


def document(name: str, *, extra: str = "", **fields: object) -> bytes:
    """Return a document with `fields` in their order, except those that are None, followed by `extra` verbatim."""
    inner = "".join(f"<{each}>{_text(value)}</{each}>" for each, value in fields.items() if value is not None)
    return f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}{extra}</{name}>'.encode()


def item(name: str, **fields: object) -> str:
    return "".join(
        [f"<{name}>", *(f"<{each}>{_text(value)}</{each}>" for each, value in fields.items()), f"</{name}>"]
    )


def contents(*keys: str) -> str:
    each = {"LastModified": "2026-11-21T04:00:00Z", "ETag": '"e"', "Size": 5}
    return "".join(item("Contents", Key=key, **each) for key in keys)


def objects(*keys: str, prefix: str = "run/", extra: str = "", **fields: object) -> bytes:
    """Return a page of ListObjectsV2."""
    fields = {"Name": "bucket", "Prefix": prefix, "IsTruncated": False, **fields}
    return document("ListBucketResult", extra=contents(*keys) + extra, **fields)


def parts(*numbers: int, extra: str = "", **fields: object) -> bytes:
    """Return a page of ListParts for the upload "u" of run/a."""
    fields = {"Bucket": "bucket", "Key": "run/a", "UploadId": "u", "IsTruncated": False, **fields}
    each = {"LastModified": "2026-11-21T04:00:00Z", "ETag": '"e"', "Size": 5}
    items = "".join(item("Part", PartNumber=number, **each) for number in numbers)
    return document("ListPartsResult", extra=items + extra, **fields)


def uploads(*keys: str, prefix: str = "run/", extra: str = "", **fields: object) -> bytes:
    """Return a page of ListMultipartUploads."""
    fields = {"Bucket": "bucket", "Prefix": prefix, "IsTruncated": False, **fields}
    items = "".join(item("Upload", Key=key, UploadId="u", Initiated="2026-11-21T04:00:00Z") for key in keys)
    return document("ListMultipartUploadsResult", extra=items + extra, **fields)


def deleted(*keys: str, extra: str = "") -> bytes:
    return document("DeleteResult", extra="".join(item("Deleted", Key=key) for key in keys) + extra)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else escape(str(value))
