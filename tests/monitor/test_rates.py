"""How fast something grows, and the most recent things that happened."""

from ckpt_async.monitor.recent import MAX_TEXT, MOST, SAME_S, Recent
from ckpt_async.monitor.report import WINDOW_S, Rates, eta_s


def test_a_rate_is_known_from_the_second_look_on() -> None:
    rates = Rates[str]()
    assert rates.look(0.0, {"a": 100}) == {}
    assert rates.look(0.1, {"a": 200}) == {}  # too soon to tell
    assert rates.look(2.0, {"a": 300, "b": 5}) == {"a": 100.0}
    assert rates.look(4.0, {"a": 300, "b": 5}) == {"a": 50.0, "b": 0.0}


def test_a_rate_is_that_of_the_last_while() -> None:
    rates = Rates[str]()
    for second in range(100):
        rates.look(float(second), {"a": min(second, 50) * 10})
    assert rates.look(100.0, {"a": 500}) == {"a": 0.0}
    assert rates.look(100.0 + 1, {"a": 500 + 15})["a"] <= 15 / (WINDOW_S - 1)


def test_when_the_rest_is_sent_is_told_if_more_than_small_files_has_moved() -> None:
    assert eta_s(1e6, 10_000_000) == 10.0
    assert [eta_s(None, 10), eta_s(0.0, 10), eta_s(22 / WINDOW_S, 5_000_000), eta_s(1e6, 0)] == [None] * 4


def test_what_is_begun_anew_has_no_negative_rate() -> None:
    rates = Rates[str]()
    rates.look(0.0, {"a": 1000})
    assert rates.look(1.0, {"a": 10}) == {}
    assert rates.look(2.0, {"a": 30}) == {"a": 20.0}


def test_how_long_nothing_has_moved() -> None:
    rates = Rates[str]()
    rates.look(0.0, {})
    assert rates.idle_s(5.0) is None
    rates.look(10.0, {"a": 1})
    rates.look(14.0, {"a": 1})
    assert rates.idle_s(14.0) == 4.0
    rates.look(15.0, {"a": 2})
    assert rates.idle_s(15.0) == 0.0


def test_what_is_new_or_given_up_has_not_moved_but_what_is_done_has() -> None:
    """A store that hangs must show, however often the trainer saves, and whatever is dropped for newer checkpoints."""
    rates = Rates[str]()
    rates.look(10.0, {"a": 0}, done=["z"])
    rates.look(13.0, {"a": 0, "b": 0}, done=["z"])
    rates.look(16.0, {"b": 0, "c": 0}, done=["z"])
    assert rates.idle_s(16.0) == 6.0
    rates.look(17.0, {"c": 0}, done=["b"])
    assert rates.idle_s(17.0) == 0.0
    rates.look(18.0, {"c": 0, "d": 5}, done=["b"])
    assert rates.idle_s(18.0) == 0.0


def test_what_comes_again_soon_is_counted_and_the_rest_is_kept_in_bounds() -> None:
    now = [0.0]
    recent = Recent(lambda: now[0])
    for now[0] in (0.0, 1.0, 2.0):
        recent.add("warn", "attempt timeout", f"at {now[0]}")
    recent.add("good", "committed", "x" * 10_000, step=1)
    recent.add("good", "committed", "y", step=2)
    told = recent.told()
    assert [(each["what"], each["step"], each["count"]) for each in told] == [
        ("attempt timeout", None, 3),
        ("committed", 1, 1),
        ("committed", 2, 1),
    ]
    assert (told[0]["text"], told[0]["at"], len(told[1]["text"])) == ("at 2.0", 2.0, MAX_TEXT)
    now[0] += SAME_S + 1
    recent.add("warn", "attempt timeout", "later")
    assert [each["count"] for each in recent.told()][:1] == [1]
    for step in range(1000):
        recent.add("good", "committed", "", step=step)
    assert len(recent.told()) == MOST
