"""Remembers which files a folder had, and until when. Pure.

Another node may announce a checkpoint whose files are gone here by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_async.watch.tree import Tree

# How many files that are gone are remembered; the newest are kept.
MAX_GONE = 100_000


@dataclass(slots=True)
class Seen:
    """The files that the looks of this launch have seen."""

    _until_ns: dict[str, int] = field(default_factory=dict)  # by path

    def see(self, tree: Tree) -> None:
        """Record the newest look."""
        self._until_ns.update(dict.fromkeys(tree.files, tree.now_ns))
        if len(self._until_ns) > 2 * MAX_GONE + len(tree.files):
            newest = sorted(self._until_ns.items(), key=lambda each: each[1])[-MAX_GONE - len(tree.files) :]
            self._until_ns = dict(newest)

    def gone(self, folder: str, tree: Tree, since_ns: int) -> list[str]:
        """Return the files that were below a folder at or after that time and are gone now, without temporary ones."""
        found = (
            path
            for path, until_ns in self._until_ns.items()
            if path.startswith(f"{folder}/") and path not in tree.files and until_ns >= since_ns
        )
        return sorted(path for path in found if not path.endswith(".tmp"))
