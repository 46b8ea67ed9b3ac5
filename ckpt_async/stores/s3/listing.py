"""How to ask for a prefix: S3 lists any, directory buckets (S3 Express One Zone) only folders, and in no order.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html. Pure.
"""

from __future__ import annotations

# The suffixes of directory buckets and of their access points.
_DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")


def is_directory_bucket(bucket: str) -> bool:
    return bucket.endswith(_DIRECTORY_BUCKETS)


def listed_prefix(bucket: str, prefix: str) -> str:
    """Return the prefix to list so that nothing with `prefix` is missing; the caller filters out the rest."""
    return prefix[: prefix.rfind("/") + 1] if is_directory_bucket(bucket) else prefix


def server_start(bucket: str, prefix: str, start_after: str) -> str:
    """Return where the server may start, so that it skips no key beyond `start_after`; "" means at the beginning.

    SeaweedFS 4.48 sorts folder by folder, as if "/" came before all other characters ("a/z/1" before "a/z-1"), and
    skips a folder whose name is exactly the start. So the start ends before the first character below "/", and then
    moves back to where the next character is above it.
    """
    if is_directory_bucket(bucket) or not start_after.startswith(prefix):
        return ""
    low = (i for i in range(len(prefix), len(start_after)) if start_after[i] < "/")
    end = next(low, len(start_after)) - 1
    while end > len(prefix) and start_after[end] == "/":
        end -= 1
    return start_after[:end] if end > len(prefix) else ""
