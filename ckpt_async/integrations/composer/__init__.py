"""Composer 0.32: a `CheckpointSaver` that uploads through ckpt_async, and a `RemoteUploaderDownloader`.

    from ckpt_async.integrations.composer import CheckpointSaver, RemoteUploaderDownloader

Both accept Composer's own arguments and more, so only the import has to change.
"""

from ckpt_async.integrations.composer.logger import RemoteUploaderDownloader
from ckpt_async.integrations.composer.saver import CheckpointSaver

__all__ = ["CheckpointSaver", "RemoteUploaderDownloader"]
