"""Arrays of any library, as the core takes them: flat memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def new_like(array: Any, shape: tuple[int, ...], what: str) -> Any:
    """An array of the kind of `array`, for an operation's result.

    Raises:
        TypeError: `array` is of a library that this does not know; the caller must give `out`.
    """
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    if hasattr(array, "__cuda_array_interface__") and hasattr(array, "__array_function__"):
        return np.empty_like(array, shape=shape)  # CuPy makes its own
    raise TypeError(f"pycomm: {what} of a {type(array).__name__} needs out=")


def check_divides(array: Any, num_ranks: int, what: str) -> int:
    """The rows of an array that is cut into one part a rank along its first axis.

    Raises:
        ValueError: they do not divide.
    """
    shape = np.shape(array)
    if not shape or shape[0] % num_ranks != 0:
        raise ValueError(
            f"pycomm: {what} needs a first axis that divides among {num_ranks} ranks, "
            f"not shape {shape}"
        )
    return int(shape[0])


class Flat:
    """An array as the core takes it; what has to be copied for that is copied back by finish()."""

    def __init__(self, array: Any, *, is_output: bool) -> None:
        self._copy_back: Callable[[], None] | None = None
        self.memory = array
        if array is None:
            return
        if hasattr(array, "__cuda_array_interface__"):
            self._stage(array, is_output)
            return
        if isinstance(array, np.ndarray):
            view = array
        elif hasattr(array, "__dlpack__") or not hasattr(array, "__array_interface__"):
            return  # the core reads it
        else:
            self.memory = view = np.asarray(array)
        if view.flags.c_contiguous:
            return
        self.memory = packed = np.ascontiguousarray(view)
        if is_output:
            self._copy_back = lambda: np.copyto(view, packed)

    def _stage(self, array: Any, is_output: bool) -> None:
        if not (hasattr(array, "get") and hasattr(array, "set")):
            raise TypeError(
                f"pycomm: a {type(array).__name__} on a device cannot be moved by a group of host "
                "memory; pass a copy on the host (for torch: tensor.cpu())"
            )
        self.memory = host = np.ascontiguousarray(array.get())
        if is_output:
            self._copy_back = lambda: array.set(host)

    def finish(self) -> None:
        """Copies the result to where it belongs."""
        if self._copy_back is not None:
            self._copy_back()
