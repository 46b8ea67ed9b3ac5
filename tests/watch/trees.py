"""The same as for `formats`."""

from tests.formats.trees import SECOND, START, safetensors, torch_zip, tree_of

__all__ = ["SECOND", "START", "safetensors", "torch_zip", "tree_of"]
