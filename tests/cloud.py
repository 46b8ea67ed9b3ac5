"""`./dev cloud URL`: what the stores' tests promise, and the demo, in a bucket of your own; see docs/cloud.md.

URL is a place below which nothing else lies. Everything is written below new names there, and the tests remove what
they have written; the demo leaves its run.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLASSES = {"s3": "TestS3Store", "gs": "TestGcsStore", "az": "TestAzureAsDocumented"}


def main(url: str) -> int:
    scheme = url.partition("://")[0]
    if scheme not in CLASSES:
        print(
            f"{url!r} is no bucket: URL is one of {', '.join(f'{each}://…' for each in CLASSES)}",
            file=sys.stderr,
        )
        return 2
    remote = url.rstrip("/")
    tests = f"tests/stores/test_conformance.py::{CLASSES[scheme]}"
    failed = [
        name
        for name, command in {
            "doctor": ("-m", "ckpt_async", "doctor", f"{remote}/doctor", "--speed"),
            "conformance": ("-m", "pytest", "-q", tests),
            "demo": ("-P", "-m", "tests.demo", "--remote", f"{remote}/demo"),
        }.items()
        if not succeeds(name, command, remote)
    ]
    print(f"FAILED: {', '.join(failed)}" if failed else "all good: doctor, conformance, demo")
    return 1 if failed else 0


def succeeds(name: str, command: tuple[str, ...], remote: str) -> bool:
    print(f"--- {name}", flush=True)
    env = {**os.environ, "CKPT_TESTS_REMOTE": remote, "PYTHONPATH": str(ROOT)}
    return subprocess.call([sys.executable, *command], cwd=ROOT, env=env) == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [""]))
