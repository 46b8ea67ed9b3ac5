"""One rank's engine: observe, decide, act, record.

`loop` starts what is due; `state` is what the engine knows, `in_flight` what is running, `upload_queue` which upload is
next. `durable`, `uploading`, `committing`, `fencing`, `publishing`, `cleanup` and `recovery` carry out the actions, and
know only `state`.

This room has no rules (see `core.decide`) and starts no threads or processes (see `runners`). An engine's state comes
from the journal alone.
"""
