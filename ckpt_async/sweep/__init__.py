"""What runs where no trainer does: `drain` finishes a dead trainer's work, the sweeper looks after remotes.

What a sweep may do is decided in `protocol.sweep_plan`; here it is carried out.
"""
