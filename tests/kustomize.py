"""Builds deploy/kubernetes as `kubectl kustomize` does, but supports only the fields that our files use.

A field that is not supported raises instead of being ignored. So the tests can look at what is applied without having
kubectl; where there is one, both must build the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
LOCAL = "config.kubernetes.io/local-config"


def build(folder: Path) -> list[Object]:
    """Return every object that `kubectl apply -k FOLDER` sends. Raises KeyError on a field that is not supported
    here.
    """
    objects: list[Object] = []
    _accumulate(folder, objects)
    return [each for each in objects if not each["metadata"].get("annotations", {}).get(LOCAL)]


def _accumulate(folder: Path, objects: list[Object]) -> None:
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    version, kind = asked.pop("apiVersion"), asked.pop("kind")
    assert (version, kind) in {
        ("kustomize.config.k8s.io/v1beta1", "Kustomization"),
        ("kustomize.config.k8s.io/v1alpha1", "Component"),
    }, folder
    for each in asked.pop("resources", ()):
        if (folder / each).is_dir():
            _accumulate(folder / each, objects)
        else:
            objects += yaml.safe_load_all((folder / each).read_text())
    assert asked.pop("generatorOptions", {"disableNameSuffixHash": True}) == {"disableNameSuffixHash": True}
    for each in asked.pop("configMapGenerator", ()):
        _generate(each, objects)
    for each in asked.pop("components", ()):
        _accumulate(folder / each, objects)
    for name in list(asked):
        TRANSFORMERS[name](objects, asked.pop(name))


def _generate(asked: Object, objects: list[Object]) -> None:
    data = dict(each.split("=", 1) for each in asked["literals"])
    if asked.get("behavior") == "merge":
        _one(objects, kind="ConfigMap", name=asked["name"])["data"].update(data)
    else:
        metadata = {"name": asked["name"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _one(objects: list[Object], *, kind: str, name: str) -> Object:
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


# --- what changes all objects ------------------------------------------------------------------------------


def _namespace(objects: list[Object], name: str) -> None:
    for each in objects:
        each["metadata"]["namespace"] = name


def _images(objects: list[Object], asked: list[Object]) -> None:
    for one in asked:
        for each in containers(objects):
            if each["image"] == one["name"]:
                each["image"] = f"{one['newName']}:{one['newTag']}"


def containers(node: Any) -> list[Object]:
    """Return all containers at any depth, including init containers and sidecars."""
    if isinstance(node, list):
        return [each for one in node for each in containers(one)]
    if not isinstance(node, dict):
        return []
    own = [*node.get("initContainers", ()), *node.get("containers", ())]
    return own + [each for one in node.values() for each in containers(one)]


def _replacements(objects: list[Object], asked: list[Object]) -> None:
    for one in asked:
        source: Any = _one(objects, kind=one["source"]["kind"], name=one["source"]["name"])
        for step in one["source"]["fieldPath"].split("."):
            source = source[int(step) if step.isdecimal() else step]
        for target in one["targets"]:
            assert target["options"] == {"create": True}
            for each in objects:
                if each["kind"] == target["select"]["kind"]:
                    for path in target["fieldPaths"]:
                        _put(each, path, copy.deepcopy(source))


def _put(node: Any, path: str, value: Object) -> None:
    """Put `value` at `path`, which ends with a list's name and `[name=…]`: the element of that name is replaced or
    added.
    """
    *steps, last, of_name = path.split(".")
    for step in steps:
        node = node[int(step) if step.isdecimal() else step]
    name = of_name.removeprefix("[name=").removesuffix("]")
    others = [each for each in node.get(last, ()) if each["name"] != name]
    node[last] = [*others, value]


TRANSFORMERS: dict[str, Callable[[list[Object], Any], None]] = {
    "namespace": _namespace,
    "images": _images,
    "replacements": _replacements,
}
