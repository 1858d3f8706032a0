"""The models that come with the runtime, and the way to the user's own.

In: the `model:` section of a config. Out: a `Model` or a `BlockModel` (`parallel/model/`). Read first: `mlp`, a loss
for one device with no collective in it, as any model may be. Then `transformer` and `moe` (with `moe_router`), put
together from `layers/`: given a parallel context, they split their own work over tensor, context and expert and call
the collectives of these strategies; without one they hold none. `catalog` finds a model by its name, `hugging_face/`
reads weights of other libraries and writes them, `sample` writes text.

`moe_config` shares the tests of `moe`; `moe_router` shares the tests of `moe`; `transformer_split` shares the tests of
`transformer`.
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
