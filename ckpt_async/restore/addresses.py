"""The addresses under which other nodes may reach this one, and the identity of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_async.local.folder import boot_id

# At most this many addresses of a node that does not answer are tried.
MOST_ADDRESSES = 4

_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 1  # linux/sockios.h, linux/if.h


def own_addresses(env: Mapping[str, str]) -> list[str]:
    """Return this node's addresses, the likeliest first.

    If GLOO_SOCKET_IFNAME is set and its interfaces have addresses, those are returned and no others; otherwise the
    address from which MASTER_ADDR is reached, then this node's other ones. Loopback addresses never count, since
    they would lead other nodes to themselves; the result is empty if there is nothing else.
    """
    there = list(interface_addresses())
    chosen = {name for name in env.get("GLOO_SOCKET_IFNAME", "").split(",") if name}
    if of_chosen := usable(address for name, address in there if name in chosen):
        return of_chosen
    towards_master = _towards(env.get("MASTER_ADDR", ""))
    return usable([*towards_master, *(address for _, address in there)])


def usable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that mean this node on other nodes too, without duplicates. Pure."""
    found: list[str] = []
    for each in addresses:
        address = ipaddress.ip_address(each)
        if not (address.is_loopback or address.is_link_local or address.is_unspecified) and each not in found:
            found.append(each)
    return found[:MOST_ADDRESSES]


def in_url(host: str) -> str:
    """Return a host name or address in the form that a URL needs."""
    return f"[{host}]" if ":" in host else host


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield name and address of every interface that is up, with one IPv4 address each. On systems other than
    Linux, yield the addresses that this host's name resolves to.
    """
    if not Path("/proc/net").exists():
        with contextlib.suppress(OSError):
            yield from (("", str(each[4][0])) for each in socket.getaddrinfo(socket.gethostname(), None))
        return
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        up = [name for name in names if _ask(asking, _SIOCGIFFLAGS, name)[16] & _IFF_UP]
        for name in up:
            with contextlib.suppress(OSError):  # it has no address
                yield name, socket.inet_ntoa(_ask(asking, _SIOCGIFADDR, name)[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            if name in up:
                yield name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))


def _ask(asking: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(asking, request, struct.pack("256s", name.encode()[:15]))


def _towards(host: str) -> Sequence[str]:
    """Return the addresses from which this node would talk to `host`. Nothing is sent."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM) if host else ():
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]).partition("%")[0])
    return found


def machine() -> str:
    """Return an identifier shared by exactly those processes that reach each other through loopback addresses."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def place(folder: Path) -> str:
    """Return an identifier shared by all processes that share this folder on one machine. A host name alone is not
    enough, because images and containers use the same one many times over.
    """
    path = Path(os.path.realpath(folder))
    above = next((each for each in (path, *path.parents) if each.exists()), path)
    facts = above.stat()
    return f"{socket.gethostname()} {boot_id()} {facts.st_dev}:{facts.st_ino}/{os.path.relpath(path, above)}"
