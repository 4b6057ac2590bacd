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

    If one of our servers could say why, the text does after PyTorch's words, and so do these attributes, which are
    otherwise empty. Keys are the caller's, decoded.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.missing_keys: list[str] = []
        """The first 100 awaited keys that do not exist."""
        self.nearest_keys: dict[str, list[tuple[str, float | None, str]]] = {}
        """Keyed by missing key, for the first four: the most similar existing keys, with the seconds since each was
        last written (None if unknown) and its writer ("" if unknown)."""
        self.missing_ranks: list[int] = []
        """The first 256 ranks known not to have written these keys, or not to have arrived."""
        self.elsewhere: list[str] = []
        """What missing but connected ranks do, at most 8: `rank 3 (node1, pid 12) is waiting for x, for 70 s`. If their
        ranks are not known, the connections that have not arrived, unless there are more of them than missing ranks."""


class MissingRanksError(StoreTimeoutError):
    """Not all ranks joined in time. PyTorch raises a plain RuntimeError.

    `ranks` lists the ranks known to be missing.
    """

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = self.missing_ranks = ranks


class DistNetworkError(DistError):
    """A connection failed or was lost, as `torch.distributed.DistNetworkError`."""


class QueueEmptyError(DistStoreError):
    """The queue to pop from is empty, as `torch.distributed.QueueEmptyError`."""


class AccessDeniedError(DistStoreError):
    """The token does not allow the call or was refused, or the server requires TLS. PyTorch has no such error."""

    def __init__(self, *args: object, final: bool = False) -> None:
        super().__init__(*args)
        self.final = final
        """Whether the refusal is permanent: the server would refuse the same token again."""


class ConnectionDeniedError(AccessDeniedError, DistNetworkError):
    """The server closed the connection: a call exceeded a limit of the client's token, or that is no longer valid."""


class PeerError(Exception):
    """The peer did something that closes its connection, and no other."""


class ProtocolError(PeerError):
    """The peer broke the protocol, or sent ADD or BARRIER for a value that is not a number."""


class NotAllowedError(PeerError):
    """The peer did something that its token does not allow, or had no valid token."""

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
    """The server holds too much of `Limits.budget_bytes` for its peers, and evicts this one."""

    def __init__(self, size: int, allowed: int, budget: int, held: int) -> None:
        super().__init__("budget_bytes", size, allowed)
        self.budget = budget
        self.held = held
        """Bytes held for this peer, its share of the store included."""

    def __str__(self) -> str:
        return (
            f"memory budget exceeded: {self.size} bytes are in use, the limit is {self.allowed} "
            f"(budget_bytes={self.budget}); this peer accounts for {self.held}"
        )


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun, for messages: `1 reply`, `2,000 replies`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def reason_of(error: Exception) -> str:
    """Return why something failed; for an error of the system, without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
