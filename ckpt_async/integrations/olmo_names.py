"""How OLMo and OLMo-core name checkpoints, and what follows from a name: where to upload it and where to find it. Pure,
and importable without either of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_async.errors import SettingsError
from ckpt_async.restore import Checkpoint

UNSHARDED = "unsharded"  # the kind of OLMo's unsharded checkpoints
FOLDER = re.compile(r"step(\d+)(-unsharded)?", re.ASCII)


def run_of(upload_to: str, folder: Path) -> str:
    """Return the run to which a folder is uploaded, where OLMo names the checkpoint's own place. Raises SettingsError
    for another name than the folder's, or one that is no checkpoint's.
    """
    remote, _, name = upload_to.rstrip("/").rpartition("/")
    if name != folder.name or not FOLDER.fullmatch(name):
        raise SettingsError(
            f"upload_to={upload_to!r}: its last part must be the name of the folder {str(folder)!r},"
            " which must be step<N> or step<N>-unsharded"
        )
    return remote


def newest_name(sharded: Checkpoint | None, unsharded: Checkpoint | None) -> str | None:
    """Return the name of the newer one; of the same step, that of the sharded one."""
    if sharded is None or unsharded is None:
        found = sharded or unsharded
        return None if found is None else found.name
    return sharded.name if sharded.step >= unsharded.step else unsharded.name


@dataclass(frozen=True, slots=True)
class Fetch:
    """`folder`: where to. `ways`: the URLs to try, each with what to find there."""

    folder: Path
    is_own: bool  # of the run that is being saved to
    ways: tuple[tuple[str, Mapping[str, Any]], ...]


def fetch_of(url: str, save_folder: str, remote_save_folder: str | None) -> Fetch | None:
    """Return how to fetch the checkpoint of a URL; None if its last part is not a checkpoint's name."""
    remote, _, name = url.rstrip("/").rpartition("/")
    match = FOLDER.fullmatch(name)
    if match is None:
        return None
    is_own = remote_save_folder is not None and remote == remote_save_folder.rstrip("/")
    which = {"step": int(match[1]), "kind": UNSHARDED if match[2] else None}
    # One of ours, then a folder that OLMo has uploaded.
    ways: tuple[tuple[str, Mapping[str, Any]], ...] = ((remote, which), (f"{remote}/{name}", {}))
    return Fetch(Path(save_folder, *([] if is_own else ["loaded"]), name), is_own, ways)


def core_step(name: str) -> int | None:
    """Return the step of OLMo-core's folder, which has no unsharded ones; None for any other name."""
    match = FOLDER.fullmatch(name)
    return None if match is None or match[2] else int(match[1])


def later(names: Iterable[str], step: int, until: int | None = None) -> list[str]:
    """Return those of OLMo-core's folders that are of a later step, and of `until` at the latest."""
    steps = ((core_step(name), name) for name in names)
    return [
        name
        for at, name in sorted((at, name) for at, name in steps if at is not None)
        if step < at and (until is None or at <= until)
    ]
