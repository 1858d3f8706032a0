"""Layout rules that were written for other libraries, as a `LayoutMap`.

In: the rules of another library, in its own words, and a tree that says which parameters there are. Out: a `LayoutMap`
with one rule for each parameter, named by its path: what that library would have decided for it. What a layout cannot
express is refused with the reason. Read first: `exact`, the map that all of them end in. No library has to be
installed: its objects are read by their attributes.

`exact` shares the tests of `keras_map`.
"""

from .flax_rules import from_flax_rules as from_flax_rules
from .keras_map import from_keras as from_keras
from .partition_rules import from_partition_rules as from_partition_rules
from .t5x_rules import from_t5x_rules as from_t5x_rules
from .tp_plan import from_tp_plan as from_tp_plan

__all__ = ["from_flax_rules", "from_keras", "from_partition_rules", "from_t5x_rules", "from_tp_plan"]
