"""The messages between trainer and runner process: one JSON list per packet, whose first item is the type.

Trainer: `start` (with the rank's lock as a descriptor), `want` WANTS, `expect_end`, `stop`, `join` (with a connection
of another kind's as a descriptor); `ping` only asks for an answer.
Runner: `here` PID VERSION, `started` GENERATION, `refused` ERROR, `report` FACTS, `log` LEVEL LOGGER TEXT FIELDS,
`died` TEXT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import threading
from typing import Any, NamedTuple, Self

from ckpt_async import errors
from ckpt_async.core.failures import Failure
from ckpt_async.core.model import CheckpointId, Decided, Outcome, RemoteAddress
from ckpt_async.core.settings import Settings
from ckpt_async.errors import CkptAsyncError, FailureReason, RunnerError, StoreError
from ckpt_async.local.forks import after_fork
from ckpt_async.runners import Start
from ckpt_async.stores import StoreOptions

# The kernel doubles this value; a packet must fit as a whole.
BUFFER_BYTES = 1 << 19
MAX_PACKET_BYTES = 1 << 18
MAX_TEXT_BYTES = 2000
# Of these messages. A runner process may be older than its trainer (a node's process that lingers) or newer (restarted
# after an upgrade of the package).
VERSION = 2
# The kernel's `struct ucred`: process, user, group.
_PEER = struct.Struct("iII")
# A trainer sends no more `want` while so many are unread, so that every other message finds room: by far fewer than
# the buffer holds.
MAX_UNREAD = 100


class PacketTooLargeError(RunnerError):
    """The other side would receive only the beginning of the packet. Nothing was sent."""


class Wants(NamedTuple):
    """All that a trainer wants of its engine now. Each message has everything, so an older one may be left out."""

    wake: int = 0  # counts the calls of `wake`
    num_hurries: int = 0  # each has failed uploads retried
    is_hurried: bool = False
    num_turns_to_newest: int = 0
    num_looks: int = 0  # for members


class Channel:
    """One end of a SOCK_SEQPACKET connection: packets arrive whole or not at all, and the stream ends when the
    other process ends. A forked child closes its copy, since otherwise the other side would never see that end.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        # The number of a descriptor that is closed during `send` may belong to another file by then.
        self._lock = threading.Lock()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        after_fork.add(self)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, *message: Any, descriptors: tuple[int, ...] = ()) -> bool:
        """Send one packet without waiting; return False if there is no room. Raises OSError if the other side is
        gone, PacketTooLargeError.
        """
        data = encode(*message)
        if len(data) > MAX_PACKET_BYTES:
            raise PacketTooLargeError(
                f"a message {message[0]!r} of {len(data)} bytes does not fit into a packet of {MAX_PACKET_BYTES}"
            )
        try:
            with self._lock:
                if descriptors:
                    socket.send_fds(self.socket, [data], descriptors, socket.MSG_DONTWAIT)
                else:
                    self.socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """Wait for the next packet; None at the end of the stream."""
        return self.receive_with_descriptors()[0]

    def receive_with_descriptors(self) -> tuple[list[Any] | None, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, MAX_PACKET_BYTES, 1)
        except ConnectionResetError:  # the other side died before reading all our packets
            return None, []
        return (decode(data) if data else None), descriptors

    def shut(self) -> None:
        """Shut the connection down; this wakes up a thread that waits in `receive`."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        after_fork.discard(self)
        with self._lock:
            self.socket.close()

    def abandon(self) -> None:
        self.socket.close()


def encode(*message: Any) -> bytes:
    text = json.dumps(message, separators=(",", ":"), default=_plain, ensure_ascii=False)
    return text.encode(errors="surrogatepass")  # as `json.loads` expects; of file names that are not UTF-8


def decode(data: bytes) -> list[Any]:
    """Return the message in a packet. Raises RunnerError if it is none."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunnerError(f"a packet between trainer and runner cannot be read: {error}") from None
    if not isinstance(message, list):
        raise RunnerError("a packet between trainer and runner is not a message")
    return message


def shortened(text: str, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text, or as much of its beginning as fits into so many bytes."""
    data = text.encode(errors="surrogatepass")
    return text if len(data) <= most_bytes else data[:most_bytes].decode(errors="ignore")


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, FailureReason | Outcome):
        return value.value
    raise TypeError(f"{value!r} cannot be sent")


# --- values ------------------------------------------------------------------------------------------------


def start_from(fields: dict[str, Any]) -> Start:
    return Start(
        **fields
        | {
            "address": RemoteAddress(**fields["address"]),
            "options": StoreOptions(**fields["options"]),
            "settings": Settings(**fields["settings"]),
        }
    )


def decided_from(fields: dict[str, Any]) -> Decided:
    checkpoint, outcome = CheckpointId(**fields["checkpoint"]), Outcome(fields["outcome"])
    return Decided(**fields | {"checkpoint": checkpoint, "outcome": outcome})


def error_fields(error: BaseException) -> dict[str, str]:
    reason = error.reason.value if isinstance(error, StoreError) else ""
    text = str(error) if isinstance(error, CkptAsyncError) else repr(error)
    return {"kind": type(error).__name__, "text": shortened(text), "reason": reason}


def error_from(fields: dict[str, str]) -> CkptAsyncError:
    """Return the same error, if its class is one of this package's; otherwise a CkptAsyncError with its text."""
    kind = getattr(errors, fields["kind"], CkptAsyncError)
    if not issubclass(kind, CkptAsyncError):
        kind = CkptAsyncError
    if fields["reason"]:
        return StoreError(fields["text"], reason=FailureReason(fields["reason"]))
    try:
        error: CkptAsyncError = kind(fields["text"])
    except TypeError:
        return CkptAsyncError(fields["text"])
    return error


def failure_fields(failure: Failure) -> dict[str, Any]:
    fields = {name: getattr(failure, name) for name in ("checkpoint", "shard", "action", "is_given_up")}
    return fields | {"error": error_fields(failure.error)}


def failure_from(fields: dict[str, Any]) -> Failure:
    error, checkpoint = error_from(fields["error"]), CheckpointId(**fields["checkpoint"])
    return Failure(**fields | {"error": error, "checkpoint": checkpoint})


# --- the node's socket ------------------------------------------------------------------------------------


class NodeSocket:
    """The place where the ranks of a node find the one process that runs their engines: a socket in the folder. It
    is reached through the folder's descriptor, because the path of a socket may only have 107 bytes.
    """

    def __init__(self, private: os.PathLike[str]) -> None:
        self._folder = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._address = f"/proc/self/fd/{self._folder}/node.sock"

    def connect(self) -> Channel | None:
        """Return a connection to the listening process, or None if there is none. Raises RunnerError if it is another
        user's: it would be sent the settings and the rank's lock.
        """
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connecting.connect(self._address)
            pid, user, _ = _PEER.unpack(
                connecting.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            if user not in (os.geteuid(), 0):
                raise RunnerError(
                    f"the node's runner process {pid} belongs to user {user}",
                    hint="all ranks that share a folder must run as one user",
                )
        except (FileNotFoundError, ConnectionRefusedError):
            connecting.close()
            return None
        except BaseException:
            connecting.close()
            raise
        return Channel(connecting)

    def listen(self) -> socket.socket:
        """Listen in place of an earlier process, which the caller knows is gone."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if os.path.lexists(self._address):
                os.unlink(self._address)
            listener.bind(self._address)
            os.chmod(self._address, 0o600)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        os.close(self._folder)
