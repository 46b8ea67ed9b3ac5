"""A rank that never delivers is silent, so the ranks that wait for it must report it."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import backlog
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Sealed
from ckpt_async.core.waiting import Receipts
from tests.stores.misbehaving import Meddled
from tests.trainer.uploads import Open, save

FAST = {"decision_poll_s": 0.05, "decision_poll_max_s": 0.1, "close_grace_s": 0.0, "launch_id": "one"}


def local(*steps: int, world_size: int = 8) -> Local:
    """Return the state of a rank that has delivered its part of these steps."""
    ids = [CheckpointId(1, step) for step in steps]
    return Local(
        3,
        1,
        {
            id_: LocalCheckpoint(id_, "s", sealed=Sealed(id_, "s", world_size), has_receipt=True)
            for id_ in ids
        },
    )


@pytest.mark.fault("O6")
@pytest.mark.parametrize(
    ("receipts", "text"),
    [
        (Receipts((0, 1, 2, 3, 4, 6)), "step 300 waits for ranks [5, 7] for 10 min"),
        (Receipts((0, 3, 7), is_whole=False), "step 300 waits for ranks [1, 2, 4, 5, 6] and more for 10 min"),
        (
            Receipts(tuple(range(8))),
            "step 300 waits for a decision, though all ranks have delivered, for 10 min",
        ),
    ],
)
def test_the_ranks_waited_for_are_named(receipts: Receipts, text: str) -> None:
    assert backlog.long_wait(local(300), CheckpointId(1, 300), receipts, 605) == text


def test_the_oldest_of_many_waiting_checkpoints_is_reported() -> None:
    known = local(300, 400, 500)
    told = backlog.long_wait(known, CheckpointId(1, 300), Receipts((3,)), 7300)
    assert (
        told == "step 300 waits for ranks [0, 1, 2, 4, 5, 6, 7] for 2 h; later checkpoints waiting as well: 2"
    )
    assert backlog.long_wait(known, CheckpointId(1, 400), Receipts((3,)), 7300) == ""


def test_the_lowest_delivered_rank_logs_first() -> None:
    """A run of thousands of ranks logs one line. If that rank has died since, the others must log."""
    assert backlog.first_log_s(Receipts((5, 2, 3)), 2) == backlog.LONG_WAIT_S == 600
    assert {backlog.first_log_s(Receipts((5, 2, 3)), rank) for rank in (3, 5)} == {1200}


@pytest.mark.fault("O6")
def test_waiting_ranks_report_a_rank_that_never_delivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Real ranks on a real store; the reports end with the commit."""
    monkeypatch.setattr(backlog, "LONG_WAIT_S", 0.2)
    caplog.set_level(logging.WARNING, "ckpt_async")

    def ranks(*numbers: int) -> list[Uploader]:
        options: Any = {"world_size": 4, **FAST, "decision_poll_max_s": 0.05}
        return [
            Uploader(tmp_path / f"{number}", f"file://{tmp_path}/run", rank=number, **options)
            for number in numbers
        ]

    def save(uploader: Uploader) -> None:
        path = uploader.folder / f"rank-{uploader.rank}.bin"
        path.write_bytes(b"x")
        uploader.enqueue(path, 300)
        uploader.seal(300)

    def told() -> list[tuple[float, str]]:
        waits = (record for record in caplog.records if "checkpoint_waits" in record.message)
        return [(record.created, record.message) for record in waits]

    def wait_until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < deadline, told()
            uploaders[0]._engine.changed.wait(0.05)

    uploaders = ranks(0, 2)
    for uploader in uploaders:
        save(uploader)
    wait_until(lambda: len(told()) >= 5)
    assert {re.sub(r"\d+ s$", "… s", each) for _, each in told()} == {
        "checkpoint_waits step 300 waits for ranks [1, 3] for … s"
    }
    assert told()[4][0] - told()[0][0] > 0.3, "each rank pauses for as long as it has waited"
    uploaders += ranks(1, 3)
    for uploader in uploaders[2:]:
        save(uploader)
    for uploader in uploaders:
        uploader.wait(300, timeout_s=20)
        uploader.close()
    assert len(list((tmp_path / "run/.ckpt-async/decisions").iterdir())) == 1


def test_a_step_that_a_rank_never_saved_is_waited_for_only_until_a_newer_one_is_committed(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Every later launch waited for the whole time, without a word."""
    store = Meddled()
    with opened(store, rank=0, world_size=2, generation=1, on_error="warn") as uploader:
        save(uploader, 4)
        uploader.close(timeout_s=0)
    with opened(store, generation=2) as uploader:
        assert not uploader.wait_for_predecessor(0.1)
        assert "previous_launch_unfinished steps=4 " in caplog.text
        save(uploader, 6)
        uploader.wait(6, timeout_s=30)
    caplog.clear()
    with opened(store, generation=3) as uploader:
        assert uploader.wait_for_predecessor(0)
    assert "predecessor" not in caplog.text
