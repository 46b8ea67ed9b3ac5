"""The objects that ranks, readers and sweepers share in the store, and the only steps that change them.

Create-once, compare-and-swap, generations, decisions, leases, what a sweep does. No local disk, no trainer.
"""
