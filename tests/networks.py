"""Two hosts on this machine: network namespaces joined by virtual interfaces, and a recorder of their traffic.

Needs Linux and root. Nothing but the namespaces themselves outlives a `with`, and they do not either.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

ADDRESSES = ("10.203.17.1", "10.203.17.2")
"""Addresses of the two hosts. Namespaces share none with this machine, so any will do."""

INTERFACE = "pair"
"""The name of the interface, on each host."""

DATA_ADDRESSES = ("10.203.18.1", "10.203.18.2")
DATA_INTERFACE = "data"
"""The interface of a second network, which some hosts have for a job's data."""

_CLONE_NEWNET = 0x4000_0000
_ETH_P_ALL = 3
_SO_ATTACH_FILTER = 26
_SO_RCVBUFFORCE = 33
_PACKET_STATISTICS = 6
_SOL_PACKET = 263

Result = TypeVar("Result")


class Network:
    """A host: its namespace and address."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.prefix = ["ip", "netns", "exec", name]
        """Prefix of a command that runs on this host."""

    @property
    def path(self) -> Path:
        return Path("/run/netns", self.name)

    def inside(self, act: Callable[[], Result]) -> Result:
        """Call a function in a thread on this host and return its result: a socket stays in its network."""
        results: list[Result] = []

        def run() -> None:
            enter(str(self.path))
            results.append(act())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return results[0]


def enter(path: str) -> None:
    """Move this thread to the network namespace with this file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


_own = False
"""Whether this process is in a network of its own."""


def leave_for_own() -> None:
    """Move this process, which has one thread, to a network of its own: loopback, on which packets can be stopped.

    Raises OSError and CalledProcessError where that is not permitted.
    """
    global _own
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    _own = True
    _ip("link", "set", "lo", "up")
    _ip("rule", "add", "priority", "1000", "lookup", "local")
    _ip("rule", "delete", "priority", "0")


@contextmanager
def stopped(*selectors: str) -> Iterator[None]:
    """Stop the packets that these select, such as `to 127.0.1.0/24`, in a network of one's own."""
    assert _own, "these rules would stop this machine's own packets"
    for selector in selectors:
        _ip("rule", "add", "priority", "100", *selector.split(), "unreachable")
    try:
        yield
    finally:
        for selector in selectors:
            _ip("rule", "delete", "priority", "100", *selector.split(), "unreachable")


@contextmanager
def unplugged(host: Network) -> Iterator[None]:
    """Let nothing pass between a host and the others."""
    _ip("-n", host.name, "link", "set", INTERFACE, "down")
    try:
        yield
    finally:
        _ip("-n", host.name, "link", "set", INTERFACE, "up")


@functools.cache
def why_not() -> str:
    """Return why there can be no networks here; empty if there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux, and the command ip"
    try:
        with two_networks():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"network namespaces are not permitted here: {said}"


@contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Make two hosts that reach only each other. Raises CalledProcessError where that is not permitted."""
    first, second = (Network(f"tcpstore-{os.getpid()}-{number}", address) for number, address in enumerate(ADDRESSES))
    made: list[Network] = []
    try:
        for one in (first, second):
            _ip("netns", "add", one.name)
            made.append(one)
            _ip("-n", one.name, "link", "set", "lo", "up")
        _join(made, INTERFACE, ADDRESSES)
        yield first, second
    finally:
        for one in made:
            _ip("netns", "delete", one.name)


def _join(hosts: Sequence[Network], interface: str, addresses: Sequence[str]) -> None:
    first, second = hosts
    peer = ("type", "veth", "peer", "name", interface, "netns", second.name)
    _ip("-n", first.name, "link", "add", interface, *peer)
    for one, address in zip(hosts, addresses, strict=True):
        _ip("-n", one.name, "address", "add", f"{address}/24", "dev", interface)
        _ip("-n", one.name, "link", "set", interface, "up")


def join_for_data(hosts: Sequence[Network]) -> None:
    """Connect two hosts by a second network."""
    _join(hosts, DATA_INTERFACE, DATA_ADDRESSES)


def close_all_but(port: int, hosts: Sequence[Network]) -> None:
    """Let nothing pass the first network of two hosts but TCP connections to this port of the first host.

    Rules of routing do that, which need no firewall in the kernel; they hold for what arrives, too. Raises
    CalledProcessError where there are none.
    """
    first, second = hosts
    for one, other, side in ((first, second, "sport"), (second, first, "dport")):
        open_ = ("to", other.address, "ipproto", "tcp", side, str(port))
        _ip("-n", one.name, "rule", "add", "priority", "100", *open_, "lookup", "main")
        _ip("-n", one.name, "rule", "add", "priority", "101", "to", other.address, "unreachable")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Wire:
    """Record the traffic of one TCP port on a host's interface."""

    def __init__(self, network: Network, port: int) -> None:
        self.port = port
        self._packets: list[bytes] = []
        self._socket = network.inside(lambda: _packets_of(port))
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._record)

    def __enter__(self) -> Wire:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop when the traffic so far is recorded."""
        os.close(self._ending)
        self._thread.join()
        self.lost: int = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
        """Packets that were not recorded."""
        self._socket.close()
        os.close(self._end)

    def _record(self) -> None:
        ended = False
        while True:
            try:
                self._packets.append(self._socket.recv(1 << 18))
            except BlockingIOError:
                if ended:
                    return
                ready, _, _ = select.select([self._socket.fileno(), self._end], [], [])
                ended = self._end in ready

    def streams(self) -> list[bytes]:
        """Return what each end of each connection has sent, in order."""
        pieces: dict[bytes, dict[int, bytes]] = {}
        first: dict[bytes, int] = {}
        for packet in self._packets:
            ip = packet[14:]
            header = (ip[0] & 15) * 4
            tcp = ip[header : int.from_bytes(ip[2:4], "big") or None]
            which = ip[12:20] + tcp[:4]
            number = int.from_bytes(tcp[4:8], "big")
            begins = tcp[13] & 2  # SYN
            if begins:
                first[which] = number + 1
                pieces.setdefault(which, {})
            data = tcp[(tcp[12] >> 4) * 4 :]
            if data and which in first:
                at = (number - first[which]) % (1 << 32)
                if len(data) > len(pieces[which].get(at, b"")):
                    pieces[which][at] = data
        return [_in_order(one) for one in pieces.values()]


def _in_order(pieces: dict[int, bytes]) -> bytes:
    out = bytearray()
    for at, data in sorted(pieces.items()):
        assert at <= len(out), "a part of the connection was not recorded"
        out[at : at + len(data)] = data
    return bytes(out)


def _packets_of(port: int) -> socket.socket:
    """Return a socket that receives the packets of TCP connections over IPv4 from or to this port."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    # `tcp port N` in the kernel's filter language: code, jump if true, jump if false, operand.
    program = [
        (0x28, 0, 0, 12), (0x15, 0, 10, 0x0800), (0x30, 0, 0, 23), (0x15, 0, 8, 6), (0x28, 0, 0, 20),
        (0x45, 6, 0, 0x1FFF), (0xB1, 0, 0, 14), (0x48, 0, 0, 14), (0x15, 2, 0, port), (0x48, 0, 0, 16),
        (0x15, 0, 1, port), (0x06, 0, 0, 0x40000), (0x06, 0, 0, 0),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))
    made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    made.bind((INTERFACE, 0))
    made.setblocking(False)
    return made
