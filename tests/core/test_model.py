"""Replay of the journal: the same rows must always give the same state, however they are split (rule R10)."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_async.core.local_state import Local, LocalShard, compacted, fold
from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Decided,
    Enqueued,
    Event,
    Failed,
    FileIdentity,
    Forgotten,
    JournalRow,
    MadeDurable,
    MultipartOpened,
    Opened,
    Outcome,
    ReceiptStored,
    Released,
    RemoteAddress,
    Retried,
    Sealed,
    Shard,
    StartedOver,
    StoredShard,
    Unproven,
    Verified,
)
from ckpt_async.errors import FailureReason

REMOTE = RemoteAddress("file:///run")
NAMES = ("a", "b")


def shard(name: str) -> Shard:
    return Shard(name, f"step/{name}", FileIdentity(1, 2, 3, 4), is_linked=True)


def stored(name: str) -> StoredShard:
    return StoredShard(name, f"ckpt/x.g1/{name}", 3, Checksum("crc32c", "AAAAAA=="))


def life(id_: CheckpointId, names: list[str], outcome: Outcome, is_lost: bool) -> list[Event]:
    """Return everything that can happen to a checkpoint, in a possible order."""
    events: list[Event] = [Enqueued(id_, "x", shard(name)) for name in names]
    events += [Sealed(id_, "x", 2), MadeDurable(id_, tuple(names), is_sealed=True)]
    for name in names:
        events += [
            MultipartOpened(id_, name, "upload", 5),
            Failed(id_, name, FailureReason.TIMEOUT, "slow"),
            Failed(id_, name, FailureReason.SOURCE_MISSING, "gone")
            if is_lost
            else Verified(id_, stored(name)),
        ]
    events += [ReceiptStored(id_), Decided(id_, outcome, "x"), Released(id_)]
    return [*events, Forgotten(id_, 1.0 if outcome is not Outcome.ABORT else None)]


@st.composite
def journals(draw: st.DrawFn) -> list[JournalRow]:
    """Generate several lives, each truncated somewhere and all interleaved, with restarts in between."""
    queues: list[list[Event]] = []
    for number in range(draw(st.integers(0, 4))):
        id_ = CheckpointId(1 + number % 2, number)
        names = draw(st.lists(st.sampled_from(NAMES), unique=True))
        whole = life(id_, names, draw(st.sampled_from(Outcome)), draw(st.booleans()))
        queues.append(whole[: draw(st.integers(0, len(whole)))])
    queues.append([Opened(each, 2, REMOTE) for each in range(1, draw(st.integers(1, 4)))])
    events: list[Event] = []
    while any(queues):
        queue = draw(st.sampled_from([each for each in queues if each]))
        events.append(queue.pop(0))
    return [JournalRow(number, 0, 100.0 + number, event) for number, event in enumerate(events, 1)]


@given(journals(), st.data())
def test_folding_a_prefix_twice_changes_nothing(rows: list[JournalRow], data: st.DataObject) -> None:
    """A polling reader may see rows again, and a shard that is already in the store must stay there."""
    prefix = rows[: data.draw(st.integers(0, len(rows)))]
    once = fold(prefix, Local(0))
    assert fold(prefix, once) == once
    assert fold(rows, once) == fold(rows, Local(0))


ANY_ID = st.builds(CheckpointId, st.just(1), st.integers(1, 2))
ANY_EVENT = st.one_of(
    st.builds(lambda generation: Opened(generation, 2, REMOTE), st.integers(1, 3)),
    st.builds(Forgotten, ANY_ID, st.sampled_from([None, 7.5])),
    st.builds(Unproven, ANY_ID),
    st.builds(lambda id_, name: Enqueued(id_, "x", shard(name)), ANY_ID, st.sampled_from(NAMES)),
    st.builds(lambda id_, name: Verified(id_, stored(name)), ANY_ID, st.sampled_from(NAMES)),
    st.builds(
        lambda id_, name, reason: Failed(id_, name, reason, "why"),
        ANY_ID,
        st.sampled_from(["", *NAMES]),
        st.sampled_from([FailureReason.TIMEOUT, FailureReason.SOURCE_MISSING]),
    ),
    st.builds(lambda id_, outcome: Decided(id_, outcome, "x"), ANY_ID, st.sampled_from(Outcome)),
    st.builds(lambda id_: Sealed(id_, "x", 2), ANY_ID),
    st.builds(StartedOver, st.just(0)),
    *(st.builds(kind, ANY_ID) for kind in (Retried, ReceiptStored, Released)),
)


@settings(max_examples=400)
@given(st.lists(st.lists(ANY_EVENT, max_size=25), min_size=1, max_size=3))
def test_a_compacted_journal_folds_to_the_same_state(parts: list[list[Event]]) -> None:
    """Whatever happened, in whatever order, and after any number of compactions."""
    every: list[JournalRow] = []
    kept: list[JournalRow] = []
    for events in parts:
        first = len(every) + 1
        new = [JournalRow(number, 0, 100.0 + number, event) for number, event in enumerate(events, first)]
        every, kept = every + new, compacted(kept + new, 0)
    whole, again = fold(every, Local(0)), fold(kept, Local(0))
    assert replace(again, sequence=0) == replace(whole, sequence=0)
    assert compacted(kept, 0) == kept
    assert fold(kept, whole).checkpoints == whole.checkpoints, "and for whoever has seen some of it"


@given(journals(), st.lists(st.integers(1, 5)))
def test_folding_in_chunks_is_folding_at_once(rows: list[JournalRow], sizes: list[int]) -> None:
    """The engine folds only new rows while a restart folds all of them; both must arrive at the same state."""
    whole, rest, state = fold(rows, Local(0)), list(rows), Local(0)
    for size in sizes:
        chunk, rest = rest[:size], rest[size:]
        state = fold(chunk, state)
    assert fold(rest, state) == whole


@given(journals())
def test_fold_does_not_modify_its_input(rows: list[JournalRow]) -> None:
    """Other threads read the old snapshot while the new one is being built."""
    middle = len(rows) // 2
    start = fold(rows[:middle], Local(0))
    before = repr(start)
    fold(rows[middle:], start)
    assert before == repr(start)


@given(journals())
def test_rows_of_other_ranks_are_ignored(rows: list[JournalRow]) -> None:
    """One journal holds the rows of several ranks, so each rank must skip those of the others."""
    assert Local(1) == fold(rows, Local(1))


def test_events_of_an_unknown_checkpoint_are_ignored() -> None:
    """A straggling task may write after its checkpoint was forgotten; that must not bring back half of it."""
    id_ = CheckpointId(1, 1)
    events = life(id_, ["a"], Outcome.COMMIT, is_lost=False)[2:-1]
    rows = [JournalRow(number, 0, 1.0, event) for number, event in enumerate(events, 1)]
    assert fold(rows, Local(0)).checkpoints == {}
    assert fold(rows, Local(0)).newest_committed is None


def test_a_restart_retries_what_failed_but_not_what_is_lost() -> None:
    """An outage longer than the timeout is retried after a restart; bytes that are gone do not come back."""
    id_ = CheckpointId(1, 1)

    def state(reason: FailureReason) -> Local:
        events: list[Event] = [
            Enqueued(id_, "x", shard("a")),
            Failed(id_, "a", reason, "why"),
            Opened(2, 1, REMOTE),
        ]
        return fold([JournalRow(number, 0, 1.0, event) for number, event in enumerate(events, 1)], Local(0))

    assert state(FailureReason.TIMEOUT).checkpoints[id_].shards["a"].failure is None
    assert state(FailureReason.SOURCE_CHANGED).checkpoints[id_].loss is not None


def test_an_event_of_a_shard_leaves_its_other_fields() -> None:
    """An outage in the middle must lose neither the parts already sent nor the record of what was fsynced."""
    id_ = CheckpointId(1, 1)
    multipart = MultipartOpened(id_, "a", "upload", 5)
    failed = Failed(id_, "a", FailureReason.TIMEOUT, "slow")

    def after(*events: Event) -> LocalShard:
        rows = [
            JournalRow(number, 0, float(number), event)
            for number, event in enumerate([Enqueued(id_, "x", shard("a")), *events], 1)
        ]
        return fold(rows, Local(0)).checkpoints[id_].shards["a"]

    durable, verified = MadeDurable(id_, ("a",), is_sealed=False), Verified(id_, stored("a"))
    assert after(multipart, failed, durable) == LocalShard(shard("a"), 1.0, True, multipart, None, failed)
    whole = LocalShard(shard("a"), 1.0, True, multipart, stored("a"), None)
    assert after(multipart, failed, durable, verified) == whole
    assert after(multipart, failed, verified, durable) == whole


def test_newest_committed_survives_forgetting() -> None:
    """Fencing and metrics ask for the newest committed checkpoint long after its rows are gone."""
    id_ = CheckpointId(2, 7)
    rows = [
        JournalRow(number, 0, 5.0, event)
        for number, event in enumerate(life(id_, ["a"], Outcome.PRUNED, is_lost=False), 1)
    ]
    after = fold(rows, Local(0))
    assert (id_, {}) == (after.newest_committed, after.checkpoints)
    older = replace(rows[-1], event=Forgotten(CheckpointId(1, 9), 9.0))
    assert id_ == fold([older], after).newest_committed


def test_shard_enqueued_after_a_restart_is_not_lost() -> None:
    """With a restart in the middle of a replay, later rows belong to the new state and must not be lost with the old
    one.
    """
    id_ = CheckpointId(1, 1)
    events: list[Event] = [
        Enqueued(id_, "x", shard("a")),
        Failed(id_, "a", FailureReason.TIMEOUT, "slow"),
        Opened(2, 1, REMOTE),
        Enqueued(id_, "x", shard("b")),
    ]
    after = fold([JournalRow(number, 0, 1.0, event) for number, event in enumerate(events, 1)], Local(0))
    assert sorted(after.checkpoints[id_].shards) == ["a", "b"]
    assert after.checkpoints[id_].shards["a"].failure is None
