"""An S3 server for benchmarks that reads every byte before it answers, and counts what clients send.

The other benchmarks send to it; run alone, it prints the environment variables that point any client to it.
Servers that answer before they have read the body (nginx `return 200`) make clients look two to four times
faster than they are. `sink.c` documents which requests it understands. With TLS (`--tls`; needs OpenSSL's
headers and its command) it decrypts on the cores that the client needs too: then compare CPU seconds rather
than MiB/s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_name("sink.c")
# Ignored by git, removed by ./dev clean.
CACHE = Path(__file__).resolve().parent.parent / ".venv" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the sink started. Bytes are those of objects and parts, without framing. `connections`
    is the most that were open at once since the previous call of `stats`.
    """

    bytes_in: int
    bytes_out: int
    requests: int
    connections: int = 0

    def __sub__(self, before: Stats) -> Stats:
        return Stats(
            self.bytes_in - before.bytes_in,
            self.bytes_out - before.bytes_out,
            self.requests - before.requests,
            self.connections,
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The limits of the network between the sink and its clients: the throughput of one connection and of all
    together, and the delay of an answer. One of every `slow_every` connections has a tenth of the throughput.
    Beyond `requests_per_s`, requests are answered with SlowDown. 0: no limit.
    """

    connection_mib_s: float = 0
    total_mib_s: float = 0
    delay_ms: int = 0
    slow_every: int = 0
    requests_per_s: int = 0

    def options(self) -> list[str]:
        limits = {
            "rate": round(self.connection_mib_s * 1024),
            "total": round(self.total_mib_s * 1024),
            "delay": self.delay_ms,
            "slow": self.slow_every,
            "limit": self.requests_per_s,
        }
        return [f"{name}={value}" for name, value in limits.items() if value]


class SinkServer:
    """One sink process on a free port. A context manager. It writes the method and target of every request to
    `log`, and keeps up to `keep_mib` of large bodies. `link` is what lies between it and its clients. With
    `is_idle` it gets only the CPU time that nobody else wants, because a server on another machine would take
    none from a trainer.
    """

    def __init__(
        self,
        *,
        verify: bool = False,
        is_tls: bool = False,
        keep_mib: int = 0,
        link: Link | None = None,
        log: Path | None = None,
        is_idle: bool = False,
    ) -> None:
        self._is_idle = is_idle
        self._options = ["stdin", *(["verify"] if verify else [])]
        self._options += [f"keep={keep_mib}"] if keep_mib else []
        self._options += link.options() if link else []
        self._options += [f"log={log}"] if log else []
        self._certificate = certificate() if is_tls else None
        self._process: subprocess.Popen[str] | None = None
        self._port = 0
        self._trust: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self._certificate else ''}://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [str(build(is_tls=self._certificate is not None)), "0", *self._options]
        if self._certificate is not None:
            command.append(f"tls={self._certificate}")
            self._trust = ssl.create_default_context(cafile=str(self._certificate.with_name("trust.pem")))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
        if self._is_idle:  # the threads that it creates from now on, one per connection, inherit this
            os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.communicate()  # closes its standard input, upon which it exits

    def stats(self) -> Stats:
        with urllib.request.urlopen(f"{self.url}/__stats", timeout=30, context=self._trust) as answer:
            return Stats(*map(int, answer.read().split()))

    def cpu_s(self) -> float:
        """Return the user and system seconds of the sink so far."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def size_of(self, bucket: str, key: str) -> int:
        """Return the object's size as the sink has it. Raises urllib.error.HTTPError if there is none."""
        request = urllib.request.Request(f"{self.url}/{bucket}/{key}", method="HEAD")
        with urllib.request.urlopen(request, timeout=30, context=self._trust) as answer:
            return int(answer.headers["Content-Length"])

    def environment(self) -> dict[str, str]:
        """Return the variables that point an S3 client to the sink."""
        trusted = self._certificate and str(self._certificate.with_name("trust.pem"))
        return {
            **(dict.fromkeys(("AWS_CA_BUNDLE", "SSL_CERT_FILE"), trusted) if trusted else {}),
            "AWS_ACCESS_KEY_ID": "sink",
            "AWS_SECRET_ACCESS_KEY": "sink-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def build(*, is_tls: bool = False) -> Path:
    """Compile the sink once per version of its source. Exits with a clear message if there is no compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit(
            "benchmarks: the sink is written in C and there is no compiler: install gcc or clang, or set CC"
        )
    flags = ["-DTLS", "-lssl", "-lcrypto"] if is_tls else []
    program = CACHE / f"sink{'-tls' * is_tls}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = program.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-pthread", "-o", str(temporary), str(SOURCE), *flags]
        done = subprocess.run(command, stderr=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"benchmarks: {compiler} cannot compile sink.c:\n{done.stderr.decode()}")
        temporary.rename(program)
    return program


def certificate() -> Path:
    """Return the path of a key with its own certificate for 127.0.0.1, made once. The certificate alone, for
    clients, is in `trust.pem` beside it, because CRT rejects a file that also holds a key.
    """
    path = CACHE / "tls.pem"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        name = ["-subj", "/CN=sink", "-addext", "subjectAltName=IP:127.0.0.1"]
        kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650"]
        files = ["-keyout", "-", "-out", "-"]
        done = subprocess.run(["openssl", "req", *kind, *name, *files], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"benchmarks: openssl cannot make a certificate: {done.stderr}")
        temporary.write_text(done.stdout[done.stdout.index("-----BEGIN CERTIFICATE") :])
        temporary.rename(path.with_name("trust.pem"))
        temporary.write_text(done.stdout)
        temporary.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--verify", action="store_true", help="check CRC64NVME and CRC32C of large bodies too"
    )
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--delay-ms", type=int, default=0, help="sleep before every answer")
    parser.add_argument("--log", type=Path, help="a line for every request")
    parser.add_argument("--json", action="store_true", help="print the totals as JSON at the end")
    arguments = parser.parse_args()
    options = {"is_tls": arguments.tls, "link": Link(delay_ms=arguments.delay_ms), "log": arguments.log}
    with SinkServer(verify=arguments.verify, **options) as sink:
        try:
            for name, value in sink.environment().items():
                print(f"export {name}={value}", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
        finally:
            stats = sink.stats()
    totals = {"bytes_in": stats.bytes_in, "bytes_out": stats.bytes_out, "requests": stats.requests}
    print(json.dumps(totals) if arguments.json else "  ".join(f"{k}={v:,}" for k, v in totals.items()))


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
