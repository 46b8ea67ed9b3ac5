"""Work without a trainer: `drain` finishes what a dead trainer left, the sweeper looks after remotes.

No rule lives here: `protocol.sweep_plan` decides what a sweep does, and an engine does the uploads.
"""
