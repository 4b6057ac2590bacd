"""What PyTorch calls at its import, if this package is installed: TCPSTORE_INSTALL=1 needs no change to a program.
And what its torchrun calls for the name of our rendezvous.

Knows: one environment variable, who makes torchrun's handlers. Must not know: anything else until that is asked for.
Invariant: nothing that happens here can keep PyTorch from being imported; neither needs the other to be imported first.
"""

import os
import warnings
from typing import Any


def autoload() -> None:
    """Install what TCPSTORE_INSTALL asks for; a failure is a warning, or a line on stderr where warnings are errors."""
    if not os.environ.get("TCPSTORE_INSTALL"):
        return
    try:
        from .torch.install import from_environment

        from_environment()
    except Exception as error:
        _warn(f"TCPSTORE_INSTALL is set, but tcpstore_async was not installed: {error}")


def _warn(text: str) -> None:
    """Warn or, where a program has made that raise, say it on stderr; where there is none, say nothing."""
    try:
        warnings.warn(text, stacklevel=3)
    except Exception:
        try:
            os.write(2, f"{text}\n".encode(errors="replace"))
        except Exception:
            pass  # nobody can be told


def torchrun_handler() -> Any:
    """What the entry point `torchrun.handlers` names: the function that makes a handler of parameters.

    PyTorch loads it while it imports its own rendezvous, which may be why ours is being imported: not from here.
    """

    def create_handler(params: Any) -> Any:
        from .torch import torchrun

        return torchrun.create_handler(params)

    return create_handler
