"""Saves on fewer ranks to the place of an earlier one, which has left files of ranks that the new one does not have."""

import json
import os
from pathlib import Path

import pytest

from ckpt_async.formats import Found, Identity, Known, Rules, find
from ckpt_async.formats.checks import EARLY_RANK_S
from ckpt_async.formats.found import Version
from tests.dcp_metadata import metadata_of
from tests.watch.conftest import Place, hashes
from tests.watch.looking import Place as Looking
from tests.watch.trees import START, safetensors, torch_zip, tree_of

pytestmark = pytest.mark.timeout(90)

HERE = "checkpoint-40"
RNG = [f"{HERE}/rng_state_{rank}.pth" for rank in range(4)]
ONE = f"{HERE}/rng_state.pth"
ZERO = [f"{HERE}/global_step40/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
DEEPSPEED = [f"global_step6/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]


def transformers(*ranks: str, num_processes: int = 0) -> dict[str, bytes]:
    arguments = {"num_processes": num_processes} if num_processes else {}
    return {
        f"{HERE}/model.safetensors": safetensors(),
        f"{HERE}/training_args.bin": torch_zip(**arguments),
        **{each: torch_zip(x=1) for each in ranks},
        f"{HERE}/trainer_state.json": json.dumps({"global_step": 40}).encode(),
    }


def done(*names: str) -> dict[str, bytes]:
    return {f"step-4/{name}": torch_zip(x=1) for name in (*names, "DONE")}


def megatron(*ranks: int) -> dict[str, bytes]:
    files = {f"iter_0000004/mp_rank_{rank:02d}_000/model_optim_rng.pt": torch_zip(x=1) for rank in ranks}
    return {**files, "latest_checkpointed_iteration.txt": b"4"}


def deepspeed(*ranks: str, dp: int) -> dict[str, bytes]:
    model = torch_zip(dp_world_size=dp, mp_world_size=1)
    return {
        "global_step6/mp_rank_00_model_states.pt": model,
        **{each: torch_zip(x=1) for each in ranks},
        "latest": b"global_step6",
    }


def saved_again(
    stale: list[str], written: dict[str, bytes], rules: Rules, now_s: float, *, is_known: bool
) -> Found:
    """A save of `written` over one that has left `stale`, and that was seen complete if `is_known`."""
    tree = tree_of({**{each: torch_zip(x=1) for each in stale}, **written}, now_s=now_s)
    earlier = {path: Identity(path_number + 99, 1, START) for path_number, path in enumerate(written)}
    earlier |= {path: tree.files[path] for path in stale}
    earlier = {each: was for each, was in earlier.items() if "/" in each}
    path = next(iter(written)).partition("/")[0]
    known = Known(versions={path: [Version(earlier, tree.files[stale[-1]].mtime_ns)]} if is_known else {})
    (found,) = find(tree, rules, known)
    return found


FEWER: dict[str, tuple[list[str], dict[str, bytes], Rules, float]] = {
    "the user says how many there are": (RNG[2:], transformers(*RNG[:2]), Rules(ranks=2), 0),
    "its arguments say it": (RNG[2:], transformers(*RNG[:2], num_processes=2), Rules(), 0),
    "its arguments say it on one of several nodes": (
        *(RNG[2:], transformers(*RNG[:2], num_processes=2), Rules(num_nodes=2), 0),
    ),
    "its arguments say it, with DeepSpeed": (
        *([*ZERO[2:], *RNG[2:]], transformers(*ZERO[:2], *RNG[:2], num_processes=2), Rules(), 0),
    ),
    "one alone, with DeepSpeed": ([*ZERO[1:], *RNG], transformers(ZERO[0], ONE, num_processes=1), Rules(), 0),
    "one alone has no number": (RNG[:2], transformers(ONE), Rules(), 31),
    "its arguments say that it was one alone": (RNG, transformers(ONE, num_processes=1), Rules(), 0),
    "nothing says it, and nobody writes": (RNG[2:], transformers(*RNG[:2]), Rules(), EARLY_RANK_S),
    "DeepSpeed says it": (DEEPSPEED[2:], deepspeed(*DEEPSPEED[:2], dp=2), Rules(), 0),
}


@pytest.mark.parametrize("what", FEWER)
def test_what_ranks_have_left_that_a_save_does_not_have_is_no_part_of_it(what: str) -> None:
    stale, written, rules, now_s = FEWER[what]
    found = saved_again(stale, written, rules, now_s, is_known=True)
    assert (found.reason, found.missing) == ("", ())
    assert {*found.files} == {*written} - {"latest"}
    assert found.of_other_ranks == tuple(stale)


MIXED: dict[str, tuple[list[str], dict[str, bytes], Rules, float]] = {
    "a rank of it is late, by what the user says": (RNG[1:2], transformers(RNG[0]), Rules(ranks=2), 9_999),
    "by its arguments": (RNG[1:2], transformers(RNG[0], num_processes=2), Rules(), 9_999),
    "a rank between others is late": (RNG[1:2], transformers(RNG[0], RNG[2]), Rules(), 9_999),
    "nothing says it, and a rank may be late": (RNG[2:], transformers(*RNG[:2]), Rules(), EARLY_RANK_S - 9),
    "a rank's DeepSpeed file, by its arguments": (
        *(ZERO[1:2], transformers(ZERO[0], *RNG[:2], num_processes=2), Rules(), 9_999),
    ),
    "a state that its trainer writes in each save": (
        *([f"{HERE}/optimizer.pt"], transformers(*RNG[:2], num_processes=2), Rules(), 0),
    ),
    "a rank of Megatron-LM's": ([*megatron(1)][:1], megatron(0), Rules(), 9_999),
    "a shard by the user's own mark": (["step-4/shard2.bin"], done("shard0.bin"), Rules(done="DONE"), 9_999),
    "a folder of shards": (["step-4/2/a.bin"], done("0/a.bin"), Rules(done="DONE"), 9_999),
    "a rank of DeepSpeed's is late": (DEEPSPEED[1:2], deepspeed(DEEPSPEED[0], dp=2), Rules(), 9_999),
}


@pytest.mark.parametrize("what", MIXED)
def test_a_rank_that_a_save_has_is_waited_for(what: str) -> None:
    stale, written, rules, now_s = MIXED[what]
    found = saved_again(stale, written, rules, now_s, is_known=True)
    assert (found.is_mixed, found.of_other_ranks) == (True, ())
    assert found.reason == f"{stale[0]} belongs to a different save to the same place than the rest"


NOT_AGAIN = {
    "a configuration": ["step-4/config.json", "step-4/frozen.bin"],
    "numbers that are times": ["step-4/events.1700000001"],
    "others that differ by a number, of which none is written": ["step-4/vocab-1.txt", "step-4/vocab-2.txt"],
}


@pytest.mark.parametrize("what", NOT_AGAIN)
def test_what_a_writer_may_not_write_again_is_sent_and_named(what: str) -> None:
    written = done("shard0.bin", "shard1.bin", "events.1700000002")
    found = saved_again(NOT_AGAIN[what], written, Rules(done="DONE"), 0, is_known=True)
    assert (found.reason, {*found.files}) == ("", {*NOT_AGAIN[what], *written})
    assert found.unwritten == tuple(NOT_AGAIN[what])


def test_if_only_the_mark_is_written_again_nothing_is_mixed() -> None:
    mark = f"{HERE}/trainer_state.json"
    found = saved_again([f"{HERE}/optimizer.pt"], {mark: transformers()[mark]}, Rules(), 0, is_known=True)
    assert (found.reason, found.unwritten) == ("", ())


def test_what_is_not_written_again_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looking = Looking(tmp_path)
    lookout = looking.lookout(Rules(done="DONE"))
    here = looking.folder / "step-4"
    here.mkdir()
    (here / "config.json").write_text("{}")
    for _ in range(2):
        (here / "shard0.bin").write_bytes(os.urandom(99))
        (here / "DONE").write_bytes(b"")
        lookout.look_and_take()
    looking.waker.close()
    assert [sorted(each.shards.values()) for each in looking.entries.all.values()] == 2 * [
        ["DONE", "config.json", "shard0.bin"]
    ]
    said = (
        "files_unwritten: step-4/config.json: not written again since an earlier save to the same place, and sent with"
        " step-4"
    )
    assert [each.message for each in caplog.records if "config.json" in each.message] == [said]


def test_what_nobody_has_seen_complete_before_is_taken_as_it_is() -> None:
    """Nothing tells then that a rank's file of a minute ago is of another save."""
    stale, written, rules, now_s = FEWER["the user says how many there are"]
    found = saved_again(stale, written, rules, now_s, is_known=False)
    assert (found.reason, found.of_other_ranks) == ("", ())


@pytest.mark.parametrize(("now_s", "is_waiting"), [(0, True), (31, False)])
def test_arguments_that_count_fewer_ranks_than_there_are_files_are_doubted(
    now_s: float, is_waiting: bool
) -> None:
    """Nothing shows that the files are of an earlier save, and if they are not, more ranks are writing."""
    stale, written, rules, _ = FEWER["its arguments say it"]
    found = saved_again(stale, written, rules, now_s, is_known=False)
    assert (bool(found.reason), found.is_waiting, found.of_other_ranks) == (is_waiting, is_waiting, ())
    found = saved_again(stale[1:], written, rules, now_s, is_known=False)
    assert found.missing == ("rng_state_2.pth",), "between others"
    one = torch_zip(num_processes=1)
    found = saved_again(
        RNG[1:2], transformers(RNG[0]) | {f"{HERE}/training_args.bin": one}, rules, now_s, is_known=False
    )
    assert found.is_waiting is is_waiting, "a single process writes no number"


def test_on_several_nodes_too() -> None:
    stale, written, _, _ = FEWER["its arguments say it"]
    found = saved_again(stale, written, Rules(num_nodes=2), 9_999, is_known=False)
    assert found.reason == (
        f"{RNG[3]} belongs to more ranks than its training_args.bin records (2): give --ranks, or delete the file"
        " if it is left over from an earlier save"
    )
    three = transformers(*RNG[:2], num_processes=3)
    found = saved_again(RNG[3:], three, Rules(num_nodes=2), 0, is_known=True)
    assert (found.reason, found.missing, found.of_other_ranks) == ("", ("rng_state_2.pth",), (RNG[3],))


def test_dcp_s_mark_names_its_files_and_what_it_does_not_name_is_left_out(place: Place) -> None:
    watching = place.watch()

    def save(*names: str) -> dict[str, str]:
        here = place.out / "step-5"
        here.mkdir(exist_ok=True)
        for name in names:
            (here / name).write_bytes(os.urandom(400))
        (here / "new").write_bytes(metadata_of(dict.fromkeys(names, 400)))
        os.replace(here / "new", here / ".metadata")
        return {path: each for path, each in hashes(here).items() if path in {*names, ".metadata"}}

    two = save("__0_0.distcp", "__1_0.distcp")
    watching.until("committed", 5)
    one = save("__0_0.distcp")
    watching.until("committed", 5)
    assert watching.end() == 0
    assert "step-5/__1_0.distcp: written by ranks of an earlier save" in watching.errors()
    assert (place.committed(5, 1), place.committed(5, 2)) == (two, one)


def test_what_is_never_complete_for_a_rank_s_file_of_an_earlier_save_is_refused_at_the_end(
    tmp_path: Path,
) -> None:
    looking = Looking(tmp_path)
    lookout = looking.lookout(Rules())

    def save(*ranks: str) -> None:
        for path, data in transformers(*ranks, num_processes=2).items():
            (looking.folder / path).parent.mkdir(exist_ok=True)
            (looking.folder / path).write_bytes(data)

    for ranks in (RNG[:2], RNG[:1]):
        save(*ranks)
        lookout.look_and_take()
    lookout.end()
    looking.waker.close()
    assert looking.told == [("refused", HERE)]
    assert "delete it" in looking.teller.refused[HERE]
    assert not looking.teller.incomplete
