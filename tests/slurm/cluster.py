"""A Slurm cluster on loopback: two nodes, each with a disk of its own at the same path, as real nodes have."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

PAUSE_S = 3.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare")
CONF = """
ClusterName=play
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=play Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Return why no Slurm can be run here; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)}: install Debian's packages slurmctld, slurmd, slurm-client and munge"
    return "" if os.geteuid() == 0 else "slurmd and its nodes' disks (mount namespaces) need root"


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Cluster:
    """Starts with the `with` block, and ends with all its processes."""

    def __init__(self, root: Path) -> None:
        self.root, self.disk = root, root / "local"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ready: dict[str, float] = {}  # the time since when each job could restart
        self.environment = dict(os.environ, PATH=_path(), SLURM_CONF=str(root / "slurm.conf"))
        for name in [name for name in self.environment if name.startswith(("SLURM_JOB", "SBATCH_"))]:
            del self.environment[name]

    def __enter__(self) -> Self:
        for name in ("state", "local", "disk-node0", "disk-node1"):
            (self.root / name).mkdir()
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        conf = CONF.format(root=self.root, host=socket.gethostname(), ports=ports)
        (self.root / "slurm.conf").write_text(conf)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        places = [f"--{what}-file={self.root}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "-F", "-f", f"--socket={self.root}/munge.socket", *places)
        until("munged answers", (self.root / "munge.socket").exists)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in ("node0", "node1"):
            self.boot(node)
        until("nodes are there", lambda: self.num_idle() == 2)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.call("scancel", "--full", "-s", "KILL", "--user=root")
        for name in reversed(self._daemons):
            self.kill(name)

    def boot(self, node: str) -> None:
        """Start a node. Its disk is mounted at the path that all nodes use, visible only to itself."""
        mounted = f"mount --bind {self.root}/disk-{node} {self.disk} && exec slurmd -D -N {node}"
        self._start(node, "unshare", "--mount", "--propagation=private", "sh", "-c", mounted)

    def lose(self, node: str) -> None:
        """Take away power and disk of a node at once, with every process on it."""
        self.kill(node)
        shutil.rmtree(self.root / f"disk-{node}")
        (self.root / f"disk-{node}").mkdir()

    def processes(self, node: str) -> list[int]:
        """Return all processes in this node's mount namespace."""
        daemon = self._daemons[node]
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{daemon.pid}/ns/mnt")
            return [pid for pid in _pids() if _namespace(pid) == namespace]
        return []

    def kill(self, name: str) -> None:
        while name.startswith("node") and (pids := self.processes(name)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if pids == [self._daemons[name].pid]:
                break
        with contextlib.suppress(ProcessLookupError):
            self._daemons[name].kill()
        self._daemons[name].wait(60)

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    def submit(self, script: Path, *arguments: str, **more: str) -> str:
        """Submit a job and return its number. `more` overrides what the script requests."""
        options = [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
        return self.call("sbatch", "--parsable", *options, str(script), *arguments).strip()

    def end(self, job: str) -> None:
        """Tell all tasks that the time is up, as --signal=TERM@300 does 300 s before the end. (For a job of an array,
        scancel 22.05 exits with 229 when it has done so.)
        """
        with contextlib.suppress(subprocess.CalledProcessError):
            self.call("scancel", "--signal=TERM", job)

    def state(self, job: str) -> str:
        lines = self.call("scontrol", "show", "job", job).split()
        return next(each for each in lines if each.startswith("JobState=")).partition("=")[2]

    def hurry(self, job: str) -> None:
        """Restart a requeued job sooner. Slurm lets it wait two minutes, because nodes refuse a job that was issued
        before they had killed all of its previous run; here it waits until they are idle, and a few seconds.
        """
        is_ready = self.state(job) == "PENDING" and self.num_idle() == 2
        since = self._ready.setdefault(job, time.monotonic()) if is_ready else None
        if since is None:
            self._ready.pop(job, None)
        elif time.monotonic() - since > PAUSE_S:
            with contextlib.suppress(subprocess.CalledProcessError):  # it has started in the meantime
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now")
            del self._ready[job]

    def num_idle(self) -> int:
        return int(self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() or 0)

    def _start(self, name: str, *command: str) -> None:
        with (self.root / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.root, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )


def _pids() -> list[int]:
    return [int(each) for each in os.listdir("/proc") if each.isdecimal()]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def until(what: str, is_so: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Wait until the condition holds, or raise an error that says what did not come."""
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.1)
