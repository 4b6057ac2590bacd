"""Entry points that PyTorch calls: the autoload hook, for TCPSTORE_INSTALL, and torchrun's rendezvous handler.

Invariants: no failure here can prevent the import of PyTorch, and neither package requires the other to be imported
first. Everything else is imported only when it is needed.
"""

import os
import warnings
from typing import Any


def autoload() -> None:
    """Install as TCPSTORE_INSTALL requests, at the import of PyTorch. A failure is only a warning."""
    if not os.environ.get("TCPSTORE_INSTALL"):
        return
    try:
        from .torch.install import from_environment

        from_environment()
    except Exception as error:
        _warn(f"TCPSTORE_INSTALL is set, but tcpstore_async was not installed: {error}")


def _warn(text: str) -> None:
    """Warn; if warnings are errors, write to standard error, if there is one."""
    try:
        warnings.warn(text, stacklevel=3)
    except Exception:
        try:
            os.write(2, f"{text}\n".encode(errors="replace"))
        except Exception:
            pass


def torchrun_handler() -> Any:
    """Return the factory of our rendezvous handler, for the entry point `torchrun.handlers`.

    PyTorch calls this while it imports its own rendezvous package, so ours is imported only by the factory.
    """

    def create_handler(params: Any) -> Any:
        from .torch import torchrun

        return torchrun.create_handler(params)

    return create_handler
