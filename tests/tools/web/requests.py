"""Requests to an HTTP port of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from support import LIMIT


def request(port: int, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    """A reply, and its body. Headers have `_` for `-`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    """The status of a reply, and its text."""
    response, body = request(port, path, **headers)
    return response.status, body.decode()


def until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true, and return its value."""
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
