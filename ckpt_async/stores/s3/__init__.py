"""Amazon S3 and S3-compatible stores, behind `stores.interface`.

The SDK sends small requests and determines what a request looks like; `stores.http` carries the bytes. No retries here.
"""
