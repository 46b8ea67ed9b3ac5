"""The view of a folder, which is `formats`' now."""

from ckpt_async.formats.tree import Identity, Tree, files_of

__all__ = ["Identity", "Tree", "files_of"]
