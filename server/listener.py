"""Accepts connections and keeps an eye on them: who is silent for too long, or holds what others need, is let go."""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
import socket
from dataclasses import dataclass

from aiohttp import web

from pie_server.connection import Connection, Patience
from pie_server.logs import log

ACCEPTS = 64  # in a row, before those that are connected get their turn
DROPS = 16  # idle connections closed at one time when there is no room
PAUSE_S = 1.0  # before the next try to accept, where nothing could be closed
LOG_S = 60.0  # between two lines about it
OWN_FILES = 256  # descriptors left to the server's own files, or a quarter of the limit where that is less


@dataclass(frozen=True)
class Room:
    """How many connections may be open at one time."""

    most: int

    @classmethod
    def of_process(cls) -> Room:
        """What the process's limit of open files leaves."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return cls(1 << 20)
        return cls(max(1, soft - min(OWN_FILES, soft // 4)))


class Listener:
    """Accepts on a bound socket until `close`. Connections that are open then stay: ending them is the runner's part."""

    def __init__(self, server: web.Server, sock: socket.socket, patience: Patience, room: Room) -> None:
        self._server, self._sock, self._patience, self._room = server, sock, patience, room
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._attaching: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._told: float | None = None  # when the log heard last of a lack of room
        self._refused = 0  # tries since then
        self._accepting()
        self._watching = self._loop.create_task(self._watch())

    def close(self) -> None:
        """Stop listening; the socket is closed."""
        self._watching.cancel()
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _accepting(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            if len(self._open) + len(self._attaching) >= self._room.most:
                self._make_room(f"{self._room.most} connections are all that the limit of open files leaves")
                return
            try:
                peer, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._make_room(error.strerror or str(error))
                return
            peer.setblocking(False)
            task = self._loop.create_task(self._attach(peer))
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    async def _attach(self, peer: socket.socket) -> None:
        def connection() -> Connection:
            return Connection(self._server, self._open, self._patience, loop=self._loop)

        try:
            await self._loop.connect_accepted_socket(connection, peer)
        except OSError as error:
            peer.close()
            log("connection_fault", logging.ERROR, error=error.strerror or str(error))
        except BaseException:
            peer.close()
            raise

    def _make_room(self, why: str) -> None:
        """Close those that have waited longest without a request; where all are at work, new ones wait in the system's queue."""
        idle = heapq.nsmallest(DROPS, (one for one in self._open if one.idle), key=lambda one: one.since)
        for one in idle:
            one.force_close()
        if not idle:
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_later(PAUSE_S, self._accepting)
        self._refused += 1
        now = self._loop.time()
        if self._told is None or now - self._told >= LOG_S:
            log("no_room_for_connections", logging.WARNING, error=why, open=len(self._open), closed_idle=len(idle), times=self._refused)
            self._told, self._refused = now, 0

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._patience.look_s)
            self._look()  # by itself: no name here may hold a connection until the next one

    def _look(self) -> None:
        now = self._loop.time()
        for one in list(self._open):
            one.look(now)


async def listen(runner: web.AppRunner, sock: socket.socket, patience: Patience | None = None, room: Room | None = None) -> Listener:
    """Serve `runner`, which is set up, on a bound socket."""
    server = runner.server
    assert server is not None  # the runner was set up
    return Listener(server, sock, patience or Patience(), room or Room.of_process())
