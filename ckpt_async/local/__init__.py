"""This node's disk: the checkpoint folder, its spool of hard links, locks, and the journals.

Calls block and are safe from any thread. Nothing here knows a store or an event loop.
"""
