"""Admission, deadlines, retries, concurrency, and how a shard is uploaded in parts.

Nothing above sees a single attempt, nothing below retries. Knows shards, not checkpoints.
"""
