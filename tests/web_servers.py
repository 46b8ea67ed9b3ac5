"""Real web servers of a folder, on loopback: aiohttp's serves ranges, the one in Python's own library does not."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from aiohttp import web


@contextlib.contextmanager
def serving_ranges(
    folder: Path, *, page: str = "", forbids: bool = False, asked: list[str] | None = None
) -> Iterator[str]:
    """Yield the URL of `folder`; below /moved/, everything is redirected there. `page` is the answer for missing
    files; with `forbids` it is 403, as from buckets that may not be listed. `asked` gets the path of each request.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        if asked is not None:
            asked.append(request.match_info["path"])
        path = folder / request.match_info["path"]
        if path.is_file():
            return web.FileResponse(path)
        if page:
            return web.Response(text=page, content_type="text/html")
        return web.Response(status=403 if forbids else 404)

    async def moved(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"/{request.match_info['path']}")

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_get("/moved/{path:.*}", moved)
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving_whole_files(folder: Path) -> Iterator[str]:
    """Serve `folder` without ranges: a request for a range is answered with the whole file."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
