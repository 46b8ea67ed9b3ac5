"""One rank's engine: observe, decide, act, record. `loop` starts what is due; `state` is what it knows and `book` what
runs; `durable`, `sending`, `settling`, `publishing`, `clearing` and `recovery` carry out the actions, and know only
`state`.

No rule lives here (see `core.decide`) and no thread or process (see `runners`). Its state comes from the journal alone.
"""
