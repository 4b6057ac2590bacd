"""Rendezvous URLs and environment variables. tests/interop/test_rendezvous_errors.py compares errors with PyTorch's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import tcpstore_async
from support import LIMIT, tcpstore_server
from tcpstore_async import StoreTimeoutError, rendezvous
from tcpstore_async.stores.rendezvous_url import Place, read_env, read_file, read_tcp

pytestmark = pytest.mark.interpreted

VARIABLES = [
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "USE_LIBUV", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TCPSTORE_JOIN", "TCPSTORE_JOB", "TCPSTORE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    *("TCPSTORE_ROUND", "GROUP_WORLD_SIZE"),
]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_tcp() -> None:
    assert read_tcp("tcp://h:1?rank=2&world_size=3") == Place("h", 1, 2, 3, True, "")
    assert read_tcp("tcp://[::1]:1/ignored?rank=0&rank=1&world_size=3&a=b=c").host == "::1"
    assert read_tcp("tcp://h:1?rank=0&rank=1&world_size=3").rank == 1


def test_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("MASTER_ADDR", "h"), ("MASTER_PORT", "1"), ("RANK", "2"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, text)
    assert read_env("env://") == Place("h", 1, 2, 3, True, "")
    assert read_env("env://?rank=5&world_size=6&use_libuv=0") == Place("h", 1, 5, 6, False, "")


def test_brackets_around_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("MASTER_ADDR", "[::1]"), ("MASTER_PORT", "1"), ("RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, text)
    place = read_env("env://")
    assert place.host == "::1"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert place.agent_hosts()


def test_an_address_without_brackets() -> None:
    for url in ("tcp://::1:29500?rank=0&world_size=1", "tcps://fe80::2:29500?rank=0&world_size=1"):
        scheme, _, rest = url.partition("://")
        hint = f"write an IPv6 address in brackets, as in {scheme}://[{rest.partition('?')[0][: -len(':29500')]}]:29500"
        with pytest.raises(ValueError, match=rf"rendezvous: Port could not be .*; {re.escape(hint)}$"):
            read_tcp(url)


def test_several_servers_are_hosted_by_no_rank() -> None:
    hint = re.escape("set TCPSTORE_SERVER_URL=tcps://a:1,b:2, and let the URL name the store")
    with pytest.raises(ValueError, match=hint):
        read_tcp("tcps://a:1,b:2?rank=0&world_size=1")


def test_file() -> None:
    assert read_file("file:///a/b?rank=1&world_size=2") == ("/a/b", 1, 2)


@pytest.mark.parametrize("query", [None, "0", "1", "true", ""])
@pytest.mark.parametrize("env", [None, "0", "1", "true", ""])
def test_query_has_precedence_over_environment(
    query: str | None, env: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if env is not None:
        monkeypatch.setenv("USE_LIBUV", env)
    url = "tcp://h:1?rank=0&world_size=1" + ("" if query is None else f"&use_libuv={query}")
    said = query if query is not None else env if env is not None else "1"
    assert read_tcp(url).use_libuv is (said == "1")


# quirk: agent-store
def test_rank_0_hosts_unless_the_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    place = read_tcp("tcp://h:1?rank=0&world_size=2")
    assert place.hosts()
    assert not place._replace(rank=1).hosts()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "h")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert not place.hosts()
    assert place._replace(port=2).hosts(), "another endpoint"


def test_joining_requires_a_job_name(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "tcp://h:1?rank=0&world_size=2&join=1"
    with pytest.raises(ValueError, match="TCPSTORE_JOB"):
        read_tcp(url)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert read_tcp(url).prefix == "run/0"
    monkeypatch.setenv("TCPSTORE_JOB", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert read_tcp(url).prefix == "job/2"
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "x")
    with pytest.raises(ValueError, match="TCPSTORE_ATTEMPT must be a number, not 'x'"):
        read_tcp(url)
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "٣")
    with pytest.raises(ValueError, match="TCPSTORE_ATTEMPT must be a number, not '٣'"):
        read_tcp(url)
    assert not read_tcp("tcp://h:1?rank=0&world_size=2").prefix


@pytest.mark.parametrize("word", ["true", "yes", "2"])
def test_invalid_join(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not count as 0: rank 0 would host a server of its own."""
    monkeypatch.setenv("TCPSTORE_JOB", "job")
    said = f"TCPSTORE_JOIN or the URL's join parameter must be 0 or 1, not '{word}'"
    with pytest.raises(ValueError, match=said):
        read_tcp(f"tcp://h:1?rank=0&world_size=2&join={word}")
    monkeypatch.setenv("TCPSTORE_JOIN", word)
    with pytest.raises(ValueError, match=said):
        read_tcp("tcp://h:1?rank=0&world_size=2")
    for no in ("0", ""):
        assert not read_tcp(f"tcp://h:1?rank=0&world_size=2&join={no}").prefix
    for unset in ("", "0"):
        monkeypatch.setenv("TCPSTORE_JOIN", unset)
        assert not read_tcp("tcp://h:1?rank=0&world_size=2").prefix


def test_several_agents_require_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another rendezvous than ours, each agent counts restarts for itself."""
    url = "tcp://h:1?rank=0&world_size=2&join=1"
    monkeypatch.setenv("TCPSTORE_JOB", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert read_tcp(url).prefix == "job/0"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="Use --rdzv-backend=tcpstore, or set TCPSTORE_ATTEMPT"):
        read_tcp(url)
    monkeypatch.setenv("TCPSTORE_ROUND", "5eed")
    assert read_tcp(url).prefix == "job/5eed"
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "7")
    assert read_tcp(url).prefix == "job/7", "the user's value has precedence"


def test_joining_warns_once_and_names_what_replaces_it() -> None:
    """Later stores are silent, and so are programs that do not join."""
    program = """
import os
from tcpstore_async.stores.rendezvous_url import read_env, read_tcp
read_env("env://")
os.environ.update(TCPSTORE_JOIN="1", TCPSTORE_JOB="job", TCPSTORE_ATTEMPT="2")
for _ in range(2):
    read_env("env://")
    read_tcp("tcps://h:1?rank=0&world_size=2")
"""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **ranks}, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stderr == (
        "TCPSTORE_JOIN (join=1) and TCPSTORE_JOB are deprecated: set TCPSTORE_SERVER_URL=tcp://[::1]:29500, and let "
        "the address name the store of the job, for example MASTER_ADDR=job-17 MASTER_PORT=1\n"
    )


def test_slash_in_a_job_name_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key `0/key` of job `a` is not key `key` of job `a/0`."""
    monkeypatch.setenv("TCPSTORE_JOB", "a/0")
    monkeypatch.setenv("TCPSTORE_ATTEMPT", "1")
    assert read_tcp("tcp://h:1?rank=0&world_size=2&join=1").prefix == "a%2F0/1"


def test_jobs_on_one_server_see_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPSTORE_JOIN", "1")
    with tcpstore_server() as server:
        stores = []
        for job, attempt in (("a", "0"), ("a", "1"), ("b", "0")):
            monkeypatch.setenv("TCPSTORE_JOB", job)
            monkeypatch.setenv("TCPSTORE_ATTEMPT", attempt)
            store, _, _ = next(tcpstore_async.rendezvous(f"tcp://127.0.0.1:{server.port}", 0, 2))
            stores.append(store)
            assert not store.check(["key"])
            store.set("key", job + attempt)
        assert [store.get("key") for store in stores] == [b"a0", b"a1", b"b0"]
        for store in stores:
            store.close()


def ranks(url: str, count: int, env: dict[str, str]) -> list[int]:
    """Fork ranks that meet at a URL and exchange their names; return their exit statuses."""
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            status = 1
            try:
                os.environ.update({**env, "RANK": str(rank)})
                if url == "env://":
                    found = tcpstore_async.rendezvous(url, timeout=60.0)
                else:
                    found = tcpstore_async.rendezvous(url, rank, count, timeout=60.0)
                store, _, _ = next(found)
                with store:
                    store.set(f"name/{rank}", f"rank {rank}")
                    names = store.multi_get([f"name/{other}" for other in range(count)])
                    store.barrier("done", count)
                status = names != [b"rank %d" % other for other in range(count)]
            finally:
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.parametrize("scheme", ["tcp", "env", "file"])
def test_a_world_of_64_processes(scheme: str, tmp_path: object) -> None:
    with tcpstore_async.TCPStore("127.0.0.1", 0, is_master=True) as other:
        port = other.port  # free again in a moment
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "64"}
    url = {"tcp": f"tcp://127.0.0.1:{port}", "env": "env://", "file": f"file://{tmp_path}/meet"}[scheme]
    assert ranks(url, 64, env) == [0] * 64
    assert not os.path.exists(f"{tmp_path}/meet")


# quirk: rendezvous-timeout
def test_a_file_that_cannot_be_had_takes_the_rendezvous_timeout(tmp_path: Path) -> None:
    with pytest.raises(StoreTimeoutError, match=r"^timeout after 50ms: "):
        next(rendezvous(f"file://{tmp_path}/missing/file?rank=0&world_size=1", timeout=timedelta(milliseconds=50)))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("MASTER_PORT", "297814", "was 297814. Check MASTER_PORT."),
        ("MASTER_PORT", "x", "'x' (value of MASTER_PORT)"),
        ("RANK", "first", "'first' (value of RANK)"),
    ],
)
def test_invalid_number_names_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for variable, value in {**good, name: text}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(said) + "$"):
        next(rendezvous("env://"))
