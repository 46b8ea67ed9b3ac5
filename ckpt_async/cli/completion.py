"""Shell completion, generated from the parser: `completion`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Iterator

from ckpt_async.cli.describing import Argument, Command, described
from ckpt_async.cli.output import Exit

PROGRAM = "ckpt-async"


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that the script is for")


def completion(options: argparse.Namespace) -> Exit:
    """Print a script that makes a shell complete commands, options and folders."""
    print(SHELLS[options.shell](described(options.root)), end="")
    return Exit.OK


# --- bash --------------------------------------------------------------------------------------------------


def bash(program: Command) -> str:
    """Return the completion script for bash. Pure.

    It offers options where a word begins with '-', else commands or choices; where there are none, bash's own files.
    """
    names = " ".join(command.name for command in program.commands)
    others = "|".join(f"{name}:--" for name in _others(program))
    cases = "\n".join(
        f"    {each.name}) options={_words(each.options)} taking={_taking(each.options)}"
        f" choices={shlex.quote(' '.join(choice for one in each.positionals for choice in one.choices))} ;;"
        for each in program.commands
    )
    return f"""\
# bash completion of {PROGRAM}: source it, or put it into ~/.local/share/bash-completion/completions/{PROGRAM}
_ckpt_async() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command= word options taking choices
  COMPREPLY=()
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $command:$word in
      {others})
        [[ $before == -- ]] && COMPREPLY=($(compgen -c -- "$current"))
        return ;;
      *:-*) ;;
      :*) command=$word ;;
    esac
  done
  # What bash breaks --option=value into.
  [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
  [[ $current == = ]] && current=
  case $command in
    '') options={_words(program.options)} taking='' choices={shlex.quote(names)} ;;
{cases}
    *) return ;;
  esac
  case $command:$before in
{_bash_values(program)}
    *) case " $taking " in *" $before "*) return ;; esac ;;
  esac
  case $current in
    -*) COMPREPLY=($(compgen -W "$options" -- "$current")) ;;
    *) COMPREPLY=($(compgen -W "$choices" -- "$current")) ;;
  esac
}}
complete -o default -F _ckpt_async {PROGRAM}
"""


def _others(program: Command) -> list[str]:
    """Return the commands that run another command."""
    return [command.name for command in program.commands if command.runs_another]


def _bash_values(program: Command) -> str:
    """Return the `case` branches with the values that options offer, with the commands that have these options."""
    of: dict[str, list[str]] = {}
    for command in program.commands:
        for option in command.options:
            if option.choices:
                of.setdefault(" ".join(option.choices), []).extend(
                    f"{command.name}:{name}" for name in option.names
                )
    return "\n".join(
        f"    {'|'.join(places)})\n"
        f'      COMPREPLY=($(compgen -W {shlex.quote(choices)} -- "$current")); return ;;'
        for choices, places in of.items()
    )


def _words(options: Iterable[Argument]) -> str:
    return shlex.quote(" ".join(name for option in options for name in option.names))


def _taking(options: Iterable[Argument]) -> str:
    return _words(option for option in options if option.value)


# --- zsh ---------------------------------------------------------------------------------------------------


def zsh(program: Command) -> str:
    """Return the completion script for zsh, which uses `_arguments`. Pure."""
    others = "|".join(_others(program))
    described_ = "\n".join(f"    {_zsh(f'{each.name}:{each.summary}')}" for each in program.commands)
    cases = "\n".join(
        f"    {each.name}) _arguments -S {_joined(_zsh_arguments(each))} ;;" for each in program.commands
    )
    top = _joined(_zsh_arguments(program))
    return f"""\
#compdef {PROGRAM}
# zsh completion of {PROGRAM}: put it into a folder of $fpath as _{PROGRAM}, or source it after compinit
_ckpt_async() {{
  local curcontext=$curcontext state line at=${{words[(i)--]}}
  if [[ $words[2] == ({others}) ]] && (( at < CURRENT )); then  # what that is to run is not ours
    shift $at words
    (( CURRENT -= at ))
    _normal
    return
  fi
  local -a commands=(
{described_}
  )
  _arguments -C {top} '1: :->command' '*:: :->arguments'
  case $state in
    command) _describe -t commands command commands; return ;;
    arguments) ;;
    *) return ;;
  esac
  case $line[1] in
{cases}
  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _ckpt_async "$@"; else compdef _ckpt_async {PROGRAM}; fi
"""


def _joined(words: Iterator[str]) -> str:
    return " ".join(words)


def _zsh(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh_arguments(command: Command) -> Iterator[str]:
    for option in command.options:
        excluded = "" if option.is_repeatable else f"({' '.join(option.names)})"
        for name in option.names:
            value = f":{_zsh_text(option.value)}:{_zsh_action(option)}" if option.value else ""
            many = "*" if option.is_repeatable else ""
            yield _zsh(f"{excluded}{many}{name}[{_zsh_text(option.help)}]{value}")
    for each in command.positionals:
        where = "*" if each.is_repeatable else ""
        colon = "::" if each.is_optional and not where else ":"
        yield _zsh(f"{where}{colon}{_zsh_text(each.value)}:{_zsh_action(each)}")


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _zsh_action(argument: Argument) -> str:
    if argument.choices:
        return f"({' '.join(argument.choices)})"
    return "_files -/" if argument.is_folder else "_files" if argument.is_file else " "


# --- fish --------------------------------------------------------------------------------------------------


def fish(program: Command) -> str:
    """Return the completion script for fish: one `complete` for each word. Pure."""
    lines = [f"# fish completion of {PROGRAM}: put it into ~/.config/fish/completions/{PROGRAM}.fish"]
    lines += [
        "function __ckpt_async_of  # a command of ours, and not yet the one that it is to run",
        "    not contains -- -- (commandline -opc); and __fish_seen_subcommand_from $argv",
        "end",
        f"complete -c {PROGRAM} -f -n 'not contains -- -- (commandline -opc)'",
        f"complete -c {PROGRAM} -n 'test (commandline -opc)[-1] = --' -a '(__fish_complete_command)'",
    ]
    first = f"complete -c {PROGRAM} -n __fish_use_subcommand"
    lines += [f"{first}{_fish_option(option)}" for option in program.options]
    for command in program.commands:
        lines.append(f"{first} -a {command.name} -d {_fish(command.summary)}")
        when = f"complete -c {PROGRAM} -n '__ckpt_async_of {command.name}'"
        lines += [f"{when}{_fish_option(option)}" for option in command.options]
        for each in command.positionals:
            if each.choices:
                lines.append(f"{when} -a {_fish(' '.join(each.choices))}")
            elif each.is_folder or each.is_file:
                lines.append(f"{when} -F" if each.is_file else f"{when} -a '(__fish_complete_directories)'")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_option(option: Argument) -> str:
    words = "".join(
        f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in option.names
    )
    if option.value:
        words += " -r -F" if option.is_file else " -x"  # -x: takes no file
        if option.choices:
            words += f" -a {_fish(' '.join(option.choices))}"
        elif option.is_folder:
            words += " -a '(__fish_complete_directories)'"
    return f"{words} -d {_fish(option.help)}"


SHELLS: dict[str, Callable[[Command], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
