"""Addresses as text: how one is written with its port, and whether it is of this host only. It must not resolve any."""

from typing import Final

_MAPPED: Final = "::ffff:"


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unbracketed(host: str) -> str:
    """Return an IPv6 address without the brackets that it has in URLs; any other host as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") and ":" in host else host


def spelled(name: str) -> str:
    """Return the name of a store as its master spells the address: one on loopback has its host and user in front."""
    _, local, port = name.rpartition("/localhost:")
    return f"localhost:{port}" if local else name


def unmapped(host: str) -> str:
    """Return the IPv4 address that a socket for both families shows as an IPv6 address; any other as it is."""
    return host[len(_MAPPED) :] if host.startswith(_MAPPED) and "." in host else host


def is_loopback(host: str) -> bool:
    """Return whether an address, as the kernel writes it, is one that only this host can reach."""
    return unmapped(host).startswith("127.") or host == "::1"
