"""Libraries that print of a failure what they also raise."""

from __future__ import annotations

import logging


def say_once(name: str) -> None:
    """What the library whose loggers begin with `name` says goes to the handlers that the program has set up, and where
    it has none not to stderr: there our own error says it, once.
    """
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
