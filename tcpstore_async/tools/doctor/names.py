"""Checks of this machine's name, its addresses, and their reverse names.

Must not know how names are looked up.
"""

import ipaddress
import re
import time
from collections.abc import Callable
from typing import Final

from .deadline import TooSlow, within
from .finding import FAIL, OK, WARN, Finding

SLOW: Final = 1.0
"""Seconds above which a look-up is slow."""

SLOW_FOR_ALL: Final = 5.0
"""Seconds above which the look-ups of all ranks together are slow."""

LookUp = Callable[[str], list[str]]
"""Returns the addresses of a name. Raises OSError."""

Reverse = Callable[[str], str]
"""Returns the name of an address, or the address. Raises OSError."""


def check_name(
    name: str, look_up: LookUp, is_local: Callable[[str], bool], own_address: str, seconds: float
) -> list[Finding]:
    """Check that a machine's name resolves to the machine, also from other machines.

    `own_address` is one by which others reach it, "" if unknown; `is_local` tells whether an address is the machine's.
    """
    began = time.perf_counter()
    try:
        addresses = within(seconds, lambda: look_up(name))
    except TooSlow:
        text = f"looking up this machine's name, {name}, takes more than {seconds:g} s"
        return [Finding("host name", FAIL, text, _entry(name, own_address))]
    except OSError as error:
        text = f"this machine's name, {name}, cannot be resolved: {error.strerror or error}"
        return [Finding("host name", FAIL, text, _entry(name, own_address))]
    took = time.perf_counter() - began
    text = f"{name} resolves to {_listed(addresses)} (in {1000 * took:.1f} ms)"
    slow = took > SLOW
    found = [Finding("host name", WARN if slow else OK, text, _entry(name, own_address) if slow else "")]
    found.append(_check_addresses(name, addresses, is_local, own_address))
    found.append(_check_families(name, addresses))
    return found


def _check_addresses(name: str, addresses: list[str], is_local: Callable[[str], bool], own_address: str) -> Finding:
    foreign = [address for address in addresses if not is_local(address)]
    if foreign:
        text = f"{name} resolves outside this machine, to {_listed(foreign)}: ranks would connect elsewhere"
        return Finding("published address", FAIL, text, _entry(name, own_address, replaced=True))
    loopback = [address for address in addresses if _parse(address).is_loopback]
    if loopback:
        text = (
            f"{name} resolves to {_listed(loopback)}: a rank that publishes it, as gloo does, can be reached only from "
            "this machine; harmless if all ranks are on it"
        )
        return Finding("published address", WARN, text, _entry(name, own_address, replaced=True))
    return Finding("published address", OK, f"{_listed(addresses)} can be reached from other machines")


def _check_families(name: str, addresses: list[str]) -> Finding:
    versions = sorted({_parse(address).version for address in addresses})
    families = " and ".join(f"IPv{version}" for version in versions)
    if versions == [6]:
        text = (
            f"{name} has IPv6 addresses only: PyTorch's legacy server and programs that bind 0.0.0.0 cannot be reached"
        )
        return Finding("address families", WARN, text, "tcpstore serve --host ::")
    return Finding("address families", OK, families)


def check_reverse_names(addresses: list[str], reverse: Reverse, ranks: int, seconds: float) -> list[Finding]:
    """Check how long it takes to look up the names of addresses that ranks connect from.

    PyTorch's servers look up the name of each peer when they accept it, one after the other; ours does not.
    """
    slowest, where = 0.0, ""
    for address in addresses:
        began = time.perf_counter()
        try:
            within(seconds, lambda address=address: reverse(address))  # type: ignore[misc]
        except (TooSlow, OSError):
            pass  # only the duration counts
        took = time.perf_counter() - began
        if took >= slowest:
            slowest, where = took, address
    if not where:
        return []
    at_least = "more than " if slowest >= seconds else ""
    text = f"looking up the name of {where} takes {at_least}{1000 * slowest:.1f} ms"
    if slowest <= SLOW and slowest * ranks <= SLOW_FOR_ALL:
        return [Finding("reverse names", OK, text)]
    text += (
        f", {at_least}{slowest * ranks:.1f} s for {ranks} ranks: PyTorch's servers look up the ranks' names one by one"
    )
    return [
        Finding(
            "reverse names", WARN, text, "tcpstore serve (it does not look up names), or list the hosts in /etc/hosts"
        )
    ]


def _entry(name: str, address: str, replaced: bool = False) -> str:
    """Return the command that adds a name to /etc/hosts."""
    if not re.fullmatch(r"[\w.-]+", name):
        return ""
    command = f"echo '{address or 'ADDRESS'} {name}' >> /etc/hosts"
    return rf"sed -i -E 's/(\s){name}(\s|$)/\1\2/' /etc/hosts && {command}" if replaced else command


def _listed(addresses: list[str]) -> str:
    return ", ".join(addresses) or "no address"


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])
