"""Work without a trainer: `drain` finishes what a dead trainer left, and the sweeper maintains remotes.

This room contains no rules: `protocol.sweep_plan` decides what a sweep does, and an engine does the uploads.
"""
