"""The entry point of torchrun: `--rdzv-backend=tcpstore`.

torchrun finds `handler` through the entry point group `torchrun.handlers`, and calls it while PyTorch's rendezvous is
being imported, perhaps by `torch/rendezvous_handler.py`, which is therefore imported later.
"""

from typing import Any


def handler() -> Any:
    """Return the function that creates a rendezvous handler."""

    def create_handler(params: Any) -> Any:
        from .torch import rendezvous_handler

        return rendezvous_handler.create_handler(params)

    return create_handler
