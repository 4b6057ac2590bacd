"""The entry point that PyTorch calls when it is imported: TCPSTORE_INSTALL=1 works without a change to a program.

So does TCPSTORE_STACKS=1. A failure here never keeps PyTorch from being imported, and no other module of the package is
imported unless needed.
"""

import os
import warnings


def autoload() -> None:
    """Do what TCPSTORE_STACKS and TCPSTORE_INSTALL ask for; on failure warn, or write to stderr if warnings raise."""
    if os.environ.get("TCPSTORE_STACKS") == "1":
        try:
            from .stacks.switch import start

            start()
        except Exception as error:
            _warn(f"ignoring TCPSTORE_STACKS: {error}")
    if not os.environ.get("TCPSTORE_INSTALL"):
        return
    try:
        from .torch.install import from_environment

        from_environment()
    except Exception as error:
        _warn(f"ignoring TCPSTORE_INSTALL, so PyTorch will use its own stores: {error}")


def _warn(text: str) -> None:
    """Warn or, where a program has made warnings raise, write to stderr if there is one."""
    try:
        warnings.warn(text, stacklevel=3)
    except Exception:
        try:
            os.write(2, f"{text}\n".encode(errors="replace"))
        except Exception:
            pass  # there is nowhere left to report it
