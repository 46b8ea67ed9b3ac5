"""Names that escape the folder, or that two stores read differently, are refused before they are used (I10)."""

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.core import keys, naming
from ckpt_async.core.naming import MAX_SHARD_NAME_LENGTH, check_component, check_relative
from ckpt_async.errors import InvalidNameError
from tests.core.hostile import HOSTILE


@pytest.mark.fault("F25")
@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_path_is_refused(name: str) -> None:
    """Fault F25: traversal, absolute, NUL, newline, drive letters, look-alikes, too long."""
    with pytest.raises(InvalidNameError):
        naming.check_relative(name, "path")


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" in name or len(name) < 201], ids=ascii)
def test_hostile_checkpoint_name_is_refused(name: str) -> None:
    """The name becomes part of every key."""
    with pytest.raises(InvalidNameError):
        naming.checkpoint_name(name, 1)


@given(st.text(alphabet=st.sampled_from("abA0._-=+@,/\\\0\n\u202e~: "), max_size=40) | st.text(max_size=40))
def test_accepted_path_never_escapes(path: str) -> None:
    """An accepted path means the same to POSIX, to S3 and to us."""
    try:
        accepted = naming.check_relative(path, "path")
    except InvalidNameError:
        return
    assert path == accepted == posixpath.normpath(path)
    assert os.path.join("/folder", path).startswith("/folder/")
    assert re.fullmatch(r"[\x21-\x7e]+", path)
    assert len(path.encode()) <= naming.MAX_SHARD_NAME_LENGTH


@given(
    st.text(alphabet="a./\n", max_size=12)
    | st.lists(st.integers(1, 201)).map(lambda n: "/".join(map("a".__mul__, n)))
)
def test_a_path_is_valid_if_and_only_if_its_components_are(path: str) -> None:
    """Checking a whole path at once is a fast path for 10,000 names; it must apply exactly the same rule."""

    def is_accepted(check: Callable[[], object]) -> bool:
        try:
            check()
        except InvalidNameError:
            return False
        return True

    by_component = all(is_accepted(lambda each=each: check_component(each, "")) for each in path.split("/"))
    assert is_accepted(lambda: check_relative(path, "")) == (
        by_component and len(path) <= MAX_SHARD_NAME_LENGTH
    )


@given(st.text(alphabet="ab.-g01", min_size=1, max_size=12), st.integers(0, 200), st.integers(0, 200))
def test_two_steps_never_share_a_name(name: str, step: int, other: int) -> None:
    """If two steps shared keys, the second would overwrite the first (R11)."""
    try:
        names = naming.checkpoint_name(name, step), naming.checkpoint_name(name, other)
    except InvalidNameError:
        return
    assert (names[0] == names[1]) == (step == other)


@given(st.none() | st.from_regex(r"[a-z0-9.=-]{1,40}", fullmatch=True), st.integers(0, keys.MAX_STEP))
def test_step_can_be_read_from_the_name(name: str | None, step: int) -> None:
    """The sweeper identifies an object's checkpoint by its key alone; an object with an unreadable key stays."""
    try:
        full = naming.checkpoint_name(name, step)
    except InvalidNameError:
        return
    parsed = keys.parse_data_key(keys.data_key(full, 7, "shard/0"))
    assert parsed is not None
    assert (7, step, full) == (parsed[0].generation, parsed[0].step, parsed[1])


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        (None, 100, "step-100"),
        ("ep1-ba100", 100, "ep1-ba100"),
        ("ep1-ba0100", 100, "ep1-ba0100"),
        ("best", 100, "best-100"),
        ("ep1", 100, "ep1-100"),
        ("epoch=1-step=100.ckpt", 100, "epoch=1-step=100.ckpt"),
        ("ba" + "0" * 20 + "100", 100, "ba" + "0" * 20 + "100-100"),
    ],
)
def test_name_ends_in_its_step(name: str | None, step: int, expected: str) -> None:
    """The names that Composer and Lightning choose are kept as they are."""
    assert expected == naming.checkpoint_name(name, step)


def test_name_that_grows_too_long_is_refused() -> None:
    """The error must come before anything is linked, not when S3 refuses the key."""
    with pytest.raises(InvalidNameError, match="200"):
        naming.checkpoint_name("a" * 199, 100)


def test_a_key_one_byte_too_long_is_rejected() -> None:
    """S3 allows keys of at most 1,024 bytes."""
    root = "s3://bucket/" + "p" * 600
    naming.check_key_length(root, "k" * (1024 - len(root) - 1))
    with pytest.raises(InvalidNameError, match=r"1025 bytes .* more than 1024"):
        naming.check_key_length(root, "k" * (1024 - len(root)))


@pytest.mark.parametrize("wrong", [5, None, b"a", Path("a"), ["a"]])
def test_a_name_must_be_a_string(wrong: object) -> None:
    """The caller must see an error about the argument, not one from a regular expression."""
    for check in (naming.check_relative, naming.check_component):
        with pytest.raises(InvalidNameError, match="must be a string"):
            check(wrong, "shard")  # type: ignore[operator]


def test_a_string_is_not_accepted_as_a_collection_of_names() -> None:
    """Everybody writes `files="model.pt"` once, and Python would take it for eight names."""
    assert naming.several(["a", "b"], "files") == naming.several(iter("ab"), "files") == ("a", "b")
    for wrong in ("model.pt", b"model.pt", ""):
        with pytest.raises(InvalidNameError, match=r"^files=.* \(give files=\[.*\]\)$"):
            naming.several(wrong, "files")


@pytest.mark.fault("F52")
@pytest.mark.parametrize(
    "template",
    [
        "{step}",
        "{}",
        "{rank",
        "{rank.real.x}",
        "../x",
        "/x",
        "a//b",
        "a\n",
        "{rank[0]}",
        "{rank:1000000000d}",
        "{rank!r}",
        "{rank:{rank}}",
    ],
)
def test_unsafe_template_is_rejected(template: str) -> None:
    """`latest_filename` must not place a symlink outside the folder (I10)."""
    with pytest.raises(InvalidNameError):
        naming.fill(template, rank=0)


def test_template_is_filled() -> None:
    """Composer's default template must work."""
    assert naming.fill("latest-rank{rank}.pt", rank=3) == "latest-rank3.pt"
    assert naming.fill("", rank=3) == ""


@pytest.mark.parametrize("name", [".ckpt-async/latest", ".ckpt-async", "../latest"])
def test_a_symlink_among_our_own_files_is_refused(name: str) -> None:
    """It would replace a journal, or lead out of the folder."""
    with pytest.raises(InvalidNameError):
        naming.fill(name, rank=0)


def test_a_symlink_may_lie_in_a_subfolder() -> None:
    assert naming.fill("links/latest-{rank}", rank=3) == "links/latest-3"
    assert naming.fill("ckpt/latest", rank=3) == "ckpt/latest"
    assert naming.fill("", rank=3) == ""
