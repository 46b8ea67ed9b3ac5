"""TLS in processes of its own: what is downloaded is decrypted beside the interpreter, not in it.

OpenSSL decrypts one record of 16 KiB per call, and Python takes the GIL after each: 65,000 times per GiB, for which the
threads of all connections compete. Here new connections are handed to processes, once that is worth it, which decrypt
into memory that they share with this one. They know nothing but TLS: this process opens the TCP connections, writes the
requests and reads the answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import mmap
import os
import pickle
import socket
import ssl
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt_async.errors import SettingsError
from ckpt_async.stores.http.offload_process import (
    CAME,
    FAILED,
    MESSAGE_BYTES,
    RECEIVE,
    SEND,
    WHERE,
)

logger = logging.getLogger(__name__)

# Starting a process takes some 50 ms of CPU. Most restarts that load less than this are over sooner without.
DUE_BYTES = 128 << 20
# With fewer cores, the interpreter keeps up with them. With more processes, it would be the limit itself.
CORES_PER_PROCESS, MAX_PROCESSES = 4, 4
# How many there are instead; 0 for none.
VARIABLE = "CKPT_ASYNC_TLS_PROCESSES"
# The longest time that a process takes for what it does at once, or limits to BLOCK_S, also on busy cores.
PATIENCE_S = 10.0
HANDSHAKE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 10.0
# The packages are only named: their own imports would take 150 ms. The process belongs to nobody who would have to
# wait for it.
_BOOTSTRAP = """\
import os, sys, types
descriptor, folder = sys.argv[1:]
for name, above in (("ckpt_async", "../.."), ("ckpt_async.stores", ".."), ("ckpt_async.stores.http", ".")):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [os.path.join(folder, above)]
from ckpt_async.stores.http.offload_process import main
if os.fork():
    os._exit(0)
main(int(descriptor))
"""


class ProcessLostError(ConnectionAbortedError):
    """The process that decrypts a connection has died, or hangs."""


class OffloadedSocket(socket.socket):
    """A TLS connection that a process decrypts. It has only what downloads need: `sendall`, `receive_at` and `memory`,
    `recv_into`, `pending`. Its errors are those of a TlsSocket, and ProcessLostError.
    """

    def __init__(
        self, raw: socket.socket, process: Process, host: str, ca_file: str | None, memory_bytes: int
    ) -> None:
        timeout_s = min(raw.gettimeout() or HANDSHAKE_TIMEOUT_S, HANDSHAKE_TIMEOUT_S)
        super().__init__(raw.family, raw.type, raw.proto, fileno=raw.detach())
        self._process, self._pending, self._is_hung_up = process, 0, False
        try:
            self._control, self.memory = process.take_over(
                self,
                memory_bytes,
                host=host,
                ca_file=ca_file and os.path.abspath(ca_file),
                timeout_s=timeout_s,
            )
        except BaseException:
            super().close()
            raise
        try:
            _limit_waits(self._control, timeout_s + PATIENCE_S)
            self._reply()  # the handshake is over
            _limit_waits(self._control, PATIENCE_S)
        except ssl.SSLError as error:
            process.give_up(error)  # this process may trust what that one does not
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def sendall(self, data: bytes, /) -> None:  # type: ignore[override]
        for start in range(0, len(data), MESSAGE_BYTES - 1):
            self._ask(SEND + data[start : start + MESSAGE_BYTES - 1])

    def receive_at(self, start: int, end: int, flags: int = 0) -> int:
        """Receive into this part of the memory as `TlsSocket.recv_into` does."""
        return self._ask(RECEIVE + WHERE.pack(start, end, flags))

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        count = self.receive_at(0, min(nbytes or len(buffer), len(self.memory)), flags)
        buffer[:count] = memoryview(self.memory)[:count]
        return count

    def pending(self) -> int:
        """Return how many bytes have arrived that nobody has read."""
        return self._pending

    def hang_up(self) -> None:
        """Let a call that waits for the process return. Any thread."""
        self._is_hung_up = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._control.close()
        super().close()

    def _ask(self, message: bytes) -> int:
        """Return how many bytes came."""
        try:
            self._control.send(message)
        except OSError as error:
            raise self._lost(error) from error
        return self._reply()

    def _reply(self) -> int:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except BlockingIOError:
            raise self._lost("it does not answer in time") from None
        except OSError as error:
            raise self._lost(error) from error
        if not message:
            raise self._lost("it has ended")
        if message[:1] == FAILED:
            raise pickle.loads(message[1:])  # noqa: S301  from our own process
        count, self._pending = CAME.unpack_from(message, 1)
        return int(count)

    def _lost(self, why: object) -> ProcessLostError:
        if not self._is_hung_up:  # else the call was cancelled, and the process may be well
            self._process.give_up(why)
        return ProcessLostError(f"the process that decrypts the connection is lost: {why}")


class OffloadedConnection(http.client.HTTPSConnection):
    """An HTTPS connection over an OffloadedSocket."""

    def __init__(
        self, host: str, port: int, timeout_s: float, process: Process, ca_file: str | None, memory_bytes: int
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._about = process, self.host, ca_file, memory_bytes

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = OffloadedSocket(self.sock, *self._about)


class Process:
    """One process that decrypts connections. Thread-safe. `give_up` is called when it turns out to be of no use."""

    def __init__(self, give_up: Callable[[object], None]) -> None:
        """Start it without waiting until it runs. Raises OSError."""
        self.give_up = give_up
        self._socket, theirs = _pair()
        try:
            with theirs:
                self._started = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(theirs.fileno()), str(_FOLDER)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except BaseException:
            self.close()
            raise

    def wait_until_started(self) -> None:
        """Raises OSError or SubprocessError if it did not start."""
        with self._started as started:
            try:
                if code := started.wait(START_TIMEOUT_S):
                    raise OSError(f"{sys.executable} exited with {code}")
            finally:
                started.kill()  # if it has not

    def take_over(
        self, connected: socket.socket, memory_bytes: int, **about: object
    ) -> tuple[socket.socket, mmap.mmap]:
        """Have the process make `connected` a TLS connection; return the socket by which to ask for what it decrypts,
        and the memory into which it does.
        """
        try:
            with contextlib.ExitStack() as ours:
                control, theirs = _pair()
                ours.callback(control.close)
                with theirs, _shared_memory(memory_bytes) as descriptor:
                    memory = mmap.mmap(descriptor, memory_bytes)
                    handed = [connected.fileno(), theirs.fileno(), descriptor]
                    socket.send_fds(self._socket, [json.dumps(about).encode()], handed)
                ours.pop_all()
                return control, memory
        except OSError as error:
            self.give_up(error)
            raise ProcessLostError(f"the connection cannot be handed to a process: {error}") from error

    def close(self) -> None:
        """Have the process end with the last of its connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Offload:
    """The processes of one pool of connections. They start when they are due, all at once; the first trouble with one
    of them is the end of all, and new connections are decrypted in this process again. Thread-safe.
    """

    def __init__(self, num_processes: int | None = None, due_bytes: int = DUE_BYTES) -> None:
        self._num_processes = possible_processes() if num_processes is None else num_processes
        self._due_bytes, self._moved_bytes = due_bytes, 0
        self._lock = threading.Lock()
        self._processes: list[Process] = []
        self._num_taken = 0
        self._has_begun = self._is_over = not self._num_processes

    def moved(self, size_bytes: int) -> None:
        """Note that this much more was downloaded over TLS. Does not block."""
        with self._lock:
            self._moved_bytes += size_bytes
            if self._has_begun or self._moved_bytes < self._due_bytes:
                return
            self._has_begun = True
        try:
            threading.Thread(target=self.start, name="ckpt-async-offload", daemon=True).start()
        except RuntimeError as error:
            self._give_up(error)

    def start(self) -> None:
        """Start the processes, and return when they run."""
        self._has_begun = True
        started: list[Process] = []
        try:
            started.extend(Process(self._give_up) for _ in range(self._num_processes))
        except OSError as error:
            self._give_up(error)
        for each in started:
            try:
                each.wait_until_started()
            except (OSError, subprocess.SubprocessError) as error:
                self._give_up(error)
        with self._lock:
            if not self._is_over:
                self._processes = started
                return
        for each in started:
            each.close()

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def process(self) -> Process | None:
        """Return the process to hand the next connection to. Does not block. None: there are none yet, or none any
        more.
        """
        with self._lock:
            if not self._processes:
                return None
            self._num_taken += 1
            return self._processes[self._num_taken % len(self._processes)]

    def _give_up(self, why: object) -> None:
        with self._lock:
            is_new, self._is_over = not self._is_over, True
        if is_new:
            logger.warning("tls_process_lost error=%s; decrypting in this process", why)
        self.close()

    def close(self) -> None:
        """Have the processes end with their last connections."""
        with self._lock:
            self._is_over = True
            ended, self._processes = self._processes, []
        for each in ended:
            each.close()


def possible_processes() -> int:
    """Return how many processes this one could use: none where it cannot share memory or start a Python.

    Raises SettingsError.
    """
    # Elsewhere (a frozen program, an embedded interpreter) it may be anything.
    is_python = Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)
    if not (is_python and hasattr(os, "memfd_create") and _FOLDER.is_dir()):
        return 0
    get = os.environ.get
    return num_of_processes(
        len(os.sched_getaffinity(0)), get("LOCAL_WORLD_SIZE", ""), wanted=get(VARIABLE, "")
    )


def num_of_processes(num_cores: int, local_world_size: str, wanted: str = "") -> int:
    """Return how many processes are wanted, or pay off in one of so many ranks on a node (as torchrun states them).

    Pure. Raises SettingsError.
    """
    if wanted:
        if not wanted.isdecimal() or len(wanted) > 2:
            raise SettingsError(f"{VARIABLE} is {wanted!r}", hint="it is a number from 0 (none) to 99")
        return int(wanted)
    num_ranks = int(local_world_size) if local_world_size.isdecimal() else 1
    return min(num_cores // max(num_ranks, 1) // CORES_PER_PROCESS, MAX_PROCESSES)


_FOLDER = Path(__file__).parent


@contextlib.contextmanager
def _shared_memory(size_bytes: int) -> Iterator[int]:
    """Yield a descriptor of new memory that other processes can map; it remains as long as one has it mapped."""
    descriptor = os.memfd_create("ckpt-async-tls")
    try:
        os.truncate(descriptor, size_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection that carries whole messages. Ours does not wait for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _limit_waits(ours, PATIENCE_S)
    _ours.add(ours)
    return ours, theirs


def _limit_waits(waiting: socket.socket, limit_s: float) -> None:
    limit = struct.pack("ll", int(limit_s), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        waiting.setsockopt(socket.SOL_SOCKET, option, limit)


# Copies in forked processes would keep our processes alive when this one is dead.
_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_copies() -> None:
    for each in list(_ours):
        each.close()


os.register_at_fork(after_in_child=_close_copies)
