"""The strategies, one file each, and the packages that run them.

Read first: `model` (the interface of a model), `data` and `fsdp` (two strategies), `blocks/forward` (gathers, runs and
drops blocks), `step/composition` (the order of the strategies in a step), `step/train_step` (the compiled program).

    data zero fsdp tensor context expert pipeline diloco compression     the strategies
    options collectives plan                                             shared by all packages
    model/            the definition of a model: pure functions, and the result of its loss
    sharding/         from the strategy of a config to the resolved plan of a run
    blocks/           running a stack of blocks, and attention over split positions
    schedule/         pipeline schedules as data
    executor/         runs a schedule's timetable
    step/             the compiled step, its parts and their cost
    verification/     compares a step with one device; the contract of a model
    xla/              code that exists because of compiler or backend behavior
"""

from .collectives import Collective as Collective
from .data import DataParallelConfig as DataParallelConfig
from .fsdp import FSDPConfig as FSDPConfig
from .model import BlockModel as BlockModel
from .model import Model as Model
from .model.loss_sums import LossSums as LossSums
from .options import Precision as Precision
from .plan import ShardingPlan as ShardingPlan
from .sharding.batch_rows import batch_axes as batch_axes
from .sharding.lay_out import lay_out as lay_out
from .sharding.named_outputs import name_output as name_output
from .sharding.strategies import STRATEGIES as STRATEGIES
from .step.build import build_step as build_step
from .step.state import TrainState as TrainState
from .step.train_step import Step as Step
from .verification.compare import verify as verify
from .verification.contract.breaches import check_model as check_model
from .verification.result import Verification as Verification
from .xla.census import census as census
