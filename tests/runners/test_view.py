"""What a trainer knows of an engine in another process."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Enqueued,
    FileIdentity,
    Opened,
    ReceiptStored,
    RemoteAddress,
    Sealed,
    Shard,
    StoredShard,
    Verified,
)
from ckpt_async.core.observe import Observer
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.runners import reports, wire
from ckpt_async.runners.view import ReportedEngine
from ckpt_async.trainer.closing import report_of

ID = CheckpointId(1, 1)
SHARD = Shard("a.pt", "step-1/a.pt", FileIdentity(1, 1, 5, 1), is_linked=False)
STORED = StoredShard("a.pt", "ckpt/step-1.g1/a.pt", 5, Checksum("crc64nvme", "AAAAAAAAAAA="))
DELIVERED = [Enqueued(ID, "step-1", SHARD), Sealed(ID, "step-1", 2), Verified(ID, STORED), ReceiptStored(ID)]


def test_the_trainer_sees_that_what_the_store_has_lost_is_not_delivered_any_more(tmp_path: Path) -> None:
    """The process drops rows of the journal when it uploads again; the trainer still counted them as delivered."""
    with contextlib.closing(Journal(Folder(tmp_path / "folder"), 0)) as journal:
        journal.append([Opened(1, 2, RemoteAddress("file:///run")), *DELIVERED])
        view = ReportedEngine(journal, Observer(), lambda: None)
        engine: Any = SimpleNamespace(
            fenced_by=None,
            store_error="",
            absent_ranks=None,
            num_due=0,
            num_distrusted=0,
            last_seen_wake=0,
            failing=frozenset(),
            failures=[],
            outcomes=SimpleNamespace(newest=list),
            local=journal.local(),
            missing_ranks=lambda _: [],
        )

        def tell(report: dict[str, Any]) -> bool:
            view.take(json.loads(wire.encode("report", report))[1])
            return True

        told = reports.Reports(tell, lambda: engine, Any)
        told.note_round(engine)
        assert report_of(view.fresh_local(), 0).num_shards_left == 0

        journal.forget_uploads([ID])
        engine.num_distrusted, engine.local = 1, journal.local()
        told.note_round(engine)
        assert report_of(view.fresh_local(), 0).num_shards_left == 1

        journal.append([Verified(ID, STORED)])
        told.note_round(engine)
        assert report_of(view.fresh_local(), 0).num_shards_left == 0
