"""The threads of a server, and a fair lock for them.

Must not know what they are for.
"""

import threading
from collections import deque
from collections.abc import Callable

from .turn import LoopTurn


class Worker(threading.Thread):
    """A thread of a server. `Server.stop` joins it, so it must not wait for the server to stop."""

    def __init__(self, run: Callable[[], object], name: str, ended: "deque[Worker]") -> None:
        """Prepare a thread that calls `run`, and adds itself to `ended` when it ends."""
        super().__init__(target=run, name=name, daemon=True)
        self._ended = ended

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._ended.append(self)


class FairLock(LoopTurn):
    """A lock handed to the thread that has waited longest.

    `threading.Lock` goes to any thread that asks while it is free: beside twenty peers that sent without a pause,
    another peer's PING took six seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inner = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> None:
        with self._inner:
            if not self._held:
                self._held = True
                self.begin()
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        try:
            ticket.acquire()
        except BaseException:  # an interrupt from the keyboard
            self._withdraw(ticket)
            raise
        self.begin()

    def __exit__(self, *_: object) -> None:
        with self._inner:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def _withdraw(self, ticket: threading.Lock) -> None:
        with self._inner:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return
        self.__exit__()
