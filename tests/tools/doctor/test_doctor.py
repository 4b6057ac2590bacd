"""The checks of `tcpstore doctor`, with what they look at made up."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from support import LIMIT, free_port, tcpstore_server
from tcpstore_async import AsyncTCPStore
from tcpstore_async.base.errors import AccessDeniedError, DistNetworkError
from tcpstore_async.cli import main
from tcpstore_async.client.tls import tls_required
from tcpstore_async.server.port_holder import Holder
from tcpstore_async.tools.doctor import examination, kernel, names, server
from tcpstore_async.tools.doctor.deadline import TooSlow, within
from tcpstore_async.tools.doctor.examination import Machine, examine
from tcpstore_async.tools.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from tcpstore_async.tools.doctor.job import check_gloo, check_nccl
from tcpstore_async.tools.doctor.kernel import (
    check_accept_queue,
    check_clock,
    check_ephemeral_ports,
    check_open_files,
    check_overflow,
    check_port,
    check_syn_queue,
)
from tcpstore_async.tools.doctor.names import check_name, check_reverse_names
from tcpstore_async.tools.doctor.server import Way, check_server, round_trips

NOBODY = -1
"""No limit, as `resource` has it."""


@pytest.fixture
def hang() -> Iterator[Callable[[object], list[str]]]:
    """What does not return before the test ends."""
    over = threading.Event()

    def hang(_: object) -> list[str]:
        over.wait(LIMIT)
        return []

    yield hang
    over.set()


# Names


def name_of(*addresses: str, local: bool = True, own: str = "10.0.0.5", name: str = "node-7") -> dict[str, Finding]:
    found = check_name(name, lambda _: list(addresses), lambda _: local, own, LIMIT)
    return {finding.check: finding for finding in found}


def test_a_good_name() -> None:
    found = name_of("10.0.0.5", "fd00::5")
    assert [finding.status for finding in found.values()] == [OK, OK, OK]
    assert found["address families"].text == "IPv4 and IPv6"
    assert found["host name"].text.startswith("node-7 resolves to 10.0.0.5, fd00::5 (in ")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_address_that_would_be_published(address: str) -> None:
    found = name_of(address)["published address"]
    assert found.status == WARN
    assert address in found.text
    assert found.fix.endswith("&& echo '10.0.0.5 node-7' >> /etc/hosts")


def test_a_name_that_leads_elsewhere() -> None:
    found = name_of("10.0.0.9", local=False)["published address"]
    assert found.status == FAIL
    assert "10.0.0.9" in found.text
    assert "node-7" in found.fix


def test_a_name_with_ipv6_only() -> None:
    assert name_of("fe80::5%eth0")["address families"].status == WARN


def test_a_name_that_is_not_known(hang: Callable[[object], list[str]]) -> None:
    def fails(_: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    (found,) = check_name("node-7", fails, lambda _: True, "", LIMIT)
    assert found == Finding(
        "host name",
        FAIL,
        "this machine's name, node-7, cannot be resolved: Name or service not known",
        "echo 'ADDRESS node-7' >> /etc/hosts",
    )
    (found,) = check_name("node-7", hang, lambda _: True, "10.0.0.5", 0.0)
    assert (found.status, found.fix) == (FAIL, "echo '10.0.0.5 node-7' >> /etc/hosts")
    assert "more than 0 s" in found.text


def test_no_command_is_made_of_a_strange_name() -> None:
    assert name_of("127.0.0.1", name="$(reboot)'")["published address"].fix == ""


def test_reverse_names(hang: Callable[[object], list[str]]) -> None:
    (found,) = check_reverse_names(["127.0.0.1"], str, 1, LIMIT)
    assert found.status == OK
    (found,) = check_reverse_names(["127.0.0.1", "10.0.0.5"], lambda address: str(hang(address)), 1000, 0.01)
    assert found.status == WARN
    assert "takes more than " in found.text
    assert " s for 1000 ranks" in found.text
    assert found.fix.startswith("tcpstore serve ")
    assert check_reverse_names([], str, 1, LIMIT) == []


def test_an_unknown_reverse_name_is_no_failure() -> None:
    def fails(_: str) -> str:
        raise OSError

    (found,) = check_reverse_names(["10.0.0.5"], fails, 1, LIMIT)
    assert found.status == OK


# The kernel


def busy(number: int) -> Callable[[int], None]:
    def bind(_: int) -> None:
        raise OSError(number, "text")

    return bind


def test_a_port() -> None:
    assert check_port(29500, lambda _: None, lambda _: None) == [Finding("port", OK, "port 29500 is free")]
    (found,) = check_port(29500, busy(errno.EADDRINUSE), lambda _: Holder("", 0, 4711, "python train.py"))
    assert (found.status, found.text) == (FAIL, "port 29500 is in use by pid 4711 (python train.py)")
    assert found.fix == "tcpstore serve --port 0 --port-file FILE, or end that process if nobody needs it: kill 4711"
    (found,) = check_port(29500, busy(errno.EADDRINUSE), lambda _: Holder("", 0))
    assert "kill" not in found.fix
    (found,) = check_port(29500, busy(errno.EADDRINUSE), lambda _: None)
    assert found.text == "port 29500 is in use"
    (found,) = check_port(80, busy(errno.EACCES), lambda _: None)
    assert (found.status, found.fix) == (FAIL, "tcpstore serve --port 29500")


@pytest.mark.parametrize(
    ("port", "reserved", "status", "fix"),
    [
        (29500, "", OK, ""),
        (40000, "", WARN, "sysctl -w net.ipv4.ip_local_reserved_ports=40000"),
        (40000, "8080,39000-41000\n", OK, ""),
        (40000, "8080,40000", OK, ""),
        (40000, "8080", WARN, "sysctl -w net.ipv4.ip_local_reserved_ports=8080,40000"),
        (32768, "", WARN, "sysctl -w net.ipv4.ip_local_reserved_ports=32768"),
        (60999, "", WARN, "sysctl -w net.ipv4.ip_local_reserved_ports=60999"),
    ],
)
def test_ephemeral_ports(port: int, reserved: str, status: str, fix: str) -> None:
    found = check_ephemeral_ports(port, "32768\t60999\n", reserved)
    assert (found.status, found.fix) == (status, fix)


def test_the_accept_queue() -> None:
    assert check_accept_queue(4096, 4096).status == OK
    assert check_accept_queue(65535, 98304).status == OK  # no server asks for more
    found = check_accept_queue(4096, 4097)
    assert (found.status, found.fix) == (WARN, "sysctl -w net.core.somaxconn=65535")


def test_the_syn_queue() -> None:
    assert check_syn_queue(2048, 1, 98304).status == OK
    assert check_syn_queue(2048, 0, 1000).status == OK
    assert check_syn_queue(2048, 0, 1536).fix == "sysctl -w net.ipv4.tcp_syncookies=1"


@pytest.mark.parametrize(
    ("aborts", "ranks", "status"), [(0, 9999, OK), (1, 10, WARN), (1, 9999, FAIL), (None, 1, SKIP)]
)
def test_an_overflow(aborts: int | None, ranks: int, status: str) -> None:
    found = check_overflow(aborts, 4096, ranks)
    assert found.status == status
    assert ("sysctl" in found.fix) == (status in (WARN, FAIL))


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "status"),
    [
        (1024, 1048576, 800, OK),
        (1024, 1048576, 1024, WARN),
        (1024, 4096, 4096, FAIL),
        (NOBODY, NOBODY, 98304, OK),
        (1024, NOBODY, 98304, WARN),
    ],
)
def test_open_files(soft: int, hard: int, ranks: int, status: str) -> None:
    found = check_open_files(soft, hard, ranks)
    assert found.status == status
    assert (str(ranks + 128) in found.fix) == (status != OK)


def test_the_clock() -> None:
    assert check_clock("tsc", "tsc hpet").status == OK
    assert check_clock("hpet", "hpet tsc").fix.startswith("echo tsc > /sys/")
    assert (check_clock("hpet", "hpet").status, check_clock("hpet", "hpet").fix) == (WARN, "")


def test_what_a_system_lacks_is_skipped() -> None:
    found = [
        check_ephemeral_ports(29500, "", ""),
        check_accept_queue(None, 10**6),
        check_syn_queue(None, None, 10**6),
        check_overflow(None, None, 10**6),
        check_clock("", ""),
    ]
    assert {finding.status for finding in found} == {SKIP}
    assert all("cannot be read" in finding.text for finding in found)


# The job


def test_gloo() -> None:
    batched = {"GLOO_ENABLE_STORE_V2_API": "1"}
    assert check_gloo({}, 64).status == OK
    found = check_gloo({}, 1024)
    assert found.status == WARN
    assert "3,145,728 requests" in found.text
    assert found.fix.startswith("export GLOO_ENABLE_STORE_V2_API=1 GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER=1 ")
    assert check_gloo({"GLOO_ENABLE_STORE_V2_API": "true"}, 1024).status == WARN  # gloo does not take it as set
    assert check_gloo(batched, 1024).fix == "export GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER=1 for all ranks"
    assert check_gloo({**batched, "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}, 1024).status == OK
    assert check_gloo({"TORCH_GLOO_LAZY_INIT": "TRUE"}, 1024).status == OK


def test_nccl() -> None:
    per_root = "TORCH_NCCL_RANKS_PER_ROOT"
    assert check_nccl({}, 128).text == "one root creates the id for 128 ranks"
    assert check_nccl({}, 1).text == "one root creates the id for 1 rank"
    assert check_nccl({}, 1024).status == OK
    assert check_nccl({}, 1024).text.startswith("8 roots create ids (")
    found = check_nccl({}, 98304)
    assert found.status == WARN
    assert "75,497,472 keys" in found.text
    assert found.fix.endswith("export TORCH_NCCL_RANKS_PER_ROOT=1536 for all ranks")
    assert check_nccl({}, 1_000_000).fix == "export TORCH_NCCL_RANKS_PER_ROOT=15625 for all ranks"
    assert check_nccl({per_root: "98304"}, 98304).status == OK
    assert "export" not in check_nccl({per_root: "2048"}, 98304).fix
    for wrong in ("0", "-1", "many"):
        assert check_nccl({per_root: wrong}, 2).status == FAIL


def test_round_trips() -> None:
    assert round_trips([0.001, 0.002, 0.5]).text == "a round trip takes 2.00 ms (median), 500.00 ms (maximum)"
    assert round_trips([0.1]).status == WARN


# All of them


def test_a_deadline_for_what_hangs(hang: Callable[[object], list[str]]) -> None:
    with pytest.raises(TooSlow):
        within(0.0, lambda: hang(0))
    assert within(LIMIT, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(LIMIT, lambda: 1 // 0)


def settings(folder: Path) -> Path:
    for name, value in {
        "net/core/somaxconn": "128\n",
        "net/ipv4/tcp_max_syn_backlog": "128\n",
        "net/ipv4/tcp_syncookies": "0\n",
        "net/ipv4/tcp_abort_on_overflow": "1\n",
        "net/ipv4/ip_local_port_range": "20000\t60999\n",
        "net/ipv4/ip_local_reserved_ports": "\n",
    }.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    return folder


def test_a_machine_is_read(tmp_path: Path) -> None:
    machine = Machine(settings(tmp_path), tmp_path / "nowhere", "localhost", {})
    found = {finding.check: finding for finding in examine(machine, 1024, 29500, None, LIMIT)}
    statuses = {name: finding.status for name, finding in found.items()}
    del statuses["host name"], statuses["reverse names"], statuses["port"], statuses["open files"]
    assert statuses.pop("address families") in (OK, WARN)
    assert statuses == {
        "published address": WARN,
        "accept queue": WARN,
        "SYN queue": WARN,
        "queue overflow": FAIL,
        "ephemeral ports": WARN,
        "clock": SKIP,
        "gloo": WARN,
        "NCCL": OK,
    }
    assert all(finding.fix for finding in found.values() if finding.status in (WARN, FAIL))


def test_a_system_without_proc(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "nowhere", tmp_path / "nowhere", "localhost", {})
    skipped = {finding.check for finding in examine(machine, 1, 29500, None, LIMIT) if finding.status == SKIP}
    assert skipped == {"accept queue", "SYN queue", "queue overflow", "ephemeral ports", "clock"}


async def nowhere() -> AsyncTCPStore:
    raise AssertionError("not to be called")


def test_the_server_is_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "look_up", lambda _: ["192.0.2.1"])
    monkeypatch.setattr(examination, "is_local", lambda _: False)
    monkeypatch.setattr(
        server, "check_server", lambda way, seconds, _: [Finding("server", OK, f"{way.host}:{way.port} {seconds}")]
    )
    found = {
        finding.check: finding for finding in examine(Machine(environ={}), 8, None, Way("store", 1, nowhere), LIMIT)
    }
    assert set(found) == {"host name", "published address", "address families", "server's machine", "clock"} | {
        "gloo", "NCCL", "server"
    }  # fmt: skip
    assert found["server's machine"].fix == "tcpstore doctor --ranks 8"
    assert found["server"].text == f"store:1 {LIMIT}"


def test_a_check_that_hangs_or_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, hang: Callable[[object], list[str]]
) -> None:
    def fails(*_: object) -> list[Finding]:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(names, "check_name", lambda *_: hang(0))
    monkeypatch.setattr(kernel, "check_port", fails)
    found = {finding.check: finding for finding in examine(Machine(environ={}), 1, 29500, None, 1e-3)}
    assert found["host name"].text == "not finished after 0.006 s"
    assert found["port"] == Finding("port", WARN, "could not be checked: denied")


# A server


def way(port: int) -> Way:
    return Way("127.0.0.1", port, lambda: AsyncTCPStore.connect("127.0.0.1", port, timeout=LIMIT))


@pytest.mark.parametrize(
    ("error", "text", "fix"),
    [
        (DistNetworkError("refused"), "store:1 cannot be used: refused", "on store: tcpstore serve --host :: --port 1"),
        (AccessDeniedError("expired"), "store:1 refuses this client: expired", "export TCPSTORE_TOKEN_FILE=FILE "),
        (tls_required(), f"store:1 refuses this client: {tls_required()}", "export TCPSTORE_TLS=1 TCPSTORE_CA=FILE "),
    ],
)
def test_a_server_that_cannot_be_used(error: Exception, text: str, fix: str) -> None:
    async def connect() -> AsyncTCPStore:
        raise error

    (found,) = check_server(Way("store", 1, connect), LIMIT)
    assert (found.status, found.text) == (FAIL, text)
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(
    ("listener", "fix"),
    [
        (None, ""),
        (Holder("", 0, 7, "tcpstore serve"), "see what that process is doing "),
        (Holder("", 9), "run this command as root, outside of containers, "),
    ],
)
def test_a_server_that_does_not_answer(listener: Holder | None, fix: str) -> None:
    """No other server can be started on the port of one that listens."""

    async def connect() -> AsyncTCPStore:
        await asyncio.Event().wait()
        raise AssertionError

    (found,) = check_server(Way("store", 1, connect), -0.99, lambda: listener)
    why = f"{listener} holds the port and does not answer" if listener else "no answer within -0.99 s"
    assert found.text == f"store:1 cannot be used: {why}"
    assert found.fix.startswith(fix)


def test_a_server_that_closes_the_connection() -> None:
    with tcpstore_server() as running:

        async def connect() -> AsyncTCPStore:
            store = await AsyncTCPStore.connect("127.0.0.1", running.port, timeout=LIMIT)
            await store.ping()
            running.stop(signal.SIGKILL)
            return store

        (found,) = check_server(Way("127.0.0.1", running.port, connect), LIMIT)
    assert found.text.startswith(f"127.0.0.1:{running.port} accepts the connection and then closes it: ")
    assert found.fix.startswith("see its log")


# The command


def test_the_command() -> None:
    port = str(free_port())
    words = ["doctor", "--ranks", "1000000000", "--port", port]
    text = CliRunner().invoke(main, words, env={"TCPSTORE_URL": ""})
    printed = CliRunner().invoke(main, [*words, "-o", "json"], env={"TCPSTORE_URL": ""})
    report = json.loads(printed.stdout)
    assert text.exit_code == printed.exit_code == (1 if report["failed"] else 0)
    lines = text.stdout.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == [one["status"] for one in report["checks"]]
    assert all(line.split()[0] == "->" for line in lines if line[0] == " ")
    index = next(number for number, line in enumerate(lines) if line.startswith("warn  gloo "))
    assert lines[index + 1].strip().startswith("-> export GLOO_ENABLE_STORE_V2_API=1 ")
    with tcpstore_server() as running:
        url = f"tcp://127.0.0.1:{running.port}"
        printed = CliRunner().invoke(main, ["doctor", "--url", url, "-o", "json"])
    found = {finding["check"]: finding["status"] for finding in json.loads(printed.stdout)["checks"]}
    assert found["server"] == "ok"
