"""A TCP proxy on loopback that breaks connections after a number of bytes, for protocols that it cannot parse."""

import asyncio
import contextlib

from tests.loop_server import LoopServer


class Cutter(LoopServer):
    """The proxy, as a context manager. Clients are given `port` instead of the server's port."""

    def __init__(self, port: int) -> None:
        super().__init__("cutter")
        self._upstream = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: dict[str, int | None] = {"up": None, "down": None}
        self.num_cut = 0
        self.port = 0

    def cut(self, way: str, after_bytes: int) -> None:
        """Break all connections, once, when this many more bytes have gone `up` to the
        server or come `down` from it.
        """
        self._loop.call_soon_threadsafe(self._left.__setitem__, way, after_bytes)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        self._break_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _break_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_writer = None
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry("up", reader, up_writer))
                group.create_task(self._carry("down", up_reader, writer))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # one of the two sides went away, or the connection was cut
        finally:
            self._tasks.discard(task)
            for each in (writer, up_writer):
                if each is not None:
                    each.transport.abort()

    async def _carry(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            left = self._left[way]
            if left is not None and left < len(data):
                self._left[way] = None
                self.num_cut += 1
                with contextlib.suppress(OSError):
                    writer.write(data[:left])
                    await writer.drain()
                self._break_all()
                return
            if left is not None:
                self._left[way] = left - len(data)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # so that the other direction ends as well
