"""Manual pages, generated from the parser: `man`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ckpt_async import __version__
from ckpt_async.cli.describing import Argument, Command, described
from ckpt_async.cli.output import Exit
from ckpt_async.cli.parsing import as_path
from ckpt_async.errors import SettingsError

PROGRAM = "ckpt-async"


def man_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "of", metavar="COMMAND", nargs="?", default="", help="the command that the page is about"
    )
    parser.add_argument(
        "--into", metavar="FOLDER", type=as_path, help="write the pages of all commands into this folder"
    )


def man(options: argparse.Namespace) -> Exit:
    """Print a page for man(1), e.g. `ckpt-async man ls | man -l -`, or write the pages of all commands."""
    program = described(options.root)
    pages = {each.name: page(each, program) for each in (program, *program.commands)}
    if options.of not in pages:
        raise SettingsError(
            f"there is no command {options.of!r}", hint=f"the commands are {', '.join(pages)[2:]}"
        )
    if options.into is None:
        print(pages[options.of], end="")
        return Exit.OK
    folder = Path(options.into)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        path = folder / f"{_title(name)}.1"
        path.write_text(text, encoding="utf-8")
        print(path)
    return Exit.OK


def page(command: Command, program: Command) -> str:
    """Return a page in the macros of man(7), dated today, or by SOURCE_DATE_EPOCH."""
    date = time.strftime("%Y-%m-%d", time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())))
    title = _title(command.name)
    return (
        "\n".join(
            [f'.TH {_text(title.upper())} 1 {date} "ckpt_async {__version__}"', *_body(command, program)]
        )
        + "\n"
    )


def _title(name: str) -> str:
    return f"{PROGRAM}-{name}" if name else PROGRAM


def _body(command: Command, program: Command) -> Iterator[str]:
    yield from (".SH NAME", f"{_text(_title(command.name))} \\- {_text(command.summary.rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {_text(f'{PROGRAM} {command.name}'.strip())}")
    yield from (_synopsis(each) for each in command.options if each.names[0] not in _COMMON)
    yield from (_synopsis(each) for each in command.positionals)
    if command.commands:
        yield from (".I COMMAND", "\\&...", ".SH COMMANDS")
        for each in command.commands:
            yield from (".TP", f".BR {_text(_title(each.name))} (1)", _text(each.summary))
    if command.positionals:
        yield ".SH ARGUMENTS"
        for argument in command.positionals:
            yield from (".TP", f".I {_text(argument.value)}", _text(argument.help) or "\\&")
    yield ".SH OPTIONS"
    for option in command.options:
        yield from (".TP", ", ".join(f"\\fB{_text(name)}\\fR{_value(option)}" for name in option.names))
        yield _text(option.help) or "\\&"
    if program.epilog:
        kind, _, codes = program.epilog.partition(": ")
        yield from (f".SH {_text(kind.upper())}", _text(codes))
    yield ".SH SEE ALSO"
    others = [each for each in (program, *program.commands) if each.name != command.name]
    yield ",\n".join(f".BR {_text(_title(each.name))} (1)" for each in others)


_COMMON = frozenset({"-h", "--version"})


def _value(option: Argument) -> str:
    return f" \\fI{_text(option.value)}\\fR" if option.value else ""


def _synopsis(argument: Argument) -> str:
    named = (
        f"\\fB{_text(argument.names[0])}\\fR{_value(argument)}"
        if argument.names
        else f"\\fI{_text(argument.value)}\\fR"
    )
    is_optional = bool(argument.names) or argument.is_optional
    return (f"[{named}]" if is_optional else named) + (" \\&..." if argument.is_repeatable else "")


def _text(text: str) -> str:
    """Escape a text for roff, so that nothing in it is an escape or a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
