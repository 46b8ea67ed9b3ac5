"""`./dev demo`: what the package is for, with real processes, in under a minute.

Two ranks train under torchrun and save through `CheckpointSaver`. Rank 1's process group is killed with SIGKILL in
the middle of an upload; torchrun restarts both; they finish what was left, resume, and train to the end. Then every
committed checkpoint is read back and compared with what torch.save made of the ranks' states, and every loss with
that of the same step before the kill. Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import CkptAsyncError, JournalError
from ckpt_async.local import journals
from tests.azurite import AzuriteServer
from tests.demo.check import Verdict, check
from tests.demo.config import Config, read_log
from tests.file_servers import FileServer
from tests.s3_servers.servers import SERVERS
from tests.stores.gcs_peer import GcsPeer

WORLD_SIZE = 2
VICTIM = 1  # the rank that is killed
TRAINING_TIMEOUT_S = 300.0
# Loopback is too fast to kill a rank in the middle of an upload: the bandwidth cap makes each upload last
# this long.
UPLOAD_S = 1.5


@dataclass(slots=True)
class Kill:
    """The state at the moment of the kill."""

    checkpoint: CheckpointId
    sent_bytes: int  # in parts that the store acknowledged
    size_bytes: int
    under_way_s: float
    at: float


@dataclass(slots=True)
class Run:
    """The training job, its kill, and its outcome."""

    kill: Kill | None = None
    exit_code: int | None = None
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--store",
        choices=("s3", *SERVERS, "azure", "gcs", "sftp", "webdav", "file"),
        default="s3",
        help="a server, or a folder",
    )
    parser.add_argument("--remote", metavar="URL", help="a place of your own, as in s3://bucket/prefix/demo")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--keep", metavar="DIR", help="work in DIR and leave everything there")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="of the transformer")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        if options.keep:
            work = Path(options.keep).absolute()
            work.mkdir(parents=True, exist_ok=True)
        else:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-async-demo-")))
        if options.remote:
            remote, environment = f"{options.remote.rstrip('/')}/{uuid.uuid4().hex[:12]}", {}
        else:
            remote, environment = stack.enter_context(_store(options.store, work))
        os.environ.update(environment)  # for the check at the end too
        config = Config(
            work=str(work),
            remote=remote,
            steps=options.steps,
            save_every=options.save_every,
            keep=2,
            width=options.width,
            depth=options.depth,
            max_bytes_per_s=_shard_bytes(options.width, options.depth) / UPLOAD_S,
            seed=options.seed,
        )
        run = _train(config)
        say("checking every committed checkpoint byte for byte …")
        try:
            verdict = check(config, WORLD_SIZE)
        except CkptAsyncError as error:
            verdict = Verdict(wrong=[f"the store cannot be checked: {error}"])
        result = _result(config, run, verdict)
    print(json.dumps(result) if options.json else _table(result))
    return 0 if result["ok"] else 1


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _shard_bytes(width: int, depth: int) -> float:
    parameters = 12 * width * width * depth + 2 * 256 * width
    return parameters * 3 * 4 / WORLD_SIZE  # fp32, with two moments of AdamW


@contextlib.contextmanager
def _store(kind: str, work: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    if kind == "file":
        yield f"file://{work / 'store' / 'demo-run'}", {}
        return
    if kind == "gcs":
        say("starting the tests' own Google Cloud Storage on loopback …")
        with GcsPeer() as peer:
            yield f"gs://{peer.bucket}/demo-run", {"STORAGE_EMULATOR_HOST": peer.url}
        return
    if kind == "azure":
        say("starting Azurite, Microsoft's emulator of Azure Blob Storage, on loopback …")
        with AzuriteServer(work / "azurite") as azurite:
            yield f"az://{azurite.container}/demo-run", azurite.environment()
        return
    if kind in ("sftp", "webdav"):
        say(f"starting a real {kind} server on loopback …")
        with FileServer(kind, work / kind) as files:
            yield f"{files.url}/demo-run", files.environment()
        return
    name = "seaweedfs" if kind == "s3" else kind
    data = work / name
    data.mkdir(exist_ok=True)
    say(f"starting {name}, an S3 server, on loopback …")
    with SERVERS[name](data) as server:
        yield f"s3://{server.bucket}/demo-run", server.environment()


# --- training, and the kill --------------------------------------------------------------------------------


def _train(config: Config) -> Run:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORLD_SIZE),
    ]
    command += ["--max-restarts", "2", "-m", "tests.demo.train", str(config.write())]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Otherwise torchrun (2.13) gives restarted ranks the rendezvous store of the dead ones, with
        # addresses where no process listens any more.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    say(f"training 2 ranks with FSDP2 under torchrun, checkpoints to {config.remote}")
    started = time.monotonic()
    run = Run()
    output = Path(config.work) / "launcher.log"
    with output.open("wb") as launcher_log:
        # torchrun's own output about the kill goes to a file; the ranks' lines are relayed.
        process = subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=launcher_log,
            text=True,
            start_new_session=True,
        )
        try:
            _watch(config, run, process, started, launcher_log)
        finally:
            _kill_groups(config, process)
    run.exit_code, run.seconds = process.returncode, time.monotonic() - started
    if run.exit_code != 0:
        run.problems.append(
            f"training ended with exit code {run.exit_code}; see launcher.log with --keep DIR"
        )
        say(output.read_text(errors="replace")[-3000:])
    return run


def _watch(config: Config, run: Run, process: subprocess.Popen[str], started: float, log: Any) -> None:
    """Relay the ranks' lines, and kill the victim once, in the middle of an upload."""
    import threading

    def relay() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(("  step ", "generation ")):
                say(line.rstrip())
            else:
                log.write(line.encode())
                log.flush()

    relaying = threading.Thread(target=relay, daemon=True)
    relaying.start()
    first = CheckpointId(1, config.save_every)
    while process.poll() is None:
        if time.monotonic() - started > TRAINING_TIMEOUT_S:
            run.problems.append(f"training took longer than {TRAINING_TIMEOUT_S:.0f} s")
            return
        if run.kill is None and (kill := _moment(config, after=first)) is not None:
            pid = int(config.pid_file(VICTIM).read_text())
            os.killpg(pid, signal.SIGKILL)
            run.kill = kill
            say(
                f"KILL -9 of rank {VICTIM}'s process group: its {kill.size_bytes / 1e6:.0f} MB of step"
                f" {kill.checkpoint.step} were uploading for {kill.under_way_s:.1f} s,"
                f" {kill.sent_bytes / 1e6:.0f} MB acknowledged"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
    relaying.join(timeout=5)


def _moment(config: Config, after: CheckpointId) -> Kill | None:
    """Return the state if the victim is in the middle of an upload now: some bytes are in the store, some are not."""
    try:
        reading = journals.read(config.folder)[VICTIM]
    except (JournalError, KeyError):
        return None  # not there yet
    local, progress = reading.local(), reading.progress
    for id_, checkpoint in local.checkpoints.items():
        if id_ <= after or checkpoint.sealed is None or checkpoint.decision is not None:
            continue
        sent = sum(size for (of, _), size in progress.items() if of == id_)
        unsent = [each for each in checkpoint.shards.values() if each.stored is None]
        under_way_s = time.time() - checkpoint.sealed_at
        if unsent and (0 < sent < checkpoint.size_bytes or under_way_s > UPLOAD_S / 3):
            return Kill(id_, sent, checkpoint.size_bytes, under_way_s, time.time())
    return None


def _kill_groups(config: Config, process: subprocess.Popen[str]) -> None:
    """Leave nothing behind, although the ranks are process groups of their own."""
    pids = [process.pid] if process.poll() is None else []
    for rank in range(WORLD_SIZE):
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(config.pid_file(rank).read_text()))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


# --- the result --------------------------------------------------------------------------------------------


def _result(config: Config, run: Run, verdict: Verdict) -> dict[str, Any]:
    logs = [line for rank in range(WORLD_SIZE) for line in read_log(config.log(rank))]
    wrong = [*run.problems, *verdict.wrong]
    if run.kill is None:
        wrong.append("nobody was killed: no moment was found in the middle of an upload")
    elif run.kill.checkpoint not in verdict.committed:
        reason = verdict.aborted.get(run.kill.checkpoint, "it has no decision")
        wrong.append(f"{run.kill.checkpoint}, which was uploading at the kill, is not committed: {reason}")
    starts = [line for line in logs if line["event"] == "started" and line["rank"] == 0]
    resumed = [line for line in logs if line["event"] == "resumed"]
    sealed = [line for line in logs if line["event"] == "sealed"]
    if run.kill is not None and not any(line["step"] == run.kill.checkpoint.step for line in resumed):
        wrong.append(f"training was not resumed from step {run.kill.checkpoint.step}")
    sealed_at: dict[CheckpointId, float] = {}
    for line in sealed:
        id_ = CheckpointId(line["generation"], line["step"])
        sealed_at[id_] = max(line["at"], sealed_at.get(id_, 0.0))
    latency_s = {
        id_: verdict.committed[id_].decided_at - at
        for id_, at in sealed_at.items()
        if id_ in verdict.committed
        and (run.kill is None or id_.generation > 1 or verdict.committed[id_].decided_at < run.kill.at)
    }  # without those that waited for the kill
    saving = [line for line in logs if line["event"] == "saving"]
    metrics = _metrics(logs)
    return {
        "ok": not wrong,
        "wrong": wrong,
        "remote": config.remote,
        "seconds": round(run.seconds, 1),
        "checkpoints_committed": len(verdict.committed),
        "checkpoints_aborted": len(verdict.aborted),
        "steps_committed": [[id_.generation, id_.step] for id_ in sorted(verdict.committed)],
        "shards_compared": verdict.num_shards,
        "bytes_compared": verdict.size_bytes,
        "saves": len(sealed),
        "blocked_ms_median": _median([1e3 * line["blocked_s"] for line in saving]),
        "blocked_ms_max": max((1e3 * line["blocked_s"] for line in saving), default=None),
        "torch_save_ms_median": _median([1e3 * line["torch_save_s"] for line in saving]),
        "commit_s_median": _median(list(latency_s.values())),
        "commit_s_max": max(latency_s.values(), default=None),
        "retries": metrics["retries"],
        "pruned_locally": metrics["pruned"],
        "generations": [line["generation"] for line in starts],
        "metrics_urls": [line["metrics_url"] for line in starts],
        "kill": None
        if run.kill is None
        else {
            "rank": VICTIM,
            "step": run.kill.checkpoint.step,
            "upload_under_way_s": round(run.kill.under_way_s, 2),
            "bytes_acknowledged": run.kill.sent_bytes,
            "bytes_total": run.kill.size_bytes,
            "resumed_from_step": max((line["step"] for line in resumed), default=None),
        },
    }


def _metrics(logs: list[dict[str, Any]]) -> dict[str, int | None]:
    """Return the values that rank 0's endpoint served over HTTP at its end."""
    texts = [line["text"] for line in logs if line["event"] == "metrics"]
    if not texts:
        return {"retries": None, "pruned": None}
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(texts[-1]) for sample in family.samples]

    def total(name: str) -> int:
        return int(sum(sample.value for sample in samples if sample.name == name))

    return {
        "retries": total("ckpt_async_upload_attempt_failures_total"),
        "pruned": total("ckpt_async_pruned_checkpoints_total"),
    }


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _table(result: dict[str, Any]) -> str:
    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} ms"

    def s(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    kill = result["kill"]
    rows = [
        ("checkpoints committed", result["checkpoints_committed"]),
        ("checkpoints given up", result["checkpoints_aborted"]),
        ("shards compared byte for byte", result["shards_compared"]),
        ("bytes compared", f"{result['bytes_compared'] / 1e6:.0f} MB"),
        ("saves (2 ranks)", result["saves"]),
        (
            "training blocked per save",
            f"{ms(result['blocked_ms_median'])} median, {ms(result['blocked_ms_max'])} max",
        ),
        ("(torch.save into memory)", f"{ms(result['torch_save_ms_median'])} median"),
        (
            "last seal to commit (not the killed)",
            f"{s(result['commit_s_median'])} median, {s(result['commit_s_max'])} max",
        ),
        ("failed attempts, retried", result["retries"]),
        ("pruned locally (rank 0)", result["pruned_locally"]),
        ("metrics", ", ".join(filter(None, result["metrics_urls"]))),
        ("seconds of training", result["seconds"]),
    ]
    if kill is not None:
        sent = f"{kill['bytes_acknowledged'] / 1e6:.0f} of {kill['bytes_total'] / 1e6:.0f} MB acknowledged"
        rows.append(("killed", f"rank {kill['rank']}, uploading step {kill['step']}, {sent}"))
        rows.append(("resumed from", f"step {kill['resumed_from_step']}"))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    if result["ok"]:
        lines.append("OK: nothing was lost, nothing half-done was shown")
    lines += [f"WRONG: {each}" for each in result["wrong"]]
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
