"""Addresses as text: formatting, brackets, loopback. Must not resolve any."""

from typing import Final

EVERYWHERE: Final = ("::", "0.0.0.0")
"""Hosts that stand for every address of a machine."""

_MAPPED: Final = "::ffff:"


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unbracketed(host: str) -> str:
    """Return an IPv6 address without the brackets of URLs; any other host unchanged."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") and ":" in host else host


def spelled(name: str) -> str:
    """Return a store's name as its master wrote the address: on loopback, host and user precede it in the name."""
    _, local, port = name.rpartition("/localhost:")
    return f"localhost:{port}" if local else name


def unmapped(host: str) -> str:
    """Return the IPv4 address that a dual-stack socket shows as an IPv6 address; any other unchanged."""
    return host[len(_MAPPED) :] if host.startswith(_MAPPED) and "." in host else host


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach an address, given as the kernel writes it."""
    return unmapped(host).startswith("127.") or host == "::1"
