"""The log in etcd, on three real members, of which some are killed, stopped and started again."""

from __future__ import annotations

import base64
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import etcd_cluster
from etcd_cluster import MEMBERS, Cluster
from support import LIMIT, run_python, until
from tcpstore_async.auth.secret_files import TlsFiles
from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.etcd import Closed, Deposed, EtcdLog, Holder, Standby, Trimmed
from tcpstore_async.log.etcd_client import UnavailableError
from tcpstore_async.log.records import Snapshot
from tls.certificates import certificates

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.interpreted("nothing of this is compiled")]

PROGRAMS = etcd_cluster.programs()
if not PROGRAMS:
    pytest.skip("there is no etcd: make etcd", allow_module_level=True)

LARGE = os.urandom(3 << 20)


@pytest.fixture(scope="module", params=PROGRAMS, ids=etcd_cluster.version_of)
def shared(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with etcd_cluster.cluster(request.param) as made:
        yield made


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    shared.start()
    shared.wait()


class Logs:
    """Makes servers' views of one log."""

    def __init__(self, urls: list[str], stack: ExitStack) -> None:
        self.urls = urls
        self.name = secrets.token_hex(4)
        self._stack = stack

    def make(self, urls: list[str] | None = None, **options: Any) -> EtcdLog:
        holder = Holder(f"host-{secrets.token_hex(2)}:1", "1.2.3", 1, secrets.token_hex(8))
        log = EtcdLog(urls or self.urls, self.name, holder, **options)
        self._stack.callback(log.close)
        return log

    def leading(self, urls: list[str] | None = None) -> EtcdLog:
        log = self.make(urls)
        log.open({})
        assert log.take_epoch()
        return log


@pytest.fixture
def logs(cluster: Cluster) -> Iterator[Logs]:
    with ExitStack() as stack:
        yield Logs(cluster.urls, stack)


class Following:
    """A log that is followed in a thread."""

    def __init__(self, log: EtcdLog, number: int = 0) -> None:
        self.log = log
        self.records: list[bytes] = []
        self.batches: list[int] = []
        self.epochs: list[Holder | None] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, args=(number,))
        self._thread.start()

    def _follow(self, number: int) -> None:
        try:
            self.log.follow(number, self._add, self.epochs.append)
        except (Trimmed, JournalError) as error:
            self.error = error.with_traceback(None)

    def _add(self, records: list[bytes]) -> None:
        self.records += records
        self.batches.append(len(records))

    def end(self) -> None:
        self.log.stop_following()
        self.join()

    def join(self) -> None:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


@contextmanager
def following(log: EtcdLog, number: int = 0) -> Iterator[Following]:
    made = Following(log, number)
    try:
        yield made
    finally:
        made.end()


class Working:
    """What blocks, in a thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.outcome: object = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._work() or "done"
        except Exception as error:
            self.outcome = error.with_traceback(None)

    def result(self) -> object:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        return self.outcome


def snapshot_before(number: int, state: bytes = b"state") -> Snapshot:
    return Snapshot(0, number, 7, 1.5, state)


# Records


def test_records_are_read_in_order_and_joined(logs: Logs) -> None:
    leader = logs.leading()
    wanted = [b"first", LARGE, b"", os.urandom(1 << 20), *(b"%d" % number for number in range(200))]
    with following(logs.make()) as early:
        for number, record in enumerate(wanted):
            leader.append(number, record)
        until(lambda: len(early.records) == len(wanted))
        with following(logs.make(), 3) as late:
            until(lambda: len(late.records) == len(wanted) - 3)
    assert early.records == leader.read_rest(0) == wanted
    assert late.records == leader.read_rest(3) == wanted[3:]
    assert max(late.batches) > 1
    assert leader.read_rest(len(wanted)) == []
    assert early.error is late.error is None


def test_a_number_is_written_once(logs: Logs) -> None:
    leader = logs.leading()
    for _ in range(2):
        leader.append(0, b"0")
        leader.append(1, LARGE)
    with pytest.raises(Deposed):
        leader.append(0, b"another")
    assert leader.read_rest(0) == [b"0", LARGE]


def test_what_comes_again_is_followed_once(logs: Logs) -> None:
    """A record that was removed, and an attempt to append it that has taken long."""
    leader = logs.leading()
    with following(logs.make()) as watching:
        leader.append(0, b"0")
        until(lambda: watching.records)
        client = leader._client
        (found,) = leader._ranges([client.get(leader._record(0))])
        client.txn([], [client.delete(leader._record(0))])
        client.txn([], [client.put(leader._record(0), found.kvs[0].value)])
        leader.append(1, b"1")
        until(lambda: len(watching.records) > 1)
    assert watching.records == [b"0", b"1"]


def test_what_comes_too_early_is_not_followed(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcpstore_async.log.etcd_client._WATCHED", math.inf)
    leader = logs.leading()
    with following(logs.make()) as watching:
        leader.append(0, b"0")
        until(lambda: watching.records)
        leader.append(2, b"2")
        watching.join()
    assert watching.records == [b"0"]
    assert isinstance(watching.error, JournalError)


def test_an_append_whose_answer_is_lost_is_not_doubled(cluster: Cluster, logs: Logs) -> None:
    with Proxy(cluster.ports[0]) as proxy:
        leader = logs.leading([proxy.url, *cluster.urls[1:]])
        leader.append(0, b"answered")
        proxy.dropping = True
        leader.append(1, b"lost")
        assert proxy.dropped
        proxy.dropping = False
        leader.append(2, LARGE)
        assert leader.read_rest(0) == [b"answered", b"lost", LARGE]


def test_an_epoch_whose_answer_is_lost_is_had(cluster: Cluster, logs: Logs) -> None:
    with Proxy(cluster.ports[0]) as proxy:
        log = logs.make([proxy.url, *cluster.urls[1:]])
        log.open({})
        grant = log._client.grant

        def granted(*given: Any) -> tuple[int, int]:
            lease = grant(*given)
            proxy.dropping = True
            return lease

        log._client.grant = granted  # type: ignore[method-assign, assignment]
        assert log.take_epoch()
        assert proxy.dropped
        log.append(0, b"ours")
        assert log.read_rest(0) == [b"ours"]


def test_who_is_deposed_writes_nothing(logs: Logs) -> None:
    first, second = logs.leading(), logs.make()
    first.append(0, b"first's")
    epoch = first._epoch
    assert epoch is not None
    first.resign()
    assert second.take_epoch()
    first._epoch = epoch  # as if it did not know
    with pytest.raises(Deposed):
        first.append(1, b"too late")
    assert first.lost()
    first._epoch = epoch
    with pytest.raises(Deposed):
        first.append(1, LARGE)
    with pytest.raises(Deposed):
        first.append(1, b"too late")
    second.append(1, b"second's")
    first._epoch = epoch
    with pytest.raises(Deposed):
        first.append(1, b"too late")
    assert second.read_rest(0) == [b"first's", b"second's"]
    assert not second._ranges([second._client.get(second._key("part/"), second._key("part0"))])[0].kvs


def test_parts_of_a_deposed_server_are_in_no_record(logs: Logs) -> None:
    """It had written some, but not the last one."""
    first, second = logs.leading(), logs.make()
    with pytest.raises(Deposed):
        for part, data in enumerate((b"x" * 9, b"y" * 9)):
            first._client.txn([], [first._client.put(first._part("part", 0, part), data)])
        first.resign()
        first.append(0, b"z")
    assert second.take_epoch()
    second.append(0, b"short")
    second.append(1, LARGE)
    assert second.read_rest(0) == [b"short", LARGE]


STOPPED = """
import sys
from tcpstore_async.log.etcd import Deposed, EtcdLog, Holder
urls, name = sys.argv[1].split(","), sys.argv[2]
log = EtcdLog(urls, name, Holder("stopped:1", "1", 1, "stopped"))
log.open({})
assert log.take_epoch()
number = 0
print("leads", flush=True)
try:
    while True:
        log.append(number, b"stopped's %d" % number)
        number += 1
except Deposed:
    print("deposed after", number)
assert log.lost() and log.certain_until == 0
log.close()
"""


def test_who_is_stopped_longer_than_its_lease_is_deposed(logs: Logs) -> None:
    arguments = [sys.executable, "-c", STOPPED, ",".join(logs.urls), logs.name]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "leads\n"
        other = logs.make()
        until(lambda: len(other.read_rest(0)) > 3)
        process.send_signal(signal.SIGSTOP)
        until(other.take_epoch)
        found = other.read_rest(0)
        other.append(len(found), b"other's")
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=LIMIT)[0]
        assert process.returncode == 0
        acknowledged = int(said.split()[-1])
        assert found == [b"stopped's %d" % number for number in range(len(found))]
        assert acknowledged <= len(found)
        assert other.read_rest(0) == [*found, b"other's"]
    finally:
        process.kill()
        process.communicate()


# The epoch


def test_one_of_many_takes_the_epoch(logs: Logs) -> None:
    logs.make().open({})
    many = [logs.make() for _ in range(8)]
    taken = [work.result() for work in [Working(log.take_epoch) for log in many]]
    assert [outcome for outcome in taken if outcome is True] == [True]
    assert taken.count("done") == len(many) - 1  # False
    leader = many[taken.index(True)]
    assert [log.lost() for log in many] == [log is not leader for log in many]
    assert [log.epoch > 0 for log in many] == [log is leader for log in many]


def test_who_resigns_is_followed_at_once(logs: Logs) -> None:
    first, second = logs.leading(), logs.make()
    with following(second) as watching:
        until(lambda: watching.epochs)
        assert watching.epochs == [first.holder]
        first.append(0, b"last")
        first.resign()
        first.resign()
        assert first.lost()
        assert first.certain_until == 0
        until(lambda: watching.epochs[1:])
        assert watching.epochs[1:] == [None]
        assert second.take_epoch()
        until(lambda: watching.epochs[2:])
        assert watching.epochs[2:] == [second.holder]
    second.append(1, b"next")
    assert second.read_rest(0) == [b"last", b"next"]


def test_the_lease_is_kept_alive_and_ends_with_its_server(logs: Logs) -> None:
    first, second = logs.leading(), logs.make()
    before = first.certain_until
    assert before > 0
    until(lambda: first.certain_until > before + 2)  # more than a lease
    assert not second.take_epoch()
    first.close()
    assert first.lost()
    assert first.certain_until == 0
    until(second.take_epoch)


def test_a_lease_that_has_ended_takes_no_epoch(logs: Logs) -> None:
    log = logs.make()
    log.open({})
    client = log._client
    grant = client.grant

    def granted(ttl: int, limit: float = LIMIT) -> tuple[int, int]:
        lease, ttl = grant(ttl, limit)
        client.revoke(lease, LIMIT)
        return lease, ttl

    client.grant = granted  # type: ignore[method-assign]
    assert not log.take_epoch()
    assert log.lost()


def test_the_lease_is_kept_alive_however_often_that_is_refused(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = logs.make()
    leader.open({})
    renew = leader._renew
    refusals: list[Exception] = [JournalError("no"), UnavailableError("no")]

    def refused(epoch: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return renew(epoch)

    monkeypatch.setattr(leader, "_renew", refused)
    assert leader.take_epoch()
    before = leader.certain_until
    until(lambda: leader.certain_until > before)
    assert not refusals


def test_an_epoch_that_was_removed_is_noticed(logs: Logs) -> None:
    leader = logs.leading()
    leader._client.txn([], [leader._client.delete(leader._key("epoch"))])
    until(leader.lost)
    assert leader.certain_until == 0
    with pytest.raises(Deposed):
        leader.append(0, b"none")


def test_nothing_is_certain_without_a_majority(cluster: Cluster, logs: Logs) -> None:
    """Nor if a member that was replaced as the leader says that it has kept the lease alive."""
    leader = logs.leading()
    epoch = leader._epoch
    assert epoch is not None
    epoch.ended.set()  # no other one renews it
    before = leader.certain_until
    keep_alive = leader._client.keep_alive

    def replaced(member: int, lease: int) -> tuple[int, int]:
        ttl, term = keep_alive(member, lease)
        return ttl, term - 1

    leader._client.keep_alive = replaced  # type: ignore[method-assign]
    assert not leader._renew(epoch)
    assert leader.certain_until == before
    leader._client.keep_alive = keep_alive  # type: ignore[method-assign]
    assert leader._renew(epoch)
    assert leader.certain_until > before


# Members


def test_it_goes_on_when_the_leading_member_is_killed(cluster: Cluster, logs: Logs) -> None:
    leader = logs.leading()
    with following(logs.make()) as watching:
        for number in range(60):
            if number in (20, 40):
                killed = cluster.leader()
                cluster.kill(killed)
            leader.append(number, b"%d" % number)
            if number in (30, 50):
                cluster.start(killed)
                cluster.wait()
        until(lambda: len(watching.records) == 60)
        assert watching.records == leader.read_rest(0) == [b"%d" % number for number in range(60)]
        assert not leader.lost()
        assert watching.epochs == [leader.holder]


def test_a_member_that_is_stopped_holds_nothing_up(cluster: Cluster, logs: Logs) -> None:
    """Before 3.4.31 and 3.5.13 one that leads ends leases when it goes on, though others have kept them alive."""
    leader = logs.leading()
    with following(logs.make()) as watching:
        number = 0
        for member in range(MEMBERS):
            cluster.stop(member)
            while number < 20 * (member + 1):
                try:
                    leader.append(number, b"%d" % number)
                    number += 1
                except Deposed:
                    until(leader.take_epoch)
                    number = len(leader.read_rest(0))
            until(lambda: len(watching.records) == number)  # noqa: B023
            cluster.go_on(member)
            cluster.wait()
    assert watching.records == leader.read_rest(0) == [b"%d" % one for one in range(number)]


def test_without_a_majority_nothing_happens_until_there_is_one(cluster: Cluster, logs: Logs) -> None:
    leader = logs.leading()
    leader.append(0, b"before")
    with following(logs.make()) as watching:
        until(lambda: watching.records)
        cluster.kill(0, 1)
        work = Working(lambda: leader.append(1, LARGE))
        until(lambda: leader.trouble)
        with pytest.raises(JournalError):
            leader.standbys()
        leader.announce(0)
        assert work.outcome is None
        cluster.start(0)
        assert work.result() == "done"
        assert leader.trouble == ""
        leader.append(2, b"after")
        assert leader.read_rest(0) == [b"before", LARGE, b"after"]
        until(lambda: len(watching.records) == 3)
    assert watching.records == [b"before", LARGE, b"after"]


class Held:
    """Follows a log, whose first records it holds up."""

    def __init__(self, log: EtcdLog) -> None:
        self.records: list[bytes] = []
        self.on = threading.Event()
        self.work = Working(lambda: log.follow(0, self._add, lambda epoch: None))
        until(lambda: self.records)

    def _add(self, records: list[bytes]) -> None:
        self.records += records
        self.on.wait(LIMIT)


def compact(cluster: Cluster, log: EtcdLog) -> None:
    revision = log._client.txn([], [log._client.get(log._key("epoch"))]).header.revision
    assert cluster.ask(0, "kv/compaction", revision=str(revision), physical=True) is not None


def test_without_space_an_append_waits(cluster: Cluster, logs: Logs) -> None:
    leader = logs.leading()
    status = cluster.ask(0, "maintenance/status")
    assert status is not None
    alarm = {"memberID": status["header"]["member_id"], "alarm": "NOSPACE"}  # type: ignore[index]
    assert cluster.ask(0, "maintenance/alarm", action="ACTIVATE", **alarm) is not None
    try:
        work = Working(lambda: leader.append(0, b"0"))
        until(lambda: "database space exceeded" in leader.trouble)
        before = leader.certain_until
        until(lambda: leader.certain_until > before)
        assert work.outcome is None
    finally:
        assert cluster.ask(0, "maintenance/alarm", action="DEACTIVATE", **alarm) is not None
    assert work.result() == "done"
    assert leader.read_rest(0) == [b"0"]


def test_a_slow_member_is_not_asked_again(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logs.make()
    log.read_rest(0)
    log.read_rest(0)
    assert log._client.member == 0
    monkeypatch.setattr("tcpstore_async.log.etcd_client._SLOW", 0.0)
    log.read_rest(0)
    assert log._client.member == 1


@pytest.mark.parametrize("limit", ["_WATCHED", "_SILENCE"])
def test_a_watch_is_begun_anew_now_and_then(limit: str, logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, or when nothing is heard."""
    leader, log = logs.leading(), logs.make()
    monkeypatch.setattr(f"tcpstore_async.log.etcd_client.{limit}", -1.0)
    watches: set[object] = set()
    with following(log) as watching:

        def begun() -> int:
            watches.add(log._watch)
            return len(watches - {None})

        until(lambda: begun() > 2)
        leader.append(0, b"0")
        until(lambda: watching.records)
    assert watching.records == [b"0"]
    assert watching.epochs == [leader.holder]


def test_who_follows_goes_on_when_its_past_is_compacted(cluster: Cluster, logs: Logs) -> None:
    leader, log = logs.leading(), logs.make()
    leader.append(0, b"0")
    held = Held(log)
    for number in range(1, 100):
        leader.append(number, b"%d" % number)
    compact(cluster, leader)
    held.on.set()
    until(lambda: len(held.records) == 100)
    assert held.records == [b"%d" % number for number in range(100)]
    log.stop_following()
    assert held.work.result() == "done"


# Snapshots


def test_a_snapshot_makes_records_unnecessary(logs: Logs) -> None:
    leader, standby = logs.leading(), logs.make()
    assert standby.snapshot() is None
    for number in range(30):
        leader.append(number, LARGE if number == 5 else b"%d" % number)
    large = snapshot_before(20, LARGE)
    standby.write_snapshot(large)
    assert leader.snapshot() == large
    assert leader.read_rest(20) == [b"%d" % number for number in range(20, 30)]
    for number in (0, 19):
        with pytest.raises(Trimmed):
            leader.read_rest(number)
        with following(logs.make(), number) as watching:
            watching.join()
            assert isinstance(watching.error, Trimmed)
            assert watching.records == []
    standby.write_snapshot(snapshot_before(10))
    assert leader.snapshot() == large
    standby.write_snapshot(snapshot_before(20, b"another"))
    assert leader.snapshot() == large
    standby.write_snapshot(snapshot_before(30))
    assert leader.snapshot() == snapshot_before(30)
    assert leader.read_rest(30) == []
    with pytest.raises(Trimmed):
        leader.read_rest(29)
    keys = leader._ranges([leader._client.get(leader._key(""), leader._key("~"), keys_only=True)])[0].kvs
    names = [kv.key.decode().split("/")[3] for kv in keys]
    assert names == ["epoch", "instance", "snap", "snapshot"]
    leader.append(30, b"goes on")
    assert leader.read_rest(30) == [b"goes on"]


def test_many_records_are_removed_in_portions(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcpstore_async.log.etcd._TRIMMED", 7)
    leader = logs.leading()
    for number in range(30):
        leader.append(number, b"")
    leader.write_snapshot(snapshot_before(29))
    (found,) = leader._ranges([leader._client.get(leader._key("log/"), leader._key("log0"))])
    assert [kv.key for kv in found.kvs] == [leader._record(29)]


def test_who_is_behind_is_told_so(cluster: Cluster, logs: Logs) -> None:
    leader = logs.leading()
    leader.append(0, b"0")
    held = Held(logs.make())
    for number in range(1, 5):
        leader.append(number, b"")
    leader.write_snapshot(snapshot_before(4))
    compact(cluster, leader)
    held.on.set()
    assert isinstance(held.work.result(), Trimmed)
    assert held.records == [b"0"]


def test_a_snapshot_that_is_not_whole_is_an_error(logs: Logs) -> None:
    log = logs.make()
    log.write_snapshot(snapshot_before(3))
    log._client.txn([], [log._client.delete(log._key("snap/"), log._key("snap0"))])
    with pytest.raises(JournalError, match="the snapshot is not whole"):
        log.snapshot()


# Standbys


def test_standbys_are_listed_while_they_are_there(logs: Logs) -> None:
    leader, standby, other = logs.leading(), logs.make(), logs.make()
    assert leader.standbys() == []
    standby.announce(3)
    standby.announce(4)
    other.announce(1)
    holder = standby.holder
    found = sorted(leader.standbys(), key=lambda one: -one.number)
    assert found[0] == Standby(holder.address, holder.version, holder.replay, holder.id, 4)
    assert [one.number for one in found] == [4, 1]
    other.close()
    assert [one.number for one in leader.standbys()] == [4]
    leader.resign()
    assert standby.take_epoch()
    assert leader.standbys() == []
    leader.announce(9)
    leader._client.revoke(leader._announced, LIMIT)
    leader.announce(9)
    leader.announce(10)
    assert [one.number for one in standby.standbys()] == [10]


# Errors


def test_another_servers_settings_are_refused(logs: Logs) -> None:
    name = logs.make().open({"limit": "1", "other": "x"})
    assert logs.make().open({"limit": "1"}) == name
    with pytest.raises(
        JournalError, match=rf"^/tcpstore/{logs.name}/ in etcd was written by .* limit=1, and .* limit=2: "
    ):
        logs.make().open({"limit": "2"})


def test_a_record_that_is_missing_is_an_error(logs: Logs) -> None:
    leader = logs.leading()
    for number in range(4):
        leader.append(number, LARGE)
    leader._client.txn(
        [], [leader._client.delete(leader._record(2)), leader._client.delete(leader._part("part", 1, 1))]
    )
    for number in (1, 2):
        with pytest.raises(JournalError, match=f"record {number} is missing, or not whole"):
            leader.read_rest(number)
    with following(logs.make()) as watching:
        watching.join()
    assert isinstance(watching.error, JournalError)


def test_what_is_no_json_is_an_error(logs: Logs) -> None:
    log = logs.make()
    log._client.txn([], [log._client.put(log._key("instance"), b"{}")])
    with pytest.raises(JournalError, match="in etcd cannot be read"):
        log.open({})


@pytest.mark.parametrize("urls", [["ftp://x"], ["http://"], ["http://x:99999"], ["http://x/path"], ["x", "?"]])
def test_what_is_no_url_is_an_error(urls: list[str], logs: Logs) -> None:
    with pytest.raises(JournalError, match="is no address of etcd"):
        logs.make(urls)


@pytest.mark.parametrize("name", ["", "a/b"])
def test_what_is_no_name_is_an_error(name: str, logs: Logs) -> None:
    logs.name = name
    with pytest.raises(JournalError, match="is no name of a store"):
        logs.make()


def test_an_old_etcd_is_refused(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcpstore_async.log.etcd.OLDEST", (9, 1))
    with pytest.raises(JournalError, match=r"^etcd 3\.\S+ is too old: 9.1 or later is needed$"):
        logs.make().open({})


NOT_THERE = """
import sys
from tcpstore_async.log.encoding import JournalError
from tcpstore_async.log.etcd import EtcdLog, Holder
try:
    log = EtcdLog(sys.argv[1].split(","), "name", Holder("", "", 1, ""))
    log.open({}, 0.3)
except JournalError as error:
    print(error)
    assert "\\n" not in str(error)
"""


def test_where_no_etcd_is_one_line_says_so() -> None:
    urls = etcd_cluster.unreachable()
    said = run_python(NOT_THERE, ",".join(urls))
    assert said.startswith(f"no member of etcd answers at {', '.join(urls)}: etcd at http://127.0.0.1:")
    assert said.count("\n") == 1


def test_without_grpcio_one_line_says_so() -> None:
    said = run_python("import sys\nsys.modules['grpc'] = None" + NOT_THERE, "x")
    assert said == "etcd needs grpcio and protobuf: pip install 'tcpstore-async[etcd]'\n"


def test_grpc_is_not_imported_before_it_is_used() -> None:
    run_python("import sys, tcpstore_async.log.etcd; assert 'grpc' not in sys.modules and 'google' not in sys.modules")


# The end


def test_what_blocks_ends_when_the_log_is_closed(logs: Logs) -> None:
    log = logs.make(list(etcd_cluster.unreachable()))
    calls = [
        Working(lambda: log.follow(0, print, print)),
        Working(lambda: log.read_rest(0)),
        Working(log.take_epoch),
        Working(lambda: log.open({}, LIMIT)),
        Working(lambda: log.write_snapshot(snapshot_before(1))),
        Working(log.snapshot),
    ]
    until(lambda: log.trouble)
    log.close()
    log.close()
    follow, *others = [call.result() for call in calls]
    assert follow == "done"
    assert all(isinstance(outcome, Closed) for outcome in others), others
    with pytest.raises(Closed):
        log.read_rest(0)


def test_an_append_ends_when_the_log_is_closed(cluster: Cluster, logs: Logs) -> None:
    leader = logs.leading()
    cluster.kill(0, 1)
    work = Working(lambda: leader.append(0, b"never"))
    until(lambda: leader.trouble)
    leader.close()
    assert isinstance(work.result(), Closed)


# TLS and users

OURS = TlsFiles(certificates().ours.ca, *certificates().client)


@pytest.fixture(scope="module", params=PROGRAMS, ids=etcd_cluster.version_of)
def secure(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with etcd_cluster.cluster(request.param, secure=True) as made:
        log = EtcdLog(made.urls, "wait", Holder("", "", 1, ""), tls=OURS)
        log.open({}, LIMIT)
        log.close()
        yield made


def test_tls(secure: Cluster) -> None:
    with ExitStack() as stack:
        leader = Logs(secure.urls, stack).make(tls=OURS)
        leader.open({})
        assert leader.take_epoch()
        leader.append(0, LARGE)
        assert leader.read_rest(0) == [LARGE]
        for tls in (certificates().trusting, OURS._replace(ca=certificates().others.ca), OURS._replace(ca="")):
            with pytest.raises(JournalError, match="no member of etcd answers"):
                Logs(secure.urls, stack).make(tls=tls).open({}, 0.1)
        with pytest.raises(JournalError, match="no member of etcd answers"):
            Logs([url.replace("https", "http") for url in secure.urls], stack).make().open({}, 0.1)


def test_a_certificate_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    with ExitStack() as stack:
        logs = Logs(["https://127.0.0.1:1"], stack)
        with pytest.raises(JournalError, match=r"^cannot load \S+/wrong.pem: No such file or directory$"):
            logs.make(tls=TlsFiles(str(wrong)))
        wrong.write_text("no certificate")
        with pytest.raises(JournalError, match=r"^cannot load the certificate \S+/wrong.pem: "):
            logs.make(tls=TlsFiles(str(wrong)))


@pytest.fixture
def guarded(cluster: Cluster) -> Iterator[Cluster]:
    """An etcd that wants a user: root, or one who may use only `allowed`."""

    def ask(method: str, **request: object) -> None:
        assert cluster.ask(0, f"auth/{method}", **request) is not None

    ask("user/add", name="root", password="very secret")
    ask("user/add", name="store", password="secret:1")
    ask("role/add", name="root")
    ask("role/add", name="store")
    begin, end = (base64.b64encode(key).decode() for key in (b"/tcpstore/allowed/", b"/tcpstore/allowed0"))
    ask("role/grant", name="store", perm={"permType": "READWRITE", "key": begin, "range_end": end})
    ask("user/grant", user="root", role="root")
    ask("user/grant", user="store", role="store")
    ask("enable")
    yield cluster
    with ExitStack() as stack:
        client = Logs(cluster.urls, stack).make(user="root:very secret")._client
        client._metadata(client.member)
        request = urllib_request(cluster.urls[0], client._token)
        until(lambda: disabled(request))
    for name in ("root", "store"):
        ask("user/delete", name=name)
        ask("role/delete", role=name)


def test_a_user_and_its_permission(guarded: Cluster) -> None:
    with ExitStack() as stack:
        logs = Logs(guarded.urls, stack)
        logs.name = "allowed"
        leader = logs.make(user="store:secret:1")
        leader.open({})
        assert leader.take_epoch()
        with following(logs.make(user="store:secret:1")) as watching:
            leader.append(0, LARGE)
            leader._client._token = "old.1"  # as after a restart of the member
            leader.append(1, b"1")
            until(lambda: len(watching.records) == 2)
        for user, said in (("", "user name is empty"), ("store:wrong", "authentication failed")):
            with pytest.raises(JournalError, match=rf"^etcd at http://\S+: etcdserver: {said}"):
                logs.make(user=user).open({})
        logs.name = "another"
        with pytest.raises(JournalError, match="permission denied"):
            logs.make(user="store:secret:1").open({})


def test_two_calls_may_find_that_the_token_is_old(logs: Logs) -> None:
    client = logs.make(user="store:secret")._client
    client._token = "old.1"
    for _ in range(2):
        failure = client._failure(0, client._grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token")
        assert isinstance(failure, UnavailableError)
        assert client._token == ""


def test_a_user_where_none_is_wanted(logs: Logs) -> None:
    logs.make(user="store:secret").open({})


def urllib_request(url: str, token: str) -> Any:
    import urllib.request

    return urllib.request.Request(f"{url}/v3/auth/disable", b"{}", {"Authorization": token})


def disabled(request: Any) -> bool:
    import urllib.request

    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return bool(answer.status == 200)


class Proxy:
    """Between a client and a member: it can drop what the member answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.dropping = False
        self.dropped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT)
        for one in self._sockets:
            one.close()

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                member = socket.create_connection(("127.0.0.1", self._port), LIMIT)
                self._sockets += [client, member]
                self._start(self._copy, client, member, False)
                self._start(self._copy, member, client, True)

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self.dropping:
                    self.dropped += len(data)
                else:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
