"""A lock that an exception raised by a signal handler does not leave locked."""

import _thread
import sys
import threading

if sys.version_info < (3, 14):
    RLock = threading.RLock
else:

    class RLock(_thread.RLock):
        """For `with`, whose entry no signal handler interrupts.

        From Python 3.14 on, the interpreter looks for signals between the call of a C function, such as `__enter__`,
        and the block: what a handler raises there would leave the lock locked. It does not look when a property has
        been read, nor when a Python function has returned.
        """

        _acquired = property(_thread.RLock.acquire)

        def __enter__(self) -> bool:
            return self._acquired
