"""What one process has learned about the link and saves for the next: advice that may be missing, old or corrupt."""

from pathlib import Path

import pytest

from ckpt_async.transfer.link import GOOD_FOR_S, KnownLink, note_known, recall_known

REMOTE, NOW_S = "s3://bucket/run", 1e9
KNOWN = KnownLink(22, 4.5e6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "link-up.json"


def test_the_newest_is_recalled(path: Path) -> None:
    note_known(path, REMOTE, KnownLink(1000, 123456789.0), NOW_S)
    note_known(path, REMOTE, KNOWN, NOW_S)
    assert recall_known(path, REMOTE, NOW_S + 60) == KNOWN


def test_a_slash_at_the_end_of_the_remote_makes_no_difference(path: Path) -> None:
    note_known(path, f"{REMOTE}/", KNOWN, NOW_S)
    assert recall_known(path, REMOTE, NOW_S) == recall_known(path, f"{REMOTE}/", NOW_S) == KNOWN


def test_what_is_of_another_remote_or_time_is_not(path: Path) -> None:
    assert recall_known(path, REMOTE, NOW_S) is None
    note_known(path, REMOTE, KNOWN, NOW_S)
    assert recall_known(path, "s3://bucket/other", NOW_S) is None
    assert recall_known(path, REMOTE, NOW_S + GOOD_FOR_S) is None
    assert recall_known(path, REMOTE, NOW_S - 1) is None


def test_what_cannot_be_understood_is_not(path: Path) -> None:
    note_known(path, REMOTE, KNOWN, NOW_S)
    whole = path.read_text()
    for data in (
        *(whole[:length] for length in range(len(whole))),
        *(whole.replace("22", each) for each in ("0", "null", "1e999", '"x"')),
        *(whole.replace("4500000.0", each) for each in ("0", "-1", "NaN", "Infinity")),
        "[" * 4000,
        "[1]",
    ):
        path.write_text(data)
        assert recall_known(path, REMOTE, NOW_S) is None, data


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link"):
        note_known(path, REMOTE, KNOWN, NOW_S)
    assert not (tmp_path / "mine").exists()
