"""The files and tensors that a `.metadata` of torch.distributed.checkpoint names, found without torch.

Nothing in the metadata is executed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import partial
from typing import Any

from ckpt_async.core.pickled import ILL_FORMED, Class, Function, Rules, interpret, refuse
from ckpt_async.errors import UnsafePickleError
from ckpt_async.formats.tree import Tree

# The file that is written last into its folder.
METADATA = ".metadata"
# A file that one rank has written.
DISTCP = re.compile(r"__[0-9]+_[0-9]+\.distcp")
# About 5 million shards of tensors: a chunk and its place in storage take some 200 bytes.
MAX_METADATA_BYTES = 1 << 30

# An object of ML Flashpoint begins with a block of FLASHPOINT_PREFIX_BYTES about itself, after which the
# offsets in `.metadata` count. The first FLASHPOINT_HEAD_BYTES identify it.
FLASHPOINT_PREFIX_BYTES = 4096
FLASHPOINT_HEAD_BYTES = 16
_FLASHPOINT_SIGNATURES = {b"MLF_TENS": True, b"TORCH___": False}
# OLMo-core's writer has its own class for the location of a part, with the same fields as torch's.
OLMO_CORE_STORAGE = ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo")

_PACKAGE = "torch.distributed.checkpoint."
_OLD_PROPERTIES = ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties")  # before torch 2.3


class _Inert:
    """Stand-in for an object of any DCP class: it keeps the fields, and no foreign code is called."""


# Enums are called with their value. megatron-core keeps the plans of all ranks in its metadata.
_ENUMS = frozenset({"_MEM_FORMAT_ENCODING", "WriteItemType", "LoadItemType"})


class _PlacesRules(Rules):
    what = "DCP's metadata"

    def find(self, module: str, name: str) -> object:
        """Accept classes by their module, so that a class added in a newer torch is no obstacle. Everything else is
        a value, or a call that does nothing.
        """
        if f"{module}.".startswith(_PACKAGE) and name not in _ENUMS:
            return Class(_Inert)
        if (module, name) in (OLMO_CORE_STORAGE, _OLD_PROPERTIES):
            return Class(_Inert)
        if (module, name) == ("collections", "OrderedDict"):
            return Function(lambda *_: OrderedDict())
        return Function(lambda *_: None)

    def build(self, target: object, state: object) -> object:
        if type(target) is _Inert and not vars(target) and type(state) is dict:
            vars(target).update((name, value) for name, value in state.items() if type(name) is str)
        return target

    def check_keys(self, keys: list[Any]) -> None:
        if not {str, _Inert}.issuperset(map(type, keys)):
            refuse("it has a key that is neither a name nor an index")


def named_files(metadata: bytes) -> dict[str, int]:
    """Return the files that hold the checkpoint's parts, as paths relative to `.metadata`, each with the least size
    that it must have. Time and memory grow with the size of `metadata`, so call it in a thread.

    Raises UnsafePickleError if it is not DCP's metadata.
    """
    try:
        found: Any = interpret(metadata, _PlacesRules())
        sizes: dict[str, int] = {}
        for place in (found.storage_data or {}).values():
            path, end = place.relative_path, place.offset + place.length
            if type(path) is not str or type(end) is not int:
                raise UnsafePickleError("it does not say where a part is stored")
            sizes[path] = max(end, sizes.get(path, 0))
    except ILL_FORMED as error:
        raise UnsafePickleError(f"it is cut short, or not DCP metadata: {error}") from error
    return sizes


def is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == METADATA


def is_dcp(tree: Tree, folder: str) -> bool:
    """Return whether a folder is a DCP checkpoint, or was begun as one. It is not if its files are those of a
    `.metadata` above.
    """
    names = tree.names(folder)
    if METADATA in names or not any(DISTCP.fullmatch(each) for each in names):
        return METADATA in names
    while folder:
        folder = folder.rpartition("/")[0]
        if METADATA in tree.names(folder):
            return False
    return True


def named_in(tree: Tree, mark: str) -> dict[str, int] | str:
    """Return what `named_files` does for a `.metadata` of a tree, or the reason why it cannot be read."""
    return tree.once("named", mark, partial(_named, tree, mark))


def _named(tree: Tree, mark: str) -> dict[str, int] | str:
    try:
        return named_files(tree.whole(mark, MAX_METADATA_BYTES))
    except UnsafePickleError as error:
        return error.without_hint


def flashpoint_is_optimised(head: bytes) -> bool | None:
    """Return whether an ML Flashpoint object that begins with `head` stores tensors in Flashpoint's own form (True)
    or torch's (False); None if it is no such object.
    """
    return _FLASHPOINT_SIGNATURES.get(head[8:FLASHPOINT_HEAD_BYTES])
