"""A server's address as a URL: `tcp://HOST:PORT`, or `tcps://HOST:PORT` for TLS; of a replicated store, several.

It must not know which options or variables hold a URL, nor PyTorch's URLs, which have queries
(`stores/rendezvous_url.py`).
"""

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from ..base.addresses import format_address

FORM: Final = "tcp://HOST:PORT[,HOST:PORT...], or tcps://... for TLS"

Address = tuple[str, int]
"""A host and a port."""


class ServerUrl(NamedTuple):
    """A server's address."""

    host: str
    port: int
    tls: bool
    """Whether the URL asks for TLS."""
    others: tuple[Address, ...] = ()
    """Further servers of the same store."""

    def all(self) -> list[Address]:
        """Return the addresses of all servers."""
        return [(self.host, self.port), *self.others]

    def __str__(self) -> str:
        where = ",".join([format_address(*one) for one in self.all()])
        return f"{'tcps' if self.tls else 'tcp'}://{where}"


class HttpUrl(NamedTuple):
    """The address of a server's HTTP process, which passes on the replies of the admin socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"http://{format_address(self.host, self.port)}"


def parse_http_url(url: str) -> HttpUrl:
    """Return the address of an http:// URL, whose default port is 80. Raises ValueError for another URL."""
    _, host, port = _parse(url, ("http",), "http://HOST:PORT", 80)
    return HttpUrl(host, port)


def parse_server_url(url: str, default_port: int = 0) -> ServerUrl:
    """Return the address of a tcp:// or tcps:// URL. Raises ValueError for another URL, or without port and default.

    Several addresses, or URLs, are separated by commas.
    """
    scheme, _, _ = url.partition("://")
    first, *more = map(str.strip, url.split(","))
    parts = [first, *[one if "://" in one else f"{scheme}://{one}" for one in more]]
    found = [_parse(one, ("tcp", "tcps"), FORM, default_port) for one in parts]
    if len({scheme for scheme, _, _ in found}) > 1:
        raise ValueError(f"{url!r} is not of the form {FORM}")
    (scheme, host, port), *others = found
    return ServerUrl(host, port, scheme == "tcps", tuple((host, port) for _, host, port in others))


def _parse(url: str, schemes: tuple[str, ...], form: str, default_port: int) -> tuple[str, str, int]:
    wrong = f"{url!r} is not of the form {form}{bracket_hint(url)}"
    try:
        parts = urlsplit(url)
        port = default_port if parts.port is None else parts.port
    except ValueError:
        raise ValueError(wrong) from None
    extra = parts.path.strip("/") or any(one in url for one in "?#@,")
    if parts.scheme not in schemes or not parts.hostname or not port or extra:
        raise ValueError(wrong)
    return parts.scheme, parts.hostname, port


def bracket_hint(url: str) -> str:
    """Return advice for a URL whose host is an IPv6 address without brackets; "" for any other."""
    scheme, _, rest = url.partition("://")
    host, _, port = re.split("[/?]", rest, maxsplit=1)[0].rpartition(":")
    wrong = host.count(":") > 1 and "[" not in host
    return f"; write an IPv6 address in brackets, as in {scheme}://[{host}]:{port}" if wrong else ""
