"""The addresses under which a node is offered to others. For real networks, see torch_side/test_peer_networks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_async.restore import PeerServer, peers


@pytest.mark.fault("F63")
def test_loopback_addresses_are_never_offered_to_other_nodes() -> None:
    """Loopback (also Debian's 127.0.1.1), link-local and unspecified addresses are left out. Each of the others is
    offered once, the most likely to work first, and only a few in all.
    """
    found = ["127.0.1.1", "10.0.0.7", "::1", "fe80::1", "169.254.1.1", "0.0.0.0", "::", "10.0.0.7", "fd00::7"]
    assert peers.usable(found) == ["10.0.0.7", "fd00::7"]
    assert peers.usable(["127.0.0.1"]) == []
    assert len(peers.usable(f"10.0.0.{number}" for number in range(100))) == peers.MOST_ADDRESSES


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, ["10.0.0.7", "fd00::7", "192.168.0.7"]),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, ["192.168.0.7"]),
        ({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, ["10.0.0.7", "fd00::7", "192.168.0.7"]),
        ({"GLOO_SOCKET_IFNAME": "typo"}, ["10.0.0.7", "fd00::7", "192.168.0.7"]),
        ({"MASTER_ADDR": "127.0.0.1"}, ["10.0.0.7", "fd00::7", "192.168.0.7"]),
        ({"MASTER_ADDR": "nobody.invalid"}, ["10.0.0.7", "fd00::7", "192.168.0.7"]),
    ],
)
def test_order_of_the_addresses(
    env: dict[str, str], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("eth0", "fd00::7"), ("eth1", "192.168.0.7")]
    monkeypatch.setattr(peers, "interface_addresses", lambda: iter(there))
    assert peers.own_addresses(env) == wanted


def test_addresses_of_this_machine() -> None:
    """They must be those that the kernel reports."""
    assert ("lo", "127.0.0.1") in list(peers.interface_addresses())
    told = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    of_kernel = {line.split()[3].partition("/")[0] for line in told.splitlines()}
    assert {address for _, address in peers.interface_addresses()} <= of_kernel


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.7", "http://10.0.0.7:"), ("fd00::7", "http://[fd00::7]:"), ("node-7", "http://node-7:")],
)
def test_addresses_become_urls(host: str, url: str, tmp_path: Path) -> None:
    with PeerServer({"key": tmp_path}, host) as server:
        assert server.peer is not None
        assert server.peer.url.startswith(url)
        assert host in server.peer.name
        assert server.peer.secret not in repr(server.peer)


def test_a_node_with_only_loopback_offers_no_address(tmp_path: Path) -> None:
    """Processes on the same node can still reach it."""
    code = (
        "from ckpt_async.restore import PeerServer\n"
        "with PeerServer({}) as server: print(server.peer, server.local_peer.url[:17])"
    )
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    done = subprocess.run(
        [*command, "bash", "-c", 'ip link set lo up; exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1"},
    )
    assert done.stdout.split() == ["None", "http://127.0.0.1:"]


def test_nodes_are_identified_by_machine_and_folder(tmp_path: Path) -> None:
    """Host names may be equal, so the machine is identified differently. The same folder reached by another path is the
    same place, even if it does not exist yet.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert peers.place(tmp_path / "a") == peers.place(tmp_path / "link")
    assert peers.place(tmp_path / "a" / "x" / "y") == peers.place(tmp_path / "link" / "x" / "y")
    assert peers.place(tmp_path / "a") != peers.place(tmp_path / "b")
    assert peers.place(tmp_path / "a" / "x") != peers.place(tmp_path / "a" / "y")
