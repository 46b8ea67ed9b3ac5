"""Two nodes that resume together over real networks: kernel network namespaces joined by a cable.

Both nodes have the same host name, as cloned images do. The tests need no root, but a kernel that lets users create
namespaces; test_addresses also tests without one how addresses are chosen.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader

MIB = 1 << 20
NAMES = [f"{number}.pt" for number in range(8)]
SCENARIOS = ["ipv6", "loopback", "no-name", "interface", "dead"]
NEEDED = "unshare --user --map-root-user --net --mount --uts"

# Start the second node, then the cable, then the first node; when one of them ends, all are ended.
SCRIPT = """
set -e
node() { mount --bind "$BASE/hosts-$1" /etc/hosts; hostname twin; ip link set lo up; }
rank() { exec "$PYTHON" -m tests.torch_side.peer_ranks "$1" "$REMOTE" "$BASE" $SCENARIOS; }
plug() { ip link set "$1" name cable; ip addr add "fd77::$2/64" dev cable nodad; ip link set cable up; }
export -f node rank plug
mkfifo "$BASE/ready" "$BASE/plugged"
unshare --net --mount --uts bash -ec '
    node 1; echo $$ > "$BASE/ready"; read _ < "$BASE/plugged"; plug cable-b 2
    export GLOO_SOCKET_IFNAME=cable; rank 1' &
far=$!
read second < "$BASE/ready"
node 0
ip link add cable-a type veth peer name cable-b
ip link set cable-b netns "$second"
plug cable-a 1
echo > "$BASE/plugged"
(export GLOO_SOCKET_IFNAME=cable; rank 0) &
near=$!
wait -n || { kill $(jobs -p); exit 1; }
wait "$far"
wait "$near"
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both nodes did in all scenarios, played in a single start."""
    if (may := subprocess.run([*NEEDED.split(), "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"no namespaces here: `{NEEDED}` says {may.stderr.strip()}")
    base = tmp_path_factory.mktemp("networks")
    remote, rng = f"file://{base}/remote", random.Random(5)
    with Uploader(base / "truth", remote, rank=0, world_size=1) as uploader:
        folder = base / "truth" / "step-1"
        folder.mkdir()
        for name in NAMES:
            (folder / name).write_bytes(rng.randbytes(MIB))
        uploader.enqueue(folder, step=1)
        uploader.seal(1)
    (base / "hosts-0").write_text("127.0.0.1 localhost\n127.0.1.1 twin the-master\n")
    (base / "hosts-1").write_text("127.0.0.1 localhost\n10.77.0.1 the-master\n127.0.1.1 twin\n")
    environment = {
        **os.environ,
        "BASE": str(base),
        "REMOTE": remote,
        "PYTHON": sys.executable,
        "SCENARIOS": " ".join(SCENARIOS),
        "OMP_NUM_THREADS": "1",
    }
    played = subprocess.run(
        [*NEEDED.split(), "bash", "-c", SCRIPT],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert played.returncode == 0, played.stderr[-5000:]
    for rank in (0, 1):
        for name in SCENARIOS:
            for file in NAMES:
                assert (base / f"node-{rank}" / name / file).read_bytes() == (folder / file).read_bytes()
    return {
        name: [json.loads((base / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        for name in SCENARIOS
    }


@pytest.mark.fault("F63")
@pytest.mark.parametrize("name", ["ipv6", "loopback", "no-name", "interface"])
def test_each_byte_leaves_the_store_once(results: Any, name: str) -> None:
    """This must hold over IPv6 alone, where the master's host name resolves to its own loopback, where that name does
    not resolve, and where the interface is named. Half of the bytes come from the other node.
    """
    for each in results[name]:
        assert each["bytes_from"] == {"remote": 4 * MIB, "peer": 4 * MIB}
        assert each["lines"] == []


@pytest.mark.fault("F63")
def test_an_unreachable_node_is_reported_once(results: Any) -> None:
    """The report names the node and says how much came from the store instead."""
    first, second = results["dead"]
    assert first["bytes_from"] == {"remote": 4 * MIB, "peer": 4 * MIB}
    assert first["lines"] == []
    assert second["bytes_from"] == {"remote": 8 * MIB}
    (line,) = second["lines"]
    assert line.startswith("peers_failed num=1 of=1 from_store_instead_mib=4.0 twin (10.77.0.99): ")
