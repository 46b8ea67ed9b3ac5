"""The trainer's interface: `Uploader`, files that are uploaded while they are written, the flush before preemption.

Calls link, append and return; they never touch the network. No rule of the protocol is implemented here.
"""
