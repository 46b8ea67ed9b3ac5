"""This node's disk: the checkpoint folder with its spool of hard links, and the journal.

Blocking calls, safe from any thread. Nothing here knows of a store or of an event loop.
"""
