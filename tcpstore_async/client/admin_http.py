"""Queries to another machine's server, through the HTTP process that passes on its admin socket's replies.

Knows HTTP. Must not know what a reply means.
"""

import time
from collections.abc import Generator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final
from urllib.parse import urlencode

from ..base.errors import DistNetworkError, DistStoreError, StoreTimeoutError
from .server_url import HttpUrl

PATH: Final = "/api/lines"

_AGAIN_SECONDS: Final = 0.2
"""Seconds between requests to a busy HTTP process."""

_MOST_TEXT: Final = 300
"""Characters of a refusal that an error quotes."""


def ask_over_http(
    url: HttpUrl, parts: list[str], timeout: float | None, **more: object
) -> Generator[bytes, None, None]:
    """Yield the reply to a request for these parts, with the `more` fields that are not None, in chunks.

    `timeout` is in seconds, for the whole reply; None means none. Raises DistNetworkError if nothing answers there,
    PermissionError if this process may not ask, DistStoreError if the request is refused, and StoreTimeoutError.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    query = {"ask": ",".join(parts), **{name: value for name, value in more.items() if value is not None}}
    busy = ""
    while True:
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        connection = HTTPConnection(url.host, url.port, timeout=left)
        try:
            connection.connect()
            peer = connection.sock
            connection.request("GET", f"{PATH}?{urlencode(query)}")
            response = connection.getresponse()
            busy = "" if response.status == 200 else _refusal(url, response)
            while not busy:
                if deadline is not None:
                    peer.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = response.read1(256 * 1024)
                if not chunk:
                    return
                yield chunk
        except TimeoutError:
            raise StoreTimeoutError(f"no complete reply from {url} within {timeout:g} s") from None
        except HTTPException:
            raise DistStoreError(f"{url} does not answer as an HTTP server does") from None
        except PermissionError:
            raise
        except OSError as error:
            raise DistNetworkError(
                f"cannot use {url}: {error.strerror or error}; is 'tcpstore serve --http' or 'tcpstore http' running "
                "there?"
            ) from None
        finally:
            connection.close()
        if deadline is not None and time.monotonic() + _AGAIN_SECONDS > deadline:
            raise StoreTimeoutError(f"gave up after {timeout:g} s: {busy}")
        time.sleep(_AGAIN_SECONDS)


def _refusal(url: HttpUrl, response: HTTPResponse) -> str:
    """Return why to repeat the request later. Raises DistError or PermissionError if the refusal is final."""
    raw = response.read(4 * _MOST_TEXT)
    text = " ".join(raw.decode(errors="replace").split())[:_MOST_TEXT]
    if response.status == 503 and response.headers.get("Retry-After"):
        return f"{url} is busy: {text or 'it has too many connections'}"
    if response.status == 503:
        raise DistNetworkError(f"{url}: {text}")
    if response.status == 403:
        raise PermissionError(f"{url}: {text}")
    if response.status == 404:
        raise DistStoreError(f"{url} is not the HTTP process of a tcpstore_async server, or of one that is too old")
    raise DistStoreError(f"{url} refuses the request ({response.status}): {text}")
