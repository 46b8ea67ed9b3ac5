"""The arguments of an uploader as one value. Arguments take precedence over the environment, and that over the
settings file. Whatever can be rejected without touching the folder or the store is rejected here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_async.core import arguments, keys, launch, naming
from ckpt_async.core.settings import Settings
from ckpt_async.errors import SettingsError
from ckpt_async.events.event import format_wants
from ckpt_async.events.run_events import SPEAKER
from ckpt_async.events.sinks import Callback, check_callable, wants_of
from ckpt_async.local.folder import boot_id, place_of
from ckpt_async.local.settings_file import load_settings
from ckpt_async.runners import Start
from ckpt_async.stores import StoreOptions, address_of, check_apart, check_key_length


def start_of(
    folder: str | os.PathLike[str],
    remote: str,
    *,
    kind: str | None,
    rank: int | None,
    world_size: int | None,
    generation: int | None,
    launch_id: str | None,
    store_options: StoreOptions | None,
    settings_file: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
    on_event: object = None,
) -> Start:
    """Return the arguments of `Uploader`, checked and completed."""
    folder = arguments.path(folder, "folder")
    environment = dict(os.environ)
    if launch_id is not None:
        environment["CKPT_ASYNC_LAUNCH_ID"] = launch_id
    rank, world_size = launch.rank_and_world_size(environment, rank, world_size)
    loaded = load_settings(settings, environment, settings_file)
    if generation is not None:
        generation = arguments.whole(generation, "generation", 1, keys.MAX_GENERATION, SettingsError)
    launch_key = _launch_key(environment, world_size, generation)
    kind = naming.check_kind(kind)
    # That default belongs to the run itself.
    if kind and loaded.latest_filename == Settings().latest_filename:
        loaded = replace(loaded, latest_filename=f"latest-{kind}-rank{{rank}}")
    naming.fill(loaded.latest_filename, rank=rank)
    pointer = naming.check_pointer(loaded.composer_symlink, rank=rank)
    check_callable(on_event)
    wants = format_wants(wants_of(loaded, callback=Callback.of_trainer if on_event is not None else ""))
    if loaded.sigterm_flush_s and threading.current_thread() is not threading.main_thread():
        raise SettingsError(
            "sigterm_flush_s needs the uploader to be opened in the main thread, because only that may set"
            " signal handlers"
        )
    address = address_of(keys.kind_remote(remote, kind), store_options, env=environment)
    place = place_of(folder)
    check_apart(place, remote)
    if pointer:
        check_key_length(address.url, pointer)
    options = replace(store_options or StoreOptions(), endpoint_url=address.endpoint_url)
    return Start(
        str(place),
        rank,
        world_size,
        address,
        options,
        loaded,
        launch_key,
        generation,
        kind=kind,
        wants=wants if rank == SPEAKER else "",
    )


def _launch_key(environment: Mapping[str, str], world_size: int, generation: int | None) -> str:
    key = launch.launch_key(environment, parent=_parent_identity())
    if key is not None:
        return key
    if world_size == 1 or generation is not None:
        return f"single={os.urandom(16).hex()}"
    raise SettingsError(
        "the launcher does not identify this launch of the run, so ranks of two launches could be mistaken for one",
        hint="set CKPT_ASYNC_LAUNCH_ID to a value that is the same on all ranks and new at every launch, or"
        " pass generation=",
    )


def _parent_identity() -> str:
    """Identify the launching process: its pid alone might be reused."""
    started = ""
    with contextlib.suppress(OSError, IndexError):
        # proc(5): field 22 of stat is the start time; the name in field 2 may hold spaces and parentheses
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot_id()}:{os.getppid()}:{started}"
