"""Simulated ranks: connections that send what PyTorch's client sends, encoded by the package."""

import asyncio
import os
import socket
from typing import Any

from tcpstore_async.wire.commands import COMMANDS, MAGIC
from tcpstore_async.wire.values import pack

_BY_NAME = {command.name: command for command in COMMANDS}


class Failed(Exception):
    """A step of the demo failed; the message says which and why."""


class Rank:
    """One rank and its connection."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer
        self._received = b""

    async def call(self, name: str, *fields: Any) -> Any:
        """Send a command and return its decoded reply; return None at once if the command has no reply."""
        command = _BY_NAME[name]
        self._writer.write(bytes([command.opcode]) + command.request.encode(fields))
        while True:
            result, stop = command.reply.decode(self._received, 0, len(self._received), 0)
            if stop >= 0:
                self._received = self._received[stop:]
                return result
            try:
                self._received += await self._reader.readexactly(-stop - len(self._received))
            except (OSError, EOFError):
                raise Failed(f"the server closed the connection of simulated rank {self.number}") from None

    async def join(self) -> int:
        """Join as PyTorch's client does; return the number of ranks that have joined so far."""
        await self.call("VALIDATE", MAGIC)
        nonce = os.getpid()
        if await self.call("PING", nonce) != nonce:
            raise Failed(f"simulated rank {self.number} received a wrong reply to PING")
        arrival: int = await self.call("ADD", b"init/", 1)
        return arrival

    async def pass_barrier(self, key: bytes, world: int) -> int:
        """Pass PyTorch's store_based_barrier, which the last rank opens; return the place in order of arrival."""
        arrival: int = await self.call("ADD", key, 1)
        if arrival == world:
            await self.call("SET", key + b":last_worker", pack(b"1"))
        await self.call("WAIT", [key + b":last_worker"])
        return arrival

    def leave(self) -> None:
        self._writer.close()


async def connect(port: int, number: int) -> Rank:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        raise Failed(f"simulated rank {number} cannot connect: {error}") from None
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Rank(number, reader, writer)
