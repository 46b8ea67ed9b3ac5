"""Reading what is under a remote without this package: with plain boto3 calls, or through the file system."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import botocore.session


def objects(remote: str, *, put: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Return every object below the remote, by relative key, after storing the objects in `put`."""
    parts = urlsplit(remote)
    if parts.scheme == "file":
        root = Path(parts.path)
        for key, data in (put or {}).items():
            (root / key).unlink(missing_ok=True)
            (root / key).write_bytes(data)
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and ".ckpt-async/tmp" not in path.as_posix()
        }
    endpoint_url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ["AWS_ENDPOINT_URL"]
    client = botocore.session.get_session().create_client("s3", endpoint_url=endpoint_url)
    prefix = f"{parts.path.strip('/')}/"
    for key, data in (put or {}).items():
        client.put_object(Bucket=parts.netloc, Key=prefix + key, Body=data)
    listed = client.get_paginator("list_objects_v2").paginate(Bucket=parts.netloc, Prefix=prefix)
    keys = [each["Key"] for page in listed for each in page.get("Contents", ())]
    return {
        key.removeprefix(prefix): client.get_object(Bucket=parts.netloc, Key=key)["Body"].read()
        for key in keys
    }
