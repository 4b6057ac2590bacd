"""A short connection that counts a rank and introduces it.

It serves a rank whose store is PyTorch's own client, which can do neither. This module must not know that client. After
a failure the caller joins with a `TCPClient` and the same token, which retries and explains.

Invariant: nothing is counted unless the server is one of ours, where a token counts once.
"""

import os
from types import TracebackType
from typing import Any, Final

from ..base.deadline import Deadline
from ..session.client import ClientSession, PendingCall
from . import requests
from .client_info import introduction
from .connect import NO_SIGPIPE, Attempt, check_hello, connect_blocking, open_blocking
from .requests import Request
from .servers import Servers

_REPLY: Final = 4096


class BriefJoin:
    """Two round trips: the handshake with the question whether the server is ours, which other work may overlap, and
    the join.
    """

    def __init__(self, host: str, port: int, deadline: Deadline, token: bytes = b"") -> None:
        """Connect, present the `token`, if any, and ask whether the server is ours.

        Raises OSError, DistNetworkError and AccessDeniedError.
        """
        self._attempt = Attempt(deadline.left())
        self._greeting: PendingCall | None = None
        """The handshake, until it is answered; None with a token, as only our servers accept one."""
        if token:
            self._peer, self._session = connect_blocking(Servers((host, port)), deadline, token=token)
            return
        self._peer = open_blocking(host, port, deadline)
        try:
            self._session = ClientSession()
            hello, self._greeting = self._session.hello(os.getpid())
            self._asked = self._send(requests.HAS_EXTENSION, after=hello)
        except BaseException:
            self._peer.close()
            raise

    def __enter__(self) -> "BriefJoin":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._peer.close()

    def join(self, rank: bytes, world: int) -> bool:
        """Count the rank with this token in a world of this size; return whether the server is ours.

        Raises OSError if the connection is lost or the deadline has passed, and ProtocolError.
        """
        if self._greeting is not None:
            self._result(self._greeting)
            check_hello(self._greeting)
            if not self._result(self._asked):
                return False
        # The store is another client, so the rank is not lost when this connection is closed.
        self._result(self._send(requests.introduce(introduction(world)), requests.join(rank), requests.DEPART))
        return True

    def _send(self, *batch: Request, after: bytes = b"") -> PendingCall:
        """Send requests, of which exactly one has a reply; return its call."""
        sent = [self._session.request(*request) for request in batch]
        self._peer.sendall(after + b"".join(data for data, _ in sent), NO_SIGPIPE)
        (call,) = [call for _, call in sent if call is not None]
        return call

    def _result(self, call: PendingCall) -> Any:
        while not call.done:
            chunk = self._attempt.receive(self._peer, _REPLY)
            if not chunk:
                raise ConnectionError("the server closed the connection while this rank was joining")
            self._session.receive(chunk)
        return call.result
