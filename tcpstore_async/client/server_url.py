"""A server's address as a URL: `tcp://HOST:PORT`, or `tcps://HOST:PORT` for TLS.

It must not know where such a URL is written down, nor PyTorch's URLs, which have queries (`stores/rendezvous_url.py`).
"""

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from ..base.addresses import format_address

FORM: Final = "tcp://HOST:PORT, or tcps://HOST:PORT for TLS"


class ServerUrl(NamedTuple):
    """A server's address."""

    host: str
    port: int
    tls: bool
    """Whether the URL asks for TLS."""

    def __str__(self) -> str:
        return f"{'tcps' if self.tls else 'tcp'}://{format_address(self.host, self.port)}"


class HttpUrl(NamedTuple):
    """The address of a server's HTTP process, at which one looks in."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"http://{format_address(self.host, self.port)}"


def parse_http_url(url: str) -> HttpUrl:
    """Return the address. Raises ValueError for another URL."""
    wrong = f"{url!r} is not of the form http://HOST:PORT{bracket_hint(url)}"
    try:
        parts = urlsplit(url)
        port = 80 if parts.port is None else parts.port
    except ValueError:
        raise ValueError(wrong) from None
    extra = parts.path.strip("/") or any(one in url for one in "?#@,")
    if parts.scheme != "http" or not parts.hostname or not port or extra:
        raise ValueError(wrong)
    return HttpUrl(parts.hostname, port)


def bracket_hint(url: str) -> str:
    """Return what to say of a URL whose host is an IPv6 address without brackets; nothing of any other."""
    scheme, _, rest = url.partition("://")
    host, _, port = re.split("[/?]", rest, maxsplit=1)[0].rpartition(":")
    wrong = host.count(":") > 1 and "[" not in host
    return f"; write an IPv6 address in brackets, as in {scheme}://[{host}]:{port}" if wrong else ""


def parse_server_url(url: str, default_port: int = 0) -> ServerUrl:
    """Return the address. The port may be left out only if there is a default. Raises ValueError for another URL."""
    wrong = f"{url!r} is not of the form {FORM}{bracket_hint(url)}"
    try:
        parts = urlsplit(url)
        port = default_port if parts.port is None else parts.port
    except ValueError:
        raise ValueError(wrong) from None
    extra = parts.path.strip("/") or any(one in url for one in "?#@,")
    if parts.scheme not in ("tcp", "tcps") or not parts.hostname or not port or extra:
        raise ValueError(wrong)
    return ServerUrl(parts.hostname, port, parts.scheme == "tcps")
