"""Stores with names: which server holds an address as a name, and how a connection is put into that store.

It knows TCPSTORE_SERVER_URL, what makes an address a name, and ENTER; it must not know how bytes travel.

Invariants: without the variable and the argument, nothing here does anything. All ranks that spell an address alike
mean the same store; one that spells it differently means the store of a master that has given any address (0.0.0.0) of
a host, if there is none under its own spelling. A client that has been in a store enters that one again or none.
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

SERVER_URL: Final = "TCPSTORE_SERVER_URL"
"""Environment variable: the server that holds all stores of this process, under names."""

ATTEMPT: Final = "TCPSTORE_ATTEMPT"

_LOOPBACK: Final = re.compile(
    r"|(.*\.)?localhost|localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)|0+|127(\.[0-9]+){1,3}"
)
"""Names and short forms that mean this host, whichever that is, beside what `ipaddress` knows."""

_ANY: Final = re.compile(r"0*")
"""Those of them that mean any of its addresses."""


_FREE_IT: Final = (
    "that is this process: close that store, or drop all references to it, before another one takes its name, or share "
    "it (multi_tenant=True for both)"
)


class StoreEndedError(DistNetworkError):
    """The store with a name that a client was in has ended."""


class StoreTakenError(DistNetworkError):
    """A store of this name has another owner."""


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
    """Return the name that an address is on a server: a loopback one is a name within this host, network and user.

    How an IP address is written makes no difference.
    """
    address, host = _parse(host)
    return (
        f"{this_network()}/{os.getuid()}/localhost:{port}" if _is_local(address, host) else format_address(host, port)
    )


_Literal = ipaddress.IPv4Address | ipaddress.IPv6Address


def _parse(host: str) -> tuple[_Literal | None, str]:
    """Return an IP address, None for a name, and how either is written here."""
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


def _address_of(host: str, port: int) -> str:
    """Return what a store is found at under an address, if its master means any of its host: whoever asks."""
    address, host = _parse(host)
    return f"{this_network()}/localhost:{port}" if _is_local(address, host) else format_address(host, port)


def _addresses_of(hosts: Iterable[str], port: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_address_of(host, port) for host in hosts))[:MAX_ADDRESSES]


def is_local(host: str) -> bool:
    """Return whether an address of this host is one that no other host can use."""
    return name_of(host, 0) == name_of("localhost", 0)


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def this_network() -> str:
    """Return text that is the same for all processes with this loopback device."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    return f"{_boot()}/{network}"


def attempt_from_environment() -> str:
    """Return the attempt of this job that the process belongs to, if all its ranks know the same; else nothing."""
    attempt = os.environ.get(ATTEMPT, "")
    if not attempt and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # each of several agents counts its own restarts
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return attempt


_process = ""


def process_id() -> str:
    """Return text that is unique to this process."""
    global _process
    if not _process:
        _process = os.urandom(16).hex()
    return _process


def _forked() -> None:
    global _process
    _process = ""


os.register_at_fork(after_in_child=_forked)


def _check_length(wrong: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise ValueError(f"{wrong}: {size} bytes (max {most})")


class StoreName:
    """A store with a name, as one client is in it."""

    def __init__(self, name: str, owner: str = "", shares: str = "", joins: int = 0, attempt: str = "") -> None:
        """The owner gives an id of its own, what it shares the store by, and how many ranks it expects.

        Raises ValueError for a name or an attempt that no server takes.
        """
        _check_length(f"{name[:32]!r}… is too long for the name of a store", name, MAX_NAME)
        _check_length(f"{ATTEMPT} is too long", attempt, MAX_ID)
        self.name = name
        self.owner = owner
        self.shares = shares
        self.joins = joins
        self.attempt = attempt
        self.incarnation = ""
        """Which store of this name it is; empty before it has been entered."""
        self.waits = True
        self.address: tuple[str, int] | None = None
        """That the name has been made of, if it has been made of one."""
        self.addresses: tuple[str, ...] = ()
        """Of the owner: what the store is found at beside its name. Of others: what that may stand for."""
        self.to_look_up = ""
        """The host that is to be looked up before the next step, with `tell`."""
        self.unknown = False
        """Whether that could not be found out: it may be later."""
        self.absent = False
        """Whether a server has said that there is no such store."""
        self.others: tuple[str, ...] = ()
        """Stores of the same port that it has named then."""
        self.wants_port = False
        """Whether the store needs a port at the server, for clients that can say no name."""
        self.port = 0
        """That port, once the store has been entered; 0 if there is none."""
        self.no_port = ""
        """Why there is none."""
        self.asked = False
        """Whether a server has been asked, and has not answered."""

    @classmethod
    def at(cls, host: str, port: int, owned: bool = False, attempt: str = "") -> "StoreName":
        """Return the name that an address is. Raises ValueError for one that no server takes."""
        made = cls(name_of(host, port), owner=os.urandom(16).hex() if owned else "", attempt=attempt)
        made.address = host, port
        if owned:
            address, host = _parse(host)
            if _ANY.fullmatch(host) if address is None else address.is_unspecified:
                made.addresses = _addresses_of(["localhost", *global_addresses()], port)
        return made

    def looks(self) -> bool:
        """Return whether another store than that of the name may be meant."""
        return self.address is not None and self.waits and not self.owner and not self.incarnation

    def tell(self, hosts: Iterable[str]) -> None:
        """Answer what `to_look_up` asks: its addresses, none if they could not be found out."""
        assert self.address is not None
        self.to_look_up = ""
        self.addresses = _addresses_of(hosts, self.address[1])
        self.unknown = not self.addresses

    def once(self) -> "StoreName":
        """Return the name as for a client that does not own the store, and does not wait for it either."""
        found = self.of_a_guest()
        found.waits = False
        return found

    def of_a_guest(self) -> "StoreName":
        """Return the same store for a client that does not own it."""
        guest = StoreName(self.name)
        guest.incarnation = self.incarnation
        return guest

    def request(self, server: str = "", waits: bool = True) -> requests.Request:
        """Return the request for the store, for a server whose host is `server`."""
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
        }
        return requests.enter({name: text for name, text in items.items() if text})

    def entering(
        self, session: ClientSession, identity: Identity | None, host: str, port: int
    ) -> Generator[tuple[bytes, PendingCall], None, Identity]:
        """Put a connection to the server with this identity into the store; return its identity from then on.

        Yields what to send, and the call whose reply has to arrive before the next. Raises StoreEndedError,
        AccessDeniedError if the token is not for it, ConnectionError if it may be about to end, and DistNetworkError if
        there can be no such store.
        """
        if identity is None or identity.extension < NAMES:
            raise DistNetworkError(
                f"the server at {host}:{port} does not support named stores (it is PyTorch's, or too old): cannot use "
                f"{spelled(self.name)!r} there"
            )
        looks = self.looks()
        entered = yield from self._ask(session, host, not looks)
        reply = read_enter_reply(unpack(entered.result))
        if looks and reply.status == ENDED:
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
        """Find out what the address may stand for, which yields a call that is `done` for a look-up."""
        assert self.address is not None
        address, host = _parse(self.address[0])
        if address is None and not _is_local(address, host):
            self.to_look_up = host
            yield b"", done
        else:
            self.tell([host])

    def missing(self) -> str:
        """Return why a connection that was being put into the store was not, for lack of time."""
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
