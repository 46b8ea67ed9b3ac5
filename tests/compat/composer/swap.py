"""A pytest plugin for Composer's own tests that puts our `CheckpointSaver` in place of theirs. See `conformance.py`.

COMPOSER_REMOTE=1 also gives every saver a `remote`, so that each save is uploaded as well.
"""

import os
import tempfile

import composer.callbacks
import composer.callbacks.checkpoint_saver
import composer.trainer.trainer

from ckpt_async.integrations.composer import CheckpointSaver

REMOTES = tempfile.mkdtemp(prefix="composer-remotes-") if os.environ.get("COMPOSER_REMOTE") else None


def _with_remote() -> type[CheckpointSaver]:
    class Saver(CheckpointSaver):
        def __init__(self, *args, **kwargs):
            remote = tempfile.mkdtemp(dir=REMOTES)
            super().__init__(*args, remote=f"file://{remote}/{{run_name}}", **kwargs)

    Saver.__name__ = Saver.__qualname__ = "CheckpointSaver"  # the name under which its state is saved
    return Saver


OURS = CheckpointSaver if REMOTES is None else _with_remote()
for module in (composer.callbacks, composer.callbacks.checkpoint_saver, composer.trainer.trainer):
    module.CheckpointSaver = OURS
