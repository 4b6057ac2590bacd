"""The rounds of elastic jobs once more, as plainly as possible; `model.py` uses it, and says what a model is.

Written from the specification of MEET and ATTEND and from PyTorch's dynamic rendezvous.
"""

from __future__ import annotations

from typing import Any

Answer = tuple[int, int, int]


class Member:
    """An agent. One that is removed and comes back is another one."""

    def __init__(self, meeting: Meeting, name: bytes) -> None:
        self.meeting = meeting
        self.name = name
        self.peers: list[Any] = []
        """The connections that represent it."""
        self.parked: Any = None
        """The one that waits for its rank."""
        self.beaten = meeting.tick
        self.seen = meeting.tick


class Meeting:
    """The rounds under one key. `answers` collects who is to be answered."""

    def __init__(self) -> None:
        self.round = 0
        self.ranks: list[Member] | None = None
        """The agents that the round was formed of, or None while they gather."""
        self.closed = False
        self.least = self.most = 1
        self.members: list[Member] = []
        """All agents, the one that was not seen for longest first."""
        self.inside: list[Member] = []
        """The agents of the current round that have not left it."""
        self.outside: list[Member] = []
        """The agents that wait for the next one."""
        self.caller: Member | None = None
        self.calls = 0
        self.told = True
        """Whether the caller has been told."""
        self.tick = 0
        self.answers: list[tuple[Member, Answer]] = []

    def find(self, name: bytes) -> Member | None:
        return next((member for member in self.members if member.name == name), None)

    def full(self) -> bool:
        return self.ranks is not None and len(self.inside) >= self.most

    def join(self, member: Member, least: int, most: int, left: int) -> Answer | None:
        self.least, self.most = least, most
        if self.ranks is not None and member in self.inside and self.round == left:
            self.leave(member)
        if self.closed:
            return self.round, -2, int(member in self.outside and self.full())
        if member not in self.inside and member not in self.outside:
            if self.ranks is None:
                self.inside.append(member)
            else:
                self.outside.append(member)
        if member in self.outside:
            return None
        if self.ranks is None:
            self.count(member)
        if self.ranks is not None:
            return self.round, self.ranks.index(member), len(self.ranks)
        if self.caller is member and not self.told:
            self.told = True
            return self.round, -1, self.calls
        return None

    def count(self, latest: Member | None = None) -> None:
        number = len(self.inside)
        if self.closed or number < self.least:
            self.caller = None
        elif number >= self.most:
            self.form()
        elif self.caller is None:
            self.caller = latest or min(self.inside, key=lambda member: member.name)
            self.calls += 1
            self.told = False

    def form(self) -> None:
        self.ranks = sorted(self.inside, key=lambda member: member.name)
        self.caller = None
        self.answers += [(member, (self.round, rank, len(self.ranks))) for rank, member in enumerate(self.ranks)]

    def leave(self, member: Member) -> None:
        if member in self.outside:
            self.outside.remove(member)
        elif member in self.inside:
            self.inside.remove(member)
            if self.caller is member:
                self.caller = None
            if self.ranks is None:
                self.count()
            elif not self.inside:
                self.round += 1
                self.ranks = None
                self.outside.sort(key=lambda member: member.name)
                self.inside, self.outside = self.outside[: self.most], self.outside[self.most :]
                self.count()

    def remove(self, member: Member) -> None:
        if member in self.members:
            self.members.remove(member)
            self.leave(member)

    def see(self, member: Member) -> None:
        member.seen = self.tick
        self.members.remove(member)
        self.members.append(member)

    def beat(self, member: Member, missing: int) -> None:
        if member.beaten == self.tick:
            self.tick += 1
        member.beaten = self.tick
        self.see(member)
        while self.tick - self.members[0].seen >= missing:
            self.remove(self.members[0])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.answers += [(member, (self.round, -2, 0)) for member in self.inside]
            self.answers += [(member, (self.round, -2, int(self.full()))) for member in self.outside]

    def status(self, member: Member | None) -> tuple[int, ...]:
        state = 2 if self.closed else 0 if self.ranks is None else 1
        waiting = 0 if self.full() else len(self.outside)
        standing = 0
        if member is not None and member in self.inside:
            standing = 1
        elif member is not None and member in self.outside:
            standing = 3 if self.full() else 2
        call = self.calls if member is not None and self.caller is member else 0
        return self.round, state, len(self.inside), waiting, standing, call
