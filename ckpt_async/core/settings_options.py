"""The settings as keyword arguments, so that type checkers know their names: `**settings: Unpack[SettingsOptions]`."""

from __future__ import annotations

from typing import TypedDict


class SaverSettings(TypedDict, total=False):
    """The settings that `CheckpointSaver` hands on: all but `latest_filename`, of which it makes its own."""

    num_checkpoints_to_keep: int
    local_retention: str
    num_concurrent_uploads: int
    max_concurrent_uploads: int
    upload_timeout_s: float
    on_error: str
    metrics_port: int
    metrics_address: str
    composer_symlink: str
    publish_copies: bool
    max_inflight_bytes: int
    max_bytes_per_s: float
    part_size_bytes: int
    request_timeout_s: float
    minimum_rate_bytes_per_s: float
    stall_timeout_s: float
    retry_initial_s: float
    retry_max_s: float
    decision_poll_s: float
    decision_poll_max_s: float
    max_backlog_checkpoints: int
    max_backlog_bytes: int
    on_backlog: str
    min_free_bytes: int
    on_disk_low: str
    block_timeout_s: float
    abandon_after_s: float
    abandon_newest_after_s: float
    remote_retention: str
    only_remotes: str
    allow_unknown_filesystem: bool
    sigterm_flush_s: float
    runner: str
    node_shared: bool
    runner_nice: int
    linger_s: float
    close_grace_s: float
    event_exec: str
    event_exec_kinds: str
    event_exec_timeout_s: float
    event_webhook: str
    event_webhook_kinds: str
    event_webhook_secret_file: str
    event_backlog_checkpoints: int
    event_stall_s: float
    event_grace_s: float


class SettingsOptions(SaverSettings, total=False):
    """All settings. What each does is in `Settings` and docs/settings.md; a test compares them."""

    latest_filename: str
