"""Silencing libraries that print failures which they also raise."""

from __future__ import annotations

import logging


def say_once(name: str) -> None:
    """Keep the library whose loggers begin with `name` from printing to stderr when the program has set up no handlers:
    our own error reports the failure, once. Handlers that the program has set up still get its messages.
    """
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
