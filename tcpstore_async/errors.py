"""The exception tree. This module imports nothing.

Names and bases that PyTorch programs match on are PyTorch's. `PeerError` and its subclasses never reach a user: they
close one connection and become one log line.
"""


class DistError(RuntimeError):
    """Base of every error of the distributed package, as `torch.distributed.DistError`."""


class DistStoreError(DistError):
    """A store operation failed or timed out, as `torch.distributed.DistStoreError`."""


class StoreTimeoutError(DistStoreError):
    """A store operation timed out. PyTorch raises a plain DistStoreError."""


class MissingRanksError(StoreTimeoutError):
    """Not all ranks joined in time. PyTorch raises a plain RuntimeError.

    `ranks` lists those known to be missing.
    """

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks


class DistNetworkError(DistError):
    """A connection failed or was lost, as `torch.distributed.DistNetworkError`."""


class QueueEmptyError(DistStoreError):
    """The queue to pop from is empty, as `torch.distributed.QueueEmptyError`."""


class PeerError(Exception):
    """The peer did something for which its connection, and only that one, is closed."""


class ProtocolError(PeerError):
    """The peer broke the protocol, or sent ADD or BARRIER for a value that is not a number."""


class LimitError(PeerError):
    """The peer exceeded a limit.

    `limit` is the name of a field of `Limits`; `size` and `allowed` are in that field's unit.
    """

    def __init__(self, limit: str, size: int, allowed: int) -> None:
        super().__init__(limit, size, allowed)
        self.limit = limit
        self.size = size
        self.allowed = allowed

    def __str__(self) -> str:
        return f"limit exceeded: {self.limit}={self.size} (max {self.allowed})"


class BudgetError(LimitError):
    """All peers together make the server hold too much of `Limits.budget_bytes`, and this one is evicted."""

    def __init__(self, size: int, allowed: int, budget: int, held: int) -> None:
        super().__init__("budget_bytes", size, allowed)
        self.budget = budget
        self.held = held
        """Bytes of it that are this peer's, its share of the store included."""

    def __str__(self) -> str:
        return (
            f"memory budget exceeded: {self.size} bytes are in use, the limit is {self.allowed} "
            f"(budget_bytes={self.budget}); this peer accounts for {self.held}"
        )


def reason_of(error: Exception) -> str:
    """Return why something failed, without the number of a system's error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
