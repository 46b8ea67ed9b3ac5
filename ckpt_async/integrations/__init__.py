"""Adapters for training frameworks, one module for each. They use only the public API.

    from ckpt_async.integrations.lightning import CkptAsyncCheckpointIO, newest_checkpoint
    from ckpt_async.integrations.transformers import CkptAsyncCallback, newest_checkpoint
    from ckpt_async.integrations.composer import CheckpointSaver, RemoteUploaderDownloader
    from ckpt_async.integrations.olmo import Trainer, find_latest_checkpoint
    from ckpt_async.integrations.olmo_core import CkptAsyncCallback, newest_checkpoint
    from ckpt_async.integrations.ray import newest_checkpoint, open_in_ray, upload_fn
    from ckpt_async.integrations.torchtitan import CkptAsyncManager

The frameworks are not dependencies. Install the extra `lightning` or `transformers`; the other modules
say what to install when they are imported.
"""
