"""Values and rules, pure: the model, `decide`, retention, keys, names, records, settings.

No clock, randomness, file, socket or thread: whatever a rule needs is an argument. Imports only `errors`.
"""
