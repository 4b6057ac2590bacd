"""Signals that end a command line program.

Invariant: a program that ends because of a signal dies of that signal. A shell shows this as status 128 plus the
signal's number (130 for Ctrl-C) and also stops the loop or script that ran the program, which no exit status does.
"""

import signal
import sys
from typing import NoReturn


def reset_sigint() -> None:
    """Have Ctrl-C end this process silently, even during an import; an ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def die_of(number: int) -> NoReturn:
    """End this process by a signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    sys.exit(128 + number)  # the signal is blocked
