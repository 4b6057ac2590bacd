"""The entry point of torchrun: `--rdzv-backend=tcpstore`.

torchrun finds `handler` by the entry point group `torchrun.handlers`, and calls it while it imports PyTorch's
rendezvous, possibly on behalf of `torch/rendezvous_handler.py`: so that is imported later.
"""

from typing import Any


def handler() -> Any:
    """Return the function that creates a rendezvous handler."""

    def create_handler(params: Any) -> Any:
        from .torch import rendezvous_handler

        return rendezvous_handler.create_handler(params)

    return create_handler
