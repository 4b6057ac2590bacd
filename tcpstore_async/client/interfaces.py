"""The addresses of this host's interfaces, from Linux's rtnetlink. It must not know what they are for."""

import socket
import struct
from contextlib import suppress
from typing import Final

_HEADER: Final = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, sequence number and port."""

_ADDRESS: Final = struct.Struct("=BBBBI")
"""`struct ifaddrmsg`: family, length of the prefix, flags, scope and interface."""

_ATTRIBUTE: Final = struct.Struct("=HH")
"""`struct rtattr`: length and type."""

_NEW_ADDRESS: Final = 20
_GET_ADDRESS: Final = 22
_REQUEST_ALL: Final = 0x301
_PEER_OR_OWN: Final = 1
_OWN: Final = 2
_GLOBAL: Final = 0
_ALIGNMENT: Final = 4
_MOST_REPLY: Final = 1 << 16


def global_addresses() -> list[str]:
    """Return this host's addresses of global scope; none where the system does not say."""
    found: list[str] = []
    with suppress(OSError, AttributeError, ValueError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        size = _HEADER.size + _ADDRESS.size
        netlink.settimeout(1.0)
        netlink.sendto(_HEADER.pack(size, _GET_ADDRESS, _REQUEST_ALL, 1, 0) + _ADDRESS.pack(0, 0, 0, 0, 0), (0, 0))
        while _read(netlink.recv(_MOST_REPLY), found):
            pass
    return found


def _read(reply: bytes, found: list[str]) -> bool:
    """Add the addresses in a part of the reply; return whether another part follows."""
    while len(reply) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(reply)
        if kind != _NEW_ADDRESS or length < _HEADER.size:  # the end of the reply, or an error
            return False
        _read_address(reply[_HEADER.size : length], found)
        reply = reply[_aligned(length) :]
    return True


def _read_address(message: bytes, found: list[str]) -> None:
    family, _, _, scope, _ = _ADDRESS.unpack_from(message)
    if scope != _GLOBAL or family not in (socket.AF_INET, socket.AF_INET6):
        return
    addresses: dict[int, str] = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        if kind in (_PEER_OR_OWN, _OWN):
            addresses[kind] = socket.inet_ntop(family, rest[_ATTRIBUTE.size : length])
        rest = rest[_aligned(length) :]
    address = addresses.get(_OWN) or addresses.get(_PEER_OR_OWN)
    if address is not None:
        found.append(address)


def _aligned(length: int) -> int:
    return (length + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
