"""Checks of the port, and of limits of the operating system that affect a job's start.

Must not know where the numbers come from: None, or an empty text, stands for one that cannot be read.
"""

import errno
import resource
from collections.abc import Callable
from typing import Final

from ...server.listen_socket import BACKLOG, RESERVE
from ...server.port_holder import Holder
from .finding import FAIL, OK, SKIP, WARN, Finding

_FAST_CLOCKS: Final = frozenset(
    {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase", "tod", "riscv_clocksource"}
)
"""Clock sources that are read without a system call."""

_NOT_HERE: Final = "does not exist on this system, or cannot be read"


def check_port(port: int, bind: Callable[[int], None], holder: Callable[[int], Holder | None]) -> list[Finding]:
    """Check that a server can listen on a port of all addresses. `bind` raises OSError if not."""
    try:
        bind(port)
        return [Finding("port", OK, f"port {port} is free")]
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            fix = "tcpstore serve --port 29500" if error.errno == errno.EACCES else ""
            return [Finding("port", FAIL, f"port {port} cannot be used: {error.strerror or error}", fix)]
    found = holder(port)
    text = f"port {port} is in use" + (f" by {found}" if found is not None else "")
    fix = "tcpstore serve --port 0 --port-file FILE"
    return [
        Finding(
            "port",
            FAIL,
            text,
            f"{fix}, or end that process if nobody needs it: kill {found.pid}" if found and found.pid else fix,
        )
    ]


def check_ephemeral_ports(port: int, port_range: str, reserved: str) -> Finding:
    """Check that no outgoing connection can take the port before the server does.

    `port_range` and `reserved` are the texts of net.ipv4.ip_local_port_range and ip_local_reserved_ports.
    """
    name = "ephemeral ports"
    try:
        low, high = map(int, port_range.split())
    except ValueError:
        return Finding(name, SKIP, f"net.ipv4.ip_local_port_range {_NOT_HERE}")
    text = f"outgoing connections from this machine use ports {low}-{high}"
    if not low <= port <= high or _contains(reserved, port):
        return Finding(name, OK, f"{text}; port {port} is not one of them")
    ports = ",".join(filter(None, [reserved.strip(), str(port)]))
    text += f": one of them may hold port {port} when the server starts"
    return Finding(name, WARN, text, f"sysctl -w net.ipv4.ip_local_reserved_ports={ports}")


def _contains(ranges: str, port: int) -> bool:
    """Return whether a port is in a list such as 8080,9000-9100."""
    for part in filter(None, ranges.strip().split(",")):
        low, _, high = part.partition("-")
        if int(low) <= port <= int(high or low):
            return True
    return False


def check_accept_queue(somaxconn: int | None, ranks: int) -> Finding:
    """Check that ranks that connect at once fit into the accept queue."""
    name = "accept queue"
    if somaxconn is None:
        return Finding(name, SKIP, f"net.core.somaxconn {_NOT_HERE}")
    text = f"net.core.somaxconn is {somaxconn}"
    if somaxconn >= min(ranks, BACKLOG):
        return Finding(name, OK, text)
    text += f": if {ranks} ranks connect at once, some will have to retry a second later"
    return Finding(name, WARN, text, f"sysctl -w net.core.somaxconn={BACKLOG}")


def check_syn_queue(backlog: int | None, cookies: int | None, ranks: int) -> Finding:
    """Check that no SYN is dropped; with SYN cookies there is no limit."""
    name = "SYN queue"
    if backlog is None:
        return Finding(name, SKIP, f"net.ipv4.tcp_max_syn_backlog {_NOT_HERE}")
    text = f"net.ipv4.tcp_max_syn_backlog is {backlog}, SYN cookies are {'on' if cookies else 'off'}"
    if cookies or ranks < backlog - backlog // 4:  # the kernel reserves a quarter for known peers
        return Finding(name, OK, text)
    text += f": if {ranks} ranks connect at once, some will have to retry a second later"
    return Finding(name, WARN, text, "sysctl -w net.ipv4.tcp_syncookies=1")


def check_overflow(aborts: int | None, somaxconn: int | None, ranks: int) -> Finding:
    """Check that a connection that does not fit into the accept queue is retried, not reset."""
    name = "queue overflow"
    if aborts is None:
        return Finding(name, SKIP, f"net.ipv4.tcp_abort_on_overflow {_NOT_HERE}")
    if not aborts:
        return Finding(name, OK, "connections that do not fit into the accept queue are retried")
    text = "net.ipv4.tcp_abort_on_overflow is 1: connections that do not fit into the accept queue are reset"
    overflows = somaxconn is not None and ranks > somaxconn
    return Finding(name, FAIL if overflows else WARN, text, "sysctl -w net.ipv4.tcp_abort_on_overflow=0")


def check_open_files(soft: int, hard: int, ranks: int) -> Finding:
    """Check that a server can hold a connection per rank. Ours raises the soft limit itself."""
    name = "open files"
    needed = ranks + 2 * RESERVE
    text = f"ulimit -n is {_files(soft)} (hard limit: {_files(hard)})"
    if not _allows(hard, needed):
        text += f": not enough for {ranks} ranks on one server, which requires {needed}"
        return Finding(name, FAIL, text, f"ulimit -Hn {needed} as root (LimitNOFILE={needed}), or run tcpstore relay")
    if not _allows(soft, needed):
        text += f": PyTorch's servers require {needed} for {ranks} ranks and do not raise it; tcpstore serve does"
        return Finding(name, WARN, text, f"ulimit -n {needed}")
    return Finding(name, OK, text)


def _allows(limit: int, files: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= files


def _files(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def check_clock(current: str, available: str) -> Finding:
    """Check that reading the clock is cheap: every timeout does."""
    name = "clock"
    if not current:
        return Finding(name, SKIP, f"the clock source setting {_NOT_HERE}")
    if current in _FAST_CLOCKS:
        return Finding(name, OK, f"the clock source is {current}")
    better = [source for source in available.split() if source in _FAST_CLOCKS]
    text = f"the clock source is {current}: each reading of the clock is a system call"
    path = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    return Finding(name, WARN, text, f"echo {better[0]} > {path}" if better else "")
