"""Import PyTorch, or raise an ImportError of one line that explains why it is unsuitable.

Imported before everything else in this package.
"""

_NEEDED = "tcpstore_async.torch needs PyTorch 2.4 or later"

try:
    import torch
    import torch.distributed
except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        raise ImportError(f"{_NEEDED}, which is not installed: pip install torch") from None
    raise ImportError(f"{_NEEDED}; the installed one cannot be imported: {error}") from None

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"{_NEEDED}, found {torch.__version__}: pip install --upgrade torch")
if not torch.distributed.is_available():
    raise ImportError(
        "tcpstore_async.torch needs a PyTorch built with torch.distributed, which the installed one lacks"
    )
