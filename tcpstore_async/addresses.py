"""Addresses as text: how one is written with its port, and whether it is of this host only. It must not resolve any."""


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether an address, as the kernel writes it, is one that only this host can reach."""
    return host.removeprefix("::ffff:").startswith("127.") or host == "::1"
