"""Our clients over TLS: both kinds, their errors, ends, forks and resumed sessions; the relay; the command line."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from click.testing import CliRunner

from client.test_resumed import Resetter, resetter
from conformance.frames import get, set_
from contract.store_kinds import either_client
from support import LIMIT, RawPeer, Server, free_port, in_child, tcpstore_relay, tcpstore_server, until
from tcpstore_async import AsyncTCPStore, DistNetworkError, Store, TCPStore, rendezvous
from tcpstore_async.auth.secret_files import TlsFiles
from tcpstore_async.cli import main
from tcpstore_async.client import background
from tcpstore_async.serving import run_loop
from tls.certificates import certificates

pytestmark = pytest.mark.needs_proc


@pytest.fixture
def server() -> Iterator[Server]:
    with tcpstore_server(*certificates().serving()) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _first_of_all() -> None:
    """What stays open from its first use on: the process that forks servers, and a pipe of uvloop's."""
    with tcpstore_server():
        run_loop(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither descriptors nor threads."""
    gc.collect()
    before = descriptors()
    yield
    until(lambda: background.running() is None)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == background.THREAD_NAME])
    gc.collect()
    assert descriptors() <= before


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


@pytest.fixture
def use_tls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(**more: str) -> None:
        for name, value in {**certificates().environment(), **more}.items():
            monkeypatch.setenv(name, value)

    return use


def test_the_synchronous_client(server: Server, use_tls: Callable[..., None]) -> None:
    use_tls()
    value = os.urandom(3_000_000)
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        store.set("large", value)
        assert store.get("large") == value
        assert store.add("counter", 2) == 2
        waiting = threading.Thread(target=store.wait, args=[["late"]])
        waiting.start()
        with store.clone() as other:
            other.set("late", "")
        waiting.join(LIMIT)
        assert not waiting.is_alive()


async def test_the_asynchronous_client(server: Server) -> None:
    value = os.urandom(3_000_000)
    known = certificates()
    async with await AsyncTCPStore.connect(
        "localhost", server.port, timeout=LIMIT, tls=True, tls_files=known.trusting
    ) as store:
        await asyncio.gather(*[store.set(f"{number}", value) for number in range(5)])
        assert await asyncio.gather(*[store.get(f"{number}") for number in range(5)]) == [value] * 5
        waiting = asyncio.create_task(store.wait(["late"]))
        async with await store.clone() as other:
            await other.set("late", "")
        await waiting


def test_what_was_written_before_the_end_arrives(server: Server, use_tls: Callable[..., None]) -> None:
    """SET has no reply: the client cannot know when it is done, and closes at once."""
    use_tls()
    value = os.urandom(5_000_000)
    for number in range(3):
        with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
            store.set(f"sync {number}", value)

        async def write(key: str) -> None:
            async with await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=LIMIT) as store:
                await store.set(key, value)

        asyncio.run(write(f"async {number}"))
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        for number in range(3):
            assert store.get(f"sync {number}") == value
            assert store.get(f"async {number}") == value


@pytest.mark.unmeasured
def test_forks(server: Server, use_tls: Callable[..., None]) -> None:
    """A child opens its own connections, and the parent's go on, also those on which a thread waits."""
    use_tls()
    with TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store:
        store.set("key", "value")
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(store.get("late")))
        waiting.start()
        until(lambda: len(store._connection()._connections) == 1 and store._connection()._connections[0].parked)
        assert in_child(lambda: (store.get("key"), store.add("child", 1))) == "(b'value', 1)"
        store.set("late", "now")
        waiting.join(LIMIT)
        assert got == [b"now"]
        assert store.add("child", 1) == 2


def check_resets(store: Store, proxy: Resetter) -> None:
    """Count, while connections of the store are reset."""
    assert not store.check(["counter"])
    assert store.queue_len("counters") == 0
    for number in range(1, 21):
        assert store.add("counter", 1) == number
        if number % 5 == 0:
            proxy.reset()
    assert store.add("counter", 0) == 20
    assert proxy.resets >= 4


@pytest.mark.parametrize("which", ["sync", "async"])
def test_a_session_survives_resets(server: Server, use_tls: Callable[..., None], which: str) -> None:
    use_tls()
    with resetter(server.port) as proxy, either_client(which) as connect:
        check_resets(connect(proxy.port), proxy)


def sync_error(port: int, host: str = "127.0.0.1", timeout: float = 30) -> str:
    with pytest.raises(DistNetworkError) as told:
        TCPStore(host, port, timeout=timeout)
    return str(told.value)


def async_error(port: int, host: str = "127.0.0.1", timeout: float = 30) -> str:
    with pytest.raises(DistNetworkError) as told:
        asyncio.run(AsyncTCPStore.connect(host, port, timeout=timeout))
    return str(told.value)


both = pytest.mark.parametrize("error", [sync_error, async_error])


@both
@pytest.mark.parametrize(
    ("pair", "ca", "client", "reason"),
    [
        ("server", "others", None, "certificate verify failed: unable to get local issuer certificate"),
        ("expired", "ours", None, "certificate verify failed: certificate has expired"),
        ("elsewhere", "ours", None, "certificate verify failed: IP address mismatch"),
        ("mutual", "ours", None, "the peer requires a certificate (TCPSTORE_CERT and TCPSTORE_KEY)"),
        ("mutual", "ours", "stranger", "the peer does not trust our certificate's CA"),
        ("mutual", "ours", "expired", "the peer says that our certificate has expired"),
    ],
)
def test_refusals_are_final_and_say_why(
    error: Callable[..., str],
    pair: str,
    ca: str,
    client: str | None,
    reason: str,
    use_tls: Callable[..., None],
) -> None:
    """They come at once: the timeout is that of a server which may still start."""
    known = certificates()
    own = None if client is None else getattr(known, client)
    use_tls(**{**known.environment(own), "TCPSTORE_CA": getattr(known, ca).ca})
    serving = known.serving(ca=True) if pair == "mutual" else known.serving(getattr(known, pair))
    with tcpstore_server(*serving) as server:
        assert reason in error(server.port, timeout=-1)


@both
# quirk: tls-mismatch
def test_a_server_without_tls(error: Callable[..., str], use_tls: Callable[..., None]) -> None:
    """A server of ours says so, and the error comes at once; PyTorch's closes the connection, as if it were full."""
    use_tls()
    with tcpstore_server() as server:
        assert error(server.port, timeout=-1).endswith("TLS handshake failed: the peer does not use TLS")
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=_close_all, args=(other,), daemon=True).start()
        try:
            text = error(other.getsockname()[1], timeout=0.5)
        finally:
            other.shutdown(socket.SHUT_RDWR)
    assert "closed the connection during the TLS handshake: does it use TLS?" in text


def _close_all(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)


@both
def test_a_server_that_never_answers(error: Callable[..., str], use_tls: Callable[..., None]) -> None:
    use_tls()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "no answer" in error(silent.getsockname()[1], timeout=0.3)


@both
def test_files_that_are_missing(error: Callable[..., str], use_tls: Callable[..., None]) -> None:
    use_tls(TCPSTORE_CA="/nonexistent/ca.pem")
    assert "cannot load /nonexistent/ca.pem: No such file or directory" in error(free_port())


def test_mutual_tls(use_tls: Callable[..., None]) -> None:
    known = certificates()
    use_tls(**known.environment(known.client))
    with (
        tcpstore_server(*known.serving(ca=True)) as server,
        TCPStore("127.0.0.1", server.port, timeout=LIMIT) as store,
    ):
        assert store.add("counter", 1) == 1


def test_a_store_that_is_closed_says_so_to_the_server(use_tls: Callable[..., None]) -> None:
    """The server sees the end of the TLS connection, which an attacker cannot forge, before that of TCP."""
    use_tls()
    pair = certificates().server
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(pair.cert, pair.key)
    ends: list[bytes] = []

    def serve(listener: socket.socket, plain_port: int) -> None:
        """Accept one connection, and pass on what comes from its client and the replies."""
        peer, _ = listener.accept()
        with (
            serving.wrap_socket(peer, server_side=True, suppress_ragged_eofs=False) as front,
            socket.create_connection(("127.0.0.1", plain_port), LIMIT) as back,
        ):
            front.settimeout(0.01)
            while not ends:
                try:
                    data = front.recv(1 << 16)
                    if data:
                        back.sendall(data)
                    else:
                        ends.append(data)
                except TimeoutError:
                    while select.select([back], [], [], 0)[0]:
                        front.sendall(back.recv(1 << 16))

    async def main(port: int) -> None:
        store = await AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT)
        await store.set("k", "v")
        assert await store.get("k") == b"v"
        await store.close()

    with (
        tcpstore_server() as plain,
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        served = pool.submit(serve, listener, plain.port)
        asyncio.run(main(listener.getsockname()[1]))
        served.result(LIMIT)
    assert ends == [b""]


@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_master_with_tls(where: str, use_tls: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    known = certificates()
    monkeypatch.setenv("TCPSTORE_SERVER", where)
    use_tls(**known.environment(known.server))
    with ExitStack() as stack:
        master = stack.enter_context(TCPStore("127.0.0.1", 0, 2, True, LIMIT, wait_for_workers=False))
        other = stack.enter_context(TCPStore("127.0.0.1", master.port, timeout=LIMIT))
        master.set("key", "value")
        assert other.get("key") == b"value"


def test_a_master_needs_a_certificate(use_tls: Callable[..., None]) -> None:
    use_tls()
    with pytest.raises(DistNetworkError, match="a server with TLS needs a certificate and its key: set TCPSTORE_CERT"):
        TCPStore("127.0.0.1", 0, is_master=True)


def test_rendezvous(use_tls: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    known = certificates()
    use_tls(**known.environment(known.server))
    monkeypatch.delenv("TCPSTORE_TLS")
    port = free_port()
    store, rank, world = next(rendezvous(f"tcps://127.0.0.1:{port}", 0, 1))
    with store:
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert (rank, world) == (0, 1)
        monkeypatch.delenv("TCPSTORE_CA")
        with pytest.raises(DistNetworkError, match="certificate verify failed"):
            TCPStore("127.0.0.1", port, timeout=LIMIT, tls=True)


def test_a_relay() -> None:
    """Its ranks are stock clients: nothing of them crosses the network in clear text."""
    known = certificates()
    with tcpstore_server(*known.serving(ca=True)) as server:
        url = f"tcps://127.0.0.1:{server.port}"
        with tcpstore_relay(url, env=known.environment(known.client)) as relay:
            with RawPeer(relay.port) as one, RawPeer(relay.port) as other:
                value = os.urandom(2_000_000)
                one.send(set_(b"/key", value))
                one.ping()
                assert other.ask_value(get(b"/key")) == value
            until(lambda: "linked to" in relay.log())


def test_a_relays_link_survives_a_reset() -> None:
    known = certificates()
    with (
        tcpstore_server(*known.serving()) as server,
        resetter(server.port) as proxy,
        tcpstore_relay(f"tcps://127.0.0.1:{proxy.port}", env=known.environment()) as relay,
        RawPeer(relay.port) as rank,
    ):
        for _ in range(3):
            rank.ping()
            until(lambda: proxy.reset() > 0)
            rank.ping()
        assert "resumed the link" in relay.log()


def test_the_command_line(server: Server) -> None:
    run = CliRunner().invoke
    options = ["--url", f"tcps://127.0.0.1:{server.port}", "--tls-ca", certificates().ours.ca]
    assert run(main, [*options, "set", "key", "value"]).exit_code == 0
    assert run(main, ["get", *options, "key"]).output == "value"
    wrong = run(main, ["get", *options[:2], "--tls-ca", certificates().others.ca, "key"])
    assert wrong.exit_code == 4
    assert "certificate verify failed" in wrong.output


async def test_the_files_of_a_call_win(server: Server, use_tls: Callable[..., None]) -> None:
    use_tls(TCPSTORE_CA=certificates().others.ca)

    files = TlsFiles(certificates().ours.ca)
    async with await AsyncTCPStore.connect("127.0.0.1", server.port, timeout=LIMIT, tls_files=files) as store:
        await store.ping()
