"""Wrong URLs, ports, ranks and environment variables: PyTorch's errors, in its words, and PyTorch as the control."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import tcpstore_async
from support import free_port
from versions import VERSION

TAKES_PORT_0 = VERSION >= (2, 8)
"""Whether PyTorch takes tcp:// with a port that the system is to choose."""

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "USE_LIBUV", "TORCHELASTIC_USE_AGENT_STORE")

GOOD_ENV = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

CASES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("invalid://", {}, {}),
    ("", {}, {}),
    ("tcp://127.0.0.1:1", {}, {}),
    ("tcp://127.0.0.1", {"rank": 0, "world_size": 1}, {}),
    ("tcp://127.0.0.1:1?rank=0", {}, {}),
    ("tcp://127.0.0.1:1?world_size=1", {}, {}),
    ("tcp://127.0.0.1:1?rank=0&world_size=1", {"rank": 0}, {}),
    ("tcp://127.0.0.1:1?rank=0", {"world_size": 2}, {}),
    ("tcp://:1?rank=0&world_size=1", {}, {}),
    ("tcp://127.0.0.1:70000?rank=0&world_size=1", {}, {}),
    ("tcp://127.0.0.1:port?rank=0&world_size=1", {}, {}),
    ("tcp://127.0.0.1:1?rank=a&world_size=1", {}, {}),
    ("tcp://127.0.0.1:1?rank=0&world_size=b", {}, {}),
    *([("tcp://127.0.0.1:0?rank=0&world_size=0", {}, {})] if TAKES_PORT_0 else []),
    ("env://", {}, {}),
    *(("env://", {}, {name: text for name, text in GOOD_ENV.items() if name != missing}) for missing in GOOD_ENV),
    *(("env://", {}, {**GOOD_ENV, empty: ""}) for empty in GOOD_ENV),
    ("env://", {}, {**GOOD_ENV, "MASTER_PORT": "70000"}),
    ("env://", {}, {**GOOD_ENV, "MASTER_PORT": "x"}),
    ("env://", {}, {**GOOD_ENV, "RANK": "x"}),
    ("env://?rank=0", {"rank": 0}, GOOD_ENV),
    ("file://", {}, {}),
    ("file:///tmp/f", {}, {}),
    ("file:///tmp/f?rank=0", {}, {}),
    ("file:///tmp/f?world_size=0", {}, {}),
    ("file:///tmp/f?rank=0&world_size=1", {"rank": 0}, {}),
]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def raised(rendezvous: Any, url: Any, options: dict[str, Any]) -> tuple[type[BaseException], str]:
    try:
        store, _, _ = next(rendezvous(url, **options))
    except Exception as error:
        return type(error), str(error)
    del store
    raise AssertionError(f"{url!r} was taken")


@pytest.mark.parametrize(("url", "options", "env"), CASES)
def test_the_same_error(
    url: str, options: dict[str, Any], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    kind, text = raised(tcpstore_async.rendezvous, url, options)
    expected_kind, expected_text = raised(dist.rendezvous, url, options)
    assert kind is expected_kind
    assert text.startswith(expected_text)


@pytest.mark.parametrize(("url", "options"), [
    (5, {}),
    (None, {}),
    ("tcp://127.0.0.1:1", {"rank": "0"}),
    ("tcp://127.0.0.1:1", {"rank": 0, "world_size": 1.0}),
    (b"tcp://127.0.0.1:1?rank=0&world_size=1", {}),
])  # fmt: skip
def test_the_same_error_for_wrong_types(url: Any, options: dict[str, Any]) -> None:
    assert raised(tcpstore_async.rendezvous, url, options) == raised(dist.rendezvous, url, options)


def test_a_pair_without_a_value() -> None:
    assert (
        raised(tcpstore_async.rendezvous, "tcp://h:1?rank", {})[0] is raised(dist.rendezvous, "tcp://h:1?rank", {})[0]
    )


def test_a_scheme_can_be_registered_once() -> None:
    def handler(url: str, **options: Any) -> Iterator[tuple[tcpstore_async.Store, int, int]]:
        seen.append((url, options))
        yield tcpstore_async.HashStore(), 3, 4

    seen: list[Any] = []
    tcpstore_async.register_rendezvous_handler("ours", handler)
    _, rank, world_size = next(tcpstore_async.rendezvous("ours://x?a=b", rank=1, world_size=2, extra=5))
    assert (rank, world_size) == (3, 4)
    assert seen == [("ours://x?a=b&rank=1&world_size=2", {"extra": 5})]
    for scheme in ("ours", "tcp"):
        with pytest.raises(RuntimeError, match=f"Rendezvous handler for {scheme}:// already registered"):
            tcpstore_async.register_rendezvous_handler(scheme, handler)


@pytest.mark.parametrize("scheme", ["tcp", "env", "file"])
def test_only_one_result(scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, text in GOOD_ENV.items():
        monkeypatch.setenv(name, text)
    url = {
        "tcp": f"tcp://127.0.0.1:{0 if TAKES_PORT_0 else free_port()}?rank=0&world_size=1",
        "env": "env://",
        "file": f"file://{tmp_path}/f?rank=0&world_size=1",
    }[scheme]
    texts = []
    for module in (tcpstore_async, dist):
        found = module.rendezvous(url)
        store, rank, world_size = next(found)
        assert (rank, world_size) == (0, 1)
        with pytest.raises(RuntimeError, match="Unable to perform") as caught:
            next(found)
        texts.append(str(caught.value))
        if module is tcpstore_async:
            store.close()
    assert texts[0] == texts[1]
