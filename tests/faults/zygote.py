"""Starts trainers by forking a process that has everything imported, so that a start takes 5 ms and not 300 ms.

The zygote reads requests from the socket whose descriptor is its only argument. It ends, together with all processes it
started, when the other side closes the socket.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
import warnings

import ckpt_async.stores.directory
import ckpt_async.stores.s3.client
import ckpt_async.trainer.uploader  # noqa: F401
from tests.faults import plays, trainer


def serve(control: socket.socket) -> None:
    alive: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            break
        request = json.loads(message)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                control.close()
                _become(request, descriptors)
            alive.add(pid)
            control.send(json.dumps(pid).encode())
        else:
            _, status = os.waitpid(request["pid"], 0)
            alive.discard(request["pid"])
            control.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
        for descriptor in descriptors:
            os.close(descriptor)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _become(request: dict, descriptors: list[int]) -> None:
    code = 1
    try:
        for wanted, descriptor in enumerate(descriptors):
            os.dup2(descriptor, wanted)
            os.close(descriptor)
        os.environ.update(request["environment"])
        play = getattr(trainer, request["play"], None) or getattr(plays, request["play"])
        if "kill_at" in request:  # only under the shim
            ctypes.CDLL(None).shim_kill_at(request["kill_at"])
        play(**request["arguments"])
        if "kill_at" in request:
            trainer.say("calls", ctypes.CDLL(None).shim_num_calls())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    warnings.simplefilter("error")
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control)
