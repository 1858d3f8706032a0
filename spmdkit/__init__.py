"""spmdkit: a distributed SPMD training runtime for JAX.

    mesh = spmdkit.DeviceMesh.simulated(8, data=2, fsdp=4)
    layouts = spmdkit.lay_out(model, mesh)
    step = spmdkit.build_step(model, optax.adamw(3e-4), layouts)
    state = spmdkit.run_steps(step, step.init(seed=0), batches)

Names are imported on first use, so that `import spmdkit` costs nothing and starts no backend.
"""

# The folders beside this one are mapped under it at installation, which pyright cannot see in a checkout.
# pyright: reportMissingImports=false

import ast
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not (_here := Path(__file__).parent).joinpath("mesh").is_dir():
    __path__.append(str(_here.parent))  # in a clone, Python finds this folder first, and the packages are beside it

if TYPE_CHECKING:
    from .checkpoints.manager import Checkpoints as Checkpoints
    from .configs import Config as Config
    from .configs import ConfigError as ConfigError
    from .configs import load_config as load_config
    from .data.batches import eval_batches as eval_batches
    from .data.batches import train_batches as train_batches
    from .data.sources.arrays import from_arrays as from_arrays
    from .launch.startup.initialize import initialize as initialize
    from .layouts import DataParallel as DataParallel
    from .layouts import Distribution as Distribution
    from .layouts import LayoutError as LayoutError
    from .layouts import LayoutMap as LayoutMap
    from .layouts import LayoutTable as LayoutTable
    from .layouts import ModelParallel as ModelParallel
    from .layouts import TensorLayout as TensorLayout
    from .layouts import distribute_tensor as distribute_tensor
    from .layouts import distribution as distribution
    from .layouts import set_distribution as set_distribution
    from .mesh import DeviceMesh as DeviceMesh
    from .mesh import UserError as UserError
    from .mesh import get_device_count as get_device_count
    from .mesh import list_devices as list_devices
    from .models.adapters import adapt as adapt
    from .parallel import BlockModel as BlockModel
    from .parallel import FSDPConfig as FSDPConfig
    from .parallel import LossSums as LossSums
    from .parallel import Model as Model
    from .parallel import Precision as Precision
    from .parallel import ShardingPlan as ShardingPlan
    from .parallel import Step as Step
    from .parallel import TrainState as TrainState
    from .parallel import batch_axes as batch_axes
    from .parallel import build_step as build_step
    from .parallel import census as census
    from .parallel import check_model as check_model
    from .parallel import lay_out as lay_out
    from .parallel import name_output as name_output
    from .parallel import verify as verify
    from .runtime.loading.load_run import LoadedRun as LoadedRun
    from .runtime.loading.load_run import load_run as load_run
    from .training.callbacks.callback import Callback as Callback
    from .training.callbacks.fit import fit as fit
    from .training.loop import evaluate as evaluate
    from .training.loop import run_steps as run_steps
    from .training.trainer import Trainer as Trainer

if "keras" not in sys.modules:  # which reads this once, and whose default, TensorFlow, cannot be trained here
    os.environ.setdefault("KERAS_BACKEND", "jax")


def _read_homes() -> dict[str, str]:
    """Returns public name -> its module, from the imports for type checkers above."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.name: f".{node.module}" for node in imports for alias in node.names}


_HOMES = _read_homes()
__version__ = "0.1.0"
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'spmdkit' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
