"""The process of `offload`: it decrypts the connections that it is handed, each in a thread, into shared memory.

It imports nothing but the standard library and `tls`, so that it runs within some 40 ms of CPU.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import socket
import struct
import sys
import threading
from typing import Any

from ckpt_async.stores.http.tls import TlsSocket, trusting

# What a control socket carries: a letter and what it is about. Every message gets one answer.
SEND, RECEIVE, DONE, FAILED = b"S", b"R", b"d", b"f"
# Where to receive to, from and to which byte of the shared memory, and how (recv(2)).
WHERE = struct.Struct("=III")
# How many bytes came, and how many have arrived and are still unread.
CAME = struct.Struct("=II")
# The largest message; a request is sent in several if it is longer.
MESSAGE_BYTES = 32 << 10
# Of the address space, which may be limited. The usual 8 MiB for the thread of each connection are a lot.
STACK_BYTES = 1 << 20


def main(descriptor: int) -> None:
    """Take connections until the other end of this socket is closed, that is, at the latest when its process ends.
    Those that are there are served until they are closed in the same way.
    """
    threading.stack_size(STACK_BYTES)
    threading.excepthook = sys.unraisablehook = _end
    with socket.socket(fileno=descriptor) as incoming:
        while True:
            message, descriptors, _, _ = socket.recv_fds(incoming, MESSAGE_BYTES, 3)
            if not message:
                return
            try:
                threading.Thread(target=_serve, args=(*descriptors, json.loads(message))).start()
            except (RuntimeError, MemoryError):
                _end()


def _end(_: object = None) -> None:
    """Called when something cannot be done, in most cases for lack of memory: the other process must not wait for it.
    A thread that fails before it runs would be waited for in here, too.
    """
    os._exit(1)


def _serve(connected: int, control: int, memory: int, about: dict[str, Any]) -> None:
    with socket.socket(fileno=control) as asked, mmap.mmap(memory, 0) as shared, memoryview(shared) as room:
        os.close(memory)
        with contextlib.suppress(OSError):  # the other process has closed the connection
            try:
                opened = _opened(socket.socket(fileno=connected), **about)
            except Exception as error:  # noqa: BLE001  raised by the other process
                asked.send(FAILED + pickle.dumps(error))
                return
            with opened:
                asked.send(DONE + CAME.pack(0, 0))
                _answer(asked, opened, room)


def _opened(raw: socket.socket, host: str, ca_file: str | None, timeout_s: float) -> TlsSocket:
    with raw:  # until the TlsSocket takes it over
        raw.settimeout(timeout_s)
        opened = TlsSocket(raw, trusting(ca_file), host)
    opened.settimeout(None)  # from now on, the kernel limits the waiting, as the other process tells it
    return opened


def _answer(asked: socket.socket, connected: TlsSocket, room: memoryview) -> None:
    while message := asked.recv(MESSAGE_BYTES):
        count = 0
        try:
            if message[:1] == SEND:
                connected.sendall(message[1:])
            else:
                start, end, flags = WHERE.unpack_from(message, 1)
                with room[start:end] as part:
                    count = connected.recv_into(part, 0, flags)
        except Exception as error:  # noqa: BLE001  raised by the other process
            asked.send(FAILED + pickle.dumps(error))
        else:
            asked.send(DONE + CAME.pack(count, connected.pending()))
