"""A store that loses what it had confirmed: it was wiped, put back to an older state, or somebody deletes there."""

import asyncio
import contextlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import CheckpointAbortedError, FencedError, SettingsError, Uploader, UploadFailedError
from ckpt_async.core import decide, keys, records
from ckpt_async.core.model import CheckpointId, Generation, Outcome, Receipt
from ckpt_async.engine import fencing
from ckpt_async.errors import FailureReason, JournalError, ObjectNotFoundError
from ckpt_async.protocol import steps
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from tests.stores.memory import MemoryBucket
from tests.stores.misbehaving import Meddled, trouble
from tests.trainer.uploads import Open, decisions, save, wait_until, write

FIRST, DATA = CheckpointId(1, 1), "ckpt/step-1.g1/"
RECEIPTS, GENERATION = keys.receipts_prefix(FIRST), keys.generation_key(1)


class _StopError(Exception):
    """Stands for SIGKILL."""


class Undecided(Meddled):
    """A store in which nothing is decided until `may_decide`: nobody gets to compare the shards."""

    def __init__(self, bucket: MemoryBucket | None = None) -> None:
        super().__init__(bucket)
        self.may_decide = False

    async def before(self, operation: str, key: str) -> None:
        asks = (operation == "list" and key.startswith(keys.DATA)) or (
            operation == "head" and key.startswith(RECEIPTS)
        )
        if asks and not self.may_decide:
            raise trouble(FailureReason.TRANSIENT)

    def lose(self, *starts: str) -> None:
        for start in starts:
            for key in self.keys(start):
                del self.bucket.objects[key]


def _killed_before_the_decision(opened: Open, store: Undecided, *names: str) -> None:
    def die() -> None:
        with opened(store, on_error="warn") as uploader:  # the store refuses to commit it
            save(uploader, 1, *names)
            wait_until(lambda: bool(store.keys(RECEIPTS)), uploader)
            raise _StopError

    with pytest.raises(_StopError):
        die()
    assert len(store.keys(DATA)) == len(names or ("a.pt", "b.pt"))
    assert not decisions(store)


def _spooled(uploader: Uploader, id_: CheckpointId = FIRST) -> list[str]:
    spool = uploader.folder / keys.PRIVATE / keys.spool_checkpoint(id_, uploader.rank)
    return sorted(each.name for each in spool.iterdir()) if spool.exists() else []


def _is_given_up(store: Undecided, caplog: pytest.LogCaptureFixture, *lost: str) -> bool:
    """Return whether the decision and an error name what is lost."""
    decision = records.decode_decision(store.bucket.objects[keys.decision_key(FIRST)].data, FIRST)
    told = [each.message for each in caplog.records if each.levelno >= logging.ERROR]
    is_named = all(any(key in each for each in told) and key in decision.reason for key in lost)
    return is_named and decision.outcome is Outcome.ABORT and decision.is_lost_by_store


@pytest.mark.fault("F108")
@pytest.mark.parametrize(
    "lost",
    [(DATA, RECEIPTS), (DATA,), (RECEIPTS,), (f"{DATA}a.pt",), (f"{DATA}a.pt", RECEIPTS)],
    ids=" and ".join,
)
def test_a_start_uploads_again_what_the_store_has_lost(
    opened: Open, caplog: pytest.LogCaptureFixture, lost: tuple[str, ...]
) -> None:
    """The remote was put back to just after the start that died: its generation is there, its shards are not."""
    store = Undecided()
    _killed_before_the_decision(opened, store)
    store.lose(*lost)
    store.may_decide = True
    with opened(store) as uploader:
        save(uploader, 2)
        uploader.wait(2, timeout_s=10)
        wait_until(lambda: FIRST in decisions(store), uploader)
    assert decisions(store) == {FIRST: "commit", CheckpointId(2, 2): "commit"}
    found = {key: store.bucket.objects[key].data for key in store.keys(DATA)}
    assert found == {f"{DATA}a.pt": b"1 a.pt", f"{DATA}b.pt": b"1 b.pt"}
    (told,) = [each for each in caplog.messages if each.startswith("uploads_gone")]
    assert all(any(each.startswith(start) for each in told.split("=")[1].split(", ")) for start in lost[:1])


def test_what_is_still_there_is_not_uploaded_again(opened: Open) -> None:
    store = Undecided()
    _killed_before_the_decision(opened, store)
    store.asked.clear()
    store.may_decide = True
    with opened(store) as uploader:
        save(uploader, 2)
        uploader.wait(2, timeout_s=10)
        wait_until(lambda: FIRST in decisions(store), uploader)
    assert not [each for each in store.asked if each[1].startswith(DATA) and each[1] != DATA]


def _put_record(store: Meddled, key: str, data: bytes) -> None:
    asyncio.run(store._store.put(key, BytesBody(data), checksum_of(data, "crc64nvme")))


def test_what_was_pruned_meanwhile_is_not_uploaded_again(opened: Open) -> None:
    """Another rank committed it, and it was pruned; this one died before it knew."""
    store = Undecided()
    _killed_before_the_decision(opened, store)
    pruned = steps.new_decision(FIRST, Outcome.PRUNED, name="step-1", world_size=1, by="a test", now=1.0)
    pruned = replace(pruned, receipts=(checksum_of(b"x", "crc64nvme"),), num_shards=2, size_bytes=10)
    _put_record(store, keys.decision_key(FIRST), records.encode_decision(pruned))
    store.lose(DATA, RECEIPTS)
    store.may_decide = True
    with opened(store) as uploader:
        save(uploader, 2)
        uploader.wait(2, timeout_s=10)
    assert not store.keys(DATA)


@pytest.mark.fault("F108")
@pytest.mark.parametrize("lost", [f"{DATA}a.pt", f"{DATA}b.pt", RECEIPTS])
def test_a_live_launch_gives_up_lost_objects(
    opened: Open, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    """All ranks had delivered, and it does not matter whose object is gone, nor whether that rank is still alive."""
    store, launch = Undecided(), {"world_size": 2, "launch_id": "1", "num_checkpoints_to_keep": 0}
    with opened(store, rank=0, **launch) as zero:

        def live_and_die() -> None:
            with opened(store, rank=1, **launch) as one:
                save(one, 1, "b.pt")
                wait_until(lambda: bool(store.keys(RECEIPTS)), one)
                raise _StopError

        with pytest.raises(_StopError):
            live_and_die()
        save(zero, 1, "a.pt")
        wait_until(lambda: len(store.keys(RECEIPTS)) == 2, zero)
        (gone, *_) = store.keys(lost)
        store.lose(lost)
        num_sent = store.asked["put", f"{DATA}a.pt"]
        store.may_decide = True
        with pytest.raises(CheckpointAbortedError, match=f"the store has lost {gone}"):
            zero.wait(1, timeout_s=10)
        assert _is_given_up(store, caplog, gone)
        assert store.asked["put", f"{DATA}a.pt"] == num_sent
        assert _spooled(zero) == ["a.pt"]
        assert [(zero.folder / "step-1" / name).exists() for name in ("a.pt", "b.pt")] == [True, True]


@pytest.mark.fault("F108")
def test_lost_checkpoints_keep_links_until_a_newer_commit(opened: Open) -> None:
    """The links may be all that is left of it: the trainer has deleted its own files."""
    store = Undecided()
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1)
        wait_until(lambda: bool(store.keys(RECEIPTS)), uploader)
        store.lose(f"{DATA}a.pt")
        store.may_decide = True
        wait_until(lambda: uploader._engine.view().outcomes.of(FIRST) is not None, uploader)
        for name in ("a.pt", "b.pt"):
            (uploader.folder / "step-1" / name).unlink()
    with opened(store) as uploader:
        wait_until(lambda: uploader._engine.view().num_rounds > 2, uploader)
        assert _spooled(uploader) == ["a.pt", "b.pt"]
        save(uploader, 2)
        uploader.wait(2, timeout_s=10)
        wait_until(lambda: not _spooled(uploader), uploader)


@pytest.mark.fault("F108")
def test_another_remote_is_refused_while_lost_files_remain(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch at another remote forgets what the folder has of the first."""
    store = Undecided()
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1)
        wait_until(lambda: bool(store.keys(RECEIPTS)), uploader)
        store.lose(RECEIPTS)
        store.may_decide = True
        wait_until(lambda: uploader._engine.view().outcomes.of(FIRST) is not None, uploader)
    other, folder = Meddled(), uploader.folder
    monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda *_, **__: other)
    with pytest.raises(SettingsError, match="generation 1 step 1, which its remote has lost"):
        Uploader(folder, "memory://other")
    assert not other.keys()
    shutil.rmtree(folder / keys.PRIVATE / keys.spool_checkpoint(FIRST, 0))
    with Uploader(folder, "memory://other") as uploader:
        assert uploader.generation == 1


def test_a_rank_whose_receipt_is_gone_does_not_wait_for_itself(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited until the launch ended, and so did the others."""
    store = Undecided()
    store.may_decide = True
    with (
        opened(store, rank=0, world_size=2, launch_id="1", on_error="warn") as zero,
        opened(store, rank=1, world_size=2, launch_id="1", on_error="warn") as one,
    ):
        save(zero, 1, "a.pt")
        wait_until(lambda: len(store.keys(RECEIPTS)) == 1, zero)
        store.lose(RECEIPTS)
        save(one, 1, "b.pt")
        for each, name in ((zero, "a.pt"), (one, "b.pt")):
            with pytest.raises(CheckpointAbortedError, match="the store has lost"):
                each.wait(1, timeout_s=10)
            assert _spooled(each) == [name]
    assert _is_given_up(store, caplog, keys.receipt_key(FIRST, 0))


class Forgetful(Meddled):
    """A store whose listings lag behind."""

    def is_hidden(self, key: str) -> bool:
        return "a.pt" in key

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        request = super().__getattr__(operation)
        if operation != "list":
            return request

        async def lagging(*args: Any, **kwargs: Any) -> Any:
            listing = await request(*args, **kwargs)
            there = (each for each in listing.objects if not self.is_hidden(each.key))
            return replace(listing, objects=tuple(there))

        return lagging


def test_a_listing_alone_proves_no_loss(opened: Open) -> None:
    store = Forgetful()
    with opened(store) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
    assert decisions(store) == {FIRST: "commit"}
    assert store.asked["head", f"{DATA}a.pt"] == 1
    assert store.asked["head", f"{DATA}b.pt"] == 0


class Hiding(Forgetful):
    """A store that does not show what it has of the first checkpoint, until `shows`."""

    hides = f"{DATA}a.pt"
    shows = False

    def is_hidden(self, key: str) -> bool:
        return key == self.hides and not self.shows

    async def before(self, operation: str, key: str) -> None:
        if operation in ("get", "head") and self.is_hidden(key):
            raise ObjectNotFoundError(key)


class HidingFromGet(Hiding):
    """A store that lists what it does not give, until `shows`."""

    def is_hidden(self, key: str) -> bool:
        return False

    async def before(self, operation: str, key: str) -> None:
        if operation in ("get", "head") and key == self.hides and not self.shows:
            raise ObjectNotFoundError(key)


@pytest.mark.fault("F108")
@pytest.mark.parametrize("hidden", [f"{DATA}a.pt", keys.receipt_key(FIRST, 0)], ids=["shard", "receipt"])
def test_what_the_store_never_shows_costs_few_requests(opened: Open, hidden: str) -> None:
    """It was asked 2,500 times a second."""
    store = Hiding()
    store.hides = hidden
    with opened(store, on_error="warn") as uploader:
        save(uploader, 1)
        with pytest.raises(CheckpointAbortedError, match="the store has lost"):
            uploader.wait(1, timeout_s=10)
        for step in range(2, 12):
            save(uploader, step)
            uploader.wait(step, timeout_s=10)
    assert store.asked["head", hidden] == store.asked["put", f"{DATA}a.pt"] == 1


@pytest.mark.fault("F108")
def test_an_unreadable_listed_receipt_is_polled_with_pauses(opened: Open) -> None:
    store = HidingFromGet()
    store.hides = keys.receipt_key(FIRST, 0)
    with opened(store, decision_poll_s=0.5, decision_poll_max_s=60.0) as uploader:
        save(uploader, 1)
        wait_until(lambda: store.asked["get", store.hides] >= 2, uploader)
        for step in range(2, 12):
            save(uploader, step)
            wait_until(lambda step=step: uploader.is_committed(step), uploader)  # type: ignore[misc]
        assert FIRST not in decisions(store)
        assert 2 <= store.asked["get", store.hides] <= 6
        store.shows = True
        uploader.wait(1, timeout_s=10)
    assert decisions(store)[FIRST] == "commit"
    assert store.asked["put", f"{DATA}a.pt"] == 1


@pytest.mark.fault("F108")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wiped_remote_costs_only_what_was_open(
    opened: Open, caplog: pytest.LogCaptureFixture, world_size: int
) -> None:
    """Later steps are committed, the generation's record is written again, and the next launch is not refused."""
    store = Undecided()
    store.may_decide = True
    names = ["a.pt", "b.pt"]
    with contextlib.ExitStack() as launch:
        how: Any = {"world_size": world_size, "launch_id": "1", "on_error": "warn"}
        ranks: list[Uploader] = [
            launch.enter_context(opened(store, rank=rank, **how)) for rank in range(world_size)
        ]

        def save_all(step: int) -> None:
            for rank, each in enumerate(ranks):
                save(each, step, names[rank])

        save_all(1)
        for each in ranks:
            each.wait(1, timeout_s=10)
        store.may_decide = False
        save_all(2)
        wait_until(lambda: len(store.keys(keys.receipts_prefix(CheckpointId(1, 2)))) == world_size, ranks[0])
        there = json.loads(store.bucket.objects[GENERATION].data)["nonce"]
        store.lose("")
        store.may_decide = True
        save_all(3)
        for each in ranks:
            each.wait(3, timeout_s=10)
            with pytest.raises(CheckpointAbortedError, match="the store has lost"):
                each.wait(2, timeout_s=10)
        wait_until(lambda: bool(store.keys(GENERATION)), ranks[0])
        assert json.loads(store.bucket.objects[GENERATION].data)["nonce"] == there
        assert decisions(store) == {CheckpointId(1, 2): "abort", CheckpointId(1, 3): "commit"}
        assert not store.keys("ckpt/step-2")
    assert [each for each in caplog.messages if each.startswith("generation_was_lost generation=1")]
    with opened(store, world_size=1, rank=0) as uploader:
        assert uploader.generation == 2


def test_a_rank_gives_up_what_another_has_lost(opened: Open) -> None:
    store = Undecided()
    store.may_decide = True
    with (
        opened(store, rank=0, world_size=2, launch_id="1", on_error="warn") as zero,
        opened(store, rank=1, world_size=2, launch_id="1", on_error="warn") as one,
    ):
        save(zero, 1, "a.pt")
        wait_until(lambda: len(store.keys(RECEIPTS)) == 1, zero)
        store.lose(f"{DATA}a.pt")
        save(one, 1, "b.pt")
        for each in (zero, one):
            with pytest.raises(CheckpointAbortedError, match=f"the store has lost {DATA}a.pt"):
                each.wait(1, timeout_s=10)


class SlowToList(Meddled):
    async def before(self, operation: str, key: str) -> None:
        if operation == "list" and key.startswith(keys.GENERATIONS):
            await asyncio.sleep(0.2)


def _wipe_while_idle(uploader: Uploader, store: Meddled) -> None:
    """Wipe the remote once nothing looks at it any more, and the next save has to wait for a look for a successor. A
    look under way would take the generation again.
    """
    engine = uploader._engine.view()
    state, running = engine.state, engine._in_flight.running  # type: ignore[attr-defined]

    def is_idle() -> bool:
        kinds = decide.ListReceipts | decide.LookForSuccessor
        looks = [each for each in list(running) if isinstance(each, kinds)]
        return state.fence.is_idle and not looks and state.now() >= state.fence.look_at

    wait_until(is_idle, uploader)
    store.bucket.objects.clear()


@pytest.mark.fault("F108")
def test_a_launch_that_was_idle_writes_nothing_where_another_has_taken_its_generation(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both write under the same keys: it replaced the other's shards, or committed in its name."""
    monkeypatch.setattr(decide, "SUCCESSOR_POLL_S", 0.0)
    store = SlowToList()

    def live() -> None:
        with opened(store) as old:
            save(old, 1)
            old.wait(1, timeout_s=10)
            _wipe_while_idle(old, store)
            with opened(Meddled(store.bucket), tmp_path / "other") as new:
                assert (old.generation, new.generation) == (1, 1)
                save(old, 2, "a.pt")
                wait_until(lambda: old._engine.view().fenced_by == 1, old)
                _crash(old, monkeypatch)
                assert not store.keys("ckpt/")
                assert not store.keys(keys.RECEIPTS)
                save_of_the_other(new)
                new.wait(2, timeout_s=10)
                assert store.bucket.objects["ckpt/step-2.g1/a.pt"].data == b"of the other"

    with pytest.raises(
        FencedError, match="step 2 will not be committed: another launch has taken generation 1"
    ):
        live()
    assert decisions(store) == {CheckpointId(1, 2): "commit"}
    assert (tmp_path / "folder/step-2/a.pt").exists()
    (left,) = [each for each in caplog.messages if each.startswith("closed_with_unfinished")]
    assert left.endswith("nobody will finish them; the files stay in the folder")


def _crash(uploader: Uploader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a bug of ours end the engine, and wait until the one that follows it has looked at what is due."""
    dead, noticed_idleness = uploader._engine.view(), decide.noticed_idleness

    def noticed(local: Any, remote: Any, policy: Any, now: float) -> Any:
        if dead.state.local is local:  # type: ignore[attr-defined]
            raise ZeroDivisionError("an injected bug")
        return noticed_idleness(local, remote, policy, now)

    monkeypatch.setattr(decide, "noticed_idleness", noticed)
    dead.wake()
    wait_until(lambda: uploader._engine.view() is not dead, uploader)
    asked = uploader._engine.view().wake()
    wait_until(lambda: uploader._engine.view().last_seen_wake >= asked, uploader)


def test_a_launch_that_never_looked_before_does_not_take_the_record_of_another_for_its_own(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote was wiped before its first save."""
    monkeypatch.setattr(decide, "SUCCESSOR_POLL_S", 0.0)
    store = SlowToList()

    def live() -> None:
        with opened(store) as old:
            store.bucket.objects.clear()
            with opened(Meddled(store.bucket), tmp_path / "other") as new:
                assert (old.generation, new.generation) == (1, 1)
                state = old._engine.view().state  # type: ignore[attr-defined]
                wait_until(lambda: state.now() >= state.fence.look_at, old)
                save(old, 2, "a.pt")
                wait_until(lambda: old._engine.view().fenced_by == 1, old)
                assert not store.keys("ckpt/")

    with pytest.raises(FencedError, match="nothing of generation 1 was committed"):
        live()


@pytest.mark.fault("F108")
def test_a_commit_of_what_another_launch_has_uploaded_is_not_taken_for_ones_own(
    opened: Open, tmp_path: Path
) -> None:
    """An old launch was in the middle of an upload when the remote was wiped. Its files would have been released."""
    store = Undecided()
    store.may_decide = True
    with opened(store) as old:
        save(old, 1)
        old.wait(1, timeout_s=10)
        store.lose("")

        def live_beside_the_old_one() -> None:
            with opened(Meddled(store.bucket), tmp_path / "other") as new:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(fencing, "look_for_successor", _looks_for_nobody)
                    save(old, 2, "a.pt")
                    old.wait(2, timeout_s=10)
                save_of_the_other(new)
                wait_until(lambda: new._engine.view().fenced_by == 1, new)
                assert not new.is_committed(2)
                with pytest.raises(FencedError, match="another launch has taken generation 1"):
                    save(new, 3)

        with pytest.raises(FencedError, match="nothing of generation 1 was committed"):
            live_beside_the_old_one()


def save_of_the_other(new: Uploader) -> None:
    new.enqueue(write(new, "step-2/a.pt", b"of the other"), 2)
    new.seal(2)


async def _looks_for_nobody(state: Any) -> None:
    state.fence = state.fence.looked(state.local, state.now())


class HidesGeneration(Meddled):
    """A store whose listings do not have the record of the first generation any more from some time on."""

    is_hiding = False

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        request = super().__getattr__(operation)
        if operation != "list":
            return request

        async def hiding(*args: Any, **kwargs: Any) -> Any:
            listing = await request(*args, **kwargs)
            there = (each for each in listing.objects if not (self.is_hiding and each.key == GENERATION))
            return replace(listing, objects=tuple(there))

        return hiding


def test_a_listing_alone_does_not_prove_that_the_remote_was_wiped(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = HidesGeneration()
    with opened(store) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        store.is_hiding, num_asked = True, store.asked["get", GENERATION]
        save(uploader, 2)
        uploader.wait(2, timeout_s=10)
        wait_until(lambda: store.asked["get", GENERATION] > num_asked, uploader)
    assert set(decisions(store).values()) == {"commit"}
    assert not [each for each in caplog.messages if each.startswith("generation_was_lost")]


class ListsNothing(Meddled):
    """A store whose listings are empty, from some time on: as those of a mount that remembers what it has seen."""

    is_hiding = False

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        request = super().__getattr__(operation)
        if operation != "list":
            return request

        async def hiding(*args: Any, **kwargs: Any) -> Any:
            listing = await request(*args, **kwargs)
            return replace(listing, objects=()) if self.is_hiding else listing

        return hiding


@pytest.mark.fault("F155")
def test_a_launch_takes_no_empty_listing_for_a_wiped_remote(opened: Open) -> None:
    store = ListsNothing()
    with opened(store) as uploader:
        for step in (1, 2):
            save(uploader, step)
            uploader.wait(step, timeout_s=10)
    store.is_hiding = True
    with opened(store) as uploader:
        assert uploader.generation == 2


@pytest.mark.fault("F155")
def test_what_was_put_back_is_told_without_what_is_still_there(opened: Open) -> None:
    store = ListsNothing()
    with opened(store) as uploader:
        for step in (1, 2):
            save(uploader, step)
            uploader.wait(step, timeout_s=10)
    store.is_hiding = True
    del store.bucket.objects[keys.decision_key(CheckpointId(1, 2))]
    with pytest.raises(JournalError, match=r"has no record: steps 2\."), opened(store):
        pass


def test_a_listing_that_lags_does_not_hide_who_has_taken_the_generation(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered late. The record of the other launch was then read, and still taken for none."""
    monkeypatch.setattr(decide, "SUCCESSOR_POLL_S", 0.0)
    store = HidesGeneration()

    def live() -> None:
        with opened(store) as old:
            save(old, 1)
            old.wait(1, timeout_s=10)
            _wipe_while_idle(old, store)
            store.is_hiding = True
            with opened(Meddled(store.bucket), tmp_path / "other") as new:
                assert (old.generation, new.generation) == (1, 1)
                save(old, 2, "a.pt")
                wait_until(lambda: old._engine.view().fenced_by == 1, old)
                assert not store.keys("ckpt/")

    with pytest.raises(FencedError, match="another launch has taken generation 1"):
        live()


def test_a_generation_that_is_taken_is_known_beside_a_newer_one(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two launches have begun in the wiped remote: the old one was fenced by the second, and finished what it had
    sealed, under the keys of the first.
    """
    monkeypatch.setattr(decide, "SUCCESSOR_POLL_S", 0.0)
    store = Meddled()

    def live() -> None:
        with opened(store) as old:
            save(old, 1)
            old.wait(1, timeout_s=10)
            _wipe_while_idle(old, store)
            for number in (1, 2):
                other = Generation(number, "other", 1, "host", f"nonce {number}", 1.0)
                _put_record(store, keys.generation_key(number), records.encode_generation(other))
            save(old, 2, "a.pt")
            wait_until(lambda: old._engine.view().fenced_by == 1, old)
            assert not store.keys("ckpt/")

    with pytest.raises(FencedError, match="another launch has taken generation 1"):
        live()
    assert len([each for each in caplog.messages if each.startswith("fenced")]) == 1


@pytest.mark.fault("F108")
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_foreign_receipt_ends_the_launch_whose_generation_is_taken_and_no_other(
    opened: Open, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that was stopped in the middle of an upload gave up the checkpoint of the one that had taken its
    generation, which raised an error there.
    """
    monkeypatch.setattr(fencing, "look_for_successor", _looks_for_nobody)
    store = Undecided()
    theirs = Receipt(FIRST, "step-1", 0, 1, (), nonce="theirs")

    def live() -> None:
        with opened(store) as uploader:
            _put_record(store, keys.receipt_key(FIRST, 0), records.encode_receipt(theirs))
            if is_taken:
                monkeypatch.undo()
                other = Generation(1, "other", 1, "host", "theirs", 1.0)
                _put_record(store, GENERATION, records.encode_generation(other))
            save(uploader, 1)
            wait_until(lambda: bool(uploader._engine.view().fenced_by or decisions(store)), uploader)

    with pytest.raises(FencedError if is_taken else UploadFailedError, match="another"):
        live()
    assert decisions(store) == ({} if is_taken else {FIRST: "abort"})


def test_a_launch_is_fenced_by_another_start_in_its_wiped_remote(opened: Open) -> None:
    """That has taken the same number, and so the same keys."""
    store = Undecided()
    store.may_decide = True
    with opened(store) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        store.lose("")
        other = Generation(1, "other", 1, "host", "nonce", 1.0)
        _put_record(store, GENERATION, records.encode_generation(other))
        save(uploader, 2)
        wait_until(lambda: uploader._engine.view().fenced_by is not None, uploader)
        with pytest.raises(FencedError, match="another launch has taken generation 1"):
            save(uploader, 3)
        problem = uploader.exporter.problem
        assert problem.startswith("fenced: another launch has taken generation 1")
    assert json.loads(store.bucket.objects[GENERATION].data)["nonce"] == "nonce"


@pytest.mark.fault("F108")
@pytest.mark.parametrize("number", [1, 3])
def test_a_lost_record_stays_lost_beside_another_launch(opened: Open, number: int) -> None:
    """The other launch took a number below ours, or above; the store has none of our own record any more."""
    store = Undecided()
    store.may_decide = True
    with opened(store):
        pass

    with opened(store) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=10)
        assert uploader.generation == 2
        store.lose(keys.GENERATIONS)
        other = Generation(number, "other", 1, "host", "nonce", 1.0)
        _put_record(store, keys.generation_key(number), records.encode_generation(other))
        save(uploader, 2)
        wait_until(lambda: uploader._engine.view().fenced_by is not None, uploader)
        with pytest.raises(FencedError):
            save(uploader, 3)
    assert not store.keys(keys.generation_key(2))


class Aborting(Meddled):
    """A store in which somebody aborts the first multipart upload after its first part."""

    num_aborted = 0

    async def after(self, operation: str, key: str) -> None:
        if operation == "put_part" and not self.num_aborted:
            self.num_aborted += 1
            self.bucket.uploads.clear()


def test_an_upload_that_is_aborted_while_it_runs_begins_again(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a final failure, which ended the trainer, although the next attempt succeeded."""
    store, data = Aborting(), bytes(18 << 20)
    with opened(store, part_size_bytes=5 << 20) as uploader:
        uploader.enqueue(write(uploader, "step-1/a.pt", data), 1)
        uploader.seal(1)
        uploader.wait(1, timeout_s=30)
    assert store.num_aborted == 1
    assert store.bucket.objects[f"{DATA}a.pt"].data == data
    assert [each for each in caplog.messages if each.startswith("upload_gone")]
