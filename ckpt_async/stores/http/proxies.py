"""HTTP proxies, as the environment names them: a tunnel through one for TLS, forwarded requests for the rest."""

from __future__ import annotations

import http
import http.client
import socket
import urllib.request
from base64 import b64encode
from functools import partial
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from ckpt_async.errors import SettingsError
from ckpt_async.stores.http.messages import HEAD_BYTES, parsed


def has_proxy(url: str) -> bool:
    """Return whether the environment sends requests to `url` through a proxy."""
    return bool(proxy_of(url))


def proxy_of(url: str) -> str:
    """Return the proxy for `url` without the name and password that may be in its URL, or "" for none."""
    return proxy_url(url).rpartition("@")[2]


def proxy_url(url: str) -> str:
    """Return the URL of the proxy for `url`, perhaps with its password, or "" for none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def send_through(proxy: str, connection: http.client.HTTPConnection, url: SplitResult) -> None:
    """Have a connection to the host of `url`, not established yet, go through the proxy. Raises SettingsError."""
    there = urlsplit(proxy)
    if there.scheme != "http" or there.hostname is None:
        raise SettingsError(f"the proxy {proxy_of(url.geturl())} is not one at http://", hint="set NO_PROXY")
    made: Any = connection
    is_tunnel = url.scheme == "https"
    made._create_connection = partial(_dial, there, is_tunnel=is_tunnel)  # noqa: SLF001  what a tunnel sets, too
    if not is_tunnel:
        made.forwarded_to = f"http://{url.netloc}".encode(), _authority(there)


def told(connection: http.client.HTTPConnection, request: bytes) -> bytes:
    """Return a request, or its head, as it is sent on this connection (RFC 9112, 3.2.2)."""
    if (there := getattr(connection, "forwarded_to", None)) is None:
        return request
    origin: bytes
    line: bytes
    origin, line = there
    first, end, rest = request.partition(b"\r\n")
    return first.replace(b" ", b" " + origin, 1) + end + line + rest


def _dial(
    proxy: SplitResult, address: tuple[str, int], timeout_s: float, source: Any, *, is_tunnel: bool
) -> socket.socket:
    made = socket.create_connection((proxy.hostname or "", proxy.port or 80), timeout_s, source)
    try:
        if is_tunnel:
            _make_tunnel(made, address, proxy)
    except BaseException:
        made.close()
        raise
    return made


def _make_tunnel(made: socket.socket, address: tuple[str, int], proxy: SplitResult) -> None:
    host, port = address
    there = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    made.sendall(f"CONNECT {there} HTTP/1.1\r\nHost: {there}\r\n".encode() + _authority(proxy) + b"\r\n")
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = made.recv(1)  # what follows belongs to TLS
        if not piece or len(head) > HEAD_BYTES:
            raise ConnectionError(f"the proxy {proxy.hostname} closed the connection")
        head += piece
    if (status := parsed(head[:-4]).status) != http.HTTPStatus.OK:
        raise ConnectionError(f"the proxy {proxy.hostname} answered {status}")


def _authority(proxy: SplitResult) -> bytes:
    """Return the header line by which the proxy knows us."""
    if proxy.username is None:
        return b""
    secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return b"Proxy-Authorization: Basic " + b64encode(secret) + b"\r\n"
