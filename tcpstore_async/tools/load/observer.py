"""Decodes the traffic of one connection between a client and a server.

An `Observer` gets copies of the bytes, in the order in which they pass, and writes rows of a recording. Must not know
sockets or clocks. Invariant: whatever passes, it raises nothing. A connection whose traffic it cannot decode becomes
opaque: from then on only bytes are counted.
"""

from collections.abc import Iterator
from typing import Any, Final

from ...base.errors import PeerError, ProtocolError
from ...base.limits import GIB, MIB, Limits
from ...session.client import ClientSession, PendingCall
from ...wire.codecs import CANCELED, DEFERRED_VALUE, NO_REPLY, NO_VALUE, VALUES, Fields, PartialRequest
from ...wire.commands import BY_METHOD, BY_OPCODE, HOLDS, Command
from .recording import FIELDS, REPLIES, RowEncoder

_LIMITS: Final = Limits(
    key_bytes=MIB,
    value_bytes=4 * GIB,
    keys=1 << 24,
    request_bytes=16 * GIB,
    request_key_bytes=GIB,
    budget_bytes=16 * GIB,
)
"""Above the limits of any server: requests that a server refuses are recorded too."""

_LINK: Final = BY_METHOD["link"]
_TAKEN: Final = BY_METHOD["taken"]
_AUTH: Final = BY_METHOD["auth"]
_ENTER: Final = BY_METHOD["enter"]
_PING: Final = BY_METHOD["ping"]
_LEASE_LATER: Final = BY_METHOD["lease_later"]
_CANCEL_WAIT: Final = BY_METHOD["cancel_wait"]
_CANCEL_FETCH: Final = BY_METHOD["cancel_fetch"]


def _as_tuple(*fields: Any) -> Fields:
    return fields


class RequestDecoder:
    """Decodes the requests of one connection, however they are split into chunks."""

    def __init__(self) -> None:
        self._command: Command | None = None
        self._partial: PartialRequest | None = None
        self._kept: bytearray | None = None
        self._need = 0

    def receive(self, chunk: bytes) -> Iterator[tuple[Command, Fields]]:
        """Yield the requests that this chunk completes. Raises PeerError for undecodable ones."""
        data = chunk
        if self._kept is not None:
            self._kept += chunk
            if len(self._kept) < self._need:
                return
            data = bytes(self._kept)
            self._kept = None
        at = 0
        end = len(data)
        while at < end:
            if self._partial is None:
                self._command = BY_OPCODE[data[at]]
                if self._command is None or self._command.request not in FIELDS:
                    raise ProtocolError(f"opcode {data[at]}")
                result, stop = self._command.request.decode(_as_tuple, data, at + 1, end, _LIMITS)
            else:
                assert self._command is not None
                result, stop = self._partial.decode(_as_tuple, data, at, end, _LIMITS)
                self._partial = None
            if stop < 0:
                if result is not None:
                    self._partial = result
                    at = result.at
                self._need = -stop - at
                self._kept = bytearray(memoryview(data)[at:])
                return
            at = stop
            assert self._command is not None
            yield self._command, result


class Processes:
    """Assigns numbers to the hosts and processes that clients connect from."""

    def __init__(self) -> None:
        self._hosts: dict[str, int] = {}
        self._processes: dict[tuple[str, int], int] = {}

    def host(self, address: str) -> int:
        return self._hosts.setdefault(address, len(self._hosts))

    def process(self, address: str, pid: int) -> int:
        return self._processes.setdefault((address, pid), len(self._processes))

    def __len__(self) -> int:
        return len(self._processes)


class Observer:
    """Observes one connection. Times are in seconds of the recording's clock."""

    def __init__(self, rows: RowEncoder, number: int, address: str, processes: Processes, now: float) -> None:
        self._rows = rows
        self._number = number
        self._address = address
        self._processes = processes
        self._requests = RequestDecoder()
        self._session = ClientSession()
        self._bytes_sent = 0
        self._bytes_received = 0
        self._process = -1
        self.opaque = False
        self.entered = False
        """Whether the client has asked for a named store."""
        self.count = 0
        """Number of requests so far."""
        rows.add(now, number, "OPEN", processes.host(address))

    def sent(self, chunk: bytes, now: float) -> None:
        """Note bytes that the client has sent."""
        self._bytes_sent += len(chunk)
        if self.opaque:
            return
        try:
            for command, fields in self._requests.receive(chunk):
                self._request(command, fields, now)
                if self.opaque:
                    return
        except PeerError as error:
            self._give_up(str(error), now)

    def replied(self, chunk: bytes, now: float) -> None:
        """Note bytes that the server has sent."""
        self._bytes_received += len(chunk)
        if self.opaque:
            return
        try:
            for call in self._session.receive(chunk):
                self._reply(call, now)
        except PeerError as error:
            self._give_up(str(error), now)

    def closed(self, by: str, now: float) -> None:
        """Note the end of the connection, by the `client` or the `server`."""
        self._rows.add(now, self._number, "CLOSE", by, self._bytes_sent, self._bytes_received)

    def _request(self, command: Command, fields: Fields, now: float) -> None:
        if command is _TAKEN:  # like LINK, it belongs to the connection, not to the job
            return
        if command is _LINK or command is _AUTH:  # tokens are not recorded
            self._session.pending.append(PendingCall(command, 0, 0, ()))
            return
        self.count += 1
        self.entered = self.entered or command is _ENTER
        blocked = self._blocked()
        if blocked is not None:
            if command is _cancel_of(blocked.command) and not blocked.canceled:
                blocked.canceled = True
                self._rows.add(now, self._number, command.name, True)
                return
            if not (command.reply is NO_REPLY and command.flags & HOLDS):
                self._give_up(f"{command.name} while {blocked.command.name} is blocking", now)
                return
        if command is _PING and self._process < 0:  # the first one has the process id; later ones, any number
            self._process = self._processes.process(self._address, fields[0])
            self._rows.add(now, self._number, "PING", self._process)
        else:
            self._rows.add_request(now, self._number, command, fields)
        count = len(fields[0]) if fields and isinstance(fields[0], list) else 0
        if command.reply is not NO_REPLY and (count or command.reply is not VALUES):
            self._session.pending.append(PendingCall(command, count, 0, ()))

    def _blocked(self) -> PendingCall | None:
        """Return the call that blocks; a cancel without a wait does not."""
        call = self._session.waiting
        return None if call is None or call.command.reply in (CANCELED, NO_VALUE) else call

    def _reply(self, call: PendingCall, now: float) -> None:
        if call.canceled and call.command is not _LEASE_LATER:
            self._rows.add(now, self._number, "REPLY", call.woken)
        elif call.command.reply in REPLIES and call.command not in (_LINK, _AUTH):
            self._rows.add_reply(now, self._number, call.command, call.result)

    def _give_up(self, why: str, now: float) -> None:
        self.opaque = True
        self._rows.add(now, self._number, "OPAQUE", why)


def _cancel_of(command: Command) -> Command | None:
    """Return the command that cancels a blocked one; None for a lease, which is given up by its ticket."""
    if command.reply is DEFERRED_VALUE:
        return _CANCEL_FETCH
    return None if command is _LEASE_LATER else _CANCEL_WAIT
