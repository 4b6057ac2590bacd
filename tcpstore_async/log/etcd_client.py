"""Calls etcd: each call goes to one member, and on to the next if that does not answer.

Knows gRPC, which is an extra of the package and imported by the first client only. Must not know what the keys mean.

Invariant: nothing waits for one member. A call whose outcome is unknown is made again as it is, so callers give only
what may be executed twice.
"""

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from ..auth.secret_files import TlsFiles, load_certificates
from ..base.addresses import format_address
from ..base.errors import DistNetworkError
from .encoding import JournalError

ATTEMPT: Final = 0.8
"""Seconds for which one member is waited for; doubled whenever all have been tried, as etcd may be slow."""

_LONGEST: Final = 10.0

_SLOW: Final = 0.25
"""Seconds after which another member is asked next: one whose disk is slow delays what it has no part in."""

PAUSE: Final = 0.05
"""Seconds between two attempts."""

_PROGRESS: Final = 0.5
"""Seconds between two requests to say something, on a watch."""

_SILENCE: Final = 2.0
"""Seconds without a word after which a watch is given up."""

_WATCHED: Final = 10.0
"""Seconds after which a watch ends in any case: before 3.4.31 and 3.5.13, etcd may lose events of a slow one."""

_SERVICES: Final = {
    "Txn": "KV",
    "LeaseGrant": "Lease",
    "LeaseRevoke": "Lease",
    "LeaseKeepAlive": "Lease",
    "Watch": "Watch",
    "Status": "Maintenance",
    "Authenticate": "Auth",
}
"""Methods, and whose they are."""

_STREAMS: Final = ("LeaseKeepAlive", "Watch")

_OPTIONS: Final = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also how long a member that is stopped may take to greet
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # what one client closes is not another's
]


class Closed(Exception):
    """The log was closed, or what was asked for is no longer wanted."""


class UnavailableError(Exception):
    """A member has not answered, or cannot: whether it has done what it was asked is not known."""


class LeaseGoneError(Exception):
    """The lease has ended."""


def parse_member(url: str) -> tuple[bool, str, int]:
    """Return whether the URL of a member asks for TLS, its host and its port. Raises ValueError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 2379
    except ValueError:
        host, port = "", 0
    if not host or parts.scheme not in ("http", "https") or parts.path.strip("/"):
        raise ValueError(f"{url!r} is no address of etcd: it is not of the form http://HOST:PORT or https://HOST:PORT")
    return parts.scheme == "https", host, port


class EtcdClient:
    """The members of one etcd."""

    def __init__(self, urls: Sequence[str], tls: TlsFiles | None, user: str) -> None:
        """`user` is NAME:PASSWORD. Raises JournalError."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes to stderr
        try:
            import grpc

            from . import etcd_pb2
        except ImportError:
            raise JournalError("etcd needs grpcio and protobuf: pip install 'tcpstore-async[etcd]'") from None
        self._grpc: Any = grpc
        self._api: Any = etcd_pb2
        codes = grpc.StatusCode
        self._passing = {
            *(codes.UNAVAILABLE, codes.DEADLINE_EXCEEDED, codes.CANCELLED, codes.UNKNOWN, codes.ABORTED),
            *(codes.INTERNAL, codes.RESOURCE_EXHAUSTED),
        }
        self._user = user
        self._token = ""
        self._credentials: Any = None
        self.urls = list(urls)
        self._channels = [self._channel(url, tls) for url in urls]
        self._methods = [
            {name: self._method(channel, name, service) for name, service in _SERVICES.items()}
            for channel in self._channels
        ]
        self.member = 0
        """The one to ask, by its place among the URLs: the last one that has answered."""
        self.closed = threading.Event()
        self.trouble: str = ""
        """Why a call is not answered that is under way; empty if there is none."""

    def _channel(self, url: str, tls: TlsFiles | None) -> Any:
        try:
            secure, host, port = parse_member(url)
        except ValueError as error:
            raise JournalError(str(error)) from None
        target = format_address(host, port)
        if not secure:
            return self._grpc.insecure_channel(target, options=_OPTIONS)
        if self._credentials is None:
            self._credentials = self._read(tls or TlsFiles())
        return self._grpc.secure_channel(target, self._credentials, options=_OPTIONS)

    def _read(self, tls: TlsFiles) -> Any:
        import ssl

        try:
            load_certificates(ssl.create_default_context(), tls)  # it says what is wrong, which gRPC does not
        except DistNetworkError as error:
            raise JournalError(str(error)) from None
        contents: list[bytes | None] = []
        for path in (tls.ca or ssl.get_default_verify_paths().cafile, tls.key, tls.cert):
            if path:
                with open(path, "rb") as file:
                    contents.append(file.read())
            else:
                contents.append(None)
        return self._grpc.ssl_channel_credentials(*contents)

    def _method(self, channel: Any, name: str, service: str) -> Any:
        request, reply = getattr(self._api, f"{name}Request"), getattr(self._api, f"{name}Response")
        return (channel.stream_stream if name in _STREAMS else channel.unary_unary)(
            f"/etcdserverpb.{service}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )

    # Calls

    def call(self, name: str, request: Any, limit: float = math.inf, stop: threading.Event | None = None) -> Any:
        """Return a member's answer. Raises Closed, also at `stop`; UnavailableError after `limit` seconds."""
        end = time.monotonic() + limit
        failed = 0
        try:
            while True:
                timeout = min(ATTEMPT * 2 ** min(failed // len(self._channels), 8), _LONGEST)
                try:
                    return self.attempt(self.member, name, request, timeout)
                except UnavailableError as error:
                    self.trouble = str(error)
                    failed += 1
                    if time.monotonic() > end:
                        raise
                (stop or self.closed).wait(PAUSE)
                if stop is not None and stop.is_set():
                    raise Closed
        finally:
            if failed:
                self.trouble = ""

    def attempt(self, member: int, name: str, request: Any, timeout: float) -> Any:
        """Return the answer of this member. Raises UnavailableError, after which another one is `member`."""
        sent = time.monotonic()
        try:
            method, metadata = self._methods[member][name], self._metadata(member)
            if name in _STREAMS:
                stream = method(iter((request,)), timeout=timeout, metadata=metadata)
                reply = next(stream, None)
                stream.cancel()
            else:
                reply = method(request, timeout=timeout, metadata=metadata)
        except self._grpc.RpcError as error:
            raise self._failure(member, error.code(), error.details() or "") from None
        except ValueError:
            raise Closed from None
        if reply is None:
            raise self._failure(member, self._grpc.StatusCode.UNAVAILABLE, "the stream ended")
        if time.monotonic() - sent > _SLOW:
            self._leave(member)
        return reply

    def _leave(self, member: int) -> None:
        """Ask another member from now on."""
        if self.member == member:
            self.member = (member + 1) % len(self._channels)

    def _metadata(self, member: int) -> tuple[tuple[str, str], ...]:
        """Without a leader, a member is to say so instead of waiting for one."""
        if self._user and not self._token:
            name, _, password = self._user.partition(":")
            request = self._api.AuthenticateRequest(name=name, password=password)
            try:
                self._token = self._methods[member]["Authenticate"](request, timeout=ATTEMPT).token
            except self._grpc.RpcError as error:
                if "authentication is not enabled" not in (error.details() or ""):
                    raise
        return (("hasleader", "true"), *([("token", self._token)] if self._token else []))

    def _failure(self, member: int, code: Any, details: str) -> Exception:
        """Return what to raise."""
        if self.closed.is_set():
            return Closed()
        if self._user and ("invalid auth token" in details or "revision of auth store is old" in details):
            self._token = ""
            return UnavailableError(details)
        if code == self._grpc.StatusCode.NOT_FOUND:
            return LeaseGoneError(details)
        text = f"etcd at {self.urls[member]}: {' '.join(details.split()) or code.name}"
        if code not in self._passing:
            return JournalError(text)
        self._leave(member)
        return UnavailableError(text)

    # Transactions

    def txn(
        self,
        compare: Sequence[Any],
        success: Sequence[Any],
        failure: Sequence[Any] = (),
        limit: float = math.inf,
        stop: threading.Event | None = None,
    ) -> Any:
        """Execute `success` if all comparisons hold, else `failure`, at once. Raises like `call`."""
        return self.call("Txn", self.transaction(compare, success, failure), limit, stop)

    def transaction(self, compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any] = ()) -> Any:
        return self._api.TxnRequest(compare=compare, success=success, failure=failure)

    def created(self, key: bytes, revision: int) -> Any:
        """Compare: the key was created at this revision."""
        return self._api.Compare(key=key, target=self._api.Compare.CREATE, create_revision=revision)

    def modified(self, key: bytes, revision: int) -> Any:
        """Compare: the key was last written at this revision; 0 if there is none."""
        return self._api.Compare(key=key, target=self._api.Compare.MOD, mod_revision=revision)

    def absent(self, key: bytes) -> Any:
        """Compare: there is no such key."""
        return self._api.Compare(key=key, target=self._api.Compare.VERSION, version=0)

    def get(self, key: bytes, end: bytes = b"", limit: int = 0, keys_only: bool = False) -> Any:
        """Read a key, or the keys up to `end`."""
        request = self._api.RangeRequest(key=key, range_end=end, limit=limit, keys_only=keys_only)
        return self._api.RequestOp(request_range=request)

    def put(self, key: bytes, value: bytes, lease: int = 0) -> Any:
        return self._api.RequestOp(request_put=self._api.PutRequest(key=key, value=value, lease=lease))

    def delete(self, key: bytes, end: bytes = b"") -> Any:
        request = self._api.DeleteRangeRequest(key=key, range_end=end)
        return self._api.RequestOp(request_delete_range=request)

    # Leases

    def grant(self, ttl: int, limit: float = math.inf) -> tuple[int, int]:
        """Return a new lease, and its seconds. If an answer was lost, there is another one, which will end."""
        reply = self.call("LeaseGrant", self._api.LeaseGrantRequest(TTL=ttl), limit)
        return reply.ID, reply.TTL

    def revoke(self, lease: int, limit: float) -> None:
        """Have a lease end, unless etcd does not answer: it ends by itself."""
        try:
            self.call("LeaseRevoke", self._api.LeaseRevokeRequest(ID=lease), limit)
        except (LeaseGoneError, UnavailableError):
            pass

    def keep_alive(self, member: int, lease: int) -> tuple[int, int]:
        """Return the lease's seconds from now on, 0 if it has ended; and the member's term before."""
        reply = self.attempt(member, "LeaseKeepAlive", self._api.LeaseKeepAliveRequest(ID=lease), ATTEMPT)
        return reply.TTL, reply.header.raft_term

    # Others

    def version(self, limit: float) -> str:
        version: str = self.call("Status", self._api.StatusRequest(), limit).version
        return version

    def status(self, member: int, timeout: float) -> Any:
        """Return what a member says of itself. Raises UnavailableError, Closed, JournalError."""
        return self.attempt(member, "Status", self._api.StatusRequest(), timeout)

    def watch(self, revision: int, *ranges: tuple[bytes, bytes, bool]) -> "Watch":
        """Watch keys from a revision on: of each range its begin and end, and whether deletions count."""
        api = self._api
        wanted = [
            api.WatchRequest(
                create_request=api.WatchCreateRequest(
                    key=begin,
                    range_end=end,
                    start_revision=revision,
                    filters=[] if deletions else [api.WatchCreateRequest.NODELETE],
                )
            )
            for begin, end, deletions in ranges
        ]
        return Watch(self, self.member, wanted)

    def close(self) -> None:
        """Have all calls raise Closed."""
        self.closed.set()
        for channel in self._channels:
            channel.close()


class Watch:
    """Events from one member, for a while, until it fails, or says nothing when asked to."""

    def __init__(self, client: EtcdClient, member: int, wanted: list[Any]) -> None:
        """Raises UnavailableError and Closed."""
        self._client = client
        self._member = member
        self._ended = threading.Event()
        self._heard = time.monotonic()
        """When something came; never while it is looked at."""
        try:
            metadata = client._metadata(member)
            self._stream = client._methods[member]["Watch"](self._requests(wanted), metadata=metadata)
        except client._grpc.RpcError as error:
            raise client._failure(member, error.code(), error.details() or "") from None
        except ValueError:
            raise Closed from None

    def _requests(self, wanted: list[Any]) -> Iterator[Any]:
        """In a thread of gRPC's."""
        yield from wanted
        api = self._client._api
        end = time.monotonic() + _WATCHED
        while not self._ended.wait(_PROGRESS):
            now = time.monotonic()
            if now > end:
                self.end()
            elif now - self._heard > _SILENCE:
                self._stream.cancel()
                return
            yield api.WatchRequest(progress_request=api.WatchProgressRequest())

    def __iter__(self) -> Iterator[Any]:
        """Yield responses, until `end`. Raises UnavailableError and Closed."""
        client = self._client
        try:
            for response in self._stream:
                self._heard = math.inf
                yield response
                self._heard = time.monotonic()
        except client._grpc.RpcError as error:
            if not self._ended.is_set():
                raise client._failure(self._member, error.code(), error.details() or "") from None

    def end(self) -> None:
        """From any thread. Idempotent."""
        self._ended.set()
        self._stream.cancel()
