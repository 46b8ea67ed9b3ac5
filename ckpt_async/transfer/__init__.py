"""Admission, deadlines, retries, concurrency, and how a shard is uploaded in parts.

No room above this one sees a single attempt, and none below retries. This room knows shards, not checkpoints.
"""
