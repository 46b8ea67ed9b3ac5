"""Events delivered by running a command.

No shell is involved: the template is split once, and each value stays within its argument.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace

from ckpt_async.errors import SettingsError
from ckpt_async.events.delivery import DeliveryError
from ckpt_async.events.event import Event

logger = logging.getLogger(__name__)

NUM_PARALLEL = 4
MAX_ATTEMPTS = 5
# Between SIGTERM and SIGKILL.
TERM_S = 2.0
OUTPUT_BYTES = 8192
# Linux allows 128 KiB in one argument or variable, and a template may have the event twice in one argument.
MAX_JSON_BYTES = 60_000
OUR_PREFIX = "CKPT_ASYNC_EVENT"
SECRET = "CKPT_ASYNC_WEBHOOK_SECRET"  # noqa: S105  the name of the variable

_FIELDS = ("kind", "id", "run", "url", "generation", "step", "name", "time", "json")
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


def parse(template: str, where: str) -> list[str]:
    """Split the template into the command's arguments, with placeholders for values. Raises SettingsError."""
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise SettingsError(f"{where} is not a command line: {error}") from None
    if not parts:
        raise SettingsError(f"{where} names no command")
    for name in (match[1] for part in parts for match in _PLACE.finditer(part)):
        if name not in _FIELDS:
            known = ", ".join(f"{{{each}}}" for each in _FIELDS)
            raise SettingsError(
                f"{where} uses {{{name}}}, which is not a field of an event", hint=f"the fields are {known}"
            )
    if _PLACE.search(parts[0]):
        raise SettingsError(f"{where} begins with a field of the event; the command itself must be fixed")
    return parts


@functools.cache  # once is enough for a process
def warn_if_missing(template: str) -> None:
    """Log a warning if the command is not there. It may come later, so it is no reason not to start."""
    command = shlex.split(template)[0]
    if shutil.which(command) is None:
        what = "an executable file" if "/" in command else "a command in PATH"
        told = "event_command_missing command=%s; this is not %s, so no event can be delivered until it is"
        logger.warning(told, command, what)


def arguments(parts: list[str], event: Event) -> list[str]:
    """Return the command's arguments with the event's values filled in."""
    values = values_of(event)
    return [_PLACE.sub(lambda match: values[match[1]], part) for part in parts]


def values_of(event: Event) -> dict[str, str]:
    values = {name: getattr(event, name) for name in _FIELDS if name != "json"}
    return {name: "" if value is None else str(value) for name, value in values.items()} | {
        "json": _json_of(event)
    }


def _json_of(event: Event) -> str:
    """Return the event as JSON, without its metrics if it would be too long for an argument with them."""
    text = event.to_json()
    if len(text) <= MAX_JSON_BYTES or "metrics" not in event.details:
        return text
    metrics = event.details["metrics"]
    return replace(
        event, details={**event.details, "metrics": {}, "num_metrics_left_out": len(metrics)}
    ).to_json()


def environment(event: Event, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command: CKPT_ASYNC_EVENT is the kind, CKPT_ASYNC_EVENT_STEP the step, and so on.

    Our own event settings and the secret are removed: a command that runs ckpt_async itself must not report its own
    work.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(f"{OUR_PREFIX}_") and name != SECRET
    }
    values = values_of(event)
    return (
        kept
        | {OUR_PREFIX: event.kind}
        | {f"{OUR_PREFIX}_{name.upper()}": values[name] for name in _FIELDS[1:]}
    )


class Command:
    """Runs a command for each event, up to `NUM_PARALLEL` at once.

    An event is delivered if its command exits with 0 in time.
    """

    name = "exec"
    num_parallel = NUM_PARALLEL
    max_attempts = MAX_ATTEMPTS

    def __init__(self, template: str, timeout_s: float) -> None:
        self._parts, self._timeout_s = parse(template, "event_exec"), timeout_s
        self._stopping = os.eventfd(0)
        weakref.finalize(self, os.close, self._stopping)

    def deliver(self, event: Event) -> None:
        try:
            process = subprocess.Popen(
                arguments(self._parts, event),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment(event, os.environ),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise DeliveryError(f"{self._parts[0]} cannot be started: {error}") from None
        with process:
            try:
                output, is_in_time = self._follow(process)
            finally:
                _end(process)
        text = output.decode(errors="replace").strip()
        if text:
            logger.info("event_exec_output kind=%s id=%s text=%s", event.kind, event.id, text)
        if not is_in_time:
            raise DeliveryError(
                f"{self._parts[0]} was terminated after {self._timeout_s:.0f} s, or with its trainer"
            )
        if process.returncode:
            raise DeliveryError(f"{self._parts[0]} exited with {process.returncode}: {text[-500:]!r}")

    def _follow(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
        """Return the end of the command's output, and whether it exited by itself in time.

        Processes that it left running are not waited for.
        """
        assert process.stdout is not None
        output, reading = b"", process.stdout.fileno()
        os.set_blocking(reading, False)
        deadline = time.monotonic() + self._timeout_s
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return self._ended_unseen(reading), True
        try:
            poll = select.poll()  # select() takes no descriptor from 1,024 on, and a trainer may have as many
            for each in (reading, pidfd, self._stopping):
                poll.register(each, select.POLLIN)
            while True:
                left_s = max(0.0, deadline - time.monotonic())
                ready = {descriptor for descriptor, _ in poll.poll(left_s * 1000)}
                if reading in ready:
                    chunk = os.read(reading, 65_536)
                    output = (output + chunk)[-OUTPUT_BYTES:]
                    if not chunk:
                        poll.unregister(reading)
                if pidfd in ready:
                    return (output + _rest(reading))[-OUTPUT_BYTES:], True
                if not ready or self._stopping in ready:
                    return output, False
        finally:
            os.close(pidfd)

    def _ended_unseen(self, reading: int) -> bytes:
        """Return the output of a command that has ended and was reaped by somebody else."""
        logger.warning(
            "event_exec_unseen command=%s; whether it failed is unknown, because SIGCHLD is ignored, or something in"
            " this process waits for all its children",
            self._parts[0],
        )
        return _rest(reading)

    def stop(self) -> None:
        """End the running commands, each with its whole process group."""
        os.eventfd_write(self._stopping, 1)  # nobody reads it, so everyone who polls it sees it


def _rest(descriptor: int) -> bytes:
    """Return the output that is available now; processes left in the background may write more."""
    try:
        return os.read(descriptor, OUTPUT_BYTES)
    except BlockingIOError:
        return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the process group if the command still runs, and then SIGKILL."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_S)
        os.killpg(process.pid, signal.SIGKILL)
