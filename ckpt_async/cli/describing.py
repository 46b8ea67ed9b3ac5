"""What the parser accepts, as plain values, from which completion scripts and manual pages are generated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ckpt_async.cli.parsing import RUNS_ANOTHER, Parser
from ckpt_async.events.event import KINDS

# Placeholders that stand for something on this node.
_FOLDERS = frozenset({"FOLDER", "FOLDER|REMOTE", "DEST", "F"})
_FILES = frozenset({"FILE", "SOURCE", "DESTINATION"})
# Values to offer for a placeholder. In a list, they complete only the first word.
_OFFERED = {"EVENTS": (*KINDS, "all")}


@dataclass(frozen=True, slots=True)
class Argument:
    """An option (with `names`) or a positional argument.

    `value` is the placeholder for its value, "" if it takes none.
    """

    names: tuple[str, ...]
    value: str
    help: str
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    is_repeatable: bool = False

    @property
    def is_folder(self) -> bool:
        return self.value in _FOLDERS

    @property
    def is_file(self) -> bool:
        return self.value in _FILES


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or the whole program, whose `name` is ""."""

    name: str
    summary: str
    options: tuple[Argument, ...]
    positionals: tuple[Argument, ...]
    commands: tuple[Command, ...] = ()
    epilog: str = ""

    @property
    def runs_another(self) -> bool:
        """Whether what comes after `--` is another program's command line."""
        return self.name == RUNS_ANOTHER


def described(parser: Parser, name: str = "", summary: str = "") -> Command:
    """Return everything that a parser accepts, including its commands, each of whose modules is imported."""
    parser.define()
    arguments = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    below = [each for each in arguments if isinstance(each, argparse._SubParsersAction)]
    plain = [_argument(each) for each in arguments if each not in below]
    commands = [
        described(action.choices[each.dest], each.dest, each.help or "")
        for action in below
        for each in action._choices_actions
    ]
    return Command(
        name,
        summary or parser.description or "",
        tuple(each for each in plain if each.names),
        tuple(each for each in plain if not each.names),
        tuple(commands),
        parser.epilog or "",
    )


def _argument(action: argparse.Action) -> Argument:
    choices = tuple(map(str, action.choices or _OFFERED.get(str(action.metavar)) or ()))
    named = action.metavar or ("|".join(choices) if choices else action.dest.upper())
    help_ = (action.help or "") % {**vars(action), "prog": "ckpt-async"}
    return Argument(
        tuple(action.option_strings),
        "" if action.nargs == 0 else named if isinstance(named, str) else " ".join(named),
        help_,
        choices,
        is_optional=action.nargs in ("?", "*"),
        is_repeatable=action.nargs in ("*", "+", argparse.REMAINDER)
        or isinstance(action, argparse._AppendAction | argparse._CountAction),
    )
