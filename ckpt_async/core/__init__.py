"""Values and rules, pure: the model, `decide`, retention, keys, names, records, settings.

Nothing here uses a clock, randomness, files, sockets or threads: whatever a rule needs is an argument. Imports only
`errors`.
"""
