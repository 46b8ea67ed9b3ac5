"""TLS decrypted by processes: when they start, what they take over, and that losing them costs one attempt."""

import asyncio
import contextlib
import errno
import logging
import os
import re
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from ckpt_async.errors import SettingsError
from ckpt_async.stores.http import offload as offload_module
from ckpt_async.stores.http.downloads import Downloads
from ckpt_async.stores.http.offload import Offload, OffloadedConnection, num_of_processes, possible_processes
from tests.stores.http_server import PATIENCE_S, Server, Talk, request_of

BODY = b"0123456789"
LOST = "tls_process_lost"


def _answering(near: socket.socket) -> None:
    while True:
        request_of(near)
        near.sendall(b"HTTP/1.1 206 X\r\nContent-Length: 10\r\n\r\n" + BODY)


def _stalling(reached: threading.Event) -> Talk:
    """Send half a body, and the rest never."""

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(b"HTTP/1.1 206 X\r\nContent-Length: 10\r\n\r\n01234")
        reached.set()
        near.recv(1)

    return talk


def _started(num_processes: int) -> Offload:
    offload = Offload(num_processes)
    offload.start()
    return offload


@contextlib.asynccontextmanager
async def _downloads(offload: Offload, ca_file: str) -> AsyncIterator[Downloads]:
    downloads = Downloads(
        max_connections=4, connect_timeout_s=5.0, read_timeout_s=20.0, ca_file=ca_file, offload=offload
    )
    try:
        yield downloads
    finally:
        downloads.close()


async def _get(downloads: Downloads, server: Server) -> bytes:
    found: list[bytes] = []
    url = f"https://localhost:{server.port}/key"
    async with asyncio.timeout(PATIENCE_S):
        await downloads.get_range(url, 0, 10, lambda piece: found.append(bytes(piece)), lambda _: None)
    return b"".join(found)


def _is_offloaded(downloads: Downloads) -> bool:
    """Return whether a process decrypts the idle connection."""
    [(idle, _)] = downloads._idle
    return isinstance(idle, OffloadedConnection)


def _processes_of(pid: int | str = "self") -> set[int]:
    """Return the processes that share memory with this one for decrypting."""
    mapped = re.compile(r" (\d+) +/memfd:ckpt-async-tls")
    ours = set(mapped.findall(Path(f"/proc/{pid}/maps").read_text()))
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if ours & set(mapped.findall(maps.read_text())):
                found.add(int(maps.parent.name))
    return found - {os.getpid(), pid}


async def _in_the_middle(
    downloads: Downloads, server: Server, reached: threading.Event
) -> tuple[asyncio.Task[bytes], int]:
    """Begin a download; return it when the server has got so far, and the process that decrypts it."""
    getting = asyncio.ensure_future(_get(downloads, server))
    assert await asyncio.to_thread(reached.wait, PATIENCE_S)
    [pid] = _processes_of()
    return getting, pid


def _wait_for_end_of(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        ended, _, _ = select.select([process], [], [], PATIENCE_S)
        os.close(process)
        assert ended


@pytest.mark.parametrize(
    ("num_cores", "local_world_size", "num_processes"),
    [
        (1, "", 0),
        (3, "", 0),
        (4, "", 1),
        (11, "", 2),
        (200, "", 4),
        (16, "8", 0),
        (64, "8", 2),
        (200, "8", 4),
        (16, "0", 4),
        (16, "many", 4),
    ],
)
def test_the_cores_of_a_rank_determine_the_number(
    num_cores: int, local_world_size: str, num_processes: int
) -> None:
    assert num_of_processes(num_cores, local_world_size) == num_processes


def test_the_environment_may_say_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    for said, num_processes in (("0", 0), ("1", 1), ("12", 12), ("", 4)):
        monkeypatch.setenv("CKPT_ASYNC_TLS_PROCESSES", said)
        assert possible_processes() == num_processes
    for said in ("none", "-1", "1.5", "100"):
        monkeypatch.setenv("CKPT_ASYNC_TLS_PROCESSES", said)
        with pytest.raises(SettingsError, match="CKPT_ASYNC_TLS_PROCESSES"):
            Offload()


def test_only_a_python_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen program would start itself, and an embedding one whatever it is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert possible_processes() == 4
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert possible_processes() == 0
    monkeypatch.delattr(sys, "frozen")
    for executable in ("", None, "/usr/sbin/uwsgi"):
        monkeypatch.setattr(sys, "executable", executable)
        assert possible_processes() == 0


def test_processes_take_over_when_they_are_due(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    """Few bytes are not worth a process. Later ones come over new connections; nobody waits for the processes."""

    async def main() -> None:
        with Server(_answering, tls) as server:
            offload = Offload(2, due_bytes=25)
            async with _downloads(offload, ca_file) as downloads:
                for _ in range(2):
                    assert await _get(downloads, server) == BODY
                assert "ckpt-async-offload" not in {thread.name for thread in threading.enumerate()}
                assert await _get(downloads, server) == BODY  # 30 bytes: due
                [starting] = [each for each in threading.enumerate() if each.name == "ckpt-async-offload"]
                await asyncio.to_thread(starting.join, PATIENCE_S)
                assert offload.is_running
                assert await _get(downloads, server) == BODY
                assert not downloads._idle  # it was closed for the sake of a process
                for _ in range(3):
                    assert await _get(downloads, server) == BODY
                    assert _is_offloaded(downloads)
                assert len(_processes_of()) == 1
            assert server.num_connections == 2

    run(main())


def test_without_processes_connections_are_kept(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    async def main() -> None:
        with Server(_answering, tls) as server:
            async with _downloads(Offload(0, due_bytes=0), ca_file) as downloads:
                for _ in range(3):
                    assert await _get(downloads, server) == BODY
            assert server.num_connections == 1

    run(main())


def test_a_certificate_of_another_host_is_rejected(run: Any, authority: trustme.CA, ca_file: str) -> None:
    """The process verifies it, and the error is the one that this process would raise. The next attempt is made here:
    an application may trust more than what the environment says.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("elsewhere.example").configure_cert(context)

    async def main() -> None:
        with Server(_answering, context) as server:
            async with _downloads(_started(1), ca_file) as downloads:
                with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'localhost'"):
                    await _get(downloads, server)
                assert not downloads._offload.is_running

    run(main())


def test_processes_take_turns(run: Any, tls: ssl.SSLContext, ca_file: str) -> None:
    both_asked = threading.Barrier(2)

    def talk(near: socket.socket) -> None:
        request_of(near)
        both_asked.wait(PATIENCE_S)
        near.sendall(b"HTTP/1.1 206 X\r\nContent-Length: 10\r\n\r\n" + BODY)
        near.recv(1)

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(_started(2), ca_file) as downloads:
                assert await asyncio.gather(_get(downloads, server), _get(downloads, server)) == [BODY, BODY]
                assert len(_processes_of()) == 2

    run(main())


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.fault("F107")
@pytest.mark.parametrize("harm", [_kill, _stop])
def test_a_lost_process_costs_one_attempt(
    run: Any,
    tls: ssl.SSLContext,
    ca_file: str,
    harm: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connections fail at once (if it hangs: soon; it took a minute), with one warning, and the next are decrypted
    here.
    """
    reached = threading.Event()
    is_first = True

    def talk(near: socket.socket) -> None:
        nonlocal is_first
        was_first, is_first = is_first, False
        (_stalling(reached) if was_first else _answering)(near)

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(_started(1), ca_file) as downloads:
                getting, pid = await _in_the_middle(downloads, server, reached)
                harm(pid)
                try:
                    async with asyncio.timeout(15):
                        with pytest.raises(ConnectionAbortedError, match="the process that decrypts"):
                            await getting
                    for _ in range(2):
                        assert await _get(downloads, server) == BODY
                        assert not _is_offloaded(downloads)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        _kill(pid)

    with caplog.at_level(logging.WARNING):
        run(main())
    [warning] = caplog.messages
    assert warning.startswith(f"{LOST} error={'it does not answer in time' if harm is _stop else ''}")
    assert warning.endswith("; decrypting in this process")


@pytest.mark.fault("F107")
def test_a_process_without_memory_costs_one_attempt(
    run: Any, tls: ssl.SSLContext, ca_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It could not start a thread, and this process waited for a minute for a connection that nobody had taken."""
    reached = threading.Event()
    is_first = True

    def talk(near: socket.socket) -> None:
        nonlocal is_first
        was_first, is_first = is_first, False
        (_stalling(reached) if was_first else _answering)(near)

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(_started(1), ca_file) as downloads:
                getting, pid = await _in_the_middle(downloads, server, reached)
                used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
                resource.prlimit(pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
                async with asyncio.timeout(5):  # less than PATIENCE_S of the module
                    for each in (_get(downloads, server), getting):
                        with pytest.raises(ConnectionAbortedError, match="the process that decrypts"):
                            await each
                assert await _get(downloads, server) == BODY
                assert not _is_offloaded(downloads)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [LOST in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.fault("F107")
def test_a_process_that_cannot_be_started_is_done_without(
    run: Any,
    tls: ssl.SSLContext,
    ca_file: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def main() -> None:
        with Server(_answering, tls) as server:
            async with _downloads(_started(2), ca_file) as downloads:
                for _ in range(3):
                    assert await _get(downloads, server) == BODY
                    assert not _is_offloaded(downloads)
            assert server.num_connections == 1

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [LOST in each for each in caplog.messages] == [True]


def test_memory_that_cannot_be_shared_costs_one_attempt(
    run: Any,
    tls: ssl.SSLContext,
    ca_file: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.ENOSYS, name)

    monkeypatch.setattr(os, "memfd_create", refuse)

    async def main() -> None:
        with Server(_answering, tls) as server:
            async with _downloads(_started(2), ca_file) as downloads:
                with pytest.raises(ConnectionAbortedError, match="cannot be handed to a process"):
                    await _get(downloads, server)
                assert await _get(downloads, server) == BODY
                assert not _is_offloaded(downloads)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [LOST in each for each in caplog.messages] == [True]


def test_processes_that_start_too_late_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[offload_module.Process] = []
    make = offload_module.Process

    def noted(*arguments: Any) -> offload_module.Process:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(offload_module, "Process", noted)
    offload = Offload(2)
    offload.close()
    offload.start()
    assert not offload.is_running
    assert [each._socket.fileno() for each in made] == [-1, -1]


def test_closing_ends_the_process_with_its_last_request(
    run: Any, tls: ssl.SSLContext, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds although a forked process has copies of its sockets."""
    has_head, is_closed = threading.Event(), threading.Event()
    copies: list[socket.socket] = []
    pair = offload_module._pair

    def copied() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        copies.append(ours.dup())
        return ours, theirs

    monkeypatch.setattr(offload_module, "_pair", copied)

    def talk(near: socket.socket) -> None:
        request_of(near)
        near.sendall(b"HTTP/1.1 206 X\r\nContent-Length: 10\r\n\r\n01234")
        has_head.set()
        assert is_closed.wait(PATIENCE_S)
        near.sendall(b"56789")
        near.recv(1)

    async def main() -> None:
        with Server(talk, tls) as server:
            async with _downloads(_started(1), ca_file) as downloads:
                getting, pid = await _in_the_middle(downloads, server, has_head)
            is_closed.set()
            assert await getting == BODY
            await asyncio.to_thread(_wait_for_end_of, pid)
            assert len(copies) == 2
            for each in copies:
                each.close()

    run(main())


def test_a_cancelled_call_does_not_wait_for_a_process_that_hangs(
    run: Any, tls: ssl.SSLContext, ca_file: str
) -> None:
    reached = threading.Event()

    async def main() -> None:
        with Server(_stalling(reached), tls) as server:
            async with _downloads(_started(1), ca_file) as downloads:
                getting, pid = await _in_the_middle(downloads, server, reached)
                _stop(pid)
                try:
                    getting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        async with asyncio.timeout(offload_module.PATIENCE_S / 2):
                            await getting
                finally:
                    _kill(pid)

    run(main())


def test_a_forked_process_has_no_copies() -> None:
    """A worker that outlives its trainer would keep our processes alive."""
    offload = _started(1)
    ours = offload._processes[0]._socket.fileno()
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(ours)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    offload.close()


TRAINER = """
import asyncio, sys
from ckpt_async.stores.http.downloads import Downloads
from ckpt_async.stores.http.offload import Offload

async def main():
    offload = Offload(1)
    offload.start()
    downloads = Downloads(
        max_connections=1, connect_timeout_s=5.0, read_timeout_s=60.0, ca_file=sys.argv[2], offload=offload
    )
    await downloads.get_range(f"https://localhost:{sys.argv[1]}/x", 0, 10, lambda _: None, lambda _: None)

asyncio.run(main())
"""


@pytest.mark.fault("F107")
def test_the_process_ends_with_a_trainer_that_is_killed(tls: ssl.SSLContext, ca_file: str) -> None:
    reached = threading.Event()
    with (
        Server(_stalling(reached), tls) as server,
        subprocess.Popen([sys.executable, "-c", TRAINER, str(server.port), ca_file]) as trainer,
    ):
        assert reached.wait(PATIENCE_S)
        [pid] = _processes_of(trainer.pid)
        trainer.kill()
        trainer.wait()
        _wait_for_end_of(pid)


def test_the_process_starts_quickly() -> None:
    """It imports only the standard library and two modules of this package."""
    before_its_main = offload_module._BOOTSTRAP.partition("if os.fork")[0]
    folder = str(offload_module._FOLDER)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", before_its_main + "print(*sys.modules)", "3", folder],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"__main__", "ckpt_async"}
    ours = {name for name in done.stdout.split() if name.startswith("ckpt_async.stores.http.")}
    assert ours == {"ckpt_async.stores.http.offload_process", "ckpt_async.stores.http.tls"}
    assert not loaded & {"asyncio", "http", "urllib", "subprocess"}
