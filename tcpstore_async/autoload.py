"""What PyTorch calls at its import, if this package is installed: TCPSTORE_INSTALL=1 needs no change to a program.

Knows: one environment variable. Must not know: anything else unless that is set.
Invariant: nothing that happens here can keep PyTorch from being imported.
"""

import os
import warnings


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
