"""How many requests a commit makes when many ranks finish together: the real engines against a store that counts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.waiting import NUM_COMMITTERS

MODEL = Path(__file__).resolve().parents[2] / "benchmarks" / "scale_model.py"


def simulate(num_writers: int, spread_s: float) -> dict[str, Any]:
    """Run the model. It checks every count against the calculated one, and fails the command on a difference."""
    arguments = ["--json", "--simulate", str(num_writers), "--spread-s", str(spread_s)]
    output = subprocess.check_output([sys.executable, MODEL, *arguments], timeout=120)
    (row,) = json.loads(output)["simulated"].values()
    return row


@pytest.mark.parametrize(("num_writers", "spread_s"), [(1, 0), (8, 0), (64, 0), (64, 20)])
def test_requests_of_a_commit_match_the_calculation(num_writers: int, spread_s: float) -> None:
    row = simulate(num_writers, spread_s)
    assert row["kinds"]["PUT receipts"] == num_writers
    assert row["kinds"]["GET receipts"] == row["committers"] * num_writers
    assert 1 <= row["committers"] <= min(num_writers, NUM_COMMITTERS)


def test_not_every_rank_that_finishes_together_reads_all_receipts() -> None:
    """64 ranks finish at once. Each sees the receipts of all 64, and without a limit each would read all of them."""
    row = simulate(64, 0)
    assert row["kinds"]["PUT decisions"] <= NUM_COMMITTERS
    assert row["requests/writer"] < 20
