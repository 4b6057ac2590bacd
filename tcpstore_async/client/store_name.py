"""Named stores: which server holds a store, which name an address stands for, and how a connection enters the store.

It knows TCPSTORE_SERVER_URL, names made of addresses, and ENTER; it must not know how bytes travel.

Invariants: without the variable or the argument, addresses are addresses. Ranks that spell an address alike mean the
same store. A rank whose spelling names no store means the store of a master that was given any address (0.0.0.0) of
that host. A client that has been in a store enters the same incarnation again, or none.
"""

import functools
import ipaddress
import os
import re
import socket
from collections.abc import Generator, Iterable
from typing import Final

from ..base.addresses import format_address, spelled
from ..base.errors import AccessDeniedError, DistNetworkError
from ..session.client import ClientSession, PendingCall
from ..session.identity import (
    ENDED,
    ENTERED,
    LOST,
    MAX_ADDRESSES,
    MAX_ID,
    MAX_NAME,
    NAMES,
    REFUSED,
    TAKEN,
    Identity,
    read_enter_reply,
    with_store,
)
from ..wire.values import unpack
from . import requests
from .interfaces import global_addresses
from .server_url import ServerUrl, parse_server_url
from .url_variables import SERVER_URL

ATTEMPT: Final = "TCPSTORE_ATTEMPT"

_LOOPBACK: Final = re.compile(
    r"|(.*\.)?localhost|localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)|0+|127(\.[0-9]+){1,3}"
)
"""Names of the local host, and short forms that `ipaddress` does not parse."""

_ANY: Final = re.compile(r"0*")
"""Short forms of "any address"."""

_FREE_IT: Final = (
    "that is this process: close that store, or drop all references to it, before another one takes its name, or share "
    "it (multi_tenant=True for both)"
)


class StoreEndedError(DistNetworkError):
    """The named store that a client was in has ended."""


class StoreTakenError(DistNetworkError):
    """The name is in use by another owner's store."""


def find_server(given: str | None) -> ServerUrl | None:
    """Return the server of the argument or, if that is None, of TCPSTORE_SERVER_URL; None without one.

    Raises ValueError for another URL.
    """
    url = os.environ.get(SERVER_URL, "") if given is None else given
    if not url:
        return None
    try:
        return parse_server_url(url)
    except ValueError as error:
        raise ValueError(f"{SERVER_URL if given is None else 'server'}: {error}") from None


def name_of(host: str, port: int) -> str:
    """Return the store name that an address stands for; one on loopback is private to this host, network and user.

    All spellings of an IP address give the same name.
    """
    address, host = _parse(host)
    return (
        f"{this_network()}/{os.getuid()}/localhost:{port}" if _is_local(address, host) else format_address(host, port)
    )


_Literal = ipaddress.IPv4Address | ipaddress.IPv6Address


def _parse(host: str) -> tuple[_Literal | None, str]:
    """Return the IP address, or None for a name, and the normalized text of either."""
    host = host.lower().rstrip(".")
    try:
        address: _Literal = ipaddress.ip_address(host)
    except ValueError:
        return None, host
    address = getattr(address, "ipv4_mapped", None) or address
    return address, str(address)


def _is_local(address: _Literal | None, host: str) -> bool:
    if address is None:
        return _LOOPBACK.fullmatch(host) is not None
    return address.is_loopback or address.is_unspecified


def address_of(host: str, port: int) -> str:
    """Return an address at which a store of any address of its host is found; unlike a name, it has no user in it."""
    address, host = _parse(host)
    return f"{this_network()}/localhost:{port}" if _is_local(address, host) else format_address(host, port)


def _addresses_of(hosts: Iterable[str], port: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(address_of(host, port) for host in hosts))[:MAX_ADDRESSES]


def is_local(host: str) -> bool:
    """Return whether an address is on loopback, so that it means another host's services there."""
    return name_of(host, 0) == name_of("localhost", 0)


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def this_network() -> str:
    """Return text that identifies this host's network namespace: processes with the same text share loopback."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    return f"{_boot()}/{network}"


def attempt_from_environment() -> str:
    """Return this process's attempt of its job, if it is the same for all ranks; else ""."""
    attempt = os.environ.get(ATTEMPT, "")
    if not attempt and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # several agents count their restarts separately
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return attempt


@functools.cache
def process_id() -> str:
    """Return text that is unique to this process."""
    return os.urandom(16).hex()


os.register_at_fork(after_in_child=process_id.cache_clear)


def _check_length(wrong: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise ValueError(f"{wrong}: {size} bytes (max {most})")


class StoreName:
    """One client's membership in a named store."""

    def __init__(self, name: str, owner: str = "", shares: str = "", joins: int = 0, attempt: str = "") -> None:
        """`owner` is the unique id of the store's owner; other clients leave it and the following two empty.

        `shares` is a key under which several owners share the store, `joins` the number of ranks expected. Raises
        ValueError if the name or the attempt is too long for a server.
        """
        _check_length(f"{name[:32]!r}… is too long for the name of a store", name, MAX_NAME)
        _check_length(f"{ATTEMPT} is too long", attempt, MAX_ID)
        self.name = name
        self.owner = owner
        self.shares = shares
        self.joins = joins
        self.attempt = attempt
        self.incarnation = ""
        """Id of the store among all that have had this name; empty until it has been entered."""
        self.waits = True
        """Whether to wait until the store exists."""
        self.address: tuple[str, int] | None = None
        """The address that the name was made of, if any."""
        self.addresses: tuple[str, ...] = ()
        """For the owner, further addresses of the store; for others, addresses that the name may stand for."""
        self.host_to_resolve = ""
        """Host to be resolved before the next step of `enter`; its addresses are due to `resolved`."""
        self.unresolved = False
        """Whether that host has no address yet."""
        self.absent = False
        """Whether the server has replied that there is no such store."""
        self.others: tuple[str, ...] = ()
        """Existing stores of the same port, from that reply."""
        self.wants_port = False
        """Whether the store needs a port at the server, for clients that cannot enter a named store."""
        self.port = 0
        """That port, once the store has been entered; 0 if there is none."""
        self.no_port = ""
        """Why there is no such port."""
        self.asked = False
        """Whether an ENTER is unanswered."""
        self.relay = ""
        """Address of the relay through which its ranks enter; empty for other clients."""

    @classmethod
    def at(cls, host: str, port: int, owned: bool = False, attempt: str = "") -> "StoreName":
        """Return the name that an address stands for. Raises ValueError if it is too long for a server."""
        made = cls(name_of(host, port), owner=os.urandom(16).hex() if owned else "", attempt=attempt)
        made.address = host, port
        if owned:
            address, host = _parse(host)
            if _ANY.fullmatch(host) if address is None else address.is_unspecified:
                made.addresses = _addresses_of(["localhost", *global_addresses()], port)
        return made

    def is_ambiguous(self) -> bool:
        """Return whether the name may stand for a store with another name."""
        return self.address is not None and self.waits and not self.owner and not self.incarnation

    def resolved(self, hosts: Iterable[str]) -> None:
        """Take the addresses of `host_to_resolve`; none if the look-up failed."""
        assert self.address is not None
        self.host_to_resolve = ""
        self.addresses = _addresses_of(hosts, self.address[1])
        self.unresolved = not self.addresses

    def once(self) -> "StoreName":
        """Return the same store for a client that neither owns it nor waits for it."""
        guest = self.of_a_guest()
        guest.waits = False
        return guest

    def of_a_guest(self) -> "StoreName":
        """Return the same store for a client that does not own it."""
        guest = StoreName(self.name)
        guest.incarnation = self.incarnation
        return guest

    def request(self, server: str = "", waits: bool = True) -> requests.Request:
        """Return the ENTER request for a server whose host is `server`."""
        items = {
            "name": self.name,
            "owner": self.owner,
            "shares": self.shares,
            "joins": str(self.joins or ""),
            "attempt": self.attempt,
            "incarnation": self.incarnation,
            "wait": "" if self.waits and waits else "0",
            "addresses": " ".join(self.addresses),
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "server": name_of(server, 0)[: -len(":0")] if self.wants_port else "",
            "relay": self.relay,
        }
        return requests.enter({name: text for name, text in items.items() if text})

    def enter(
        self, session: ClientSession, identity: Identity | None, host: str, port: int
    ) -> Generator[tuple[bytes, PendingCall], None, Identity]:
        """Put a connection into the store; return the server's identity from then on.

        Yields the bytes to send, and the call to be answered before the next step. Raises StoreEndedError,
        AccessDeniedError if the token does not allow it, ConnectionError if the store may be about to end, and
        DistNetworkError if there can be no such store.
        """
        if identity is None or identity.extension < NAMES:
            raise DistNetworkError(
                f"the server at {host}:{port} does not support named stores (it is PyTorch's, or too old): cannot use "
                f"{spelled(self.name)!r} there"
            )
        # An ambiguous name does not wait at first: only if there is no store of that name does another one count.
        ambiguous = self.is_ambiguous()
        entered = yield from self._ask(session, host, not ambiguous)
        reply = read_enter_reply(unpack(entered.result))
        if ambiguous and reply.status == ENDED:
            self.absent, self.others = True, reply.others
            yield from self._find_addresses(entered)
            entered = yield from self._ask(session, host)
            reply = read_enter_reply(unpack(entered.result))
        if reply.status == ENTERED:
            self.incarnation = reply.incarnation
            self.name = reply.store or self.name
            self.port = reply.port
            self.no_port = reply.no_port or ("" if reply.port else "the server is too old to have ports for stores")
            session.store = self.name
            return with_store(identity, self.name, reply.incarnation)
        if reply.status == TAKEN:
            ours = f"(host {socket.gethostname()}, pid {os.getpid()})" in reply.reason
            raise StoreTakenError(
                f"cannot create the store {spelled(self.name)!r} on the server at {host}:{port}: EADDRINUSE, address "
                f"already in use: {reply.reason}; "
                + (_FREE_IT if ours else "wait until that store ends, or use another address")
            )
        if reply.status == REFUSED:
            text = f"the server refused to open the store {spelled(self.name)!r}: {reply.reason}"
            raise AccessDeniedError(text, final=True)
        if reply.status == LOST:
            raise ConnectionError(reply.reason)
        raise StoreEndedError(reply.reason or reply.status)

    def _ask(
        self, session: ClientSession, server: str, waits: bool = True
    ) -> Generator[tuple[bytes, PendingCall], None, PendingCall]:
        entering, entered = session.request(*self.request(server, waits))
        assert entered is not None
        self.asked = True
        yield entering, entered
        self.asked = False
        return entered

    def _find_addresses(self, done: PendingCall) -> Generator[tuple[bytes, PendingCall], None, None]:
        """Find the addresses that the name may stand for. For a look-up, yields `done`, a call that is answered."""
        assert self.address is not None
        address, host = _parse(self.address[0])
        if address is None and not _is_local(address, host):
            self.host_to_resolve = host
            yield b"", done
        else:
            self.resolved([host])

    def missing(self) -> str:
        """Return why entering has timed out, for an error; "" if the store is not the reason."""
        if not (self.asked or self.absent) or self.owner:
            return ""
        text = f"the store {spelled(self.name)!r} has not been created there"
        if self.attempt:
            text += f" by attempt {self.attempt} of the job"
        if "/localhost:" in self.name:
            text += " (an address on loopback means another store on each host)"
        if self.others:
            text += (
                f"; stores of that port there are {', '.join(self.others)}: give the address as the store's master "
                "gives it"
            )
        return text
