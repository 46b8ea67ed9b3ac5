"""All settings in one frozen value, and where they come from. Pure: files and environment are arguments.

Order of precedence: keyword arguments, then `CKPT_ASYNC_*`, then the TOML file, then the default.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_async.core import retention
from ckpt_async.core.arguments import shown
from ckpt_async.core.units import MIB
from ckpt_async.errors import SettingsError

ENVIRONMENT_PREFIX = "CKPT_ASYNC_"
# Recorded in the journal, so that `drain` treats the user's files and pointers as the trainer would have.
INHERITED = ("num_checkpoints_to_keep", "local_retention", "latest_filename", "composer_symlink")
# Also recorded, for the sweeper: `remote_retention`, the policy of each kind of checkpoints.
RECORDED = (*INHERITED, "remote_retention")
# Recorded under this name: which sinks want which events, but not their addresses, since a webhook's URL may be secret.
EVENTS = "events"


def _setting(
    default: Any, help_: str, low: float | None = None, high: float | None = None, **more: Any
) -> Any:
    metadata = {"help": help_, "low": low, "high": high, **more}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of an engine. `docs/settings.md` is generated from these lines."""

    num_checkpoints_to_keep: int = _setting(
        -1, "local checkpoints to keep: -1 all, 0 none once committed, N the newest N", -1, 10**6
    )
    local_retention: str = _setting(
        "",
        "further local checkpoints to keep, as a policy like remote_retention; with"
        " num_checkpoints_to_keep=-1 only this policy decides, and the newest is kept too; empty for no"
        " others",
    )
    num_concurrent_uploads: int = _setting(
        8, "initial number of concurrent requests that carry shard bytes, per engine", 1, 1024
    )
    max_concurrent_uploads: int = _setting(
        128,
        "upper bound for the number of concurrent uploads, which grows until the link is full and is halved"
        " on SlowDown",
        1,
        1024,
    )
    upload_timeout_s: float = _setting(
        3600.0, "how long one shard may fail before it is reported", 1, 604_800
    )
    on_error: str = _setting(
        "raise",
        "after a final failure: raise an exception at the next call, or only log it",
        choices=("raise", "warn"),
    )
    metrics_port: int = _setting(
        -1, "Prometheus port: -1 none, 0 any free one; local rank r takes metrics_port + r", -1, 65_535
    )
    metrics_address: str = _setting("127.0.0.1", "address that the metrics are served on")
    latest_filename: str = _setting(
        "latest-rank{rank}", "local symlink to the newest committed checkpoint; empty for none"
    )
    composer_symlink: str = _setting(
        "",
        "remote text file that names the newest checkpoint, as Composer writes it, e.g."
        " latest-rank{rank}.pt.symlink; empty for none",
    )
    publish_copies: bool = _setting(
        False,
        "also publish files under exact keys (`enqueue(publish_as=)`); when the uploader is opened, it checks"
        " that the store can copy objects",
        choices=(False, True),
    )
    max_inflight_bytes: int = _setting(
        4096 * MIB, "maximum number of shard bytes in flight at once", MIB, 10**15
    )
    max_bytes_per_s: float = _setting(
        0.0,
        "limit on the upload bandwidth of one engine, to leave the rest to training; 0 for no limit",
        0,
        1e12,
    )
    part_size_bytes: int = _setting(
        8 * MIB,
        "minimum part size of a multipart upload; larger shards get larger parts, so that few requests are"
        " needed",
        5 * MIB,
        5 * 10**9,
    )
    request_timeout_s: float = _setting(
        30.0,
        "deadline of a request, not counting the time for its bytes (see minimum_rate_bytes_per_s)",
        0.05,
        3600,
    )
    minimum_rate_bytes_per_s: float = _setting(
        1.0 * MIB,
        "minimum rate assumed for a request: its size / this rate is added to its deadline; a late request"
        " may continue as long as it achieves an eighth of this rate",
        1,
        1e12,
    )
    stall_timeout_s: float = _setting(
        20.0, "abort a request when no bytes have moved for this long", 0.05, 3600
    )
    retry_initial_s: float = _setting(0.2, "initial retry backoff, doubled with full jitter", 0.001, 60)
    retry_max_s: float = _setting(20.0, "maximum retry backoff", 0.01, 3600)
    decision_poll_s: float = _setting(
        0.5,
        "first interval at which to poll for the other ranks' receipts, doubled up to decision_poll_max_s",
        0.01,
        3600,
    )
    decision_poll_max_s: float = _setting(
        60.0, "longest interval at which to poll for the decision", 0.01, 3600
    )
    max_backlog_checkpoints: int = _setting(
        0, "checkpoints that may wait for upload before `on_backlog` applies; 0 for no limit", 0, 10**6
    )
    max_backlog_bytes: int = _setting(
        0, "bytes that may wait for upload before `on_backlog` applies; 0 for no limit", 0, 10**15
    )
    on_backlog: str = _setting(
        "block",
        "when uploads fall behind: block in `enqueue`, give up older checkpoints of which nothing is uploaded and"
        " which remote_retention would not keep, or raise",
        choices=("block", "supersede", "raise"),
    )
    min_free_bytes: int = _setting(
        -1,
        "free bytes on the folder's file system below which `on_disk_low` applies; -1 for twice the size of what"
        " this folder's ranks save at a time, 0 for no limit; see also watch.md",
        -1,
        10**15,
    )
    on_disk_low: str = _setting(
        "supersede",
        "when the disk runs low: give up older checkpoints of which nothing is uploaded, and if that is not enough,"
        " skip the new save; or block in `enqueue`, or raise",
        choices=("block", "supersede", "raise"),
    )
    block_timeout_s: float = _setting(
        1800.0, "longest time to block in `enqueue`; then it raises", 0, 604_800
    )
    abandon_after_s: float = _setting(
        86_400.0,
        "sweeper: age at which unfinished checkpoints of a superseded generation are given up; with less than half an"
        " hour also those that a live trainer still has to send",
        60,
        1e9,
    )
    abandon_newest_after_s: float = _setting(
        604_800.0,
        "sweeper: the same for the newest generation, whose trainer may merely be paused",
        60,
        1e9,
    )
    remote_retention: str = _setting(
        "",
        "checkpoints that a sweeper keeps remotely, e.g. last=3,every-steps=1000,best=2:loss:min; empty keeps all",
    )
    only_remotes: str = _setting(
        "",
        "`drain` and sweeper: of the remotes that journals name, only these and what is below them are touched, at the"
        " endpoint that an option or the environment names, e.g. s3://bucket/team gs://other; URLs separated by blanks;"
        " empty for all",
    )
    allow_unknown_filesystem: bool = _setting(
        False,
        "accept a folder on a file system that is not known to be local; if another machine uses the folder"
        " too, or file locks do not work there, the journal is destroyed, and checkpoints that are not"
        " committed yet are lost",
        choices=(False, True),
    )
    sigterm_flush_s: float = _setting(
        0.0, "flush on SIGTERM within this many seconds, newest checkpoint first; 0 for no handler", 0, 3600
    )
    runner: str = _setting(
        "thread",
        "where uploads run: on a thread of the trainer, or in a separate process, which does not share the"
        " trainer's GIL and finishes the uploads if the trainer dies",
        choices=("thread", "process"),
    )
    node_shared: bool = _setting(
        False,
        "runner process: one for all ranks of the folder, so that num_concurrent_uploads, max_inflight_bytes"
        " and max_bytes_per_s apply to the whole node",
        choices=(False, True),
    )
    runner_nice: int = _setting(
        10,
        "runner process: added to the niceness of the threads that carry bytes, so that training gets the"
        " cores first; also lowers the priority of their disk reads; not in effect during `wait`, `flush` and"
        " `close`",
        0,
        19,
    )
    linger_s: float = _setting(
        600.0,
        "runner process: how long it keeps uploading after the trainer died; a restarted trainer takes over",
        0,
        86_400,
    )
    close_grace_s: float = _setting(
        30.0, "how long close() waits for other ranks once this rank's shards are uploaded", 0, 86_400
    )

    event_exec: str = _setting(
        "", "command to run for events, without a shell, e.g. evaluate --step {step} {url}; see events.md"
    )
    event_exec_kinds: str = _setting(
        "committed", "kinds of events to run it for, separated by commas; empty for all"
    )
    event_exec_timeout_s: float = _setting(
        600.0, "how long one run of the command may take before it is terminated", 1, 86_400
    )
    event_webhook: str = _setting("", "URL that events are posted to, as JSON; see events.md")
    event_webhook_kinds: str = _setting(
        "", "kinds of events to post, separated by commas: committed, given_up, fenced, …; empty for all"
    )
    event_webhook_secret_file: str = _setting(
        "", "file with the secret that signs the posts; default: the variable CKPT_ASYNC_WEBHOOK_SECRET"
    )
    event_backlog_checkpoints: int = _setting(
        3,
        "number of sealed checkpoints waiting for upload at which a `backlog` event is sent; 0 for never",
        0,
        10**6,
    )
    event_stall_s: float = _setting(
        600.0,
        "seconds without progress, while uploads are pending, after which a `backlog` event (state `stalled`)"
        " is sent; 0 for never",
        0,
        604_800,
    )
    event_grace_s: float = _setting(
        10.0,
        "how long close() waits for events to be delivered; the rest are delivered by the next launch or"
        " `drain`",
        0,
        3600,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name), f"{field.name}")
        policy = _parse_policy("remote_retention", self.remote_retention)
        _parse_policy("local_retention", self.local_retention)
        if self.on_backlog == "supersede" and retention.keeps_all(policy):
            raise SettingsError(
                "on_backlog is 'supersede', but remote_retention keeps all: nothing could be given up",
                hint="set what must be kept, e.g. remote_retention='last=2,every-steps=1000'",
            )
        if not self.metrics_address:
            raise SettingsError(
                "metrics_address is '', which would mean every address; if you want that, use 0.0.0.0"
            )
        if self.node_shared and self.runner != "process":
            raise SettingsError("node_shared=True needs runner='process'")
        if self.retry_max_s < self.retry_initial_s:
            raise SettingsError(
                f"retry_max_s={self.retry_max_s} must be at least retry_initial_s={self.retry_initial_s}"
            )
        if self.decision_poll_max_s < self.decision_poll_s:
            raise SettingsError(
                f"decision_poll_max_s={self.decision_poll_max_s} must be at least"
                f" decision_poll_s={self.decision_poll_s}"
            )


def _parse_policy(name: str, text: str) -> retention.RetentionPolicy:
    try:
        return retention.parse(text)
    except SettingsError as error:
        raise SettingsError(f"{name}={text!r}: {error}") from None


def load(arguments: Mapping[str, Any], environment: Mapping[str, str], toml: str = "") -> Settings:
    """Merge the three sources and check every value. An argument of None counts as not given.

    Raises SettingsError with the name, its source, the value and what is allowed; also for unknown names, but in the
    environment only for those that are nearly the name of a setting.
    """
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    for name, value in _parse_toml(toml).items():
        if name not in fields:
            raise SettingsError(f"settings file: unknown setting {name!r}", hint=_nearest(name, fields))
        values[name] = _check(fields[name], value, f"settings file: {name}")
    for name, field in fields.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            values[name] = _check(field, _parse_text(field, environment[variable], variable), variable)
    for variable in environment:
        _refuse_misspelt(variable, fields)
    for name, value in arguments.items():
        if name not in fields:
            raise SettingsError(f"unknown setting {name!r}", hint=_nearest(name, fields))
        if value is not None:
            values[name] = _check(fields[name], value, name)
    return Settings(**values)


def _check(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    low, high = field.metadata["low"], field.metadata["high"]
    allowed = field.metadata.get("choices")
    match field.type:
        case "int":
            if isinstance(value, bool) or not isinstance(value, int):
                raise SettingsError(f"{where}={shown(value)} must be a whole number from {low} to {high}")
        case "float":
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise SettingsError(f"{where}={shown(value)} must be a number from {low} to {high}")
            try:
                value = float(value)
            except OverflowError:
                raise SettingsError(f"{where}={shown(value)} must be from {low} to {high}") from None
        case "bool":
            if not isinstance(value, bool):
                raise SettingsError(f"{where}={shown(value)} must be true or false")
        case _:
            if not isinstance(value, str):
                raise SettingsError(f"{where}={shown(value)} must be a string")
            if allowed and value not in allowed:
                raise SettingsError(f"{where}={shown(value)} must be one of {', '.join(allowed)}")
    if low is not None and not low <= value <= high:
        raise SettingsError(f"{where}={shown(value)} must be from {low} to {high}")
    return value


def _parse_text(field: dataclasses.Field[Any], text: str, where: str) -> Any:
    if field.type == "bool":
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
    convert = {"int": int, "float": float}.get(str(field.type), str)
    try:
        return convert(text)
    except ValueError:
        low, high = field.metadata["low"], field.metadata["high"]
        raise SettingsError(f"{where}={shown(text)} must be a number from {low} to {high}") from None


def _parse_toml(text: str) -> dict[str, Any]:
    """Return the whole file, or its `[tool.ckpt_async]` table if it has one, so that pyproject.toml can be used."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise SettingsError("settings file is nested too deeply") from None
    except ValueError as error:  # also for a number with thousands of digits
        raise SettingsError(f"settings file is not TOML: {error}") from None
    tool = document.get("tool", {})
    if isinstance(tool, dict) and "ckpt_async" in tool:
        document = tool["ckpt_async"]
        if not isinstance(document, dict):
            raise SettingsError(f"settings file: tool.ckpt_async={shown(document)} is not a table")
    elif "tool" in document or "project" in document:
        return {}
    return dict(document)


def _refuse_misspelt(variable: str, fields: Mapping[str, Any]) -> None:
    """Raise SettingsError for a variable that is nearly the name of a setting.

    Other unknown ones are accepted: for example, Kubernetes derives variables from service names, and these may have
    our prefix.
    """
    import difflib

    name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    if not variable.startswith(ENVIRONMENT_PREFIX) or name in fields:
        return
    if close := difflib.get_close_matches(name, fields, n=1, cutoff=0.85):
        raise SettingsError(
            f"{variable} in the environment is not a setting",
            hint=f"did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?",
        )


def _nearest(name: str, fields: Mapping[str, Any]) -> str:
    import difflib

    close = difflib.get_close_matches(name, fields, n=1)
    return f"did you mean {close[0]}?" if close else f"known settings: {', '.join(sorted(fields))}"
