"""Requests that many peers send alike: one registration and one reply for all of them.

The ranks of a job WAIT for the same keys and read them with the same MULTI_GET. What is found out about a `KeyList` is
kept until one of its keys changes: whether all keys exist, the reply to a MULTI_GET, and the group of waiters that the
next WAIT joins. This module does not know how lists are recognized (`session/key_list_cache.py`), nor what is stored.

Invariants: what is kept for a list is what its keys would give now, and an open group awaits what a new WAIT for its
list would await. A key is named by at most one tracked list.
"""

from ..base.limits import MEMBER_BYTES
from ..wire.values import Framed, length
from .waiter_types import IDLE, UNKNOWN, KeyList, SharedWait, Waiter
from .waiters import WaiterRegistry


class SharedRequests(WaiterRegistry):
    """What is kept for lists of keys. The base class of `AgentRegistry`; `Keyspace` supplies what is stored."""

    def __init__(self, max_size: int, portion: int) -> None:
        super().__init__(max_size, portion)
        self.noting = False
        """Whether `note` must be called before a change: cheaper to test than what it looks at."""
        self.max_kept_reply: int = 0
        """Bytes of a reply above which it is not kept."""

    # What the keyspace supplies

    def check(self, keys: list[bytes]) -> bool:
        """Whether every key exists."""
        raise NotImplementedError

    def exists(self, key: bytes) -> bool:
        """Whether a key exists."""
        raise NotImplementedError

    def multi_get(self, keys: list[bytes]) -> list[Framed]:
        """Return the values in order, empty ones for missing keys."""
        raise NotImplementedError

    def wait(self, waiter: Waiter, keys: list[bytes]) -> bool:
        """True if every key exists; else the waiter is parked on the missing ones."""
        raise NotImplementedError

    # Requests for a list

    def check_shared(self, listed: KeyList) -> bool:
        """As `Keyspace.check`."""
        if listed.present != UNKNOWN:
            return listed.present == 1
        self._use(listed)
        present = self.check(listed.keys)
        if listed.tracked:
            listed.present = 1 if present else 0
        return present

    def wait_shared(self, waiter: Waiter, listed: KeyList) -> bool:
        """As `Keyspace.wait`, but an idle waiter joins the group for the list, if it is open."""
        if waiter.state != IDLE:
            return self.wait(waiter, listed.keys)
        group = listed.group
        if group is None:
            if self.check_shared(listed):
                self.renew_handoff(waiter, listed.keys)
                return True
            group = self._park_group(listed)
        else:
            self._grow(MEMBER_BYTES)
        group.add(waiter)
        self._weigh(waiter, MEMBER_BYTES)
        return False

    def multi_get_shared(self, listed: KeyList) -> list[Framed]:
        """As `Keyspace.multi_get`. The second reply since a key changed is kept, in one piece for all who follow."""
        if listed.reply is not None:
            return [listed.reply]
        self._use(listed)
        values = self.multi_get(listed.keys)
        if listed.tracked:
            listed.reads += 1
            if listed.reads > 1 and (size := length(values)) <= self.max_kept_reply:
                listed.reply = b"".join(values)
                listed.longest_reply = max(listed.longest_reply, size)
                return [listed.reply]
        return values

    def renew_handoff(self, waiter: Waiter, keys: list[bytes]) -> None:
        """Let a waiter that is woken again for a queue keep its hand-off."""
        handoff = waiter.handoff
        if handoff is not None and handoff.queue in keys:
            waiter.handoff = self.new_handoff(handoff.queue)

    def _park_group(self, listed: KeyList) -> SharedWait:
        """Register a new group for the missing keys of a list. Raises LimitError."""
        missing = [key for key in listed.keys if not self.exists(key)]
        growth = MEMBER_BYTES
        for key in missing:
            growth += self.registration_bytes(key)
        self._grow(growth)
        group = SharedWait(self)
        self.park(group, missing)
        if listed.tracked:
            listed.group = group
            group.listed = listed
        return group

    # Tracking

    def _use(self, listed: KeyList) -> None:
        """Count a request that nothing is kept for. The second one shows that more may follow: the list is tracked."""
        if not listed.tracked:
            listed.uses += 1
            if listed.uses > 1:
                self._track(listed)

    def _track(self, listed: KeyList) -> None:
        """Keep what is found out about a list from now on."""
        tracked = self.tracked
        for key in listed.keys:
            other = tracked.get(key)
            if other is not None and other is not listed:
                self.untrack(other)
            tracked[key] = listed
        listed.tracked = True
        self.noting = True

    def untrack(self, listed: KeyList) -> None:
        """Keep nothing for a list any more."""
        if not listed.tracked:
            return
        if listed.group is not None:
            self._close(listed.group)
        self._forget(listed)
        listed.uses = 0
        listed.tracked = False
        for key in listed.keys:
            self.tracked.pop(key, None)
        self.update_noting()

    def update_noting(self) -> None:
        self.noting = len(self.tracked) > 0 or self.waking is not None

    def note(self, key: bytes) -> None:
        """Note that a key is about to change: drop what is kept for its list, and wake its waiters if that is due."""
        self.finish_waking(key)
        listed = self.tracked.get(key)
        if listed is not None:
            self._forget(listed)

    def _forget(self, listed: KeyList) -> None:
        listed.present = UNKNOWN
        listed.reads = 0
        listed.reply = None
