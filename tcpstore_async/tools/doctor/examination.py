"""Reads this machine and runs the checks.

Knows where the kernel and the resolver have the inputs of checks. Must not know what is good or bad.
"""

import functools
import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from ...server.etcd_options import EtcdOptions
from ...server.port_holder import PROC, Holder, find_holder
from . import job, kernel, names, server
from .deadline import TooSlow, within
from .etcd import check_etcd
from .finding import SKIP, WARN, Finding

SECONDS: Final = 5.0
"""Timeout of one look-up, or of the server."""

_LOOK_UPS: Final = 6
"""Look-ups whose timeouts together limit one check, whatever hangs."""

_SYS: Final = Path("/sys")

_CLOCK: Final = "devices/system/clocksource/clocksource0"

_SOMEWHERE: Final = ("192.0.2.1", 9)
"""An address reserved for documentation; nothing is sent to it."""


class Machine:
    """This machine, or a test's imitation."""

    def __init__(
        self, proc: Path = PROC, sys: Path = _SYS, name: str = "", environ: Mapping[str, str] = os.environ
    ) -> None:
        self.proc = proc
        self.sys = sys
        self.name = name or socket.gethostname()
        self.environ = environ

    def sysctl(self, name: str) -> str:
        """Return a kernel setting, "" if it does not exist."""
        return _read(self.proc / "sys" / name.replace(".", "/"))

    def number(self, name: str) -> int | None:
        text = self.sysctl(name)
        return int(text) if text.isdecimal() else None

    def clock(self, what: str) -> str:
        return _read(self.sys / _CLOCK / f"{what}_clocksource")


def _read(path: Path) -> str:
    """Return the contents of a kernel file, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def examine(
    machine: Machine,
    ranks: int,
    port: int | None,
    way: server.Way | None,
    seconds: float = SECONDS,
    etcd: EtcdOptions | None = None,
) -> Iterator[Finding]:
    """Yield findings, check by check.

    `port` is for a server to be started on this machine, None for none; `way` leads to a running server, perhaps on
    this machine; `etcd`, to the etcd of its stores. Checks of a server's machine are skipped on other machines.
    """
    serves = port is not None or (way is not None and bool(_own_addresses(way.host, seconds)))
    store_port = port if port is not None else way.port if way is not None else None
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("host name", lambda: names.check_name(machine.name, look_up, is_local, own_address(), seconds))
    ]
    if serves:
        checks.append(
            ("reverse names", lambda: names.check_reverse_names(_peers(machine.name, seconds), reverse, ranks, seconds))
        )
        if port is not None:
            checks.append(
                ("port", lambda: kernel.check_port(port, bind, lambda held: find_holder("::", held, machine.proc)))
            )
        checks.append(("queues", lambda: _check_queues(machine, ranks)))
    else:
        text = "the server is on another machine: run this command there too"
        checks.append(("queues", lambda: [Finding("server's machine", SKIP, text, f"tcpstore doctor --ranks {ranks}")]))
    if store_port is not None and serves:
        checks.append(("ephemeral ports", lambda: [_check_ephemeral_ports(machine, store_port)]))
    checks += [
        ("clock", lambda: [kernel.check_clock(machine.clock("current"), machine.clock("available"))]),
        ("gloo", lambda: [job.check_gloo(machine.environ, ranks)]),
        ("NCCL", lambda: [job.check_nccl(machine.environ, ranks)]),
    ]
    if way is not None:
        find_listener = functools.partial(_find_listener, machine, way, seconds)
        checks.append(("server", lambda: server.check_server(way, seconds, find_listener)))
    if etcd is not None:
        checks.append(("etcd", lambda: check_etcd(etcd, seconds)))
    for name, check in checks:
        try:
            yield from within(_LOOK_UPS * seconds, check)
        except TooSlow:
            yield Finding(name, WARN, f"not finished after {_LOOK_UPS * seconds:g} s")
        except OSError as error:
            yield Finding(name, WARN, f"could not be checked: {error.strerror or error}")


def _check_queues(machine: Machine, ranks: int) -> list[Finding]:
    somaxconn = machine.number("net.core.somaxconn")
    backlog, cookies = machine.number("net.ipv4.tcp_max_syn_backlog"), machine.number("net.ipv4.tcp_syncookies")
    return [
        kernel.check_accept_queue(somaxconn, ranks),
        kernel.check_syn_queue(backlog, cookies, ranks),
        kernel.check_overflow(machine.number("net.ipv4.tcp_abort_on_overflow"), somaxconn, ranks),
        kernel.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), ranks),
    ]


def _check_ephemeral_ports(machine: Machine, port: int) -> Finding:
    ports, reserved = (machine.sysctl(f"net.ipv4.ip_local_{what}") for what in ("port_range", "reserved_ports"))
    return kernel.check_ephemeral_ports(port, ports, reserved)


def _find_listener(machine: Machine, way: server.Way, seconds: float) -> Holder | None:
    """Return the listener that a way leads to, if it is on this machine."""
    for address in _own_addresses(way.host, seconds):
        found = find_holder(address, way.port, machine.proc)
        if found is not None and not found.peer:
            return found
    return None


def _own_addresses(host: str, seconds: float) -> list[str]:
    """Return the addresses of a name that are this machine's."""
    try:
        return list(filter(is_local, within(seconds, lambda: look_up(host))))
    except (OSError, TooSlow):
        return []


# The resolver and sockets


def look_up(name: str) -> list[str]:
    """Return the addresses of a name. Raises OSError."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"not a valid name: {error}") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def reverse(address: str) -> str:
    """Return the name of an address, looked up as PyTorch's servers do."""
    return socket.getnameinfo((address, 0), 0)[0]


def is_local(address: str) -> bool:
    """Return whether an address is this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0][4])
    except OSError:
        return False
    return True


def own_address() -> str:
    """Return the address from which this machine reaches others, "" for none. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_SOMEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _peers(name: str, seconds: float) -> list[str]:
    """Return the addresses from which ranks on this machine connect."""
    try:
        return list(dict.fromkeys(["127.0.0.1", *within(seconds, lambda: look_up(name))]))
    except (OSError, TooSlow):
        return ["127.0.0.1"]


def bind(port: int) -> None:
    """Bind a port as a master would, without listening. Raises OSError if that fails."""
    try:
        _bind(socket.AF_INET6, "::", port)
    except OSError:
        _bind(socket.AF_INET, "0.0.0.0", port)


def _bind(family: int, host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind((host, port))
