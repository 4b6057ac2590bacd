"""The log in etcd: records that outlive the host of the server that appends them.

    /tcpstore/NAME/instance            which log it is, and what it depends on, in JSON
                   epoch               the server that serves, in JSON, as long as its lease lasts
                   log/NUMBER          records, in order and without gaps
                   part/NUMBER/PART    what does not fit there
                   snapshot            which snapshot is the last one, in JSON
                   snap/NUMBER/PART    the state behind all records before NUMBER
                   standby/ID          a server that follows, in JSON, as long as its lease lasts

Calls block, and are made in threads: one of them follows, one appends, any may do the rest. This module must not know
what a record says.

Invariants: a record is appended only while the epoch is its server's own, which etcd compares in the same transaction,
so no clock matters. A number is written once. Whoever follows gets each record once, in order.
"""

import math
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ..auth.secret_files import TlsFiles
from .encoding import JournalError
from .etcd_client import ATTEMPT, PAUSE, Closed, EtcdClient, LeaseGoneError, UnavailableError, Watch
from .records import Snapshot, decode_snapshot

__all__ = ["Closed", "Deposed", "EtcdLog", "Holder", "Standby", "Trimmed"]

OLDEST: Final = (3, 4)
"""The oldest version of etcd that has what is used."""

_PART: Final = 1 << 20
"""Bytes of the longest value: etcd takes requests of 1.5 MiB."""

_HEAD: Final = struct.Struct("<II")
"""Before a record: how many parts of it stand elsewhere, and a crc of the whole if there are any."""

_PAGE: Final = 64
"""How many records are read at once: 64 MiB at most."""

_TRIMMED: Final = 1000
"""How many records are deleted at once: etcd does nothing else meanwhile."""

_LIMIT: Final = 3.0
"""Seconds after which what can be done without is given up."""

_MARGIN: Final = 0.1
"""The part of a lease that is not relied on, as clocks do not run equally fast."""


class Deposed(Exception):
    """Another server has, or may have, the epoch: nothing more may be appended."""


class Trimmed(Exception):
    """Records that are wanted were removed, as a snapshot made them unnecessary: begin anew with it."""


class Holder(msgspec.Struct):
    """A server."""

    address: str
    """HOST:PORT."""
    version: str
    replay: int
    id: str
    """Random, of a process."""


class Standby(Holder):
    """A server that follows."""

    number: int
    """Of the next record that it waits for."""


class _Instance(msgspec.Struct):
    instance: str
    settings: dict[str, str]


class _Whole(msgspec.Struct):
    """A snapshot of which all parts are there."""

    number: int
    parts: int


class _Epoch(NamedTuple):
    """What is had while the epoch is ours."""

    lease: int
    ttl: int
    revision: int
    """At which the key was created: no other server's has the same."""
    ended: threading.Event


class EtcdLog:
    """The log of one name."""

    def __init__(
        self,
        urls: list[str],
        name: str,
        holder: Holder,
        *,
        lease: float = 2.0,
        tls: TlsFiles | None = None,
        user: str = "",
    ) -> None:
        """`lease`: seconds, of which etcd may grant more. `user` is NAME:PASSWORD. Raises JournalError."""
        if not name or "/" in name:
            raise JournalError(f"{name!r} is no name of a store in etcd: it is empty, or has a slash")
        self._client = EtcdClient(urls, tls, user)
        self.where = f"/tcpstore/{name}/"
        """Where all keys are."""
        self.holder = holder
        self._ttl = math.ceil(lease)
        self._lock = threading.Lock()
        """Held while the next two change."""
        self._epoch: _Epoch | None = None
        self.certain_until: float = 0.0
        """`time.monotonic()` until which the lease is certainly held."""
        self._keeper: threading.Thread | None = None
        self._stop = threading.Event()
        self._watch: Watch | None = None
        self._announced = 0
        """The lease of the key below standby/; 0 if there is none."""

    def _key(self, name: str) -> bytes:
        return f"{self.where}{name}".encode()

    def _record(self, number: int) -> bytes:
        return self._key(f"log/{number:020}")

    def _part(self, folder: str, number: int, part: int = 0) -> bytes:
        return self._key(f"{folder}/{number:020}/{part:08}")

    @property
    def trouble(self) -> str:
        """Why a call is not answered that is under way, such as `append`; empty if there is none."""
        return self._client.trouble

    @property
    def epoch(self) -> int:
        """Grows with each server that has it; 0 if this one has not."""
        epoch = self._epoch
        return 0 if epoch is None else epoch.revision

    # The start

    def open(self, settings: dict[str, str], limit: float = 10.0) -> str:
        """Return the name of the log, a new one where there is none. Raises JournalError.

        Records can be read only with the `settings` with which they were written.
        """
        client = self._client
        try:
            version = client.version(limit)
            found = tuple(int(number) for number in version.split(".")[:2])
            if found < OLDEST:
                raise JournalError(f"etcd {version} is too old: {'.'.join(map(str, OLDEST))} or later is needed")
            key = self._key("instance")
            value = msgspec.json.encode(_Instance(secrets.token_hex(8), settings))
            reply = client.txn([client.absent(key)], [client.put(key, value)], [client.get(key)], limit)
        except UnavailableError as error:
            raise JournalError(f"no member of etcd answers at {', '.join(client.urls)}: {error}") from None
        if not reply.succeeded:
            value = reply.responses[0].response_range.kvs[0].value
        instance: _Instance = self._decode(value, _Instance)
        for name, wanted in settings.items():
            if instance.settings.get(name) != wanted:
                raise JournalError(
                    f"{self.where} in etcd was written by a server with {name}={instance.settings.get(name)}, and "
                    f"this one has {name}={wanted}: start with the same, or with another name"
                )
        return instance.instance

    def _decode(self, value: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(value, type=kind)
        except msgspec.MsgspecError as error:
            raise JournalError(f"{self.where} in etcd cannot be read: {error}") from None

    # Reading

    def snapshot(self) -> Snapshot | None:
        """Return the last one that is whole. Raises JournalError."""
        before = 0
        while True:
            (found,) = self._ranges([self._client.get(self._key("snapshot"))])
            if not found.kvs:
                return None
            whole = self._decode(found.kvs[0].value, _Whole)
            data = b"".join(self._parts("snap", whole.number, whole.parts))
            try:
                return decode_snapshot(data)
            except JournalError as error:
                if found.kvs[0].mod_revision == before:  # else a later one has replaced it meanwhile
                    raise JournalError(f"{self.where} in etcd: {error}") from None
            before = found.kvs[0].mod_revision

    def _ranges(self, wanted: list[Any], stop: threading.Event | None = None, limit: float = math.inf) -> list[Any]:
        """Read at once, after all that has been acknowledged."""
        reply = self._client.txn([], wanted, limit=limit, stop=stop)
        return [response.response_range for response in reply.responses]

    def _parts(self, folder: str, number: int, count: int) -> list[bytes]:
        """Return the parts that there are, of so many."""
        end = self._part(folder, number, count)
        found: list[bytes] = []
        while True:
            (page,) = self._ranges([self._client.get(self._part(folder, number, len(found)), end, _PAGE)])
            found += [kv.value for kv in page.kvs]
            if not page.more:
                return found

    def _whole(self, number: int, value: bytes) -> bytes:
        """Return a record, of which this is the last part, or all. Raises like `_page`."""
        count, crc = _HEAD.unpack_from(value)
        if not count:
            return value[_HEAD.size :]
        record = b"".join([*self._parts("part", number, count), value[_HEAD.size :]])
        if zlib.crc32(record) != crc:
            raise self._missing(number)
        return record

    def saved(self, limit: float = _LIMIT) -> int:
        """Return the number of the first record behind the last snapshot, 0 if there is none. Raises JournalError."""
        try:
            (found,) = self._ranges([self._client.get(self._key("snapshot"))], limit=limit)
        except UnavailableError as error:
            raise JournalError(str(error)) from None
        return self._saved(found)

    def _saved(self, found: Any) -> int:
        """The same, of what was found below the key."""
        return self._decode(found.kvs[0].value, _Whole).number if found.kvs else 0

    def _missing(self, number: int) -> Exception:
        """Return what to raise: this record is not there, or not whole."""
        if self.saved(math.inf) > number:
            return Trimmed(f"record {number} was removed")
        return JournalError(f"{self.where} in etcd: record {number} is missing, or not whole")

    def _page(self, number: int, stop: threading.Event | None = None) -> tuple[list[bytes], Any, int]:
        """Return records from this one on, the epoch's key, and etcd's revision if that was all.

        Raises Trimmed, and JournalError.
        """
        client = self._client
        reply = client.txn(
            [],
            [
                client.get(self._record(number), self._key("log0"), _PAGE),
                client.get(self._key("snapshot")),
                client.get(self._key("epoch")),
            ],
            stop=stop,
        )
        found, snapshot, epoch = [response.response_range for response in reply.responses]
        if not found.kvs and self._saved(snapshot) > number:
            raise Trimmed(f"record {number} was removed")
        records = []
        for kv in found.kvs:
            if kv.key != self._record(number):
                raise self._missing(number)
            records.append(self._whole(number, kv.value))
            number += 1
        return records, (epoch.kvs[0] if epoch.kvs else None), (0 if found.more else reply.header.revision)

    def read_rest(self, number: int) -> list[bytes]:
        """Return the records from this one to the end. Raises Trimmed, and JournalError."""
        rest: list[bytes] = []
        revision = 0
        while not revision:
            records, _, revision = self._page(number + len(rest))
            rest += records
        return rest

    # Following

    def follow(
        self,
        number: int,
        on_records: Callable[[list[bytes]], object],
        on_epoch: Callable[[Holder | None], object],
    ) -> None:
        """Call back with the records from this one on, as they come, until `stop_following`; each exactly once.

        Before, and whenever that changes, call back with the server that has the epoch, if there is one. Raises
        Trimmed, and JournalError.
        """
        follower = _Follower(self, number, on_records, on_epoch)
        try:
            while not self._stop.is_set():
                revision = follower.catch_up(self._stop)
                client = self._client
                try:
                    watch = self._watch = client.watch(
                        revision + 1,
                        (self._key("log/"), self._key("log0"), False),
                        (self._key("epoch"), b"", True),
                    )
                    if not self._stop.is_set():
                        follower.watch(watch)
                except UnavailableError:
                    pass
                finally:
                    if self._watch is not None:
                        self._watch.end()
                        self._watch = None
                self._stop.wait(PAUSE)
        except Closed:
            pass
        finally:
            self._stop.clear()

    def stop_following(self) -> None:
        """Have `follow` return, if it runs; else the next time that it is called. From any thread."""
        self._stop.set()
        watch = self._watch
        if watch is not None:
            watch.end()

    # The epoch

    def take_epoch(self) -> bool:
        """Try to take the epoch, and keep its lease alive from then on; return whether it is ours."""
        client = self._client
        key = self._key("epoch")
        sent = time.monotonic()
        lease, ttl = client.grant(self._ttl)
        try:
            reply = client.txn(
                [client.absent(key)],
                [
                    client.put(key, msgspec.json.encode(self.holder), lease),
                    client.delete(self._key(f"standby/{self.holder.id}")),
                ],
                [client.get(key)],
            )
        except LeaseGoneError:
            return False
        revision = reply.header.revision
        if not reply.succeeded:
            (found,) = reply.responses[0].response_range.kvs
            if found.lease != lease:
                client.revoke(lease, ATTEMPT)
                return False
            revision = found.create_revision  # by an attempt whose answer was lost
        epoch = _Epoch(lease, ttl, revision, threading.Event())
        with self._lock:
            self._epoch = epoch
            self.certain_until = sent + ttl * (1 - _MARGIN)
        self._keeper = threading.Thread(target=self._keep, args=(epoch,), name="tcpstore lease", daemon=True)
        self._keeper.start()
        return True

    def _keep(self, epoch: _Epoch) -> None:
        pause = epoch.ttl / 4
        while not epoch.ended.wait(pause):
            pause = PAUSE
            try:
                if self._renew(epoch):
                    pause = epoch.ttl / 4
            except UnavailableError:
                pass
            except (JournalError, LeaseGoneError):  # such as that the user may not do this: `append` says so
                pause = epoch.ttl / 4
            except Closed:
                return

    def _renew(self, epoch: _Epoch) -> bool:
        """Keep the lease alive; return whether it certainly is. Raises UnavailableError, Closed, JournalError."""
        client = self._client
        member = client.member
        sent = time.monotonic()
        ttl, term = client.keep_alive(member, epoch.lease)
        # A leader that has been stopped for a while, and replaced, would keep it alive for nobody but itself. So the
        # same member must then see a majority, and in the term in which it was asked. Whether the epoch is ours is
        # asked too: such a leader could have ended the lease as well (etcd's issue 15247).
        request = client.transaction([], [client.get(self._key("epoch"))])
        reply = client.attempt(member, "Txn", request, ATTEMPT)
        kvs = reply.responses[0].response_range.kvs
        if not kvs or kvs[0].create_revision != epoch.revision:
            self._lose(epoch)
        elif ttl > 0 and term == reply.header.raft_term:
            with self._lock:
                if self._epoch is epoch:
                    self.certain_until = max(self.certain_until, sent + ttl * (1 - _MARGIN))
            return True
        return False

    def _lose(self, epoch: _Epoch) -> None:
        epoch.ended.set()
        with self._lock:
            if self._epoch is epoch:
                self._epoch = None
                self.certain_until = 0.0

    def lost(self) -> bool:
        """Return whether the epoch is known not to be ours, or no more."""
        return self._epoch is None

    def resign(self) -> None:
        """Give up the epoch at once. Idempotent."""
        epoch = self._epoch
        if epoch is not None:
            self._lose(epoch)
            self._client.revoke(epoch.lease, _LIMIT)

    # Writing

    def append(self, number: int, record: bytes) -> None:
        """Append a record, however long that takes. Raises Deposed; then whether it was appended is not known."""
        epoch = self._epoch
        if epoch is None:
            raise Deposed("the epoch is not held")
        client = self._client
        ours = client.created(self._key("epoch"), epoch.revision)
        *parts, last = _cut(record)
        for part, data in enumerate(parts):
            if not client.txn([ours], [client.put(self._part("part", number, part), data)]).succeeded:
                self._depose(epoch)
        value = _HEAD.pack(len(parts), zlib.crc32(record) if parts else 0) + last
        key = self._record(number)
        reply = client.txn([ours, client.absent(key)], [client.put(key, value)], [client.get(key)])
        if not reply.succeeded:
            found = reply.responses[0].response_range.kvs
            if not found or found[0].value != value:  # else an attempt has succeeded whose answer was lost
                self._depose(epoch)

    def _depose(self, epoch: _Epoch) -> None:
        self._lose(epoch)
        raise Deposed("another server has, or had, the epoch")

    # Standbys

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot and delete what it makes unnecessary, unless there is a later one. Raises JournalError."""
        client = self._client
        parts = _cut(b"".join(snapshot.encode()))
        for part, data in enumerate(parts):
            key = self._part("snap", snapshot.number, part)
            reply = client.txn([client.absent(key)], [client.put(key, data)], [client.get(key)])
            if not reply.succeeded and reply.responses[0].response_range.kvs[0].value != data:
                return  # another standby writes one of the same records
        value = msgspec.json.encode(_Whole(snapshot.number, len(parts)))
        key = self._key("snapshot")
        written = False
        while not written:
            (found,) = self._ranges([client.get(key)])
            if self._saved(found) >= snapshot.number:
                break
            last = client.modified(key, found.kvs[0].mod_revision if found.kvs else 0)
            written = client.txn([last], [client.put(key, value)]).succeeded
        self._trim(snapshot.number)

    def _trim(self, number: int) -> None:
        """Delete what is below this number, which is that of a whole snapshot, or lower."""
        client = self._client
        client.txn([], [client.delete(self._key("snap/"), self._part("snap", number))])
        while True:
            (found,) = self._ranges([client.get(self._key("log/"), self._record(number), 1, keys_only=True)])
            if not found.kvs:
                return
            end = min(int(found.kvs[0].key.rpartition(b"/")[2]) + _TRIMMED, number)
            client.txn(
                [],
                [
                    client.delete(self._key("log/"), self._record(end)),
                    client.delete(self._key("part/"), self._part("part", end)),
                ],
            )

    def remove(self) -> None:
        """Remove all records, if the epoch is ours, which it is no more: the stores have ended for good.

        Raises JournalError if etcd does not answer.
        """
        epoch = self._epoch
        if epoch is None:
            return
        client = self._client
        ours = client.created(self._key("epoch"), epoch.revision)
        names = ("instance", "snapshot", "epoch")
        folders = [client.delete(self._key(f"{name}/"), self._key(f"{name}0")) for name in ("log", "part", "snap")]
        self._lose(epoch)
        try:
            client.txn([ours], [*folders, *(client.delete(self._key(name)) for name in names)], limit=_LIMIT)
        except UnavailableError as error:
            raise JournalError(str(error)) from None
        client.revoke(epoch.lease, _LIMIT)

    def announce(self, number: int) -> None:
        """Say that this server follows, up to this record. To be called once a second; forgotten after some."""
        client = self._client
        standby = Standby(**msgspec.structs.asdict(self.holder), number=number)
        try:
            if self._announced and client.keep_alive(client.member, self._announced)[0] <= 0:
                self._announced = 0
            if not self._announced:
                self._announced, _ = client.grant(2 * self._ttl, ATTEMPT)
            key = self._key(f"standby/{standby.id}")
            client.txn([], [client.put(key, msgspec.json.encode(standby), self._announced)], limit=ATTEMPT)
        except LeaseGoneError:
            self._announced = 0
        except UnavailableError:
            pass

    def standbys(self) -> list[Standby]:
        """Return those that follow. Raises JournalError, also if etcd does not answer."""
        try:
            (found,) = self._ranges([self._client.get(self._key("standby/"), self._key("standby0"))], limit=_LIMIT)
        except UnavailableError as error:
            raise JournalError(str(error)) from None
        return [self._decode(kv.value, Standby) for kv in found.kvs]

    def close(self) -> None:
        """End all threads; have all calls raise Closed, and `follow` return. The epoch's lease is left to end."""
        epoch = self._epoch
        if epoch is not None:
            self._lose(epoch)
        announced, self._announced = self._announced, 0
        if announced and not self._client.closed.is_set():
            self._client.revoke(announced, ATTEMPT)
        self._client.close()
        self.stop_following()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None


class _Follower:
    """Calls back with what comes."""

    def __init__(
        self,
        log: EtcdLog,
        number: int,
        on_records: Callable[[list[bytes]], object],
        on_epoch: Callable[[Holder | None], object],
    ) -> None:
        self._log = log
        self._number = number
        """Of the next record."""
        self._on_records = on_records
        self._on_epoch = on_epoch
        self._epoch = -1
        """The revision of the last one that was told, 0 for none."""

    def catch_up(self, stop: threading.Event) -> int:
        """Read what is there; return the revision of etcd at which that was all."""
        while True:
            records, epoch, revision = self._log._page(self._number, stop)
            self._tell_epoch(epoch)
            self._tell(records)
            if stop.is_set():
                raise Closed
            if revision:
                return revision

    def watch(self, watch: Watch) -> None:
        """Take what comes, until something is missing, or the watch ends."""
        log = self._log
        for response in watch:
            if "permission denied" in response.cancel_reason:
                raise JournalError(f"{log.where} in etcd: {response.cancel_reason}")
            records: list[bytes] = []
            for event in response.events:
                if event.kv.key == log._key("epoch"):
                    self._tell_epoch(event.kv if event.type == 0 else None)
                    continue
                number = int(event.kv.key.rpartition(b"/")[2])
                expected = self._number + len(records)
                if number > expected:
                    return
                if number == expected:
                    records.append(log._whole(number, event.kv.value))
            self._tell(records)
            if response.canceled:
                return

    def _tell(self, records: list[bytes]) -> None:
        if records:
            self._number += len(records)
            self._on_records(records)

    def _tell_epoch(self, kv: Any) -> None:
        revision = 0 if kv is None else kv.create_revision
        if revision != self._epoch:
            self._epoch = revision
            self._on_epoch(None if kv is None else self._log._decode(kv.value, Holder))


def _cut(data: bytes) -> Sequence[bytes]:
    return [data[at : at + _PART] for at in range(0, len(data), _PART)] or [b""]
