"""Ranks behind a relay whose server cannot be reached: PyTorch's client would wait for it forever, once connected."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from support import LIMIT, free_port
from tcpstore_async.relay import core, upstream
from tcpstore_async.relay.running import relay


async def is_closed(port: int) -> bool:
    """Join as a rank; return whether the connection is closed without a reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(bytes.fromhex("00cef7853c0d07000000"))
    try:
        with suppress(ConnectionResetError):
            return await asyncio.wait_for(reader.read(1), LIMIT) == b""
        return True
    finally:
        writer.close()


async def test_they_have_to_connect_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_WAITING_SECONDS", 0.0)
    async with relay([("127.0.0.1", free_port())]) as front:
        assert await is_closed(front.port)
        await asyncio.wait_for(front.empty.wait(), LIMIT)


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "localhost"), ("::", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
async def test_a_relay_in_front_of_itself_says_so(host: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both ports are 29500 by default. It would wait for its own answer, and say that there is none."""
    port = free_port()
    async with relay([(name, port)], host, port):
        while "is the relay itself" not in caplog.text:
            assert "no answer" not in caplog.text
            await asyncio.sleep(0.001)


async def test_so_do_they_when_the_server_had_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_WAITING_SECONDS", 0.0)

    async def have_no_links(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x01")
        writer.close()

    server = await asyncio.start_server(have_no_links, "127.0.0.1", 0)
    async with relay([("127.0.0.1", server.sockets[0].getsockname()[1])]) as front:
        while front.state != core.DIRECT:
            await asyncio.sleep(0.001)
        server.close()
        await server.wait_closed()
        assert await is_closed(front.port)
        await asyncio.wait_for(front.empty.wait(), LIMIT)
