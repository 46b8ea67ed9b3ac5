"""The sinks that the settings ask for: who wants to hear of events."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ckpt_async.core.arguments import shown
from ckpt_async.core.settings import Settings
from ckpt_async.errors import SettingsError
from ckpt_async.events import command, webhook
from ckpt_async.events.delivery import Sink
from ckpt_async.events.event import Event, Wants, parse_kinds

OnEvent = Callable[[Event], object]


class Callback:
    """Calls the function for one event after another. If it raises, this is logged and the event counts as told."""

    # A sweeper's function is a sink of its own: an event told to it is still told to the trainer's.
    of_trainer, of_sweeper = "callback", "sweeper"
    num_parallel = 1
    max_attempts = 1

    def __init__(self, function: OnEvent, name: str = of_trainer) -> None:
        self._function, self.name = function, name

    def deliver(self, event: Event) -> None:
        try:
            self._function(event)
        except (
            BaseException
        ):  # sys.exit() too: this thread must live, and the next launch would meet it again
            logger.exception(
                "on_event_failed kind=%s id=%s; not calling it again for this event", event.kind, event.id
            )

    def stop(self) -> None:
        """Do nothing: a function cannot be cut short, so its thread is abandoned."""


def check_callable(on_event: object) -> None:
    """Raise SettingsError unless `on_event` is a function or None."""
    if on_event is not None and not callable(on_event):
        raise SettingsError(f"on_event={shown(on_event)} is not callable")


logger = logging.getLogger(__name__)

_SECRET_FILE = "event_webhook_secret_file"  # noqa: S105  the name of the setting


def wants_of(settings: Settings, *, callback: str = "") -> Wants:
    """Return which sinks there are and which kinds of events each wants.

    `callback` is the name of a function's sink, which wants all kinds. Raises SettingsError, before any work, if a sink
    is set up wrongly.
    """
    check(settings)
    wants = {}
    if callback:
        wants[callback] = parse_kinds("", "")
    if settings.event_exec:
        wants["exec"] = parse_kinds(settings.event_exec_kinds, "event_exec_kinds")
    if settings.event_webhook:
        wants["webhook"] = parse_kinds(settings.event_webhook_kinds, "event_webhook_kinds")
    return wants


def check(settings: Settings, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise SettingsError if a setting of a sink is wrong.

    `names` maps settings to the names under which the user gave them, for error messages.
    """
    if settings.event_exec:
        command.parse(settings.event_exec, names.get("event_exec", "event_exec"))
        parse_kinds(settings.event_exec_kinds, names.get("event_exec_kinds", "event_exec_kinds"))
    if settings.event_webhook:
        webhook.host_of(settings.event_webhook, names.get("event_webhook", "event_webhook"))
        parse_kinds(settings.event_webhook_kinds, names.get("event_webhook_kinds", "event_webhook_kinds"))
        _secret(settings, os.environ, names.get(_SECRET_FILE, _SECRET_FILE))


def sinks_of(settings: Settings, environment: Mapping[str, str], *, warns: bool = True) -> list[Sink]:
    """Return the sinks that any process can serve. Raises SettingsError.

    `warns`: whether to warn about a command that is not there, and a webhook without a secret.
    """
    sinks: list[Sink] = []
    if settings.event_exec:
        if warns:
            command.warn_if_missing(settings.event_exec)
        sinks.append(command.Command(settings.event_exec, settings.event_exec_timeout_s))
    if settings.event_webhook:
        secret = _secret(settings, environment)
        hook = webhook.Webhook(settings.event_webhook, secret)
        if warns and not secret:
            logger.warning(
                "webhook_unsigned host=%s; set %s or event_webhook_secret_file", hook.host, command.SECRET
            )
        sinks.append(hook)
    return sinks


def _secret(settings: Settings, environment: Mapping[str, str], where: str = _SECRET_FILE) -> bytes:
    path = settings.event_webhook_secret_file
    if not path:
        return environment.get(command.SECRET, "").encode(errors="surrogateescape")
    try:
        with open(path, "rb") as file:
            secret = file.read(4096).strip()
    except OSError as error:
        raise SettingsError(f"{where} {path!r} cannot be read: {error.strerror}") from None
    if not secret:
        raise SettingsError(f"{where} {path!r} is empty")
    return secret
