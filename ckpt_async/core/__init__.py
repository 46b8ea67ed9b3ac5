"""Values and rules, pure: what is known, what is decided by it, how it is named and written down.

No clock, no randomness, no file, no socket, no thread: whatever a rule needs is an argument. It imports `errors` only.
"""
