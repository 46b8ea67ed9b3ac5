"""`CheckpointSaver` decides when to save, what, and under which name; it builds on `Uploader` and `ckpt_async.torch`.

    from ckpt_async.saver import CheckpointSaver, Timestamp

Schedules, names and intervals are pure functions. Nothing in this package uploads or knows a file format.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ckpt_async.saver needs torch: run pip install '.[torch]' in the clone of ckpt_async (Uploader works"
        " without it)",
        name=error.name,
    ) from None

from ckpt_async.saver.auto import Auto, Choice
from ckpt_async.saver.saver import CheckpointSaver
from ckpt_async.saver.saving import SavedCheckpoint
from ckpt_async.saver.timestamp import Event, Timestamp

__all__ = ["Auto", "CheckpointSaver", "Choice", "Event", "SavedCheckpoint", "Timestamp"]
