"""HTTP/1.1 on blocking sockets in worker threads: connections, framing, request bodies, ranged reads.

A call makes one attempt, with its own timeouts and errors. Nothing here knows about S3, retries or checkpoints.
"""
