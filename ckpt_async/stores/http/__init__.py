"""Bytes over HTTP/1.1 in threads of their own: connections, framing, bodies sent and ranges received.

Nothing here knows of S3, of retries or of checkpoints: one attempt, its deadline and its error.
"""
