"""The parallel trainer: a transformer, or a module of one's own, over any layout of ranks.

from pycomm.train import Config, Trainer, load_config
"""

from pycomm.train.config import Config, make_config
from pycomm.train.files import load_config
from pycomm.train.trainer import Summary, Trainer

__all__ = ["Config", "Summary", "Trainer", "load_config", "make_config"]
