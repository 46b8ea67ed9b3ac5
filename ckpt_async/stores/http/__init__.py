"""HTTP/1.1 on blocking sockets in worker threads: connections, framing, request bodies, ranged reads.

One attempt with its deadline and its error. Nothing here knows S3, retries or checkpoints.
"""
