"""The server's side of a connection, without I/O: bytes in, commands executed, replies out.

A `ServerSession` decodes requests, executes them by the table of its store, and encodes replies. It must not know how
bytes travel, what time it is, or what the commands do.

Invariants: commands and replies do not depend on how bytes are cut into chunks. A command is executed once, when it is
complete. Whatever arrives, a session replies or raises PeerError; after an error, call `leave` and drop it.
"""

from typing import Any

from ..base.errors import LimitError, PeerError, ProtocolError
from ..keyspace.accounts import Account
from ..keyspace.keyspace import Keyspace
from ..keyspace.steps import Running
from ..keyspace.waiter_types import Handoff
from ..wire.codecs import LargeValue, PartialRequest
from ..wire.commands import BY_OPCODE
from ..wire.values import Framed, length
from .session import Session
from .slots import NO_COMMANDS, Slot
from .store import WRITES, Store
from .tls import HANDSHAKE


class ServerSession(Session):
    """One connection: its incomplete request, its replies, and what is known about its peer."""

    def receive(self, chunk: bytes) -> None:
        """Take bytes, execute the commands that are complete, and put their replies into `out`.

        Stops while more than `Limits.unsent_high_water` bytes of replies are unsent, after each step of a long command,
        and before a command that has to wait for space on the disk; see `stalled`. Raises PeerError.
        """
        # What rarely happens is in methods of its own: compiled, the common path then takes fewer cache lines.
        store = self.store
        keyspace = store.keyspace
        clock = keyspace.clock
        recorder = clock.recorder
        if recorder is not None and not recorder.inside:
            recorder.receive(self, chunk)
            return
        clock.done = -1
        clock.points += 1
        begun = 0
        if self.input_buffer is not None:
            begun = min(self.need, 1)  # then the beginning of the first request is in the journal, and it may end
            joined = self._join_kept(chunk)
            if joined is None:
                return
            chunk = joined
        budget = store.budget
        if keyspace is not budget.keyspace:  # something happened in another store last
            budget.switch(store.share)
        elif keyspace.size != budget.seen:
            budget.attribute()
        store.serving = self
        if store.observer is not None:
            self.heard_at = clock.now
        limits = store.limits
        high_water = limits.unsent_high_water
        holding = store.hub.held
        out = self.out
        end = len(chunk)
        at = held = 0
        if (keyspace.working or self.running is not None) and not self._finish_before(store, chunk):
            return
        if self.unsent > high_water:  # even if the chunk is empty: what was kept back waits for the peer to read
            self._stall(chunk, 0)
            return
        while at < end or self.partial is not None:
            if keyspace.working and keyspace.postpones(self):
                # It must not see its next reply before the wake-up that earlier writes owe it.
                self.running = Running(keyspace.until_not_postponed(self))
                self._keep_until_done(chunk, at)
                return
            handoff = self.handoff
            partial = self.partial
            if partial is None:
                slot = self.table[chunk[at]]
                if slot is None:  # not sent in this store before, or refused
                    slot = self._missing(chunk[at])
                if holding and at >= begun and (slot.writes or holding > WRITES):
                    self._stall(chunk, at)
                    return
                self.slot = slot
                result, stop = slot.request.decode(slot.call, chunk, at + 1, end, limits)
            else:
                slot = self.slot
                if holding and begun <= at < end and (slot.writes or holding > WRITES):
                    self._stall(chunk, at)
                    return
                held = self.held
                result, stop = self._decode_more(partial, chunk, at)
                if stop == 0 and result is partial:  # a link stopped early, within its first frame
                    self._stall(chunk, 0)
                    return
            if stop < 0:  # incomplete: -stop bytes are needed
                self._suspend(result, chunk, at, -stop)
                return
            at = stop
            clock.done = at
            if slot.lasting:
                clock.lasting = True
            slot.tally.count += 1
            if keyspace.working and not keyspace.postpones(self):  # it may have woken itself
                keyspace.resolve(self)
            if keyspace.running is not None:
                if not self._begin_steps(keyspace, handoff, chunk, at, at if partial is None else max(held, at)):
                    return
                continue
            if slot.encode is not None:
                result = slot.encode(result)
            if result:
                if slot.in_pieces:
                    self._add_pieces(result)
                else:
                    out.append(result)
                    self.unsent += len(result)
            if handoff is not None:  # this command took the item that the session was woken for, or left it
                store.keyspace.end_handoff(self, handoff)
            if self.unsent > high_water:
                self._stall(chunk, at)
                return
        if self.held:
            self._account()

    def _join_kept(self, chunk: bytes) -> bytes | None:
        """Return the kept bytes and `chunk`; None if they do not suffice, and `chunk` is kept too."""
        kept = self.input_buffer
        assert kept is not None
        if len(kept) + len(chunk) < self.need:
            kept += chunk
            self._account()
            return None
        self.input_buffer = None
        return b"".join([kept, chunk])

    def _finish_before(self, store: Store, chunk: bytes) -> bool:
        """Do what must precede the next command: work that concerns this session, and the rest of the last command.

        Returns whether commands follow now; if not, `chunk` has been dealt with.
        """
        keyspace = store.keyspace
        if keyspace.working and not keyspace.postpones(self):
            keyspace.resolve(self)
            if self.store is not store:  # it has been let into another store
                self.receive(chunk)
                return False
        if self.running is not None:
            if keyspace.postpones(self) or not self._continue():
                self._keep_until_done(chunk, 0)
                return False
            if self.store is not store:  # ENTER: what follows is for another store
                if chunk:
                    self._keep_until_done(chunk, 0)
                return False
        return True

    def _decode_more(self, partial: PartialRequest, chunk: bytes, at: int) -> tuple[Any, int]:
        """Decode more of a request, and execute it if it is complete. Returns what `PartialRequest.decode` does."""
        if self.held:
            self._count_held(0)  # executing the command may move what it holds to the store
        result, stop = partial.decode(self.slot.call, chunk, at, len(chunk), self.store.limits)
        if self.partial is partial and not partial.endless:  # LINK replaces it
            self.partial = None
        return result, stop

    def _begin_steps(self, keyspace: Keyspace, handoff: Handoff | None, chunk: bytes, at: int, size: int) -> bool:
        """Begin the rest of a command that is carried out in steps, whose request has `size` bytes.

        Returns whether it is done, so that others follow now; if not, the rest of `chunk` is held back.
        """
        self._take_running(size)
        if handoff is not None:
            keyspace.end_handoff(self, handoff)
        running = self.running
        assert running is not None
        if running.steps is not None or not self._continue():  # others are served between two steps
            self._keep_until_done(chunk, at)
            return False
        if self.unsent > self.store.limits.unsent_high_water:
            self._stall(chunk, at)
            return False
        return True

    def _add_pieces(self, pieces: list[Framed]) -> None:
        """Add a reply in pieces. Raises LimitError."""
        size = length(pieces)
        self.check_reply_size(size)
        self.out.extend(pieces)
        self.unsent += size

    def large_value(self) -> LargeValue | None:
        """Return the large value under way, if any.

        Instead of reading, the server may receive into its `free_space`, report that to `fill`, and call
        `receive(b"")`.
        """
        partial = self.partial
        return partial if isinstance(partial, LargeValue) and self.input_buffer is None else None

    def stalled(self) -> bool:
        """Whether requests are held back until replies have been sent, or the disk has space.

        `receive(b"")` continues with them.

        While a command is `running`, `receive(b"")` continues it whatever is unsent.
        """
        return self.input_buffer is not None and self.need == 0

    def waits_for_space(self) -> bool:
        """Whether its next command, or the rest of one that is arriving, has to wait for space on the disk."""
        holding = self.store.hub.held
        if not holding or self.running is not None:
            return False
        if holding > WRITES:
            return True
        if self.partial is not None:
            return self.slot.writes
        kept = self.input_buffer
        slot = self.table[kept[0]] if kept else None
        return slot is not None and slot.writes

    def waits_for_work(self) -> bool:
        """Whether its command in steps may be waiting until the keyspace's deferred work has woken waiters."""
        return self.running is not None and self.store.keyspace.wakes_many()

    def hold_back(self, chunk: bytes) -> None:
        """Keep bytes that arrive while this is `stalled`. Raises BudgetError."""
        kept = self.input_buffer
        assert kept is not None
        kept += chunk
        self._account()

    def drop_held_back(self) -> int:
        """Forget the bytes that are held back, while this is `stalled`; return how many they are."""
        kept = self.input_buffer
        assert kept is not None
        count = len(kept)
        self.input_buffer = bytearray() if self.running is not None else None
        self._count_held(self._holds())
        return count

    def _take_running(self, size: int) -> None:
        """Take over the rest of the command that was just called, whose request has so many bytes."""
        keyspace = self.store.keyspace
        running = keyspace.running
        keyspace.running = None
        self.running = running
        if running is not None and running.request is not None:
            running.held = size

    def _keep_until_done(self, chunk: bytes, at: int) -> None:
        """Hold back what follows a command that is not done."""
        self.need = 0
        self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _continue(self) -> bool:
        """Do the next step of the last command. True if that was all; its reply is in `out` then."""
        running = self.running
        assert running is not None
        if self.held:
            self._count_held(0)  # this step may move what it holds to the store
        done = running.step() if running.account is None else self._step_counted(running, running.account)
        if not done:
            return False
        keyspace = self.store.keyspace
        if running.request is not None:
            keyspace.free_later(running.request)
        if keyspace.running is not None:
            self._take_running(0)
            return False
        self.running = None
        slot = self.slot
        result = running.result
        if slot.encode is not None and not isinstance(result, list):
            result = slot.encode(result)
        if isinstance(result, list):
            self._add_pieces(result)
        elif result:
            self.out.append(result)
            self.unsent += len(result)
        self.out.extend(running.behind)
        self.unsent += length(running.behind)
        return True

    def _step_counted(self, running: Running, account: Account) -> bool:
        """Do the next step of a command whose effects are counted."""
        keyspace = self.store.keyspace
        account.usage.command = self.slot.command.name
        before = keyspace.charge(account)
        try:
            return running.step()
        finally:
            keyspace.charge(before)
            if keyspace.running is not None:
                keyspace.running.account = account

    def _stall(self, chunk: bytes, at: int) -> None:
        """Hold back requests, as the peer reads its replies too slowly or the disk has no space."""
        self._keep(chunk, at, 0)

    def check_reply_size(self, size: int) -> None:
        """Raise LimitError for a reply of more bytes than the whole budget."""
        most = self.store.limits.budget_bytes
        if size > most:
            raise LimitError("budget_bytes", size, most)

    def _suspend(self, partial: PartialRequest | None, chunk: bytes, at: int, need: int) -> None:
        """Keep what decoding an incomplete request needs later."""
        if partial is not None:
            self.partial = partial
            at = partial.at
            before = partial.before
            if before:
                partial.before = b""
                chunk = before + chunk[at:]
                need += len(before) - at
                at = 0
        self._keep(chunk, at, need - at)

    def _keep(self, chunk: bytes, at: int, need: int) -> None:
        self.need = need
        if at < len(chunk):
            self.input_buffer = bytearray(memoryview(chunk)[at:])
        self._account()

    def _missing(self, opcode: int) -> Slot:
        """Return how a command is executed for which the table has nothing. Raises PeerError."""
        slot = self.store.guards.slot(self, opcode)
        if slot is None:
            raise self._refusal(opcode)
        return slot

    def _refusal(self, opcode: int) -> PeerError:
        store = self.store
        if self.table is store.handshake:
            if opcode == HANDSHAKE:
                self._alert()
                return ProtocolError("it began a TLS handshake, but this server does not use TLS")
            return ProtocolError(f"first frame has opcode {opcode}, expected VALIDATE")
        if self.table is NO_COMMANDS:
            return ProtocolError(f"opcode {opcode} from an evicted session")
        command = BY_OPCODE[opcode]
        if command is not None and store.hub.auth.is_limited(self):
            return self._stranger(command.name)
        return ProtocolError(f"unknown opcode {opcode}")
