"""The options that say who receives events, for every command that runs an engine or a sweep."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ckpt_async.cli.parsing import as_path
from ckpt_async.core.settings import Settings
from ckpt_async.events.command import warn_if_missing
from ckpt_async.events.sinks import check

# Option -> setting.
OPTIONS = {
    "exec": "event_exec",
    "exec_on": "event_exec_kinds",
    "webhook": "event_webhook",
    "webhook_on": "event_webhook_kinds",
    "webhook_secret_file": "event_webhook_secret_file",
}


def add_events(parser: argparse._ActionsContainer) -> None:
    """Add `--exec`, `--webhook` and their companions."""
    parser.add_argument(
        "--exec",
        metavar="CMD",
        type=_as_command,
        help="run this command for events, without a shell, e.g. 'evaluate {step} {url}'",
    )
    parser.add_argument(
        "--exec-on",
        metavar="EVENTS",
        help="run it only for these events, separated by commas (default: committed)",
    )
    parser.add_argument(
        "--webhook",
        metavar="URL",
        help="POST events to URL as JSON (other users see it in `ps`; to hide it, use"
        " CKPT_ASYNC_EVENT_WEBHOOK)",
    )
    parser.add_argument(
        "--webhook-on", metavar="EVENTS", help="post only these events, separated by commas (default: all)"
    )
    parser.add_argument(
        "--webhook-secret-file",
        metavar="FILE",
        type=as_path,
        help="file with the secret that signs the posts (default: the secret in CKPT_ASYNC_WEBHOOK_SECRET)",
    )


def _as_command(text: str) -> str:
    if text.strip():
        return text
    raise argparse.ArgumentTypeError("it is empty: give a command, or leave it out")


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given by these options."""
    return {
        setting: value
        for option, setting in OPTIONS.items()
        if (value := getattr(options, option)) is not None
    }


def event_settings(options: argparse.Namespace, settings: Settings) -> Settings:
    """Return the settings combined with these options. Raises SettingsError if one of them is wrong."""
    said = given(options)
    settings = replace(settings, **said)
    options_of = {setting: f"--{option.replace('_', '-')}" for option, setting in OPTIONS.items()}
    check(settings, {setting: options_of[setting] for setting in said})
    if settings.event_exec:
        warn_if_missing(settings.event_exec)  # now, and not only when there is an event
    return settings
