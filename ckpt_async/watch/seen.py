"""Which files a folder had, and until when: what other nodes tell of later may be gone by then. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_async.watch.tree import Tree

# Of files that are gone: the newest.
MAX_GONE = 100_000


@dataclass(slots=True)
class Seen:
    """What the looks of this start have seen."""

    _until_ns: dict[str, int] = field(default_factory=dict)  # by path

    def see(self, tree: Tree) -> None:
        """The newest look."""
        self._until_ns.update(dict.fromkeys(tree.files, tree.now_ns))
        if len(self._until_ns) > 2 * MAX_GONE + len(tree.files):
            newest = sorted(self._until_ns.items(), key=lambda each: each[1])[-MAX_GONE - len(tree.files) :]
            self._until_ns = dict(newest)

    def gone(self, folder: str, tree: Tree, since_ns: int) -> list[str]:
        """What was below a folder at that time or later, and is not there any more; not what had no name yet."""
        found = (
            path
            for path, until_ns in self._until_ns.items()
            if path.startswith(f"{folder}/") and path not in tree.files and until_ns >= since_ns
        )
        return sorted(path for path in found if not path.endswith(".tmp"))
