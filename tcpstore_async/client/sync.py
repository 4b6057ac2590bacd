"""The synchronous client: connections that threads lease, write to and read from themselves.

Knows: which connection a call may use, deadlines, threads and forks, when to ask the server who it is. Must not know:
what a call means.
Invariants: a call that waits keeps no other thread waiting. What one thread has written is there for whatever any
thread asks next, on whichever connection. A call that is interrupted, or out of time, leaves its connection in step or
closed. A handler of signals may make calls whatever it has interrupted: it waits for the server and for other threads,
never for what only the interrupted call could do. There is no thread of our own.
"""

import os
import socket
import sys
import time
from threading import RLock, get_ident
from typing import Any, Final

from ..blob import Framed, unpack
from ..errors import DistNetworkError, ProtocolError, StoreTimeoutError
from ..limits import Limits
from ..session.client import Call
from ..session.extension import Identity, read_identity
from . import calls, older
from .calls import ANOTHER, Ask
from .channel import FLAGS, NOBODY, Channel, OutOfTime
from .deadline import ONE_LOOK, SURPLUS_SECONDS, Deadline
from .dial import Unwanted, dial_in_this_thread
from .line import Line, Turn

_LAST_LOOK: Final = 0.05
"""Seconds that what follows a wake gets, though that came at the last moment."""

_PATIENCE: Final = 0.001
"""Seconds that a thread waits for a connection before others let it go first.

Without that, a thread that makes call after call gives its connection back and has it again before any other runs.
"""

_MOMENT: Final = 0.01
"""Seconds that a thread lets others go first without a look for itself, and that a handler of signals waits to be told:
what it is told may go to the call that it has interrupted, or be held up by a lock that this one holds."""

_FREE_THREADED: Final[bool] = hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled()

_VALUE_BYTES: Final = Limits().value_bytes

_TOO_LONG: Final = (
    " (a request of %d bytes was sent before: a server closes the connection for a value over its limit,"
    f" which is {_VALUE_BYTES} bytes unless it was set)"
)

_FORKED: Final = "the process was forked in the midst of this call, whose outcome only the parent hears"


class TCPClient:
    """The connections of one store."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        introduction: dict[str, str] | None = None,
        began: float | None = None,
    ) -> None:
        """Connect, trying again until the timeout, in seconds from now or from `began`. Raises DistNetworkError.

        The introduction is what the server may know of this client, once it turns out to be one of ours.
        """
        self.host = host
        self.port = port
        self.timeout = timeout
        self.introduction = introduction or {}
        self.identity: Identity | None = None
        """Who the server is, if it is one of ours and was asked."""
        self.last_word: Ask | None = None
        """What a server of ours is told when the store is closed; it has no reply."""
        self.closed = False
        self._asked = False
        self._known: dict[str, bool] = {}
        """What PyTorch's servers have not always known: whether this one does, if that was tried."""
        self._lost = ""
        self._start([Channel(*dial_in_this_thread(host, port, Deadline(timeout, began)))])

    def _start(self, channels: list[Channel]) -> None:
        self._channels = channels
        self._tries: list[Channel] = []
        """Those that are asked whether they lead to the same server, and those on which it is tried what that knows."""
        self._opening = NOBODY
        """The thread that opens one more."""
        self._asking = NOBODY
        """The thread that asks the server who it is."""
        self._lock = RLock()  # a handler of signals may make a call in the midst of one
        self._line = Line()
        """For a connection."""
        self._curious = Line()
        """To hear who the server is."""
        self._starving = 0
        """Threads that have waited for a connection for long."""

    def close(self) -> None:
        """Close every connection. Calls under way in other threads fail, and later ones."""
        if not self.closed:
            self._return_stranded()
            self._say_last_word()
        self.closed = True
        self._lose("the store has been closed")

    def clone(self) -> "TCPClient":
        """Another on the same server, if it is the same still, where that can be asked. Raises DistNetworkError."""
        if self._lost:
            raise DistNetworkError(self._lost)
        clone = TCPClient(self.host, self.port, self.timeout, self.introduction)
        clone._known = dict(self._known)
        try:
            if self.identity is not None and (not clone.extended() or clone.identity != self.identity):
                raise DistNetworkError(ANOTHER)
        except BaseException:
            clone.close()
            raise
        return clone

    def describe(self) -> str:
        """Both ends of the first connection, as PyTorch's client shows them."""
        channel = next(iter(self._channels), None)
        if channel is None:
            return "closed" if self.closed else "not connected"
        try:
            here, there = channel.peer.getsockname(), channel.peer.getpeername()
        except OSError:
            return "lost"
        ends = f"addr=[{here[0]}]:{here[1]}, remote=[{there[0]}]:{there[1]}"
        return f"SocketImpl(fd={channel.peer.fileno()}, {ends})"

    def forked(self) -> None:
        """For a forked child: it gets connections of its own; the parent's stay the parent's."""
        me = get_ident()
        for channel in [*self._channels, *self._tries]:
            channel.gone = True
            if channel.user == me:
                _replace(channel.peer)  # a handler of signals has forked: the interrupted call is still at it
            else:
                channel.peer.close()
        self._start([])

    # Calls

    def ask(self, ask: Ask, deadline: Deadline | None = None) -> Any:
        """A call that the server answers at once, or not at all. Raises StoreTimeoutError, DistNetworkError.

        The deadline is the store's timeout unless given; of that, 0 means one look.
        """
        channel = None
        me = get_ident()
        try:
            # `_lease` without the call, as `_release` below: 0.3 µs of the 1.7 that the client itself takes.
            with self._lock:
                channels = self._channels
                if len(channels) == 1 and not channels[0].user and not self._starving:
                    channel = channels[0]
                    channel.user = me
            if channel is None or channel.session.pending:
                deadline = deadline or Deadline.of_a_call(self.timeout)
                if channel is None:
                    channel = self._lease_later(me, deadline)
                if channel.session.pending:
                    channel.settle(deadline)
            data, call = channel.session.prepare(*ask)
            writes = call is None and ask[0].mutates
            if not channel.put(data, call, writes):
                deadline = deadline or Deadline.of_a_call(self.timeout)
                channel.put_rest(data, call, deadline, writes)
            if call is None:
                if len(self._channels) > 1:
                    self._confirm_within(channel, me, deadline)
                return None
            try:
                channel.read()
            except BlockingIOError:
                pass  # there is none yet
            if not call.done:
                channel.read_until(call, deadline or Deadline.of_a_call(self.timeout))
            return call.result
        except OutOfTime as out:
            raise calls.late(ask, self.timeout, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(channel, error) from None
        finally:
            if channel is not None:
                try:
                    if (
                        _FREE_THREADED
                        or channel.frame
                        or channel.broken
                        or channel.user != me
                        or channel.session.pending
                    ):
                        self._release(channel)
                    else:  # whoever joins the line before this is seen in it, whoever does so after it sees this
                        channel.user = NOBODY
                        if self._lost or self._line.turns or len(self._channels) > 1:
                            self._pass_on(channel)
                except BaseException:  # an interrupt, of which there is no second so soon
                    self._release(channel)
                    raise

    def park(self, ask: Ask, seconds: float, then: Ask | None = None, began: float | None = None) -> Any:
        """A call that is answered when something happens; after `seconds`, negative for never, StoreTimeoutError.

        With `then` that is asked next on the same connection, before anything else, and its result returned. The
        seconds are counted from `began` if that is given. 0 means one look.
        """
        channel = None
        deadline = Deadline.of_a_call(seconds, began)
        try:
            channel = self._lease(deadline, seconds, deadline.began)
            call = channel.request(ask, deadline)
            self._wait_for(channel, call, deadline, one_look=seconds == 0)
            if then is not None:
                deadline = _at_least(_LAST_LOOK, deadline)
                call = channel.request(then, deadline)
                channel.read_until(call, deadline)
            return call.result
        except OutOfTime as out:
            raise calls.late(ask, seconds, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(channel, error) from None
        finally:
            if channel is not None:
                try:
                    self._release(channel)
                except BaseException:  # an interrupt, of which there is no second so soon
                    self._release(channel)
                    raise

    def pop(self, lease: Ask, seconds: float, began: float) -> bytes | None:
        """Take the item that a server of ours leases; None if there is none.

        It is the caller's from the moment that this is said to the server. An interrupt that strikes between that and
        the return has it pushed back, to the end of the queue. The caller must not make a call before it returns it.
        """
        taken: list[Framed] = []
        confirmed: list[int] = []
        try:
            return self._pop(lease, seconds, began, taken, confirmed)
        except BaseException:
            if confirmed:
                self.ask(calls.push_back(lease[1][0], taken[0]))
            raise

    def _pop(self, lease: Ask, seconds: float, began: float, taken: list[Framed], confirmed: list[int]) -> bytes | None:
        channel = None
        deadline = Deadline.of_a_call(seconds, began)
        try:
            channel = self._lease(deadline, seconds, deadline.began)
            try:
                call = channel.request(lease, deadline)
                if lease[0].parks:
                    self._wait_for(channel, call, deadline, one_look=False)
                else:
                    channel.read_until(call, deadline)
                _, item = call.result
                if item is None:
                    return None
                taken.append(item)
                value = unpack(item)
                channel.confirm(lease, confirmed, deadline)
                return value
            except BaseException:
                if not confirmed:
                    channel.give_back(lease)
                raise
        except OutOfTime as out:
            raise calls.late(lease, seconds, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(channel, error) from None
        finally:
            if channel is not None:
                try:
                    self._release(channel)
                except BaseException:  # an interrupt, of which there is no second so soon
                    self._release(channel)
                    raise

    def pop_unconfirmed(self, ask: Ask, seconds: float, began: float, wait: Ask | None) -> bytes | None:
        """Take an item from a server of PyTorch's, after a wait if that is given; None if there is none.

        Whatever keeps it from the caller, it is pushed back, to the end of the queue, when it has come.
        """
        channel = None
        deadline = Deadline.of_a_call(seconds, began)
        try:
            channel = self._lease(deadline, seconds, deadline.began)
            if wait is not None:
                self._wait_for(channel, channel.request(wait, deadline), deadline, one_look=seconds == 0)
                deadline = _at_least(ONE_LOOK, deadline)
            mine: list[Call] = []
            try:
                mine.append(channel.request(ask, deadline))
                channel.read_until(mine[0], deadline)
                item: Framed | None = mine[0].result[1]
                return None if item is None else unpack(item)
            except BaseException:
                channel.stranded += mine or [call for call in channel.session.pending if call.fields is ask[1]]
                raise
        except OutOfTime as out:
            raise calls.late(wait or ask, seconds, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._failed(channel, error) from None
        finally:
            if channel is not None:
                try:
                    self._release(channel)
                except BaseException:  # an interrupt, of which there is no second so soon
                    self._release(channel)
                    raise

    def _say_last_word(self) -> None:
        word = self.last_word
        if word is None:
            return
        for channel in self._channels:
            if not channel.user and not channel.broken and channel.session.waiting is None:
                try:
                    channel.peer.send(channel.session.request(*word)[0], FLAGS)
                except OSError:
                    pass  # it has been lost

    def _return_stranded(self) -> None:
        """Before all is closed: have what was popped for callers who have gone go back, if it comes within a moment."""
        deadline = Deadline(ONE_LOOK)
        for channel in self._channels:
            if channel.stranded and not channel.user:
                try:
                    channel.settle(deadline)
                except (OSError, ProtocolError, OutOfTime):
                    pass  # it has gone with the connection

    def ask_all(self, asks: list[Ask], deadline: Deadline) -> list[Any]:
        """Calls that the server answers at once, all sent before the first reply is read: one round trip.

        For replies of a few bytes: nothing is read while the requests are sent. Raises StoreTimeoutError,
        DistNetworkError.
        """
        channel = None
        try:
            channel = self._lease(deadline, deadline.timeout, deadline.began)
            channel.broken = True
            requests = [channel.session.request(*ask) for ask in asks]
            channel.send(b"".join([data for data, _ in requests]), deadline)
            channel.broken = False
            results: list[Any] = []
            for _, call in requests:
                if call is not None:
                    channel.read_until(call, deadline)
                    results.append(call.result)
            return results
        except OutOfTime as out:
            raise calls.late(asks[0], deadline.timeout, out.__cause__) from out.__cause__
        except (OSError, ProtocolError) as error:
            raise self._lose(_said(error)) from None
        finally:
            if channel is not None:
                try:
                    self._release(channel)
                except BaseException:  # an interrupt, of which there is no second so soon
                    self._release(channel)
                    raise

    def _wait_for(self, channel: Channel, call: Call, deadline: Deadline, one_look: bool) -> None:
        """Read until a call that waits is over. Raises OSError, ProtocolError or OutOfTime."""
        channel.read_soon()
        if call.done:
            return
        if one_look:
            channel.cancel()
            channel.settle(deadline)
            if not call.woken:
                raise OutOfTime
            return
        pending = channel.session.pending
        while pending and pending[0] is not call:  # the fence: until then others must not go elsewhere
            channel.read_until(pending[0], deadline)
        with self._lock:
            channel.parked = True
            self._line.tell_all()
        channel.read_until(call, deadline)

    # Who the server is

    def extended(self, ask: Ask | None = None, seconds: float | None = None, began: float | None = None) -> bool:
        """Whether the server is one of ours. Asks it, once, the first time this is asked.

        That is part of the call `ask`, which has so many seconds. Raises StoreTimeoutError, DistNetworkError.
        """
        if not self._asked:
            seconds = self.timeout if seconds is None else seconds
            try:
                self._ask_who(Deadline.of_a_call(seconds, began))
            except (OutOfTime, StoreTimeoutError):
                raise calls.late(ask or calls.HAS_EXTENSION, seconds) from None
        return self.identity is not None

    def knows(self, what: str, ask: Ask, seconds: float | None = None, began: float | None = None) -> bool:
        """Whether the server knows what older ones of PyTorch's do not: tried once, on a connection of its own.

        That is part of the call `ask`, which has so many seconds. Raises StoreTimeoutError, DistNetworkError.
        """
        known = self._known.get(what)
        if known is None:
            known = self._known[what] = self.extended(ask, seconds, began) or self._tried(what, ask, seconds, began)
        return known

    def _tried(self, what: str, ask: Ask, seconds: float | None, began: float | None) -> bool:
        seconds = self.timeout if seconds is None else seconds
        try:
            deadline = Deadline.of_a_call(seconds, began)
            return any(self._try_out(older.tries(what), deadline) for _ in range(older.TRIES))
        except OutOfTime:
            raise calls.late(ask, seconds) from None

    def _try_out(self, asks: list[Ask], deadline: Deadline) -> bool:
        channel = self._dial(deadline)
        channel.user = get_ident()
        try:
            with self._lock:
                if self._lost:
                    raise DistNetworkError(self._lost)
                self._tries.append(channel)
            for ask in asks:
                channel.read_until(channel.request(ask, deadline), deadline)
        except OSError:
            self.ask(calls.NO_KEY, deadline)  # unless the store, or the server, has gone altogether
            return False
        except ProtocolError as error:
            raise self._lose(str(error)) from None
        finally:
            with self._lock:
                if channel in self._tries:
                    self._tries.remove(channel)
            channel.peer.close()
        return True

    def _ask_who(self, deadline: Deadline) -> None:
        """One thread asks, the others wait for the outcome. Raises OutOfTime, StoreTimeoutError, DistNetworkError."""
        me = get_ident()
        turn = Turn()
        while not self._asked and not self._lost:
            with self._lock:
                # A handler of signals does not wait for them: they may wait for what the interrupted call holds.
                others = self._asking not in (NOBODY, me) and not self._within_another(me)
                if others:
                    self._curious.join(turn)
                else:
                    self._asking = me
            if not others:
                self._ask_now(deadline)
            elif not turn.wait(deadline.moment()) and deadline.passed():
                raise OutOfTime

    def _ask_now(self, deadline: Deadline) -> None:
        try:
            if self.ask(calls.HAS_EXTENSION, deadline):
                self.identity = read_identity(unpack(self.ask(calls.WHO_ARE_YOU, deadline)))
            if self.identity is not None:
                self.ask(calls.introduce(self.introduction), deadline)
            self._asked = True
        finally:
            with self._lock:
                self._asking = NOBODY
                self._curious.tell_all()

    def _verify(self, channel: Channel, deadline: Deadline) -> None:
        """A further connection must lead to the same server, where that can be asked."""
        known = self.identity
        if known is None:
            return
        data, _ = channel.session.prepare(*calls.introduce(self.introduction))
        if not channel.put(data, None):
            channel.put_rest(data, None, deadline)
        call = channel.request(calls.WHO_ARE_YOU, deadline)
        channel.read_until(call, deadline)
        found = read_identity(unpack(call.result))
        if found is None or found.instance != known.instance:
            raise ProtocolError(ANOTHER)

    # Connections

    def _lease(self, deadline: Deadline | None, seconds: float, began: float) -> Channel:
        """A connection for this thread alone, on which all that the store has written is there.

        The common case needs no deadline; it is made of the seconds of the call if there is none yet. Wherever an
        interrupt strikes, none stays leased. Raises OutOfTime.
        """
        me = get_ident()
        channel: Channel | None = None
        try:
            with self._lock:
                channels = self._channels
                if len(channels) == 1 and not channels[0].user and not self._starving:  # the common case
                    channel = channels[0]
                    channel.user = me
            if channel is None:
                deadline = deadline or Deadline.of_a_call(seconds, began)
                channel = self._lease_later(me, deadline)
            if channel.session.pending:
                channel.settle(deadline or Deadline.of_a_call(seconds, began))
            return channel
        except BaseException:
            if channel is not None and channel.user == me:
                self._release(channel)
            raise

    def _lease_later(self, me: int, deadline: Deadline) -> Channel:
        """The same when there is none at the moment, perhaps: wait for one, or open one."""
        channel: Channel | None = None
        turn = Turn()
        within = self._within_another(me)
        behind = self._starving > 0 and not within
        try:
            for other in list(self._channels) if within else []:
                if other.user == me:
                    other.await_writes(deadline)
            while channel is None:
                with self._lock:
                    self._line.join(turn)  # before the look: whoever gives one back must see it
                    if not behind:
                        channel = self._free()
                    may_open = channel is None and not behind and self._may_open(me, within)
                    if channel is not None:
                        channel.user = me
                        self._leave(turn)
                if channel is not None and self._unconfirmed_beside(channel):
                    if channel.session.pending:
                        channel.settle(deadline)
                    channel.read_until(channel.request(calls.NO_KEY, deadline), deadline)
                    self._release(channel)
                    channel = None
                elif may_open:
                    self._open(deadline, me, within)
                elif channel is None:
                    self._wait(turn, deadline, behind or within)
                    behind = False
            return channel
        except BaseException:
            try:
                self._give_up(channel, turn, me)
            except BaseException:  # an interrupt, of which there is no second so soon
                self._give_up(channel, turn, me)
            raise

    def _within_another(self, me: int) -> bool:
        """Whether this thread is in a call already, which a handler of signals has interrupted to make this one."""
        if self._opening == me or any(channel.user == me for channel in [*self._channels, *self._tries]):
            return True
        return any(turn.user == me for turn in list(self._line.turns))

    def _confirm_within(self, channel: Channel, me: int, deadline: Deadline | None) -> None:
        """What a handler of signals has written must be executed before the call goes on that it has interrupted, for
        that may write as well, on another connection. Raises OSError, ProtocolError or OutOfTime.
        """
        if any(other is not channel and other.user == me for other in list(self._channels)):
            deadline = deadline or Deadline.of_a_call(self.timeout)
            channel.read_until(channel.request(calls.NO_KEY, deadline), deadline)

    def _wait(self, turn: Turn, deadline: Deadline, briefly: bool) -> None:
        """Until this thread is told, or for a moment if it has not even looked yet. Raises OutOfTime."""
        left = deadline.moment()
        if briefly:
            left = _MOMENT if left is None else min(left, _MOMENT)
        if not turn.wait(left) and deadline.passed():
            raise OutOfTime
        if not turn.starving and deadline.spent() > _PATIENCE:
            with self._lock:
                self._starving += 1
                turn.starving = True

    def _leave(self, turn: Turn) -> None:
        self._starving -= turn.starving
        turn.starving = False
        self._line.leave(turn)

    def _give_up(self, channel: Channel | None, turn: Turn, me: int) -> None:
        with self._lock:
            self._leave(turn)
            self._line.tell()  # what this thread was told, perhaps, another must hear
        if channel is not None and channel.user == me:
            self._release(channel)

    def _free(self) -> Channel | None:
        if self._lost:
            raise DistNetworkError(self._lost)
        free = None
        me = get_ident()
        for channel in self._channels:
            if channel.user:
                if channel.session.unconfirmed() and channel.user != me:
                    return None
            elif free is None or channel.session.unconfirmed():
                free = channel
        return free

    def _unconfirmed_beside(self, channel: Channel) -> bool:
        """Whether a free connection and another one both have writes that are not confirmed: two threads have written
        at the same time. What is asked on one of them could overtake the other's, so one is confirmed first.
        """
        return channel.session.unconfirmed() and any(
            other is not channel and not other.user and other.session.unconfirmed() for other in list(self._channels)
        )

    def _may_open(self, me: int, within: bool) -> bool:
        """Whether none is to be had, and nobody else opens one. A handler of signals waits for others' writes only."""
        if within:
            return not any(channel.user != me and channel.session.unconfirmed() for channel in self._channels)
        return not self._opening and all(channel.parked for channel in self._channels)

    def _open(self, deadline: Deadline, me: int, within: bool) -> None:
        """Open one more, if nobody else does."""
        mine = False
        opened: list[Channel] = []  # not a name that may be None: in `finally` mypyc takes it for a Channel
        try:
            with self._lock:
                if self._opening and not within:
                    return
                mine = not self._opening
                if mine:
                    self._opening = me
            channel = self._dial(deadline)
            opened.append(channel)
            channel.user = me
            with self._lock:
                if self._lost:
                    raise DistNetworkError(self._lost)
                self._tries.append(channel)
            self._verify(channel, deadline)
            channel.user = NOBODY
            with self._lock:
                if self._lost:
                    raise DistNetworkError(self._lost)
                self._channels.append(channel)
        except BaseException:
            for one in opened:
                one.peer.close()
            raise
        finally:
            with self._lock:
                for one in opened:
                    if one in self._tries:
                        self._tries.remove(one)
                if mine:
                    self._opening = NOBODY
                self._line.tell_all()

    def _dial(self, deadline: Deadline) -> Channel:
        """Raises DistNetworkError; OutOfTime if it is only for the time that there is no connection."""
        try:
            return Channel(*dial_in_this_thread(self.host, self.port, deadline, lambda: not self._lost))
        except Unwanted:
            raise DistNetworkError(self._lost) from None
        except DistNetworkError as error:
            if self._lost:
                raise DistNetworkError(self._lost) from None
            if self._channels:
                raise OutOfTime from error
            raise

    def _release(self, channel: Channel) -> None:
        """Give a connection back, in step, or closed if it can be neither. May be called again."""
        if channel.user == get_ident():
            channel.tidy()
            if channel.session.waiting is not None and not channel.gone:
                channel.cancel()
            if channel.broken and not self._lost and not channel.gone:
                self._drop(channel)
            channel.parked = False
            with self._lock:  # without the GIL, whoever has joined the line and looked might not be seen below
                channel.user = NOBODY
        self._pass_on(channel)

    def _pass_on(self, channel: Channel) -> None:
        """Have others know that a connection is free. Whoever did not see that was in line before it looked."""
        if (self._lost or channel.gone) and not channel.user:
            channel.peer.close()
            if channel.gone:
                return
        if self._line.turns or len(self._channels) > 1:
            with self._lock:
                self._line.tell()
                self._close_surplus(channel)

    def _close_surplus(self, channel: Channel) -> None:
        """Of several connections, close those that have not been used for a while."""
        now = channel.used = time.monotonic()
        for other in self._channels[1:]:
            if not other.user and now - other.used > SURPLUS_SECONDS and not other.session.unconfirmed():
                self._channels.remove(other)
                other.peer.close()

    def _drop(self, channel: Channel) -> None:
        """Close a connection that is out of step; the store goes on if nothing was lost with it."""
        if channel.session.unconfirmed() or self.identity is None:
            self._lose("a connection had to be closed in the midst of a call")
            return
        with self._lock:
            if channel in self._channels:
                self._channels.remove(channel)
        channel.peer.close()

    def _failed(self, channel: Channel | None, error: Exception) -> DistNetworkError:
        """What a call says whose connection has failed: that the store is lost."""
        if channel is not None and channel.gone:
            return DistNetworkError(_FORKED)
        said = _said(error)
        if channel is not None and channel.longest > _VALUE_BYTES and isinstance(error, OSError):
            said += _TOO_LONG % channel.longest
        return self._lose(said)

    def _lose(self, reason: str) -> DistNetworkError:
        """The store is lost, as PyTorch's is when its connection goes. The error says why it was lost first."""
        with self._lock:
            self._lost = self._lost or reason
            for channel in [*self._channels, *self._tries]:
                _shut(channel)
            self._channels.clear()
            self._line.tell_all()
            self._curious.tell_all()
        error = DistNetworkError(self._lost)
        error.__cause__ = None  # and so no context is shown, in compiled code either
        return error


def _at_least(seconds: float, deadline: Deadline) -> Deadline:
    """What is left of a deadline, or so many seconds if that is more."""
    left = deadline.left()
    return Deadline(-1.0 if left is None else max(left, seconds))


def _shut(channel: Channel) -> None:
    """Close it; if it is leased, wake who reads from it, who closes it then: its number must not become another's."""
    try:
        channel.peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already
    if not channel.user:
        channel.peer.close()


def _replace(peer: socket.socket) -> None:
    """Put a connection that has ended in its place: whoever is about to read from it hears that, and nothing else."""
    ended, other = socket.socketpair()
    other.close()
    os.dup2(ended.fileno(), peer.fileno(), inheritable=False)
    ended.close()


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
