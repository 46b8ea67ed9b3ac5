"""Events of a trainer: to a function, a command and a webhook, across kills, with receivers that fail."""

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async import Event, Uploader
from ckpt_async.cli import main
from ckpt_async.core import keys
from ckpt_async.errors import SettingsError
from ckpt_async.events import delivery, is_signed
from ckpt_async.events.command import Command
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.stores.http import tls
from tests.events.receiver import free_port, receiving, wait_until
from tests.events.saves import QUICK, save
from tests.stores.lax_authority import LaxAuthority
from tests.sweep.trainers import Trainers


def opened(tmp_path: Path, **more: Any) -> Uploader:
    return Uploader(tmp_path / "folder", f"file://{tmp_path}/run", **QUICK | more)


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_function_and_a_webhook_are_told_once_of_each_checkpoint(tmp_path: Path, runner: str) -> None:
    seen: list[Event] = []
    threads: set[str] = set()

    def on_event(event: Event) -> None:
        seen.append(event)
        threads.add(threading.current_thread().name)

    with (
        receiving() as receiver,
        opened(
            tmp_path,
            runner=runner,
            on_event=on_event,
            event_webhook=receiver.url,
            event_backlog_checkpoints=0,
            event_grace_s=60,
        ) as uploader,
    ):
        save(uploader, 1, metrics={"loss": 0.5})
        save(uploader, 2)
        uploader.wait(2, timeout_s=60)
        uploader.give_up(3, "the disk was full")
    told = [(each.kind, each.step) for each in seen]
    assert sorted(told) == [("committed", 1), ("committed", 2), ("given_up", 3)]
    assert sorted(receiver.kinds()) == sorted(told)
    assert {each["id"] for each in receiver.bodies} == {each.id for each in seen}
    first = next(each for each in seen if each.step == 1)
    assert first.details["metrics"] == {"loss": 0.5}
    assert first.details["size_bytes"] == 100
    assert first.url == f"file://{tmp_path}/run/{keys.data_prefix('step-1', uploader.generation)}"
    assert Path(first.url.removeprefix("file://")).is_dir()
    given_up = next(each for each in seen if each.kind == "given_up")
    assert "the disk was full" in given_up.details["reason"]
    assert threads == {"ckpt-async-callback-0"}


@pytest.mark.parametrize("raised", [ZeroDivisionError("mine"), SystemExit("mine")])
def test_what_a_function_raises_is_logged_and_the_next_event_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    seen: list[int | None] = []

    def on_event(event: Event) -> None:
        seen.append(event.step)
        raise raised

    with opened(tmp_path, on_event=on_event) as uploader:
        save(uploader, 1, 2)
        uploader.wait(2, timeout_s=60)
    assert sorted(seen) == [1, 2]
    assert caplog.text.count(f"{type(raised).__name__}: mine") == 2
    assert caplog.text.count("on_event_failed") == 2


def test_a_function_that_blocks_holds_up_no_commit_and_is_told_again_by_the_next_start(
    tmp_path: Path,
) -> None:
    blocked, release = threading.Event(), threading.Event()
    ids: list[str] = []

    def on_event(event: Event) -> None:
        ids.append(event.id)
        blocked.set()
        release.wait(30)

    uploader = opened(tmp_path, on_event=on_event, event_grace_s=0.0)
    save(uploader, 1)
    assert blocked.wait(10)
    save(uploader, 2)
    uploader.wait(2, timeout_s=10)  # the function is still running
    uploader.close()
    seen: list[Event] = []
    with opened(tmp_path, on_event=seen.append):
        wait_until(lambda: len(seen) == 2)
    release.set()
    assert [each.step for each in seen] == [1, 2]
    assert seen[0].id == ids[0]


@pytest.mark.parametrize("trouble", [[500, 503], ["reset"], ["drop"], [302], [404]])
def test_a_webhook_that_fails_is_posted_again_with_the_same_id(tmp_path: Path, trouble: list[Any]) -> None:
    with receiving() as receiver, opened(tmp_path, event_webhook=receiver.url) as uploader:
        receiver.says = list(trouble)
        save(uploader, 1)
        (body,) = receiver.wait_for(1)
        assert len(receiver.raw) == len(trouble) + 1
    assert {headers["Idempotency-Key"] for _, headers in receiver.raw} == {body["id"]}
    assert receiver.says == []  # following a redirect would have consumed more answers


def test_a_webhook_that_hangs_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "ckpt_async.events.webhook.Webhook.__init__.__kwdefaults__", {"timeout_s": 0.3, "where": ""}
    )
    with receiving() as receiver, opened(tmp_path, event_webhook=receiver.url) as uploader:
        receiver.says = ["hang"]
        save(uploader, 1)
        receiver.wait_for(1)
    assert "has not answered within" in caplog.text


def test_a_receiver_that_answers_something_else_was_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver, opened(tmp_path, event_webhook=receiver.url) as uploader:
        receiver.says = ["garbage"]
        save(uploader, 1)
        receiver.wait_for(1)
    assert "sent an invalid HTTP response" in caplog.text
    assert "cannot be reached" not in caplog.text


def test_a_receiver_that_is_down_delays_neither_enqueue_nor_commit_nor_close(tmp_path: Path) -> None:
    port = free_port()
    with opened(tmp_path, event_webhook=f"http://127.0.0.1:{port}/hook", event_grace_s=1.0) as uploader:
        slowest_s = 0.0
        for step in range(1, 21):
            started = time.perf_counter()
            save(uploader, step)
            slowest_s = max(slowest_s, time.perf_counter() - started)
            uploader.wait(step, timeout_s=10)
        closing = time.monotonic()
    assert time.monotonic() - closing < 5
    assert slowest_s < 0.5
    with receiving(port=port) as receiver, opened(tmp_path, event_webhook=receiver.url):
        told = {each["step"] for each in receiver.wait_for(20)}
    assert told == set(range(1, 21))
    assert len(receiver.bodies) == 20


def test_a_new_start_does_not_wait_for_the_pause_that_the_last_one_had_come_to(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/hook"
    with opened(tmp_path, event_webhook=url, event_grace_s=0.0) as uploader:
        save(uploader, 1)
        uploader.wait(1)
    with contextlib.closing(Journal(Folder(tmp_path / "folder"), 0)) as journal:
        [waiting] = journal.outbox().waiting("webhook")
        journal.outbox().failed(waiting, time.time() + 3600)
    with receiving() as receiver, opened(tmp_path, event_webhook=receiver.url):
        receiver.wait_for(1)


def test_bodies_are_signed_and_the_secret_is_nowhere_in_log_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CKPT_ASYNC_WEBHOOK_SECRET", "hush-hush")
    caplog.set_level(logging.DEBUG)
    with receiving() as receiver:
        url = receiver.url.replace("http://", "http://me:pass-word@") + "?token=to-ken"
        with opened(tmp_path, event_webhook=url) as uploader:
            receiver.says = [500]
            save(uploader, 1)
            receiver.wait_for(1)
    for body, headers in receiver.raw:
        header = headers["Ckpt-Async-Signature"]
        assert is_signed(body, header, b"hush-hush", time.time())
        assert not is_signed(body, header, b"another", time.time())
        assert not is_signed(body + b" ", header, b"hush-hush", time.time())
        assert not is_signed(body, header, b"hush-hush", time.time() + 1000)
        assert is_signed(body, header, b"hush-hush", time.time() + 1000, tolerance_s=2000)
        assert not is_signed(body, "", b"hush-hush", time.time())
    kept = b"".join(path.read_bytes() for path in (tmp_path / "folder").rglob("*") if path.is_file())
    for secret in ("hush-hush", "pass-word", "to-ken"):
        assert secret not in caplog.text
        assert secret.encode() not in kept


def test_a_receiver_whose_certificate_nobody_vouches_for_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import ssl

    import trustme

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with receiving(context) as receiver, opened(tmp_path, event_webhook=receiver.url) as uploader:
        save(uploader, 1)
        uploader.wait(1)
        wait_until(lambda: "event_not_delivered" in caplog.text)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert receiver.raw == []


def test_a_receiver_whose_authority_states_no_key_usage_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = LaxAuthority()
    monkeypatch.setenv("SSL_CERT_FILE", authority.write_to(tmp_path))
    tls._context.cache_clear()
    try:
        with (
            receiving(authority.context(tmp_path)) as receiver,
            opened(tmp_path, event_webhook=receiver.url) as uploader,
        ):
            save(uploader, 1)
            (body,) = receiver.wait_for(1)
            assert body["kind"] == "committed"
    finally:
        tls._context.cache_clear()


KILLED = """
import json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from ckpt_async import Uploader
from ckpt_async.events.delivery import SinkDelivery
told = json.loads(sys.argv[1])
if told["when"] == "before":  # delivery, but after the commit
    SinkDelivery._deliver = lambda self, waiting: os.kill(os.getpid(), signal.SIGKILL)
if told["when"] == "within":  # the transaction that has the decision
    from ckpt_async.local import outbox
    outbox.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
uploader = Uploader(told["folder"], told["remote"], **told["settings"])
shard = uploader.folder / "a.pt"
shard.write_text("x")
uploader.enqueue(shard, 1)
uploader.seal(1)
uploader.wait(1)
if told["when"] == "after":
    from ckpt_async.local.outbox import Outbox
    Outbox.delivered = lambda self, notice: os.kill(os.getpid(), signal.SIGKILL)
uploader.close()
"""


def die(tmp_path: Path, when: str, **settings: Any) -> None:
    told = {"folder": str(tmp_path / "folder"), "remote": f"file://{tmp_path}/run", "when": when}
    command = [sys.executable, "-c", KILLED, json.dumps(told | {"settings": QUICK | settings})]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == -signal.SIGKILL


@pytest.mark.parametrize("when", ["within", "before"])
def test_a_kill_between_commit_and_delivery_loses_no_event(tmp_path: Path, when: str) -> None:
    with receiving() as receiver:
        die(tmp_path, when, event_webhook=receiver.url)
        assert receiver.raw == []
        seen: list[Event] = []
        with opened(tmp_path, event_webhook=receiver.url, on_event=seen.append):
            (body,) = receiver.wait_for(1)
        assert (body["kind"], body["step"]) == ("committed", 1)
        with opened(tmp_path, event_webhook=receiver.url):
            pass
    assert len(receiver.bodies) == 1
    # The killed launch had no function to call; but if it had not learned of the commit, it has not noted it
    # either.
    assert len(seen) == (when == "within")


def test_a_kill_between_delivery_and_its_mark_delivers_twice_with_one_id(tmp_path: Path) -> None:
    with receiving() as receiver:
        receiver.says = ["hang"]
        port = receiver.url
        process = threading.Thread(target=die, args=(tmp_path, "after"), kwargs={"event_webhook": port})
        process.start()
        wait_until(lambda: len(receiver.raw) == 1)
        receiver.is_over.set()  # the connection is dropped; the event is posted again, and accepted
        process.join()
        receiver.wait_for(1)
        with opened(tmp_path, event_webhook=receiver.url):
            receiver.wait_for(2)
    assert len({each["id"] for each in receiver.bodies}) == 1


def test_a_runner_process_tells_of_what_it_finishes_when_its_trainer_is_dead(tmp_path: Path) -> None:
    with receiving() as receiver:
        receiver.says = [503]
        text = KILLED.replace("uploader.wait(1)", "os.kill(os.getpid(), signal.SIGKILL)")
        told = {
            "folder": str(tmp_path / "folder"),
            "remote": f"file://{tmp_path}/run",
            "when": "",
            "settings": QUICK | {"runner": "process", "event_webhook": receiver.url},
        }
        ran = subprocess.run([sys.executable, "-c", text, json.dumps(told)], timeout=60, capture_output=True)
        assert ran.returncode == -signal.SIGKILL
        (body,) = receiver.wait_for(1)
    assert (body["kind"], body["step"]) == ("committed", 1)


def test_drain_tells_in_the_place_of_a_dead_trainer(
    tmp_path: Path, trainers: Trainers, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/run"
    with receiving() as receiver:
        # No checkpoint is kept, so that in the end the journal holds only undelivered events.
        away = {"event_webhook": "http://127.0.0.1:9/hook", "num_checkpoints_to_keep": 0}
        trainers.die(folder, remote, 1, 2, **away)
        # A drain without a receiver leaves the events to one that has a receiver.
        assert main(["drain", str(folder)]) == 1
        assert receiver.raw == []
        assert "rank 0: 4 events are not delivered yet" in capsys.readouterr().out
        hook = ["--webhook", receiver.url]
        assert main(["drain", str(folder), *hook]) == 0
        assert capsys.readouterr().out == "rank 0: 4 events were delivered\n"  # it said "nothing to do"
        told = sorted(receiver.kinds())
        assert told == [("committed", 1), ("committed", 2), ("pruned", 1), ("pruned", 2)]
        assert main(["drain", str(folder), *hook]) == 0
        assert capsys.readouterr().out == "nothing to do\n"
    assert len(receiver.bodies) == 4


def test_a_drain_that_does_not_deliver_an_event_is_no_success(
    tmp_path: Path, trainers: Trainers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "nothing to do", with exit code 0; and later 0 or 1, depending on its time limit."""
    folder = tmp_path / "folder"
    # No checkpoint is kept, so that in the end the journal holds only undelivered events.
    trainers.die(folder, f"file://{tmp_path}/run", 1, event_exec="true", num_checkpoints_to_keep=0)
    assert main(["drain", str(folder)]) == 1
    assert "rank 0: 1 event is not delivered yet" in capsys.readouterr().out
    monkeypatch.setenv("CKPT_ASYNC_EVENT_GRACE_S", "1")
    assert main(["drain", str(folder), "--exec", "false", "--json"]) == 1
    drained = json.loads(capsys.readouterr().out)
    assert (drained["is_drained"], drained["ranks"][0]["num_untold_events"]) == (False, 1)
    monkeypatch.setattr(Command, "max_attempts", 1)  # five take a quarter of a minute
    assert main(["drain", str(folder), "--exec", "false"]) == 1
    told = "rank 0: 1 event was dropped after the last attempt and will not be sent again\n"
    assert capsys.readouterr().out == told


def test_one_event_for_a_checkpoint_of_two_ranks_whoever_commits(tmp_path: Path) -> None:
    seen: dict[int, list[Event]] = {0: [], 1: []}
    opening = [
        threading.Thread(target=lambda rank=rank: uploaders.update({rank: start(rank)})) for rank in (0, 1)
    ]
    uploaders: dict[int, Uploader] = {}

    def start(rank: int) -> Uploader:
        return opened(tmp_path, rank=rank, world_size=2, generation=1, on_event=seen[rank].append)

    for each in opening:
        each.start()
    for each in opening:
        each.join(30)
    for step, last in ((1, 0), (2, 1), (3, 0), (4, 1)):
        save(uploaders[1 - last], step)
        save(uploaders[last], step)
        for each in uploaders.values():
            each.wait(step, timeout_s=20)
    for each in uploaders.values():
        each.close()
    assert sorted(each.step or 0 for each in seen[0]) == [1, 2, 3, 4]
    assert {each.details["world_size"] for each in seen[0]} == {2}
    assert seen[1] == []


def test_a_fenced_trainer_tells_it_once(tmp_path: Path) -> None:
    seen: list[Event] = []
    remote = f"file://{tmp_path}/run"
    first = Uploader(
        tmp_path / "a",
        remote,
        rank=0,
        world_size=1,
        generation=1,
        on_event=seen.append,
        on_error="warn",
        **QUICK,
    )
    save(first, 1)
    first.wait(1)
    with Uploader(tmp_path / "b", remote, rank=0, world_size=1, generation=2, **QUICK):
        save(first, 2, 3)
        wait_until(lambda: any(each.kind == "fenced" for each in seen))
        first.close()
    fenced = [each for each in seen if each.kind == "fenced"]
    assert [(each.generation, each.step, each.details) for each in fenced] == [
        (1, None, {"by_generation": 2})
    ]


def test_local_retention_is_told(tmp_path: Path) -> None:
    seen: list[Event] = []
    with opened(tmp_path, on_event=seen.append, num_checkpoints_to_keep=1) as uploader:
        for step in (1, 2, 3):
            save(uploader, step)
            uploader.wait(step)
    pruned = [(each.step, each.details["location"]) for each in seen if each.kind == "pruned"]
    assert pruned == [(1, "local"), (2, "local")]


def test_a_backlog_is_told_up_and_down(tmp_path: Path) -> None:
    """Rank 1 comes late, so what rank 0 has delivered waits for it."""
    seen: list[Event] = []
    more = {"event_backlog_checkpoints": 2, "event_stall_s": 1.0}
    first = opened(tmp_path, rank=0, world_size=2, generation=1, on_event=seen.append, **more)
    save(first, 1, 2)
    states = lambda: [each.details["state"] for each in seen if each.kind == "backlog"]  # noqa: E731
    wait_until(lambda: states() == ["high", "stalled"])
    assert seen[-1].details["missing_ranks"] == [1]
    assert seen[-1].details["oldest_step"] == 1
    with opened(tmp_path, rank=1, world_size=2, generation=1) as second:
        save(second, 1, 2)
        wait_until(lambda: sorted(states()[2:]) == ["moving", "normal"])
    first.close()


def test_a_command_gets_values_as_whole_arguments_and_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ASYNC_WEBHOOK_SECRET", "hush")
    script = tmp_path / "told.py"
    script.write_text(
        "import json, os, sys\n"
        "names = [each for each in os.environ if each.startswith('CKPT_ASYNC')]\n"
        "told = {'argv': sys.argv[1:], 'env': {each: os.environ[each] for each in names}}\n"
        f"open({str(tmp_path / 'told.json')!r}, 'a').write(json.dumps(told) + chr(10))\n"
    )
    hostile = tmp_path / "a run; touch $(echo INJECTED) `id` 'x' {step}"
    command = f"{sys.executable} {script} {{step}} 'at {{url}}' '{{\"json\": 1}}'"
    with Uploader(tmp_path / "folder", f"file://{hostile}", event_exec=command, **QUICK) as uploader:
        save(uploader, 7)
    told = json.loads((tmp_path / "told.json").read_text())
    url = f"file://{hostile}/{keys.data_prefix('step-7', 1)}"
    assert told["argv"] == ["7", f"at {url}", '{"json": 1}']
    assert told["env"]["CKPT_ASYNC_EVENT"] == "committed"
    assert told["env"]["CKPT_ASYNC_EVENT_STEP"] == "7"
    assert Event.from_json(told["env"]["CKPT_ASYNC_EVENT_JSON"]).url == url
    assert "CKPT_ASYNC_WEBHOOK_SECRET" not in told["env"]
    assert not list(tmp_path.rglob("INJECTED"))


def test_a_command_that_takes_too_long_is_ended_with_its_group_and_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    script = tmp_path / "slow.sh"
    script.write_text(f"echo begun; sleep 60 & echo $! >> {tmp_path}/pids; wait\n")
    with opened(tmp_path, event_exec=f"sh {script}", event_exec_timeout_s=1.0, event_grace_s=0.0) as uploader:
        save(uploader, 1)
        wait_until(lambda: "event_not_delivered" in caplog.text)
        assert "text=begun" in caplog.text
        wait_until(lambda: len((tmp_path / "pids").read_text().split()) == 2)
    for pid in (tmp_path / "pids").read_text().split():  # the second one ended with the uploader
        wait_until(lambda pid=pid: not _is_running(int(pid)))


def test_a_command_that_still_runs_at_close_is_ended_and_run_by_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "slow.sh"
    script.write_text(f"echo $$ >> {tmp_path}/pids; exec sleep 60\n")
    uploader = opened(tmp_path, event_exec=f"sh {script}", event_grace_s=0.0)
    save(uploader, 1)
    wait_until((tmp_path / "pids").exists)
    uploader.close()
    assert _left(caplog) == ["events_left sink=exec num=1 cut_short=1; the next launch delivers them"]
    assert not _is_running(int((tmp_path / "pids").read_text()))
    script.write_text(f"echo $CKPT_ASYNC_EVENT_STEP > {tmp_path}/told\n")
    with opened(tmp_path, event_exec=f"sh {script}"):
        pass
    assert (tmp_path / "told").read_text() == "1\n"
    assert len(_left(caplog)) == 1


def test_what_could_not_be_delivered_is_summed_up_at_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        delivery, "random", SimpleNamespace(uniform=lambda *_: 1000.0)
    )  # no retry is due at the end
    url = f"http://127.0.0.1:{free_port()}/hook"
    with opened(tmp_path, event_webhook=url, event_grace_s=0.0, event_backlog_checkpoints=0) as uploader:
        save(uploader, 1, 2, 3)
        wait_until(lambda: caplog.text.count("event_not_delivered") == 3)
    assert _left(caplog) == ["events_left sink=webhook num=3 cut_short=0; the next launch delivers them"]


def _left(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.getMessage().startswith("events_left")]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"event_exec": "evaluate {stpe}"}, "{stpe}"),
        ({"event_exec": "{name} x"}, "begins with a field of the event"),
        ({"event_exec": "evaluate 'x"}, "not a command line"),
        ({"event_webhook": "example.com/secret"}, "not a URL"),
        ({"event_webhook": "http://x/", "event_webhook_kinds": "comitted"}, "comitted"),
        ({"event_webhook": "http://x/", "event_webhook_secret_file": "/nowhere"}, "/nowhere"),
        ({"on_event": "print"}, "is not callable"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    tmp_path: Path, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint.replace("{", r"\{")) as refused:
        opened(tmp_path, **settings)
    assert "secret" not in str(refused.value).replace("event_webhook_secret_file", "")
    assert not (tmp_path / "folder").exists()
