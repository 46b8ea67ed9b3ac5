"""Templates for names, such as `ep{epoch}-ba{batch}-rank{rank}.pt`. Pure."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from ckpt_async.core import arguments, keys, naming
from ckpt_async.core.launch import Placement
from ckpt_async.errors import InvalidNameError, SettingsError
from ckpt_async.saver.timestamp import Timestamp

OF_RUN = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
OF_RANK = frozenset({"rank", "local_rank", "node_rank"})  # those of them that may differ between ranks
OF_TIME = (
    *("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "token", "token_in_epoch"),
    *("total_wct", "epoch_wct", "batch_wct", "step", "iteration"),
)
# Each of these alone tells a later file from an earlier one.
_COUNTS = ("step", "batch", "sample", "token", "iteration", "epoch")


def used(template: str) -> frozenset[str]:
    """Return the variables that a template uses. Raises InvalidNameError if it is malformed."""
    try:
        return frozenset(name for _, name, _, _ in string.Formatter().parse(template) if name is not None)
    except ValueError as error:
        raise InvalidNameError(f"template {template!r}: {error}") from None


def check(template: str, what: str, allowed: Iterable[str], *, run_name: str | None) -> None:
    """Refuse what is not text, a variable that is not in `allowed`, and `{run_name}` if the run has no name."""
    if not isinstance(template, str):
        raise SettingsError(f"{what}={arguments.shown(template)} must be text")
    known = tuple(allowed)
    for name in sorted(used(template)):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise InvalidNameError(
                f"{what}={template!r}: {{{name}}} is not a variable here",
                hint=(f"did you mean {{{close[0]}}}? " if close else "")
                + f"known: {', '.join(f'{{{each}}}' for each in known)}",
            )
        if name == "run_name" and run_name is None:
            raise SettingsError(f"{what}={template!r} needs run_name=")


def variables(run_name: str | None, placement: Placement) -> dict[str, object]:
    """Return the values of the variables that are fixed for the run."""
    of_ranks = {name: getattr(placement, name) for name in OF_RUN if name != "run_name"}
    return {"run_name": run_name or "", **of_ranks}


def fill(template: str, values: Mapping[str, object]) -> str:
    return naming.substitute(template, values) if "{" in template or "}" in template else template


def below(remote: str, name: str) -> str:
    """Turn an object's name in the bucket into a key below `remote`.

    If the path of `remote` ends with the folders that the name begins with, they are dropped from the name.
    """
    parts, above = PurePosixPath(name.strip("/")).parts, PurePosixPath(keys.path_in(remote)).parts
    for count in range(len(parts) - 1, 0, -1):
        if above[-count:] == parts[:count]:
            return "/".join(parts[count:])
    return "/".join(parts)


def is_ahead(name: str, template: str, run: Mapping[str, object], resumed: Timestamp) -> bool:
    """Return whether `template` gives a file of this name for some time after `resumed`.

    A template without a time variable always gives the same name, which counts as ahead.
    """
    found = times(name, template, run)
    if found is None:
        return False
    for count in _COUNTS:
        if count in found:
            return found[count] > float(getattr(resumed, count))
    return True


def times(name: str, template: str, run: Mapping[str, object]) -> dict[str, float] | None:
    """Read the time variables back from a name; None if the template cannot give this name on this rank."""
    pattern = ""
    groups: list[str] = []
    for text, variable, width, _ in string.Formatter().parse(template):
        pattern += re.escape(text)
        if variable in OF_TIME:
            groups.append(variable)
            pattern += r"([0-9]+(?:\.[0-9]+)?)"
        elif variable is not None:
            pattern += re.escape(format(run[variable], width or ""))
    match = re.fullmatch(pattern, name)
    if match is None:
        return None
    return {variable: float(text) for variable, text in zip(groups, match.groups(), strict=True)}
