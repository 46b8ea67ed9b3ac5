"""Amazon S3 and S3-compatible stores, behind the interface of `stores.interface`.

The SDK speaks for small requests and decides how a request looks; `stores.http` carries the bytes.
"""
