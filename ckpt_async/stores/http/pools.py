"""All connections of one store that carry bodies: large and small, up and down, with records kept apart from shards."""

from __future__ import annotations

from typing import Any

from ckpt_async.stores.http.downloads import Downloads
from ckpt_async.stores.http.small_downloads import SmallDownloads
from ckpt_async.stores.http.small_uploads import SmallUploads
from ckpt_async.stores.http.traffic import Traffic
from ckpt_async.stores.http.uploads import Uploads
from ckpt_async.stores.interface import Body, BytesBody
from ckpt_async.stores.options import StoreOptions


class Pools:
    """One store's pools, each of up to `options.max_connections`. `ca_file`: None for the system's certificates."""

    def __init__(self, options: StoreOptions, ca_file: str | None) -> None:
        shared: dict[str, Any] = {
            "max_connections": options.max_connections,
            "connect_timeout_s": options.connect_timeout_s,
            "read_timeout_s": options.read_timeout_s,
            "ca_file": ca_file,
        }
        self.traffic = Traffic()  # of shard bytes
        self.downloads = Downloads(**shared, traffic=self.traffic)
        self.small_downloads = SmallDownloads(**shared, traffic=self.traffic)
        self.small_uploads = SmallUploads(**shared, traffic=self.traffic)
        self._uploads = Uploads(**shared, traffic=self.traffic)
        self._records = Uploads(**shared, is_bulk=False)

    def uploads_for(self, body: Body) -> Uploads:
        """Return the pool for `body`: a receipt or a decision does not queue behind shards."""
        return self._records if isinstance(body, BytesBody) else self._uploads

    def close(self) -> None:
        """Close the idle connections now, and those in use when their requests end. Does not block."""
        small = (self.small_downloads, self.small_uploads)
        for each in (self.downloads, self._uploads, self._records, *small):
            each.close()
