"""Rules for safe names. Pure: values in, values or a clear error out."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ckpt_async.core import keys
from ckpt_async.errors import InvalidNameError

T = TypeVar("T")

_COMPONENT = re.compile(keys.COMPONENT)
_NAME = rf"(?!\.\.?(?:/|\Z)){_COMPONENT.pattern}"
_RELATIVE = re.compile(rf"{_NAME}(?:/{_NAME})*")

_NUMBER = re.compile(r"\d+")
_WIDTH = re.compile(r"\d{0,2}d?")

# S3 allows keys of 1,024 bytes. The rest is for the run's prefix.
MAX_SHARD_NAME_LENGTH = 600
MAX_CHECKPOINT_NAME_LENGTH = 200
MAX_KEY_LENGTH = 1024
# The folders in which a run keeps its own objects, besides `keys.PRIVATE`, which no name may have.
_OWN_FOLDERS = ("ckpt", "kinds")
# A pointer of Composer's contains only a name; anything larger is a file that happens to have the suffix.
POINTER_SUFFIX, MAX_POINTER_BYTES = ".symlink", 4096


def several(given: Iterable[T], what: str) -> tuple[T, ...]:
    """Return the names given as the argument `what`, as a tuple.

    Raises InvalidNameError for a single string, which would otherwise be taken letter by letter.
    """
    if isinstance(given, str | bytes):
        raise InvalidNameError(
            f"{what}={given!r} must be a collection of names, not a single one",
            hint=f"give {what}=[{given!r}]",
        )
    return tuple(given)


def check_component(component: str, what: str) -> str:
    """Return `component` if it is one safe path component, else raise InvalidNameError saying why not."""
    if not isinstance(component, str):
        raise InvalidNameError(f"{what} {component!r} must be a string")
    if component in {"", ".", ".."}:
        raise InvalidNameError(f"{what} {component!r} is not a name")
    if component.lower().startswith(keys.PRIVATE):
        raise InvalidNameError(
            f"{what} {component!r} begins with {keys.PRIVATE}, which this package reserves"
        )
    if component.startswith("-"):
        raise InvalidNameError(f"{what} {component!r} begins with '-', as options of commands do")
    if not _COMPONENT.fullmatch(component):
        raise InvalidNameError(
            f"{what} {component!r} has a character or a length that is not safe in every store",
            hint="use 1 to 200 of A-Z a-z 0-9 . _ - = + @ ,",
        )
    return component


def check_kind(kind: object) -> str:
    """Return the name of a kind of checkpoints, "" for None. Raises InvalidNameError if it is not a valid name."""
    if kind is None or kind == "":
        return ""
    if not isinstance(kind, str) or not keys.is_kind(kind):
        raise InvalidNameError(
            f"kind {kind!r} is not a name for a kind of checkpoints",
            hint="use 1 to 32 of a-z 0-9 _ -, a letter or digit first, e.g. weights",
        )
    return kind


def check_relative(path: str, what: str) -> str:
    """Return `path` if it is a relative '/'-joined path of safe components."""
    if not isinstance(path, str):
        raise InvalidNameError(f"{what} {path!r} must be a string")
    if len(path) <= MAX_SHARD_NAME_LENGTH and _RELATIVE.fullmatch(path):
        return path
    if path.startswith("/"):
        raise InvalidNameError(f"{what} {path!r} must be relative")
    for component in path.split("/"):
        check_component(component, f"{what} {path!r}: component")
    if len(path) > MAX_SHARD_NAME_LENGTH:
        raise InvalidNameError(
            f"{what} {path[:80]!r}… has {len(path)} characters, more than {MAX_SHARD_NAME_LENGTH}"
        )
    return path


def check_publish_as(key: str) -> str:
    """Return `key` if a copy of a shard may be published under it, relative to the run. Raises InvalidNameError."""
    _check_not_ours(check_relative(key, "publish_as"), "publish_as")
    if key.endswith(POINTER_SUFFIX):
        raise InvalidNameError(f"publish_as {key!r} would be mistaken for one of Composer's pointers")
    return key


def check_pointer(template: str, *, rank: int) -> str:
    """Return the key of Composer's pointer, "" for none, relative to the run. Raises InvalidNameError."""
    key = _check_not_ours(fill(template, rank=rank), "composer_symlink")
    if key and not key.endswith(POINTER_SUFFIX):
        raise InvalidNameError(
            f"composer_symlink {key!r} must end in {POINTER_SUFFIX}, or Composer would take it for a checkpoint",
            hint=f"use {key}{POINTER_SUFFIX}",
        )
    return key


def _check_not_ours(path: str, what: str) -> str:
    if path.partition("/")[0] in _OWN_FOLDERS:
        raise InvalidNameError(
            f"{what} {path!r} lies in a folder that this package reserves",
            hint="use another first component",
        )
    return path


def check_key_length(root: str, key: str, *, most: int = MAX_KEY_LENGTH) -> None:
    """Raise InvalidNameError for a key too long for the store. `root` is the run's prefix within the bucket."""
    length = len(f"{root}/{key}".encode()) if root else len(key.encode())
    if length > most:
        raise InvalidNameError(
            f"object key {key[:80]!r}… would have {length} bytes including its prefix, more than {most}",
            hint="shorten the remote prefix, the checkpoint's name or the shard's path",
        )


def checkpoint_name(name: str | None, step: int) -> str:
    """Return the human-readable name of a checkpoint, made unique in its generation: its last number is the step.

    `ep1-ba100` at step 100 stays, `best` becomes `best-100`, and None becomes `step-100`. Without this, two
    steps called `last` would share keys, and the second would overwrite a committed checkpoint (rule R11).
    """
    if name is None:
        return f"step-{step}"
    check_component(name, "checkpoint name")
    numbers = _NUMBER.findall(name)
    # At most twelve digits: `keys.parse_data_key` must recover the step, or the shards could never be cleaned up.
    if not numbers or len(numbers[-1]) > 12 or int(numbers[-1]) != step:
        name = f"{name}-{step}"
    if len(name) > MAX_CHECKPOINT_NAME_LENGTH:
        raise InvalidNameError(
            f"checkpoint name {name!r} has more than {MAX_CHECKPOINT_NAME_LENGTH} characters"
        )
    return name


def fill(template: str, *, rank: int) -> str:
    """Replace `{rank}` in a file-name template.

    Raises InvalidNameError for any other variable, which it names, and for a result that would lead out of the folder.
    An empty template stays empty.
    """
    filled = substitute(template, {"rank": rank})
    return check_relative(filled, "template") if filled else filled


def substitute(template: str, values: Mapping[str, object]) -> str:
    """Replace `{name}` by `values[name]`, plain or with a width (`{rank:05d}`); anything else is refused.

    Does not use `str.format`, which would let a template access attributes of the values and write a billion digits.
    """
    filled = ""
    try:
        for text, name, width, conversion in string.Formatter().parse(template):
            filled += text
            if name is None:
                continue
            if name not in values or conversion or not _WIDTH.fullmatch(width or ""):
                raise ValueError(
                    f"not {name!r}" if name not in values else "a width may have at most two digits"
                )
            filled += format(values[name], width or "")
    except ValueError as error:
        allowed = ", ".join(f"{{{name}}}" for name in values)
        raise InvalidNameError(f"template {template!r}: only {allowed} can be used ({error})") from None
    return filled
