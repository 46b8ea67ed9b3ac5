"""What is done about what was found."""

from dataclasses import replace
from typing import Any

import pytest

from ckpt_async.core.refusal import Refusal
from ckpt_async.formats import Found, Identity, Rules, Tree, find
from ckpt_async.watch import plan
from ckpt_async.watch.entries import Entry, State, entry_of
from tests.watch.trees import SECOND, torch_zip, tree_of


def one(path: str = "last.ckpt", tensor: bytes | None = b"0" * 40, **state: int) -> tuple[Found, Tree]:
    tree = tree_of({path: torch_zip(tensor=tensor, **({"global_step": 10} | state))})
    return find(tree)[0], tree


def entry(
    number: int, step: int, *, written_s: int, state: State = State.HANDED, generation: int = 1
) -> Entry:
    files = {f"step-{step}": Identity(number, 1, written_s * SECOND)}
    shards = {f"step-{step}": f"step-{step}"}
    return Entry(
        number, "dcp", f"step-{step}", step, f"step-{step}", files, shards, state=state, generation=generation
    )


def test_what_is_known_as_it_is_is_left_alone_also_when_a_rotation_has_begun() -> None:
    written = {"step1/model.pt": torch_zip(x=1), "step1/optim.pt": torch_zip(x=1), "step1/config.yaml": b"a"}
    tree = tree_of(written)
    (found,) = find(tree)
    known = entry_of(found, tree, 1)
    assert plan.judge(found, tree, [known], num_nodes=1) is None
    left = {path: was for path, was in tree.files.items() if path != "step1/optim.pt"}
    rest = Tree(left, tree.read, "run", tree.now_ns)
    assert plan.judge(find(rest)[0], rest, [known], num_nodes=1) is None


def test_a_file_of_the_same_name_is_new_if_it_was_renamed_there_and_refused_if_it_was_written_in_place() -> (
    None
):
    found, tree = one(tensor=None)  # it has no checksum that would say what its bytes should be
    known = entry_of(found, tree, 1)
    was = tree.files["last.ckpt"]
    renamed = Tree({"last.ckpt": was._replace(inode=99)}, tree.read)
    verdict = plan.judge(found, renamed, [known], num_nodes=1)
    assert verdict
    assert verdict.take
    in_place = Tree({"last.ckpt": was._replace(mtime_ns=was.mtime_ns + 1)}, tree.read)
    verdict = plan.judge(found, in_place, [known], num_nodes=1)
    assert verdict
    assert (verdict.take, verdict.refusal) == (False, Refusal.CHANGED)
    assert "written in place" in verdict.reason
    made_anew = replace(in_place, born_ns=lambda _: known.staged_ns + 1)
    verdict = plan.judge(found, made_anew, [known], num_nodes=1)
    assert verdict
    assert verdict.take, "the inode was given out again"
    found, tree = one()
    known, was = entry_of(found, tree, 1), tree.files["last.ckpt"]
    in_place = Tree({"last.ckpt": was._replace(mtime_ns=was.mtime_ns + 1)}, tree.read)
    verdict = plan.judge(found, in_place, [known], num_nodes=1)
    assert verdict
    assert verdict.take, "its bytes are compared with its own checksums before it is handed in"


def test_what_may_be_a_copy_waits_for_what_it_may_be_a_copy_of() -> None:
    """Of any step; and of its shape."""
    first = entry(1, 10, written_s=5)
    new: dict[str, Any] = {"state": State.STAGED, "generation": 0, "files": {}, "shards": {}}
    again = replace(entry(2, 10, written_s=9), path="step-10-best", marker_ns=9 * SECOND, **new)
    stepless = replace(entry(3, 20, written_s=20), path="best", marker_ns=20 * SECOND, **new)
    first = replace(first, files={}, shards={}, marker_ns=5 * SECOND)
    for copy in (again, stepless):
        known = [first, copy]
        assert plan.awaits_akin(copy, known)
        assert not plan.awaits_akin(first, known), "it was before that"
        assert not plan.awaits_akin(copy, [replace(first, state=State.COMMITTED), copy]), "that is compared"
        assert not plan.akin(copy, [replace(first, state=State.REFUSED)])
        assert not plan.akin(copy, [replace(first, files={"x": Identity(1, 1, 1)}, shards={"x": "x"})])
    for copy in (again, stepless):
        assert plan.akin(copy, [replace(first, step=11)])


def test_copy_with_its_times_may_have_any_step() -> None:
    first = entry(1, 10, written_s=5, state=State.COMMITTED)
    moved = entry(2, 99, written_s=5, state=State.STAGED, generation=0)
    assert plan.akin(moved, [first, moved]) == [first]
    saved = entry(3, 99, written_s=6, state=State.STAGED, generation=0)
    assert not plan.akin(saved, [first, saved])


def test_what_is_committed_as_another_one_is_a_copy_of_that() -> None:
    first, second = entry(1, 10, written_s=5, state=State.COMMITTED), entry(3, 11, written_s=7)
    copy = replace(first, number=2, path="best")
    assert plan.originals([copy, second, first]) == [first, second]


def test_a_file_with_another_name_for_a_step_that_is_taken_is_not_sent_again() -> None:
    """Its tensors are the same, wherever it is, and also when the other one has been deleted."""
    for last in ("last.ckpt", "b/step=10.ckpt"):
        written = {"epoch=0-step=10.ckpt": torch_zip(x=1), last: torch_zip(global_step=10, path="x" * 99)}
        tree = tree_of(written)
        first, second = find(tree)
        known = entry_of(first, tree, 1)
        assert plan.judge(second, tree, [known], num_nodes=1) is None
    tree = tree_of({"epoch=0-step=10.ckpt": torch_zip(x=1), "last.ckpt": torch_zip(global_step=10)})
    first, second = find(tree)
    known = entry_of(first, tree, 1)
    assert plan.judge(second, tree, [replace(known, state=State.REFUSED)], num_nodes=1), "that is not there"
    long_ago = {path: was._replace(mtime_ns=was.mtime_ns - 100 * SECOND) for path, was in known.files.items()}
    assert plan.judge(second, tree, [replace(known, files=long_ago)], num_nodes=1), (
        "the trainer has gone back"
    )
    for path in ("last.ckpt", "b/step=10.ckpt"):
        left = tree_of({path: torch_zip(global_step=10)})
        assert plan.judge(find(left)[0], left, [known], num_nodes=1) is None
        left = tree_of({path: torch_zip(tensor=b"\1" * 400, global_step=10)})
        verdict = plan.judge(find(left)[0], left, [known], num_nodes=1)
        assert verdict, "it has the same size, and is another state"
        assert verdict.refusal is Refusal.UNSUPPORTED


@pytest.mark.parametrize("other", [torch_zip(tensor=b"\1" * 400, x=1), b"no zip"])
def test_another_state_of_a_step_that_is_taken_is_refused(other: bytes) -> None:
    """Of a student and its teacher, say: as long to the byte."""
    tree = tree_of({"student-step=10.ckpt": torch_zip(x=1), "teacher-step=10.ckpt": other})
    student, teacher = sorted(find(tree), key=lambda each: each.path)
    verdict = plan.judge(teacher, tree, [entry_of(student, tree, 1)], num_nodes=1)
    assert verdict
    assert (verdict.take, verdict.refusal) == (False, Refusal.UNSUPPORTED)
    assert (
        "teacher-step=10.ckpt is not uploaded, since student-step=10.ckpt of the same step" in verdict.reason
    )


@pytest.mark.parametrize("path", ["step 2/model.pt", "step-2/notes (1).md"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_names_that_not_every_store_takes_are_refused_before_anybody_hears_of_them(
    path: str, num_nodes: int
) -> None:
    tree = tree_of({path: torch_zip(x=1), f"{path.partition('/')[0]}/DONE": b"x"})
    (found,) = find(tree, Rules(done="DONE"))
    verdict = plan.judge(found, tree, [], num_nodes=num_nodes)
    assert verdict
    assert (verdict.take, verdict.refusal) == (False, Refusal.UNSUPPORTED)
    assert "not safe in every store" in verdict.reason


def test_files_on_another_node_are_missed_on_one_node_only() -> None:
    found, tree = one()
    found = replace(found, missing=("a", "b", "c", "d"))
    alone = plan.judge(found, tree, [], num_nodes=1)
    assert alone
    assert alone.reason.startswith("its marker names files that are not here: a, b, c and 1 more")
    several = plan.judge(found, tree, [], num_nodes=2)
    assert several
    assert several.take


def test_a_trainer_that_goes_back_begins_a_new_generation() -> None:
    known = [entry(1, 100, written_s=10), entry(2, 200, written_s=20)]
    assert not plan.needs_new_generation(entry(3, 300, written_s=30), known, 1)
    assert plan.needs_new_generation(entry(3, 200, written_s=30), known, 1), "the same step once more"
    assert plan.needs_new_generation(entry(3, 150, written_s=30), known, 1), "from step 100"
    assert not plan.needs_new_generation(entry(3, 150, written_s=15), known, 1), "it was only late"
    assert not plan.needs_new_generation(entry(3, 150, written_s=20), known, 1), "by a clock of whole seconds"
    assert not plan.needs_new_generation(entry(3, 150, written_s=30), known, 2), "a new launch already"


def test_a_file_that_was_copied_with_its_time_makes_no_checkpoint_old() -> None:
    earlier = entry(1, 200, written_s=20, state=State.COMMITTED)
    files = {"step-150/config.json": Identity(8, 1, SECOND), "step-150/mark": Identity(9, 1, 30 * SECOND)}
    copied = replace(entry(2, 150, written_s=30), files=files, marker="step-150/mark")
    assert plan.needs_new_generation(copied, [earlier], 1)
    assert not plan.passed_over(copied, [earlier], 2)


def test_what_is_older_than_an_earlier_start_s_newest_never_becomes_the_newest() -> None:
    known = [entry(1, 200, written_s=20, state=State.COMMITTED)]
    assert plan.passed_over(entry(2, 100, written_s=10), known, 2)
    assert plan.passed_over(entry(2, 100, written_s=20), known, 2), "by a clock of whole seconds"
    assert not plan.passed_over(entry(2, 100, written_s=30), known, 2), "the trainer has gone back"
    assert not plan.passed_over(entry(2, 100, written_s=10), known, 1), (
        "of this launch: latest does not go back"
    )
    assert not plan.passed_over(entry(2, 300, written_s=10), known, 2)


def test_what_has_settled_is_handed_in_as_it_was_found() -> None:
    """A trainer that goes back while the store is away."""
    staged = [
        replace(entry(n, step, written_s=n), state=State.STAGED) for n, step in ((1, 30), (2, 10), (3, 20))
    ]
    staged[2] = replace(staged[2], staged_ns=5 * SECOND)
    assert [each.step for each in plan.due(staged, 5 * SECOND, 1.0)] == [30, 10]


def test_what_was_staged_by_a_clock_that_was_an_hour_ahead_is_handed_in_all_the_same() -> None:
    staged = replace(entry(1, 30, written_s=1), state=State.STAGED, staged_ns=3600 * SECOND)
    assert plan.due([staged], 5 * SECOND, 30.0) == [staged]
    assert not plan.due([staged], 3599 * SECOND, 30.0)


def test_after_a_trainer_has_gone_back_what_it_saved_before_is_decided_first() -> None:
    """Else, handed in again in another launch, that would be the newest."""
    again = entry(3, 20, written_s=30, state=State.STAGED)
    assert plan.predecessors(again, [entry(1, 20, written_s=10)], 1, num_nodes=1)
    assert plan.predecessors(again, [entry(1, 20, written_s=10)], 2, num_nodes=1), (
        "of an earlier launch, and not decided"
    )
    assert not plan.predecessors(again, [entry(1, 20, written_s=10, state=State.COMMITTED)], 1, num_nodes=1)
    assert not plan.predecessors(again, [entry(1, 10, written_s=10)], 1, num_nodes=1)
    assert not plan.predecessors(again, [entry(1, 10, written_s=10)], 2, num_nodes=1)


def test_on_several_nodes_what_an_earlier_start_had_handed_in_comes_again_before_what_is_new() -> None:
    """Else a third start would find that it is older than what the second one has committed."""
    new = entry(3, 30, written_s=30, state=State.STAGED)
    undecided = entry(1, 10, written_s=10)
    assert plan.predecessors(new, [undecided], 2, num_nodes=2)
    assert not plan.predecessors(new, [undecided], 1, num_nodes=2)
    assert not plan.predecessors(new, [undecided], 2, num_nodes=1), "its journal finishes it"
    assert not plan.predecessors(new, [replace(undecided, state=State.COMMITTED)], 2, num_nodes=2)


def test_local_retention_keeps_the_newest_committed() -> None:
    known = [entry(n, step, written_s=n, state=State.COMMITTED) for n, step in ((1, 30), (2, 10), (3, 20))]
    known.append(entry(4, 5, written_s=0, state=State.REFUSED))
    assert [each.step for each in plan.to_remove(known, 1)] == [30, 10]
    assert len(plan.to_remove(known, 0)) == 3


@pytest.mark.parametrize("state", State)
def test_local_retention_leaves_a_place_that_was_saved_to_again_to_its_newest_save(state: State) -> None:
    first = entry(1, 10, written_s=1, state=State.COMMITTED)
    again = replace(entry(2, 10, written_s=2, state=state), generation=2)
    other = entry(3, 20, written_s=3, state=State.COMMITTED)
    is_committed = state is State.COMMITTED
    assert plan.to_remove([first, again, other], 1) == [again] * is_committed
    assert plan.to_remove([first, again], 1) == []


def test_of_several_saves_of_a_step_the_newest_is_the_one_that_a_file_is_compared_with() -> None:
    """Lightning's `last.ckpt`, when the step is saved again within the minute."""
    tree = tree_of({"last.ckpt": torch_zip(tensor=b"\2" * 400, global_step=10)})
    (found,) = find(tree)
    names = ("a-step=10.ckpt", "b-step=10.ckpt")
    trees = [tree_of({name: torch_zip(tensor=bytes([n]) * 400)}) for n, name in enumerate(names, 1)]
    known = [entry_of(find(each)[0], each, number) for number, each in enumerate(trees, 1)]
    assert plan.judge(found, tree, known, num_nodes=1) is None
    verdict = plan.judge(found, tree, known[:1], num_nodes=1)
    assert verdict is not None
    assert verdict.refusal is Refusal.UNSUPPORTED


def names(verdict: plan.Verdict | None) -> tuple[str, ...]:
    assert verdict is not None
    return verdict.late


def test_what_comes_after_a_checkpoint_was_handed_in_is_no_part_of_it_as_long_as_its_mark_stays() -> None:
    tree = tree_of({"checkpoint-1/trainer_state.json": b'{"global_step": 1}', "checkpoint-1/late.txt": b"b"})
    (found,) = find(tree)
    known = replace(entry_of(found, tree, 1), state=State.COMMITTED)
    files = {path: was for path, was in known.files.items() if path != "checkpoint-1/late.txt"}
    less = replace(known, files=files)
    assert names(plan.judge(found, tree, [less], num_nodes=1)) == ("checkpoint-1/late.txt",)
    staged = plan.judge(found, tree, [replace(less, state=State.STAGED)], num_nodes=1)
    assert staged
    assert staged.take, "it belongs to what was not handed in yet"
    again = replace(less, files={path: was._replace(inode=99) for path, was in files.items()})
    anew = plan.judge(found, tree, [again], num_nodes=1)
    assert anew
    assert anew.take, "another save to the same place"


def test_a_state_that_is_as_it_was_keeps_a_save_to_the_same_place_incomplete() -> None:
    names = ("rank0.pt", "rank1.pt")
    tree = tree_of({f"step1/{name}": torch_zip(x=1) for name in names} | {"step1/config.yaml": b"a"})
    (found,) = find(tree)
    known = replace(entry_of(found, tree, 1), state=State.COMMITTED)
    other = {path: was._replace(inode=99) for path, was in known.files.items()}
    left = replace(known, files=other | {"step1/rank1.pt": known.files["step1/rank1.pt"]})
    verdict = plan.judge(found, tree, [left], num_nodes=1)
    assert verdict
    assert (verdict.take, verdict.is_mixed) == (False, True)
    assert "step1/rank1.pt is that of the save to the same place before" in verdict.reason


def test_a_format_that_does_not_name_the_files_of_other_nodes_is_refused_on_several() -> None:
    tree = tree_of({"step1/model.pt": torch_zip(x=1), "step1/config.yaml": b"a"})
    (found,) = find(tree)
    verdict = plan.judge(found, tree, [], num_nodes=2)
    assert verdict
    assert verdict.refusal is Refusal.UNSUPPORTED
    assert "shared folder" in verdict.reason


def test_local_retention_neither_counts_nor_deletes_a_copy_that_somebody_has_made() -> None:
    known = [entry(n, step, written_s=n, state=State.COMMITTED) for n, step in ((1, 10), (2, 20))]
    copy = replace(known[0], number=3, path="best", files={"best": Identity(9, 1, 9 * SECOND)})
    assert plan.to_remove([*known, copy], 2) == []
    assert plan.to_remove([*known, copy], 0) == known
    kept_times = replace(known[0], number=0, path="best/step-10")
    assert plan.to_remove([kept_times, *known], 0) == known, "what is deeper is the copy"


def test_only_another_node_can_continue_what_it_had_announced() -> None:
    earlier = replace(entry(1, 10, written_s=10, state=State.STAGED), is_followed=True, announced_ns=5)
    assert plan.awaits_others(earlier)
    assert not plan.awaits_others(replace(earlier, state=State.HANDED))
    assert not plan.awaits_others(replace(earlier, is_followed=False))
