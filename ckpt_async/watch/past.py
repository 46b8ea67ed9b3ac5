"""Remembers versions of a place that no entry has, because they were written to before or after they were handed in.

A next save to the same place may still find their files there. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ckpt_async.watch.formats.found import Version
from ckpt_async.watch.tree import Tree

# How many versions of a place are remembered besides those that were handed in.
NUM_PAST = 2


@dataclass(slots=True)
class Past:
    """Versions by path and by entry number."""

    _versions: dict[str, dict[int, Version]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._versions)

    def remember(self, path: str, number: int, version: Version) -> None:
        past = self._versions.setdefault(path, {})
        past[number] = version
        for each in sorted(past)[:-NUM_PAST]:
            del past[each]

    def forget(self, tree: Tree) -> None:
        """Forget versions of which no file is there unchanged: nothing of them can be mistaken for a later save's."""
        for path, past in list(self._versions.items()):
            for number, version in list(past.items()):
                if version.files.items().isdisjoint(tree.files.items()):
                    del past[number]
            if not past:
                del self._versions[path]

    def of(self, path: str) -> Collection[Version]:
        return self._versions.get(path, {}).values()

    @property
    def all(self) -> Mapping[str, Collection[Version]]:
        return {path: each.values() for path, each in self._versions.items()}
