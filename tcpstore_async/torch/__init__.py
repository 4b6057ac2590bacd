"""The stores inside PyTorch: as `torch.distributed.Store`s, under `init_process_group` and under `torchrun`."""

from . import require_torch as require_torch
from .install import install, rendezvous, uninstall
from .stores import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "install",
    "rendezvous",
    "uninstall",
]
