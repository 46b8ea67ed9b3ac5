"""Patience and bytes: admission, deadlines, retries, concurrency; how a shard goes up in parts.

Above it nobody sees a single attempt; below it nobody retries. It knows shards, not checkpoints.
"""
