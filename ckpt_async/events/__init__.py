"""Events: what becomes of checkpoints, told to a function, a command or a webhook.

Below here facts are recorded, and with them, in one transaction, what is to be told (`core.notices`). Here is which
event a fact is, who wants to hear of it, and how it gets there. Nothing here may stop or slow a trainer.
"""

from ckpt_async.events.event import KINDS, Event
from ckpt_async.events.signing import is_signed

__all__ = ["KINDS", "Event", "is_signed"]
