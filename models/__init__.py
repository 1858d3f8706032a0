"""Reference models, and the way to the user's own.

Read in this order: `transformer` (with `attention`), `moe` (with `moe_router`), `mlp`, `catalog` (a model by the name
in a config), `sample`.
A model imports nothing of the runtime but its description (`parallel.model`) and holds no collectives.
"""

from .catalog import MODELS as MODELS
from .catalog import load_model as load_model
from .mlp import MLPConfig as MLPConfig
from .mlp import mlp as mlp
from .moe import moe as moe
from .moe_config import MoEConfig as MoEConfig
from .sample import generate as generate
from .transformer import TransformerConfig as TransformerConfig
from .transformer import transformer as transformer

__all__ = [
    "MODELS",
    "MLPConfig",
    "MoEConfig",
    "TransformerConfig",
    "generate",
    "load_model",
    "mlp",
    "moe",
    "transformer",
]
