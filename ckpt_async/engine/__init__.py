"""One rank's engine: observe, decide, act, record.

It owns no rule (`core.decide` does) and no thread (`runners` do); state comes from the journal alone.
"""
