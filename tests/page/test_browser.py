"""The page in a real browser: a run in progress, a stalled run, and malicious names."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ckpt_async import Uploader
from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.page.board import Board
from ckpt_async.page.server import serve
from ckpt_async.watch.reporter import Reporter
from tests.page.browser import Browser, find
from tests.page.scenes import HOSTILE, Run, going_on
from tests.seaweed import SeaweedServer

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium: ./dev page gets it and runs these")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A server of its own, because the test takes it away."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as started:
        yield started


@pytest.fixture
def browser() -> Iterator[Browser]:
    program = find()
    assert program is not None
    with Browser(program) as opened:
        opened.look(390, 844)
        yield opened


@pytest.fixture
def run(browser: Browser, server: SeaweedServer, tmp_path: Path) -> Iterator[Run]:
    """A run that begins only once the browser is there, which takes a while on a busy machine: it must be seen in
    progress.
    """
    with going_on(server, tmp_path, "llama-7b") as started:
        yield started


def says(text: str) -> str:
    return f"document.body.innerText.includes({json.dumps(text)})"


def test_a_run_that_goes_on_a_store_that_goes_away_and_a_process_that_ends(
    run: Run, server: SeaweedServer, browser: Browser
) -> None:
    browser.go(run.url)
    browser.until(says("waits for rank 3"))
    browser.until("document.querySelector('.uploading progress')")
    browser.until(says("MiB/s"))
    text = browser.text
    assert "Steps 1300, 1400 would be lost" in text
    assert "training would go back to step 1100" in text
    assert [*browser.ask("[...document.querySelectorAll('.line b')].map((each) => each.textContent)")] == [
        f"Step {step}" for step in (1400, 1300, 1200, 1100, 1000)
    ]
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")  # the width of a phone
    before = browser.ask("document.querySelector('.uploading progress').value")
    # The page updates without a reload; between two checkpoints, there may be no progress bar for a moment.
    browser.until(f"![undefined, {before}].includes(document.querySelector('.uploading progress')?.value)")
    assert (browser.complaints, browser.violations) == ([], [])

    server.kill()
    browser.until("document.querySelector('.stalled')")
    assert "Uploads are failing" in browser.text
    assert browser.ask("document.getElementById('link').textContent") == "live"
    assert (browser.complaints, browser.violations) == ([], [])

    run.close()
    browser.until(says("connection lost"))
    browser.until("/No answer for [1-9]/.test(document.body.innerText)")
    assert "Step 1100" in browser.text


def test_what_events_tell_and_who_was_not_told_is_read(tmp_path: Path, browser: Browser) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}/hook"
    settings: dict[str, Any] = {"num_checkpoints_to_keep": 1, "event_webhook": nobody, "event_grace_s": 0}
    with Uploader(
        tmp_path / "a", f"file://{tmp_path}/b", rank=0, world_size=1, metrics_port=0, **settings
    ) as uploader:
        for step in (1, 2):
            (tmp_path / f"a/{step}.pt").write_bytes(b"x")
            uploader.enqueue(tmp_path / f"a/{step}.pt", step)
            uploader.seal(step)
        assert uploader.page_url is not None
        browser.go(uploader.page_url)
        browser.until(
            "/3 events not delivered to the webhook, in [0-9]+ attempts?/.test(document.body.innerText)"
        )
        browser.until(says("Step 1 files of this node removed"))
        assert (browser.complaints, browser.violations) == ([], [])


def test_what_a_watcher_refuses_is_counted_and_named(tmp_path: Path, browser: Browser) -> None:
    with Uploader(tmp_path / "a", f"file://{tmp_path}/b", rank=0, world_size=1, metrics_port=0) as uploader:
        reporter = Reporter()
        for step in (1, 2):
            reporter.record(Refused(f"last-{step}.ckpt", Refusal.CHANGED, "it was written in place", step))
        reporter.count_in(uploader.metrics)
        reporter.record(Refused(HOSTILE, Refusal.NO_SPACE, HOSTILE))
        assert uploader.page_url is not None
        browser.go(uploader.page_url)
        browser.until(says("3 refused by the watcher, and not in the store (changed 2, no space 1)"))
        browser.until(says("last-2.ckpt is refused: it was written in place"))
        check_harmless(browser)


def test_what_means_ill_is_text(tmp_path: Path, browser: Browser) -> None:
    """The names of a folder and a remote, and the reason why a checkpoint was given up, may come from an attacker."""
    remote = f"file://{tmp_path}/{HOSTILE}"
    with Uploader(
        tmp_path / HOSTILE, remote, rank=0, world_size=1, metrics_port=0, on_error="warn"
    ) as uploader:
        uploader.give_up(5, HOSTILE)
        assert uploader.page_url is not None
        browser.go(uploader.page_url)
        browser.until(says("given up: ") + " && " + "document.querySelector('.aborted')")
        assert browser.text.count(HOSTILE) >= 3
        check_harmless(browser)


def test_every_field_may_mean_ill(tmp_path: Path, browser: Browser) -> None:
    """This includes fields that cannot hold such a text today."""
    with Uploader(tmp_path / "a", f"file://{tmp_path}/b", rank=0, world_size=1, metrics_port=0) as uploader:
        (tmp_path / "a/x").write_bytes(b"x")
        uploader.enqueue(tmp_path / "a/x", 1)
        uploader.seal(1)
        uploader.wait(1, 60)
        (told,) = (each._look() for each in [uploader.exporter])
    (folder,) = told["folders"]
    told["remotes"] = [
        {"remote": HOSTILE, "last_committed": None, "checkpoints": folder["checkpoints"], "error": HOSTILE}
    ]
    server = serve(CollectorRegistry(), 0, "127.0.0.1", {}, Board(lambda: hostile(told), lambda: HOSTILE))
    assert server is not None
    try:
        browser.go(server.page_url)
        browser.until(f"document.body.innerText.split({json.dumps(HOSTILE)}).length > 10")
        check_harmless(browser)
    finally:
        server.close()


def hostile(told: Any) -> Any:
    """Replace every text in `told`, and every name in it, except those that a program reads."""
    match told:
        case dict():
            kept = ("state", "role", "level", "kind")
            return {key: each if key in kept and each else hostile(each) for key, each in told.items()}
        case list():
            return [hostile(each) for each in told]
        case str():
            return HOSTILE
    return told


def check_harmless(browser: Browser) -> None:
    assert browser.ask(
        "window.hacked === undefined && !document.querySelector('main img, main script, main svg')"
    )
    assert (browser.complaints, browser.violations) == ([], [])
    # Even if the page's own script were careless, the browser would still refuse.
    refused = (
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } })()"
    )
    assert browser.ask(refused)
    browser.until("window.violations.length > 0")
