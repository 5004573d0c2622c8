"""What can go wrong, as exceptions.

Every error names the operation, the group, this rank, and the rank at fault where one is known.
The torch backend raises `torch.distributed.DistBackendError` with the same texts instead.
"""

from __future__ import annotations


class Error(RuntimeError):
    """Anything that went wrong in a group.

    Attributes:
        rank: the rank at fault, in the numbering of the group that reports; -1 if none is known.
    """

    def __init__(self, text: str, rank: int = -1) -> None:
        super().__init__(text)
        self.rank = rank


class InvalidUsageError(Error, ValueError):
    """The caller's fault: arguments, operations that differ among ranks, unequal settings."""


class SystemFailureError(Error, OSError):
    """The operating system refused sockets, memory or descriptors."""

    def __str__(self) -> str:
        return str(self.args[0])


class OperationTimeoutError(Error, TimeoutError):
    """A deadline passed; the text names the ranks that were waited for."""

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLostError(Error):
    """A rank died or left; `rank` names it. The group is over: make a new one without it."""


class AbortedError(Error):
    """The group was closed or aborted, or failed in an earlier operation."""


class InternalError(Error):
    """A fault in pycomm, or a peer that breaks the protocol."""


# By the core's status code.
_CLASSES: tuple[type[Error], ...] = (
    Error,
    InvalidUsageError,
    SystemFailureError,
    OperationTimeoutError,
    PeerLostError,
    AbortedError,
    InternalError,
)


def make_error(code: int, name: str, text: str, rank: int) -> Error:
    """The exception for a status of the core."""
    error = _CLASSES[code](f"pycomm: {name}: {text}")
    error.rank = rank
    return error
