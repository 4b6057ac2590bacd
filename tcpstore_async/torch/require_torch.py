"""PyTorch, if it is one that will do. Imported before everything else here.

Knows: what is needed of PyTorch. Must not know: what for.
Invariant: a PyTorch that will not do is an ImportError of one line that says why.
"""

_NEEDED = "tcpstore_async.torch needs PyTorch 2.4 or later"

try:
    import torch
    import torch.distributed
except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        raise ImportError(f"{_NEEDED}, which is not installed: pip install torch") from None
    raise ImportError(f"{_NEEDED}, and the one that is installed cannot be imported: {error}") from None

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"{_NEEDED}, and this is {torch.__version__}: pip install --upgrade torch")
if not torch.distributed.is_available():
    raise ImportError("tcpstore_async.torch needs a PyTorch that was built with torch.distributed; this one was not")
