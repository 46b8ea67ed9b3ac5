"""The settings file of a node or a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_async.core.settings import Settings, load
from ckpt_async.errors import SettingsError


def load_settings(
    arguments: Mapping[str, Any], environment: Mapping[str, str], path: str | os.PathLike[str] | None = None
) -> Settings:
    """Return the settings of an uploader with these arguments. Arguments take precedence over CKPT_ASYNC_* in the
    environment, and those over the TOML file `path` (default: CKPT_ASYNC_SETTINGS_FILE). Raises SettingsError,
    which names the setting and its allowed values.
    """
    if path is None:
        path = environment.get("CKPT_ASYNC_SETTINGS_FILE")
    if path is None:
        return load(arguments, environment)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"settings file {os.fspath(path)!r} cannot be read: {why}") from error
    return load(arguments, environment, text)
