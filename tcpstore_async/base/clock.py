"""What enters a server's stores: the time, and events, which pass a `Recorder` if there is one.

Whoever drives the stores sets the time once a turn, and nothing in them reads any other. A method that is called from
outside passes itself to the recorder first. So what is executed again, at the same times, does the same; `log/` does
that. This module must not know what an event does.

Invariant: the time changes between events only.
"""

from collections.abc import Callable, Generator
from typing import Any

from .mypyc_shim import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder:
    """Notes events, or executes noted ones again."""

    def __init__(self) -> None:
        self.inside = False
        """Whether an event is being executed: what is called now is part of it."""
        self.again = False
        """Whether events are executed again."""

    def enter(self, subject: Any, method: str, *given: Any) -> Any:
        """Call a method of something in the engine: an event."""
        raise NotImplementedError

    def receive(self, session: Any, chunk: bytes) -> None:
        """Have a session on a connection of its own receive bytes: an event."""
        raise NotImplementedError

    def answer(self, ask: Callable[[], Any]) -> Any:
        """Return what somebody outside of the engine answers, which is part of the event."""
        raise NotImplementedError

    def hide(self, secret: bytes) -> bytes:
        """Return what stands for a secret, of the same length: the event does not have the secret itself."""
        raise NotImplementedError

    def steps(self, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
        """Return steps whose result depends on what is no event. The result is part of the event in which they end."""
        raise NotImplementedError

    def opened(self, session: Any) -> None:
        """Number a new session. If it is on a connection of its own, that is an event."""
        raise NotImplementedError

    def left(self, session: Any) -> None:
        """Forget a session."""
        raise NotImplementedError

    def evicts(self, victim: Any, wanted: int) -> None:
        """Note whom the budget evicts, or refuses a command, as memory is short; see `Clock.points` for `wanted`."""
        raise NotImplementedError

    def victims(self, wanted: int) -> list[Any]:
        """Return whom the budget evicts at this point, while events are executed again."""
        raise NotImplementedError


class Clock:
    """The time of the present turn."""

    def __init__(self) -> None:
        self.now: float = 0.0
        """In seconds of the server's clock, which is monotonic."""
        self.done: int = -1
        """Where the last command that `receive` executed ends, in the bytes kept and received; -1 if none was."""
        self.points: int = 0
        """How often in this event a session has received bytes, or the budget was asked whether too much is used.

        With `done`, and the size that the store is about to have, or -1, it says at which point memory is short.
        """
        self.lasting = False
        """Set by `receive` when it executes a command that may change anything."""
        self.recorder: Recorder | None = None
        """What events pass; None while they are neither recorded nor executed again."""

    def enters(self, subject: Any, method: str, *given: Any) -> bool:
        """Return whether the call of a method is an event, which has passed the recorder then: return at once."""
        recorder = self.recorder
        if recorder is None or recorder.inside:
            return False
        recorder.enter(subject, method, *given)
        return True

    def ask(self, ask: Callable[[], Any]) -> Any:
        """Return what is answered outside of the engine."""
        return ask() if self.recorder is None else self.recorder.answer(ask)

    def hidden(self, secret: bytes) -> bytes:
        """Return what stands for a secret that has been received, the same for the same secret."""
        return secret if self.recorder is None else self.recorder.hide(secret)
