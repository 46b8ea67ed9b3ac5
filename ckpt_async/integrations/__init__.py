"""Adapters for training frameworks, over the public API: one module each, imported where it is wanted.

    from ckpt_async.integrations.lightning import CkptAsyncCheckpointIO, newest_checkpoint
    from ckpt_async.integrations.transformers import CkptAsyncCallback, newest_checkpoint

The frameworks are not dependencies: `pip install ckpt-async[lightning]` or `ckpt-async[transformers]`.
"""
