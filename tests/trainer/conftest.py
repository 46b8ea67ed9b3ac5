"""An uploader over a store of the test's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import failures
from tests.stores.misbehaving import Meddled
from tests.trainer.uploads import QUICK, Open


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open an uploader by `with opened(store, **settings) as uploader`: it is closed, or cut short after an error."""
    monkeypatch.setattr(failures, "RETRY_ACTION_S", 0.05)

    @contextmanager
    def opened(store: Meddled, folder: Path = tmp_path / "folder", **more: Any) -> Iterator[Uploader]:
        monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda *_, **__: store)
        uploader = Uploader(folder, "memory://test", **QUICK | more)  # type: ignore[arg-type]
        try:
            yield uploader
        except BaseException:
            uploader.close(timeout_s=0)
            raise
        uploader.close()

    return opened
