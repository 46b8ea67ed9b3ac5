"""The alerts in a real Prometheus, also run by `./dev alerts`; promtool tests them in tests/test_deploy.py."""

import os
import re
import shutil

import pytest

from tests.alerts.play import RULES, faster, play


def test_all_times_of_a_rule_are_scaled() -> None:
    """Otherwise an alert could fire in the play for another reason than it does in reality."""
    rules = faster(RULES.read_text())
    assert "        for: 6000ms\n" in rules
    assert "deriv(sum by (run) (ckpt_async_queue_bytes)[6000ms:200ms]) > 0" in rules
    assert "(time() - " not in rules
    assert "> 12\n" in rules
    assert "6 * 12" in rules
    assert not re.findall(
        r"\d+[mh]\b(?!s)|\b[0-9]{3,}\b(?!ms)", "\n".join(re.findall(r"(?:expr|for): .*", rules))
    )


@pytest.mark.fault("O11")
@pytest.mark.soak
@pytest.mark.skipif("CKPT_ASYNC_SOAK_MINUTES" not in os.environ, reason="./dev alerts: 2 minutes")
def test_every_alert_fires_and_resolves_in_a_real_prometheus() -> None:
    if not shutil.which("prometheus"):
        pytest.skip("no Prometheus here: ./dev alerts says how to get it")
    assert play() == set(re.findall(r"- alert: (\w+)", RULES.read_text()))
