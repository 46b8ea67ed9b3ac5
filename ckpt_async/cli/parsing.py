"""Parses the command line: the parser, and the argument types that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ckpt_async.cli.output import UsageError, Which
from ckpt_async.core import keys
from ckpt_async.core.settings import Settings

WHERE = "s3://bucket/prefix/run or file:///path/run"

_STEP = re.compile(r"(\d{1,18})(?:@g(\d{1,18}))?", re.ASCII)


class Parser(argparse.ArgumentParser):
    """A parser that takes options by their full names only.

    An abbreviation in a script would break, or change its meaning, with the next option that begins like it. Unknown
    words are refused with a suggestion of what was probably meant.
    """

    def __init__(self, *, define: Callable[[Parser], None] | None = None, **more: Any) -> None:
        """Set up the parser. `define` adds its arguments once it is clear that the parser is needed."""
        super().__init__(allow_abbrev=False, **more)
        self._define = define
        self.commands: Mapping[str, Parser] = {}
        self.lacks_separator = False

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.prog)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._define is not None:
            define, self._define = self._define, None
            define(self)
        if self.commands and args and not args[0].startswith("-") and args[0] not in self.commands:
            meant = _similar(args[0], self.commands)
            raise UsageError(f"there is no command {args[0]!r}", self.prog, meant=meant)
        if self.commands and args:
            self._check_order(args)
        ours, argv = split_command(args) if self.commands and args else (args, [])
        if self.commands:
            self.commands[RUNS_ANOTHER].lacks_separator = "--" not in (args or ())
        found, unknown = super().parse_known_args(ours, namespace)
        if argv:
            found.argv = argv
        if unknown:
            self._check_separator(args, unknown[0])
            meant = _similar(unknown[0].partition("=")[0], self._option_string_actions)
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", self.prog, meant=meant)
        return found, unknown

    def _check_separator(self, args: Sequence[str], word: str) -> None:
        """Refuse a command line of another program that does not begin after `--`."""
        if self.lacks_separator and not word.startswith("-") and "://" not in word:
            at = list(args).index(word)
            meant = shlex.join([*self.prog.split(), *args[:at], "--", *args[at:]])
            raise UsageError("the command to run must come after --", self.prog, meant=f"`{meant}`")

    def _check_order(self, args: Sequence[str]) -> None:
        """Refuse options that belong to commands before the command."""
        at = next((at for at, each in enumerate(args) if each in self.commands), 0)
        option = args[0].partition("=")[0]
        if at and option.startswith("-") and option not in self._option_string_actions:
            meant = shlex.join([self.prog, args[at], *args[:at], *args[at + 1 :]])
            raise UsageError(f"{option} must come after the command", self.prog, meant=f"`{meant}`")


# The command that runs another program, whose command line begins after `--`.
RUNS_ANOTHER = "run"


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own arguments, and the command line that `run` runs, which is not ours to parse."""
    if list(arguments[:1]) != [RUNS_ANOTHER] or "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _similar(word: str, known: Iterable[str]) -> str:
    """Return the one of `known` that was probably meant, or ""."""
    begun = [each for each in known if word.lstrip("-") and each.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, known, n=1)), "")


def add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint-url", metavar="URL", help="endpoint of an S3-compatible store")
    parser.add_argument("--region", help="region of the bucket")
    parser.add_argument("--profile", help="profile in the AWS configuration files")


def add_only_remote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only-remote",
        metavar="URL",
        action="append",
        help="of the remotes that journals name, touch only this one and what is below it;"
        " repeatable (default: the setting only_remotes)",
    )


def only_remotes(options: argparse.Namespace, settings: Settings) -> Settings:
    """Return the settings with what `--only-remote` says."""
    return replace(settings, only_remotes=" ".join(options.only_remote)) if options.only_remote else settings


def add_kind(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", metavar="KIND", type=as_kind, help="a kind of checkpoint of the run, as `ls` shows it"
    )


def add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--generation",
        metavar="N",
        type=as_generation,
        help="only checkpoints of this generation (one launch of the run)",
    )


def as_generation(text: str) -> int:
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= keys.MAX_GENERATION:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a generation, which is a whole number from 1")


def generation_of(which: Which, generation: int | None) -> int | None:
    """Return the generation given by `100@g2` or `--generation`. Raises UsageError if they contradict each other."""
    if generation is None or which.generation in (None, generation):
        return which.generation if generation is None else generation
    raise UsageError(f"{which.text} does not belong to generation {generation}", "ckpt-async")


def as_kind(text: str) -> str:
    if keys.is_kind(text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a valid name for a kind of checkpoint, such as weights"
    )


def as_path(text: str) -> str:
    if text:
        return os.path.expanduser(text)  # which the shell leaves alone in quotes
    raise argparse.ArgumentTypeError("'' is not a path; use '.' for the working directory")


def as_folder(instead: str) -> Callable[[str], str]:
    """Return the type of an argument for a folder on this node.

    A remote is refused with what to do `instead`, in which "{}" stands for the remote.
    """

    def parse(text: str) -> str:
        if "://" not in text:
            return as_path(text)
        raise argparse.ArgumentTypeError(
            f"{text} is a remote, not a folder of this node: {instead.format(text)}"
        )

    return parse


def as_which(text: str) -> Which:
    """Parse a checkpoint given by its step, by step and generation, or by its name."""
    if match := _STEP.fullmatch(text):
        return Which(int(match[1]), int(match[2]) if match[2] else None, text)
    return Which(None, None, text)


def as_step(text: str) -> Which:
    if (which := as_which(text)).step is not None:
        return which
    raise argparse.ArgumentTypeError(f"{text!r} is not a step such as 100, or 100@g2 of generation 2")


def as_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:([KMGTP])(i?))?B?", text, re.IGNORECASE)
    if match is not None:
        power = "KMGTP".index(match[2].upper()) + 1 if match[2] else 0
        if (size_bytes := int(float(match[1]) * (1024 if match[3] else 1000) ** power)) >= 1:
            return size_bytes
    raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 40GiB or 500MB")


def as_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 604_800:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 604800")
