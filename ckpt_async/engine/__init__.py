"""One rank's engine: observe, decide, act, record.

No rule lives here (see `core.decide`) and no thread or process (see `runners`). Its state comes from the journal alone.
"""
