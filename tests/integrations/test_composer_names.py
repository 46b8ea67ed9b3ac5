"""Which files Composer's saver takes for left-overs of killed launches and deletes, without Composer installed."""

import pytest

from ckpt_async.saver import Timestamp, names

RUN = {
    "run_name": "run.1",
    "rank": 3,
    "local_rank": 1,
    "world_size": 16,
    "local_world_size": 2,
    "node_rank": 1,
}
RESUMED = Timestamp(batch=100, epoch=2, batch_in_epoch=20, sample=800, sample_in_epoch=160, token=4000)


@pytest.mark.parametrize(
    ("template", "earlier", "later"),
    [
        (
            "ep{epoch}-ba{batch}-rank{rank}.pt",
            ["ep2-ba100-rank3.pt", "ep2-ba99-rank3.pt", "ep3-ba100-rank3.pt"],
            ["ep2-ba101-rank3.pt", "ep1-ba1000-rank3.pt"],
        ),
        ("{run_name}-ep{epoch}.pt", ["run.1-ep2.pt", "run.1-ep1.pt"], ["run.1-ep3.pt", "run.1-ep10.pt"]),
        ("{sample}/ba.pt", ["800/ba.pt"], ["801/ba.pt"]),
        ("last-{rank}.pt", [], ["last-3.pt"]),
        ("be{batch_in_epoch}-ba{batch}.pt", ["be30-ba99.pt"], ["be1-ba101.pt"]),
    ],
)
def test_only_what_is_later_than_the_resumed_checkpoint_is_left_over(
    template: str, earlier: list[str], later: list[str]
) -> None:
    of_time = [name for name in (*earlier, *later) if names.is_ahead(name, template, RUN, RESUMED)]
    assert of_time == later


@pytest.mark.parametrize(
    "name",
    [
        "ep2-ba101-rank4.pt",  # of another rank
        "ep2-ba101-rank33.pt",
        "ep2-ba101-rank3.pt.tmp",
        "my-ep2-ba101-rank3.pt",
        "ep2-ba101-rank3xpt",
        "ep-ba101-rank3.pt",
        "latest-rank3.pt",
        "metrics.csv",
    ],
)
def test_a_file_that_this_rank_never_writes_is_nobody_s_left_over(name: str) -> None:
    assert not names.is_ahead(name, "ep{epoch}-ba{batch}-rank{rank}.pt", RUN, RESUMED)


def test_a_run_s_name_is_no_pattern() -> None:
    assert not names.is_ahead("runx1-ba101.pt", "{run_name}-ba{batch}.pt", RUN, RESUMED)
    assert names.is_ahead("run.1-ba101.pt", "{run_name}-ba{batch}.pt", RUN, RESUMED)
