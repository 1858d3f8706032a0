"""Strategies, one file each, and the step they compose into.

Read in this order: `model` (what a model is), `data` and `fsdp` (the strategies), `forward` (gather, run, drop),
`gradients`, `step` (the one compiled program), `census` (what the compiler made of it).
"""

from .census import census as census
from .collectives import Collective as Collective
from .data import DataParallelConfig as DataParallelConfig
from .fsdp import FSDPConfig as FSDPConfig
from .lay_out import lay_out as lay_out
from .layouts import Layouts as Layouts
from .model import BlockModel as BlockModel
from .model import Model as Model
from .precision import Precision as Precision
from .state import TrainState as TrainState
from .step import Step as Step
from .step import build_step as build_step
from .strategy import STRATEGIES as STRATEGIES
from .verification import Verification as Verification
from .verify import verify as verify
