"""The files that an OLMo checkpoint must have, by their names. Pure.

unsharded        model.pt or model.safetensors
torch_legacy     rank<N>.pt of every rank
local            model/rank<N>.pt, optim/rank<N>.pt and train/rank<N>.pt of every rank; the number of ranks is in
                 metadata.yaml
olmo_core 0.1    model/rank_<N>.safetensors, and the same below optim/
torch_new        model_and_optim, whose `.metadata` names its files
"""

from __future__ import annotations

import re
from collections.abc import Collection

METADATA_YAML = "metadata.yaml"

_RANK_FILE = re.compile(r"((?:model/|optim/|train/)?)rank_?([0-9]{1,6})\.(?:pt|safetensors)")
_NOT_THE_MODEL = re.compile(
    r"(?:config|metadata)\.yaml|\.metadata\.json|config\.json|(?:train|optim|other)(?:/.*|\.(?:pt|safetensors))"
)
_WORLD_SIZE = re.compile(rb"^world_size: *([1-9][0-9]{0,5})\s*$", re.MULTILINE)


def world_size(metadata_yaml: bytes) -> int:
    """Return the number of ranks that a `metadata.yaml` gives; 0 if it gives none."""
    told = _WORLD_SIZE.search(metadata_yaml)
    return int(told[1]) if told else 0


def lacking(names: Collection[str], metadata_yaml: bytes = b"") -> str:
    """Return why these cannot be all files of the checkpoint; "" if they may be. Without `metadata.yaml` a missing
    last rank goes unnoticed.
    """
    if all(_NOT_THE_MODEL.fullmatch(name) for name in names):
        return "it has no model"
    ranks: dict[str, set[int]] = {}
    for name in names:
        if match := _RANK_FILE.fullmatch(name):
            ranks.setdefault(match[1], set()).add(int(match[2]))
    is_local = METADATA_YAML in names and "model/" in ranks
    if not is_local:
        train = ranks.pop("train/", {0})  # a rank that has no file here uses that of rank 0
        if 0 not in train:
            return "it has no file of rank 0 in train/"
    told = world_size(metadata_yaml) if is_local else 0
    most = told or 1 + max((max(each) for each in ranks.values()), default=-1)
    for folder, each in sorted(ranks.items()):
        if missing := set(range(most)) - each:
            return (
                f"it has no file of rank {min(missing)}{f' in {folder}' if folder else ''}, but there were"
                f" {most} ranks"
            )
    return ""
