"""Events: a function, a command or a webhook is told what becomes of checkpoints.

The layers below record facts and, in the same transaction, the notices to be delivered (`core.observe`). This package
decides which event a fact is and who wants to hear of it, and delivers it. Nothing here may stop or slow a trainer.
"""

from ckpt_async.events.event import KINDS, Event
from ckpt_async.events.webhook import is_signed

__all__ = ["KINDS", "Event", "is_signed"]
