"""Checks of the etcd in which servers keep their stores: what can be seen from outside.

Must not know what servers write there. Invariant: a lease removes what is written here, whatever happens.
"""

import secrets
import ssl
import time
import urllib.error
import urllib.request
from contextlib import closing
from typing import Final

from ...auth.secret_files import TlsFiles, load_certificates
from ...base.errors import counted, reason_of
from ...log.encoding import JournalError
from ...log.etcd import OLDEST
from ...log.etcd_client import EtcdClient, UnavailableError
from ...server.etcd_options import EtcdOptions
from ..look.asking import in_bytes
from .finding import FAIL, OK, SKIP, WARN, Finding

LEASE: Final = 2
"""Seconds of the lease of a server that serves."""

_WRITES: Final = 20

_WRITES_LEASE: Final = 60

_SLOW: Final = 0.02
"""Seconds of a commit above which all requests of ranks are slow."""

_LATE: Final = LEASE / 4
"""Seconds of a commit above which a lease may end though its server is well."""

_FULL: Final = 0.5
"""The part of the quota above which it is time to act."""

_MANY_REVISIONS: Final = 10_000
"""Revisions after which a history that is ever removed would have been, on most systems."""

_COMPACTION: Final = "--auto-compaction-mode=periodic --auto-compaction-retention=1m"

_FREE: Final = "etcdctl compact REVISION, etcdctl defrag for each member, then etcdctl alarm disarm"

_MAJORITY: Final = "start members until more than half of them run, or correct the URLs"

_SIZE, _IN_USE = "etcd_mvcc_db_total_size_in_bytes", "etcd_mvcc_db_total_size_in_use_in_bytes"
_QUOTA = "etcd_server_quota_backend_bytes"
_REVISION, _COMPACTED = "etcd_debugging_mvcc_current_revision", "etcd_debugging_mvcc_compact_revision"


def check_etcd(etcd: EtcdOptions, seconds: float) -> list[Finding]:
    """Check an etcd whose members have `seconds` for each answer."""
    try:
        client = EtcdClient(etcd.urls, etcd.tls, etcd.user)
    except JournalError as error:
        return [Finding("etcd", FAIL, str(error))]
    with closing(client):
        answers: dict[str, str] = {}
        silent: dict[str, str] = {}
        alarms: set[str] = set()
        for member, url in enumerate(etcd.urls):
            try:
                status = client.status(member, seconds)
            except (JournalError, UnavailableError) as error:
                silent[url] = str(error).rpartition(": ")[2]
            else:
                answers[url] = status.version
                alarms.update(status.errors)
        found = [check_members(answers, silent)]
        if not answers:
            return found
        found.append(check_alarms(alarms))
        found += _check_metrics(list(answers), etcd.tls, seconds)
        try:
            found += _check_commits(client, seconds)
        except (JournalError, UnavailableError) as error:
            fix = _FREE if "space exceeded" in str(error) else _MAJORITY
            found.append(Finding("etcd commit", FAIL, f"nothing can be written: {error}", fix))
        return found


def _check_commits(client: EtcdClient, seconds: float) -> list[Finding]:
    """Write to a key of our own, with the leases that servers have. Raises JournalError and UnavailableError."""
    lease, granted = client.grant(LEASE, seconds)
    client.revoke(lease, seconds)
    lease, _ = client.grant(_WRITES_LEASE, seconds)
    key = f"/tcpstore/doctor/{secrets.token_hex(8)}".encode()
    took = []
    try:
        for _ in range(_WRITES):
            began = time.perf_counter()
            client.txn([], [client.put(key, bytes(100), lease)], limit=seconds)
            took.append(time.perf_counter() - began)
    finally:
        client.revoke(lease, seconds)
    return [check_commits(took), check_lease(granted)]


def check_members(answers: dict[str, str], silent: dict[str, str]) -> Finding:
    """Check which members answer, keyed by URL: with their versions; and why others do not."""
    many = len(answers) + len(silent)
    reasons = "; ".join(f"{url}: {reason}" for url, reason in silent.items())
    text = f"{len(answers)} of {many} members answer"
    if not answers:
        return Finding("etcd", FAIL, f"{text}: {reasons}", _MAJORITY)
    text += f", with etcd {', '.join(sorted(set(answers.values())))}"
    old = [url for url, version in answers.items() if tuple(map(int, version.split(".")[:2])) < OLDEST]
    if old:
        oldest = ".".join(map(str, OLDEST))
        return Finding("etcd", FAIL, f"{text}: too old at {', '.join(old)}", f"install etcd {oldest} or later")
    if silent:
        return Finding("etcd", WARN, f"{text}; {reasons}", "start that member, or correct its URL")
    if many < 3:
        return Finding("etcd", WARN, f"{text}: one that dies is not done without", "run three members; give all URLs")
    return Finding("etcd", OK, text)


def check_alarms(alarms: set[str]) -> Finding:
    """Check what members complain of."""
    if not alarms:
        return Finding("etcd alarms", OK, "none")
    text = "; ".join(sorted(alarms))
    return Finding("etcd alarms", FAIL, text, _FREE if "NOSPACE" in text else "etcdctl endpoint status")


def _check_metrics(urls: list[str], tls: TlsFiles | None, seconds: float) -> list[Finding]:
    """Check what only metrics say: of the member that has least space left."""
    metrics = []
    for url in urls:
        try:
            metrics.append(read_metrics(url, tls, seconds))
        except (OSError, ValueError) as error:
            text = f"cannot be read, nor whether its history is removed: {url}/metrics: {reason_of(error)}"
            return [
                Finding("etcd quota", SKIP, text, f"start each member with --quota-backend-bytes and {_COMPACTION}")
            ]
    worst = max(metrics, key=lambda found: found.get(_SIZE, 0) / found.get(_QUOTA, 1))
    return [
        check_quota(worst.get(_SIZE), worst.get(_IN_USE), worst.get(_QUOTA)),
        check_history(worst.get(_REVISION), worst.get(_COMPACTED)),
    ]


def read_metrics(url: str, tls: TlsFiles | None, seconds: float) -> dict[str, float]:
    """Return a member's metrics without labels. Raises OSError and ValueError."""
    context = None
    if tls is not None:
        context = ssl.create_default_context()
        load_certificates(context, tls)  # the client of etcd has loaded them before
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(f"{url}/metrics", timeout=seconds) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.partition(" ") for line in lines) if name.isidentifier()}


def check_quota(size: float | None, in_use: float | None, quota: float | None) -> Finding:
    """Check that the database may grow: beyond its quota etcd takes no more writes, and needs an operator."""
    if size is None or quota is None:
        return Finding("etcd quota", SKIP, "this etcd does not say how large its database may be")
    text = f"the database has {in_bytes(size)} of {in_bytes(quota)}"
    if size <= _FULL * quota:
        return Finding("etcd quota", OK, text)
    if in_use is not None and in_use <= _FULL * size:
        return Finding(
            "etcd quota", WARN, f"{text}, of which {in_bytes(in_use)} are used", "etcdctl defrag, member by member"
        )
    return Finding("etcd quota", WARN, text, f"start each member with {_COMPACTION} and a larger --quota-backend-bytes")


def check_history(revision: float | None, compacted: float | None) -> Finding:
    """Check that old revisions are removed: also those of what has been deleted fill the database."""
    if revision is None or compacted is None:
        return Finding("etcd history", SKIP, "this etcd does not say how long its history is")
    if compacted > 0:
        return Finding("etcd history", OK, f"{revision - compacted:,.0f} revisions since the last compaction")
    fix = f"start each member with {_COMPACTION}"
    text = f"{counted(int(revision), 'revision')}, none of which has been removed"
    if revision < _MANY_REVISIONS:
        return Finding("etcd history", SKIP, f"{text} yet: whether that ever happens cannot be seen", fix)
    return Finding("etcd history", WARN, f"{text}: the database will grow to its quota", fix)


def check_commits(took: list[float]) -> Finding:
    """Judge the seconds that writes took."""
    took = sorted(took)
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    text = f"a commit takes {1000 * p50:.1f} ms (p50), {1000 * p99:.1f} ms (p99 of {len(took)})"
    if p50 <= _SLOW and p99 <= _LATE:
        return Finding("etcd commit", OK, text)
    return Finding("etcd commit", WARN, text, "faster disks for etcd alone, and its members close to each other")


def check_lease(granted: int) -> Finding:
    """Check that etcd grants the lease that a server asks for: not less than 1.5 times its election time-out."""
    text = f"a lease of {granted} s is granted: when a server dies, nobody serves for that long"
    if granted <= LEASE:
        return Finding("etcd lease", OK, text)
    text += ", as it is at least 1.5 times etcd's election time-out"
    return Finding(
        "etcd lease", WARN, text, "start each member with --election-timeout=1000 and --heartbeat-interval=100"
    )
