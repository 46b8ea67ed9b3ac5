"""Amazon S3 and S3-compatible stores, behind `stores.interface`.

The SDK sends small requests and determines the form of all requests; `stores.http` carries the bytes. No retries here.
"""
