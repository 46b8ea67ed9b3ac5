"""What the trainer calls: `Uploader`, the file that is sent while it is written, the flush before preemption.

Calls link, append and return; they never touch the network. No rule of the protocol is decided here.
"""
