"""The exception tree, and helpers for messages. This module imports nothing.

Names and bases that PyTorch programs match on are PyTorch's. `PeerError` and its subclasses never reach a user: they
close one connection and become one log line.
"""


class DistError(RuntimeError):
    """Base of every error of the distributed package, as `torch.distributed.DistError`."""


class DistStoreError(DistError):
    """A store operation failed or timed out, as `torch.distributed.DistStoreError`."""


class StoreTimeoutError(DistStoreError):
    """A store operation timed out. PyTorch raises a plain DistStoreError.

    If a server of ours could say why, the text says so after PyTorch's words, and these attributes have it; otherwise
    they are empty. Keys are as the caller knows them, decoded.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.missing_keys: list[str] = []
        """Keys that were awaited and do not exist, the first 100."""
        self.nearest_keys: dict[str, list[tuple[str, float | None, str]]] = {}
        """By missing key, for the first four: the existing keys most like it, with the seconds since each was last
        written (None if that is not known) and who wrote it ("" if that is not known)."""
        self.missing_ranks: list[int] = []
        """Ranks that have not written these keys, or have not arrived, the first 256, as far as they are known."""
        self.elsewhere: list[str] = []
        """What missing ranks that are connected do: `rank 3 (node1, pid 12) is waiting for x, for 70 s`; at most 8."""


class MissingRanksError(StoreTimeoutError):
    """Not all ranks joined in time. PyTorch raises a plain RuntimeError.

    `ranks` lists those known to be missing.
    """

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = self.missing_ranks = ranks


class DistNetworkError(DistError):
    """A connection failed or was lost, as `torch.distributed.DistNetworkError`."""


class QueueEmptyError(DistStoreError):
    """The queue to pop from is empty, as `torch.distributed.QueueEmptyError`."""


class AccessDeniedError(DistStoreError):
    """The client's token does not allow the call, or the server refused the token. PyTorch has no such error."""

    def __init__(self, *args: object, final: bool = False) -> None:
        super().__init__(*args)
        self.final = final
        """Whether the server has refused what the client presents, and not just for now."""


class ConnectionDeniedError(AccessDeniedError, DistNetworkError):
    """The server has closed the connection: a call exceeded a limit of the client's token, or that is not valid now."""


class PeerError(Exception):
    """The peer did something for which its connection, and only that one, is closed."""


class ProtocolError(PeerError):
    """The peer broke the protocol, or sent ADD or BARRIER for a value that is not a number."""


class NotAllowedError(PeerError):
    """The peer did what its token does not allow, or had none that is valid."""

    def __str__(self) -> str:
        return f"not allowed: {self.args[0]}"


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


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, for messages: `1 reply`, `2,000 replies`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def reason_of(error: Exception) -> str:
    """Return why something failed, without the number of a system's error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
