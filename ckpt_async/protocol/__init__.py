"""The objects that ranks, readers and sweepers share through the store, and the only steps that change them.

Create-once, compare-and-swap, generations, decisions, leases, the sweep plan. No local disk, no trainer.
"""
