"""Communication for training across uneven machines.

`torch.distributed.init_process_group("pycomm")` is all that most programs need; importing this
package is not required. See README.md.
"""

from pycomm._register import register

__version__ = "0.1.0"
__all__ = ["__version__", "register"]

register()
