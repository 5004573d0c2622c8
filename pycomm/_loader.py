"""Loads the compiled torch module and explains why it does not load."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from typing import Any


@functools.cache
def torch_module() -> Any:
    """The compiled module.

    Raises:
        ImportError: it was built for another torch, or not built; the text says what to do.
    """
    import torch

    try:
        from pycomm import _torch
    except ImportError as error:
        here = Path(__file__).parent
        if (here.parent / "CMakeLists.txt").exists() and not list(here.glob("_torch*.so")):
            raise ImportError(
                f"Python found pycomm's source folder ({here}) before the installed package, and "
                "the source has no compiled modules. Run from another folder, or install with "
                "`pip install -e .`."
            ) from error
        raise ImportError(
            f"pycomm's torch backend does not load with torch {torch.__version__}: {error}. "
            "It is built for one torch version; build it again with "
            "`pip install --force-reinstall --no-deps .` in pycomm's source folder."
        ) from error
    if _torch.torch_version != torch.__version__:
        raise ImportError(
            f"pycomm was built for torch {_torch.torch_version}, this is {torch.__version__}; "
            "build it again with `pip install --force-reinstall --no-deps .` "
            "in pycomm's source folder."
        )
    # A script that ends without destroying its groups leaves with a goodbye all the same.
    atexit.register(_torch.shutdown_process)
    return _torch
