"""The models that come with the runtime, and the adapters for the user's own.

Input: the `model:` section of a config. Output: a `Model` or a `BlockModel` (`parallel/model/`). Read first: `mlp`, a
loss for one device without collectives, like any user's model. Then `transformer` and `moe`, built from `layers` and
`attention`: with a parallel context, they split their own work over tensor, context and expert and call the collectives
of these strategies; without one they have none. `catalog` finds a model by its name, `hugging_face/` reads and writes
other libraries' weights, `adapters/` wraps other libraries' modules, and `generation` samples text.
"""

from .catalog import MODELS as MODELS
from .catalog import load_model as load_model
from .generation import generate as generate
from .mlp import MLPConfig as MLPConfig
from .mlp import mlp as mlp
from .moe import MoEConfig as MoEConfig
from .moe import moe as moe
from .transformer import TransformerConfig as TransformerConfig
from .transformer import transformer as transformer
