"""The exception tree.

Knows: which errors exist and what they carry. Must not know: anything else; this module imports nothing.
Invariant: names and bases that PyTorch programs match on are PyTorch's. `PeerError` and below never reach a user:
they end one connection and become one log line.
"""


class DistError(RuntimeError):
    """Base of every error of the distributed package, as `torch.distributed.DistError`."""


class DistStoreError(DistError):
    """A store operation failed, a timeout among them, as `torch.distributed.DistStoreError`."""


class StoreTimeoutError(DistStoreError):
    """A store operation was not done within its timeout. PyTorch raises a plain DistStoreError for it."""


class MissingRanksError(StoreTimeoutError):
    """Not all ranks came in time. PyTorch raises a plain RuntimeError for it.

    `ranks` are those that are known to be missing.
    """

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks


class DistNetworkError(DistError):
    """A connection could not be made or was lost, as `torch.distributed.DistNetworkError`."""


class QueueEmptyError(DistStoreError):
    """A pop found its queue empty, as `torch.distributed.QueueEmptyError`."""


class PeerError(Exception):
    """The peer of one connection did what closes that connection, and only that one."""


class ProtocolError(PeerError):
    """The peer sent bytes that mean nothing here, or an ADD or BARRIER on a value that is no number."""


class LimitError(PeerError):
    """The peer went over a limit.

    `limit` is the name of a field of `Limits`; `size` and `allowed` are in that field's unit.
    """

    def __init__(self, limit: str, size: int, allowed: int) -> None:
        super().__init__(limit, size, allowed)
        self.limit = limit
        self.size = size
        self.allowed = allowed

    def __str__(self) -> str:
        return f"over the limit {self.limit}: {self.size}, allowed {self.allowed}"


class BudgetError(LimitError):
    """All peers together make the server hold more than a mark below `Limits.budget_bytes`, and this one has to go."""

    def __init__(self, size: int, allowed: int, budget: int, held: int) -> None:
        super().__init__("budget_bytes", size, allowed)
        self.budget = budget
        self.held = held
        """How much of it is this peer's, what it has stored included."""

    def __str__(self) -> str:
        return f"{super().__str__()} of {self.budget}; this peer holds, or has stored, {self.held}"
