from __future__ import annotations

import random
import signal
import threading

import pytest

from support import LIMIT
from tcpstore_async.base.locks import RLock


class Struck(Exception):
    pass


@pytest.mark.unmeasured
def test_an_interrupt_leaves_no_lock_locked() -> None:
    """Python's own lock stays locked after many of these on 3.14."""
    lock = RLock()

    def handle(*_: object) -> None:
        raise Struck

    def enter() -> None:
        while True:
            with lock:
                pass

    def is_free() -> bool:
        free = lock.acquire(blocking=False)
        if free:
            lock.release()
        return free

    old = signal.signal(signal.SIGALRM, handle)
    rng = random.Random(8)
    struck = 0
    try:
        for _ in range(100):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.random() / 2000 + 1e-6)
                    enter()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Struck:
                struck += 1
            seen: list[bool] = []
            other = threading.Thread(target=lambda: seen.append(is_free()))  # noqa: B023
            other.start()
            other.join(LIMIT)
            assert seen == [True]
    finally:
        signal.signal(signal.SIGALRM, old)
    assert struck == 100
