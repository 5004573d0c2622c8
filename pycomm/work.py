"""Operations on their way, and what every operation takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from pycomm import _core

# As a result: the rank that sent.
SOURCE = object()


class Call(TypedDict, total=False):
    """What every operation takes.

    timeout: seconds; None is the communicator's.
    async_op: return a Work at once instead of waiting.
    """

    timeout: float | None
    async_op: bool


class Work:
    """An operation on its way; what it works on must not be touched until it is done."""

    def __init__(self, handle: _core.Handle, result: Any, finish: Callable[[], None]) -> None:
        self._handle, self._result, self._finish = handle, result, finish
        self._is_finished = False

    def is_done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self._handle.is_done()

    def wait(self, timeout: float | None = None) -> Any:
        """Waits, and returns what the blocking call returns.

        Args:
            timeout: seconds; None is the operation's own timeout.

        Raises:
            pycomm.Error: the operation failed; OperationTimeoutError also if only the wait did.
        """
        self._handle.wait(-1 if timeout is None else int(timeout * 1000))
        if not self._is_finished:
            self._is_finished = True
            self._finish()
        return self._handle.source if self._result is SOURCE else self._result
