"""What the errors of calls that time out say of the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from client.fakes import freezable
from contract.store_kinds import AsyncStore, Connect, either_client
from marks import STOCK_SERVERS
from support import LIMIT, tcpstore_relay, tcpstore_server, torch_server
from tcpstore_async import Store, StoreTimeoutError, TCPStore
from tcpstore_async.base.deadline import Deadline
from tcpstore_async.client import explanation
from tcpstore_async.stores.tcp import _wait_for_workers
from versions import needs

SECONDS = 0.25
SHORT = timedelta(seconds=SECONDS)


@pytest.fixture(scope="module", params=["uv", "threaded", "relay"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with tcpstore_server("--backend", "uv" if request.param == "relay" else request.param) as server:
        if request.param != "relay":
            yield server.port
            return
        with tcpstore_relay(server.port) as relay:
            yield relay.port


_numbers = iter(range(1_000_000))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that no other test uses; its stores are those of rank 5 of 8."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    return f"job{chr(97 + next(_numbers) % 26) * 9}/"


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with either_client(request.param) as connect:
        yield connect


@pytest.fixture
def store(port: int, connect: Connect, job: str) -> Store:
    return connect(port)


def late(call: Callable[..., object], *given: object) -> StoreTimeoutError:
    with pytest.raises(StoreTimeoutError) as raised:
        call(*given)
    return raised.value


def test_missing_and_nearest_keys(store: Store, job: str) -> None:
    store.set(job + "x/2", "")
    store.set(job + "ready", "")
    error = late(store.wait, [job + "ready", job + "x/3"], SHORT)
    text = rf"wait timeout after 250ms, keys: /{job}ready, /{job}x/3\. 1 of 2 keys missing: '{job}x/3'; most similar: "
    assert re.fullmatch(text + rf"'{job}x/2' written \d s ago by rank 5 \(.+, pid \d+\)", str(error))
    assert error.missing_keys == [job + "x/3"]
    (near, age, by), *_ = error.nearest_keys[job + "x/3"]
    assert (near, by.startswith("rank 5 (")) == (job + "x/2", True)
    assert age is not None
    assert 0 <= age < LIMIT
    store.set_timeout(SHORT)
    for call in (lambda: store.get(job + "x/3"), lambda: store.multi_get([job + "x/3"])):
        error = late(call)
        start = f"wait timeout after 250ms, keys: /{job}x/3. 1 of 1 key missing: '{job}x/3'; most similar: '{job}x/2' "
        assert str(error).startswith(start)
        assert error.nearest_keys.keys() == {job + "x/3"}
    store.set(job + "x/3", "there")
    assert store.get(job + "x/3") == b"there"


def test_arrivals_at_a_barrier(store: Store, job: str) -> None:
    error = late(store.barrier, job + "bar", 8, SHORT)
    said = f"barrier timeout after 250ms, key: {job}bar. 1 of 8 have arrived; missing ranks: 0, 1, 2, 3, 4, 6, 7"
    assert str(error) == said
    assert error.missing_ranks == [0, 1, 2, 3, 4, 6, 7]
    assert error.missing_keys == []


def test_without_news_the_words_are_pytorchs(store: Store, job: str) -> None:
    name = job[:-1].swapcase() * 12
    error = late(store.wait, [name], SHORT)
    assert str(error) == f"wait timeout after 250ms, keys: /{name}"
    assert error.missing_keys == [name]


def test_a_short_look_is_not_asked_about(store: Store, job: str) -> None:
    store.set(job + "x/2", "")
    for timeout in (0, 0.05):
        error = late(store.wait, [job + "x/3"], timeout)
        assert str(error).endswith(f"keys: /{job}x/3")
        assert error.missing_keys == []


def test_who_has_not_joined(port: int, job: str) -> None:
    """A master says it."""
    with TCPStore("127.0.0.1", port, 8, timeout=LIMIT) as store:
        assert store._client is not None
        with pytest.raises(StoreTimeoutError) as raised:
            _wait_for_workers(store._client, 8, Deadline(SECONDS))
    said = "Timed out after 1 seconds waiting for clients. 1/8 clients joined. Missing ranks: 0, 1, 2, 3, 4, 6, 7"
    assert str(raised.value) == said
    assert raised.value.missing_ranks == [0, 1, 2, 3, 4, 6, 7]


@needs("barrier")
@pytest.mark.parametrize("backend", STOCK_SERVERS)
def test_pytorchs_servers_are_not_asked(connect: Connect, backend: str) -> None:
    """They would close the connection."""
    with torch_server(backend) as server:
        store = connect(server)
        store.set("x/2", "")
        assert str(late(store.wait, ["x/3"], SHORT)) == "wait timeout after 250ms, keys: /x/3"
        assert store.get("x/2") == b""
        store.close()


def test_a_server_that_does_not_answer(connect: Connect) -> None:
    """The error is that of the call, and the store goes on when the server does."""
    with freezable() as frozen:
        store = connect(frozen.port)
        store.set("k_1", "v")
        assert store.get("k_1") == b"v"
        frozen.freeze()
        assert str(late(store.wait, ["k_2"], SHORT)) == "wait timeout after 250ms, keys: /k_2"
        frozen.thaw()
        assert store.get("k_1") == b"v"
        store.set("k_2", "w")
        assert store.get("k_2") == b"w"
        store.close()


def test_one_round_trip_and_no_further_connection(store: Store, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set(job + "x/2", "")
    assert store.check([job + "x/2"])
    questions: list[object] = []
    question = explanation.question

    def counted(*given: Any) -> Any:
        questions.append(question(*given))
        return questions[-1]

    monkeypatch.setattr(explanation, "question", counted)
    error = late(store.wait, [job + f"x/{number}" for number in range(3, 500)], SHORT)
    assert len(error.missing_keys) == 100
    assert len(error.nearest_keys) == 4
    assert len(questions) == 1
    client: Any = store.client if isinstance(store, AsyncStore) else store._client  # type: ignore[attr-defined]
    connections = client._connections
    assert len(connections) == 1
