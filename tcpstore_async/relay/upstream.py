"""Keep the relay connected to a server: choose it, find out what it can do, and resume the link when it breaks.

It knows LINK and the commands that identify a server and authenticate. It must not know how ranks' bytes travel.

Invariants: LINK is sent only to a server that has it. A broken link is resumed while the server keeps it, and no
longer; then its ranks are closed, as if the server had died. No rank waits for a server that refuses the relay for
good: it is told so.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from struct import Struct
from typing import Final

from ..auth.secret_files import TlsFiles
from ..base.addresses import EVERYWHERE, format_address
from ..base.errors import AccessDeniedError, ProtocolError, counted
from ..client import requests
from ..client.connect import leaves_host, open_connection, transfer
from ..client.credentials import warn_of_clear_text
from ..client.requests import Request
from ..client.server_url import Address
from ..client.servers import Servers, StandsByError
from ..client.tls import TlsFailed, TlsSocket, tls_required
from ..links.frames import LINK_REFUSED, RESUMED, UNKNOWN, LinkReply
from ..session.identity import LINKS, NAMES, QUESTIONS, TOKENS, Identity, check_admitted, read_auth_reply, read_identity
from ..session.tls import is_mismatch
from ..wire.commands import BY_METHOD, MAGIC
from .core import DIRECT, LINKED, Relay
from .forwarding import ForwardedConnection
from .refusing import Refusal, RefusedConnection

_ATTEMPT_SECONDS: Final = 10.0
"""Time to connect to one server and receive its reply to LINK."""

_PATIENCE: Final = 2.0
"""The same if there are other servers to try; doubled with each round."""

_WAITING_SECONDS: Final = 30.0
"""Seconds without a server after which a rank is closed and must connect again. PyTorch's client retries until its
timeout, but once connected it waits without a timeout."""

_TICK_SECONDS: Final = 1.0
"""Longest time between two ticks."""

_MISSED: Final = 3
"""Keep-alive intervals without a byte after which the connection counts as lost."""

_MOST_REPLY: Final = 64 * 1024
"""Bytes of the longest identity, or reply to LINK."""

_READY: Final = b"\x00"
"""The reply of CHECK if all keys exist: the server is ours."""

_U64: Final = Struct("<Q")

log = logging.getLogger("tcpstore_async.server")


class _RefusedError(Exception):
    """The server cannot be used for the link."""


class Upstream:
    """Keeps a relay connected to the first reachable one of its servers."""

    def __init__(
        self,
        relay: Relay,
        servers: list[Address],
        token: Callable[[], bytes] = bytes,
        tls: TlsFiles | None = None,
    ) -> None:
        """`servers` are hosts and ports; `token` returns the token to present to them, empty for none.

        With `tls`, connections to them are encrypted.
        """
        self.relay = relay
        self.token = token
        self.tls = tls
        self.servers = Servers(*servers)
        self.direct: set[_DirectConnection] = set()
        """Connections of ranks, while the server has no links."""
        self.refused: set[RefusedConnection] = set()
        """Connections of ranks that are told why the server has refused the relay."""
        self.server: Address = servers[0]
        """The last one reached."""
        self.reconsider = asyncio.Event()
        """Set when a server without links may have been replaced: ask it again."""
        self._over = asyncio.Event()
        """Set when the link's connection is lost."""
        self._refusal: Refusal | None = None
        """Serves ranks while no server can be used until a mistake is corrected; else None."""
        self._grace = 0.0
        self._keep_alive: float = 0.0
        self._heard: float = 0.0
        """When `_tick` last noticed that something was received on the link, in seconds of the loop's clock."""
        self._sent: float = 0.0
        """The tick before the one that last noticed that something was sent."""
        self._ticked: float = 0.0
        """When the last tick was."""
        self._sent_bytes: int = 0
        """What had been sent by then."""
        self._ticking: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._announced = ""
        """The last message about the server reached, which is not repeated."""
        relay.on_lost = self._lost
        relay.on_broken = self._broken
        relay.on_direct = self._forward

    async def run(self) -> None:
        """Connect, and reconnect, until cancelled."""
        failures = 0
        try:
            while True:
                if await self._connect_and_hold(failures):
                    failures = 0
                else:
                    failures += 1
                    self.relay.close_waiting(_WAITING_SECONDS)
                self.relay.wait_if_direct()
                if failures > 0:
                    await asyncio.sleep(self.servers.pause(failures))
        finally:
            self._cancel_giving_up()

    def close(self) -> None:
        """Close the connections of ranks that are not on a link."""
        for connection in list(self.direct):
            connection.close()
        for refused in list(self.refused):
            refused.close()

    async def _connect_and_hold(self, failures: int = 0) -> bool:
        """Connect to one of the servers, and wait until that connection is over. `failures` is how often that failed.

        Returns whether it was of use; then the next attempt follows at once.
        """
        causes: list[str] = []
        refusals = 0
        known = self.servers.all()
        self.servers.first = known[0] if self._giving_up is None else self.server  # which has the link
        limit = _ATTEMPT_SECONDS if len(known) == 1 else min(_ATTEMPT_SECONDS, _PATIENCE * 2.0 ** min(failures, 10))
        for server in self.servers.round():
            try:
                peer, reply = await asyncio.wait_for(self._reach(server), limit)
            except (OSError, ProtocolError, asyncio.TimeoutError, AccessDeniedError, _RefusedError) as error:
                causes.append(f"{format_address(*server)}: {_cause(error, limit)}")
                self.servers.note(error)
                if isinstance(error, (AccessDeniedError, TlsFailed)) and error.final:
                    refusals += 1
                    if isinstance(error, AccessDeniedError) and self._giving_up is not None and server == self.server:
                        self._give_up(_cause(error, limit))  # not for TlsFailed: a certificate may be corrected in time
                continue
            self._note_refusal("")
            with closing(peer):
                if reply is None:
                    peer.close()
                    self.server = server
                    await self._go_without_links()
                    return True
                return await self._hold(reply)
        tried = "; ".join(causes)
        refused = refusals == len(causes)
        exits = refused and not self.relay.tried.is_set()  # with this error
        if not exits and (self.relay.count or not self.relay.used.is_set()):
            self.relay.log_limited("upstream", f"cannot connect to {tried}; retrying")
        self._note_refusal(tried if refused else "")
        if self._refusal is not None:
            for fd, host, port in self.relay.take_waiting():
                self._refusal.serve(fd, host, port)
        return False

    def _note_refusal(self, reason: str) -> None:
        """Note the outcome of an attempt: why no server can be used until a mistake is corrected, or ""."""
        relay = self.relay
        relay.refusal = reason
        relay.tried.set()
        if not reason:
            self._refusal = None
        elif self._refusal is None or reason not in self._refusal.reason:
            where = format_address(relay.host, relay.port)
            text = f"the relay at {where} cannot use its server: {reason}"
            self._refusal = Refusal(text, self.refused, partial(relay.log_limited, "refused"), relay.left)

    # Reaching a server

    async def _reach(self, server: tuple[str, int]) -> tuple[socket.socket, LinkReply | None]:
        """Connect to a server; return the socket and the reply to LINK, or None if the server has no links.

        Raises OSError, ProtocolError, AccessDeniedError and _RefusedError.
        """
        token = self.token()
        peer = await open_connection(*server, self.tls)
        try:
            if self._is_own(peer):
                raise _RefusedError("this is the relay itself; --upstream must be the address of a server")
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            identity = await _identify(peer)
            if identity is not None and identity.elsewhere is not None:
                raise StandsByError(identity.elsewhere)
            if token:
                await _authenticate(peer, identity, token, server if self.tls is None and leaves_host(peer) else None)
            if self.relay.entry is not None and (identity is None or not identity.has_links(NAMES)):
                raise _RefusedError("it does not support named stores behind a relay")
            if identity is not None and identity.has_links(LINKS):
                try:
                    return peer, await self._open_link(peer, server, identity.extension >= QUESTIONS)
                except ConnectionError:
                    if not token:
                        check_admitted(identity)
                    raise
            self._check_that_link_may_end(server)
            return peer, None
        except ConnectionError as error:
            try:
                raise (peer.why(error) if isinstance(peer, TlsSocket) else error) from None
            finally:
                peer.close()
        except BaseException:
            peer.close()
            raise

    def _is_own(self, peer: socket.socket) -> bool:
        """Return whether a connection leads to the relay itself, even by a name such as localhost."""
        own = self.relay.host
        host, port = peer.getpeername()[:2]
        local = host == peer.getsockname()[0]
        return port == self.relay.port and (own == host or (own in EVERYWHERE and local))

    async def _open_link(self, peer: socket.socket, server: tuple[str, int], describes: bool) -> LinkReply:
        """Resume the link on a connection, or open a new one if the server no longer knows it; return the reply.

        `describes` is whether the server accepts descriptions of ranks.
        """
        relay = self.relay
        for _ in range(2):
            link = relay.link
            link.describes = describes
            await transfer(peer, link.request(validate=False))
            raw = await _read_value(peer)
            if relay.link is not link:
                raise _RefusedError("the link was abandoned in the meantime")
            reply = link.answered(raw)
            if link.connected:
                self._carry_on(peer, server, reply)
                return reply
            if reply.status == LINK_REFUSED:
                relay.abandon_link()
                raise _RefusedError(f"it refused the link: {reply.reason}")
            if reply.status != UNKNOWN:
                break
            if reply.instance != link.instance:
                self._check_that_link_may_end(server)
            self._give_up("the server has restarted, or has ended the link")
        raise ProtocolError(f"unexpected status {reply.status!r} in the reply to LINK")

    def _check_that_link_may_end(self, server: tuple[str, int]) -> None:
        """Raise _RefusedError if another server, which may come back, has the link."""
        if self._giving_up is not None and server != self.server:
            raise _RefusedError(f"it does not recognize the link established with {format_address(*self.server)}")

    # A link

    def _carry_on(self, peer: socket.socket, server: tuple[str, int], reply: LinkReply) -> None:
        """Let the relay use a connection that the server has accepted as the link's."""
        self.server = server
        self._cancel_giving_up()
        self._grace = reply.grace
        self._over.clear()
        if reply.status == RESUMED:
            self.relay.log_limited("resumed", f"resumed the link to {format_address(*server)}")
        else:
            self._announce(f"linked to {format_address(*server)}")
        self.relay.connect(peer)

    async def _hold(self, reply: LinkReply) -> bool:
        """Serve the link until its connection is over; return whether it carried anything."""
        relay = self.relay
        link = relay.link
        taken = link.taken
        self._keep_alive = reply.keep_alive or _TICK_SECONDS
        self._heard = self._sent = self._ticked = asyncio.get_running_loop().time()
        self._sent_bytes = link.sent
        self._expect_tick()
        try:
            await self._over.wait()
        finally:
            if self._ticking is not None:
                self._ticking.cancel()
        relay.disconnect()
        return link.taken > taken

    def _expect_tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(self._tick_seconds(), self._tick)

    def _tick_seconds(self) -> float:
        return min(_TICK_SECONDS, self._keep_alive / 2)

    def _tick(self) -> None:
        """Keep the connection alive, give it up if the server is silent, and tick the relay."""
        self._expect_tick()
        relay = self.relay
        relay.tick()
        now = relay.loop.time()
        sent = relay.link.sent
        if relay.heard:
            self._heard, relay.heard = now, False
        if self._sent_bytes != sent:
            self._sent, self._sent_bytes = self._ticked, sent
        if now - self._heard >= _MISSED * self._keep_alive:
            relay.disconnect()
            self._lost(f"nothing received for {now - self._heard:.0f} s")
        elif now + self._tick_seconds() - self._sent >= self._keep_alive:  # the next tick may be too late
            self._sent = now
            relay.acknowledge()
        self._ticked = now

    def _lost(self, reason: str) -> None:
        """Handle the loss of the connection: the link can be resumed within its grace period."""
        if self.relay.ranks_on_link():
            where = format_address(*self.server)
            text = f"lost the link to {where}: {reason}; will try for up to {self._grace:g} s to resume it"
            self.relay.log_limited("lost", text)
            self._cancel_giving_up()
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._grace, self._give_up, f"not resumed within {self._grace:g} s")
        else:
            self._give_up(reason)
        self._over.set()

    def _broken(self, reason: str) -> None:
        self._give_up(reason)
        self._over.set()

    def _give_up(self, reason: str) -> None:
        """Close all ranks, as if the server had died."""
        self._cancel_giving_up()
        relay = self.relay
        count = relay.ranks_on_link()
        log.log(
            logging.WARNING if count else logging.INFO,
            "the link to %s has ended: %s; closing %s",
            format_address(*self.server),
            reason,
            counted(count, "connection"),
        )
        self._announced = ""
        relay.abandon_link()

    def _cancel_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    # Without links

    async def _go_without_links(self) -> None:
        """Give each rank a connection of its own, until `reconsider`."""
        relay = self.relay
        if relay.state == LINKED:
            self._give_up("the server has been replaced by one that does not support links")
        where = format_address(*self.server)
        self._announce(f"{where} does not support links: each rank gets a connection of its own")
        self.reconsider.clear()
        relay.set_state(DIRECT)
        await self.reconsider.wait()

    def _forward(self, fd: int, host: str, port: int) -> None:
        if not self.direct:
            self.reconsider.set()  # no rank depends on the present server, so asking again costs little
        connection = _DirectConnection(self)
        self.direct.add(connection)
        connection.start(fd)

    async def connect(self) -> socket.socket:
        """Return a socket connected to the last server reached. Raises OSError."""
        return await open_connection(*self.server, self.tls)

    def _announce(self, text: str) -> None:
        if text != self._announced:
            self._announced = text
            log.info("%s", text)


class _DirectConnection(ForwardedConnection):
    """A rank's connection to a server without links."""

    def __init__(self, upstream: Upstream) -> None:
        super().__init__(upstream.connect)
        self.upstream = upstream
        self._starting: asyncio.Task[None] | None = None
        self._since = time.monotonic()
        self._over = False

    def start(self, fd: int) -> None:
        self._starting = asyncio.get_running_loop().create_task(self._start(socket.socket(fileno=fd)))

    async def _start(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self.client, accepted)
        except OSError:
            accepted.close()
            self._leave()

    def failed(self, address: str, error: OSError) -> None:
        upstream = self.upstream
        where = format_address(*upstream.server)
        upstream.relay.log_limited("direct", f"cannot connect to {where} for {address}, retrying: {_cause(error)}")
        upstream.reconsider.set()
        if time.monotonic() - self._since >= _WAITING_SECONDS:
            self.close()

    def lost(self, by_client: bool, error: Exception | None) -> None:
        if not by_client and not self.client.finished and not self._over:
            self.upstream.reconsider.set()
        self._over = True
        super().lost(by_client, error)
        self._leave()

    def _leave(self) -> None:
        if self in self.upstream.direct:
            self.upstream.direct.discard(self)
            self.upstream.relay.left()


async def _identify(peer: socket.socket) -> Identity | None:
    """Ask a server, on a new connection, for its identity; None if it is not one of ours.

    Raises OSError, ProtocolError, and AccessDeniedError if it requires TLS.
    """
    await transfer(peer, _encode((BY_METHOD["validate"], (MAGIC,))) + _encode(requests.HAS_EXTENSION))
    answer = await _read_exactly(peer, 1)
    if is_mismatch(answer):
        raise tls_required()
    if answer != _READY:
        return None
    await transfer(peer, _encode(requests.WHO_ARE_YOU))
    return read_identity(await _read_value(peer))


async def _authenticate(
    peer: socket.socket, identity: Identity | None, token: bytes, clear_to: tuple[str, int] | None
) -> None:
    """Present a token to a server that checks it. Raises OSError, ProtocolError and AccessDeniedError.

    `clear_to` is the server's address if others could read the token in transit.

    Servers without links do not check tokens, so ranks with connections of their own need none.
    """
    if identity is None or identity.extension < TOKENS:
        raise AccessDeniedError("it does not check tokens, so the token was not sent")
    if clear_to is not None:
        warn_of_clear_text(*clear_to)
    await transfer(peer, _encode(requests.auth(token)))
    read_auth_reply(await _read_value(peer))


def _encode(request: Request) -> bytes:
    command, fields = request
    return command.prefix + command.request.encode(fields)


async def _read_value(peer: socket.socket) -> bytes:
    size: int = _U64.unpack(await _read_exactly(peer, 8))[0]
    if size > _MOST_REPLY:
        raise ProtocolError(f"reply too long: {size} bytes")
    return await _read_exactly(peer, size)


async def _read_exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = await transfer(peer, count - len(data))
        if not chunk:
            raise ConnectionError("the server closed the connection")
        data += chunk
    return data


def _cause(error: Exception, limit: float = _ATTEMPT_SECONDS) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {limit:g} s"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
