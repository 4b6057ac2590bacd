"""The same stores inside PyTorch: as `torch.distributed.Store`s, and under `init_process_group` and `torchrun`."""

try:
    import torch.distributed
except ImportError:
    raise ImportError(
        "tcpstore_async.torch needs PyTorch 2.4 or later, which is not installed: pip install torch"
    ) from None

if not torch.distributed.is_available():
    raise ImportError("tcpstore_async.torch needs a PyTorch that was built with torch.distributed; this one was not")

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
