"""What Ctrl-C, and the signals like it, do to a program of ours that is run from a shell.

Knows: signals. Must not know: what is interrupted.
Invariant: whoever ends because of a signal ends by that signal. A shell shows that as 128 and its number (130 for
Ctrl-C), and stops the loop or script that the program is part of, which it does for no exit status.
"""

import signal
import sys
from typing import NoReturn


def end_at_once() -> None:
    """From now on Ctrl-C ends this process without a word, in the midst of an import too; unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_by(number: int) -> NoReturn:
    """End as this signal would have ended us."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    sys.exit(128 + number)
