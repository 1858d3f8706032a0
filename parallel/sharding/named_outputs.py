"""Named activations: layout rules for values inside a model, like those for the outputs of Keras layers.

    in the model     y = name_output(y, "blocks/mlp/output")                       y itself
    in layouts.rules blocks/mlp/output: [data, null, tensor]                       a key that ends in /output
    in the step      y[B_data, L, F] = with_sharding_constraint(y, [·, null, tensor])   forward, and its gradient

1. A device processes only its own rows, so the axes that split rows are removed from dim 0. The other manual axes
   already split the work, and a rule with such an axis is rejected. The constraint applies to the remaining axes, which
   XLA handles; null means not split.
2. Rules are matched while the model is traced. A rule that does not match any name is an error.
3. Outside a step (on one device, in the reference of `verify`, in `predict`), a name has no effect.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from ...layouts import problems
from ...layouts.output_rules import OUTPUT, unused_output_rules
from ...layouts.problems import LayoutError
from ...layouts.tensor_layout import TensorLayout, without_axes
from ...mesh.errors import UserError
from ..model import BlockModel, Model
from ..plan import ShardingPlan

_current: Any = jax.make_user_context(None)
"""The `NamedOutputs` of the current trace. It is part of JAX's trace key, so a jitted layer is traced for each step."""


def name_output(x: Any, path: str) -> Any:
    """Names an activation, so that a rule of the run can lay it out; without a rule it is returned unchanged.

    Args:
        x: An array with rows on dim 0.
        path: The name: parts joined by "/", ending in "output", for example "blocks/mlp/output". Calls in a loop over
            layers may share a name.

    Returns:
        `x`, in the layout of the rule for `path` if a step with such a rule is being traced.

    Raises:
        UserError: The name does not end in "/output".
    """
    if not isinstance(path, str) or not path.endswith(OUTPUT) or path == OUTPUT:
        raise UserError(
            f"name_output(x, {path!r}): the name of an activation ends in {OUTPUT}, as the rules for activations do. "
            f'Write name_output(x, "{str(path).strip("/")}{OUTPUT}").'
        )
    outputs: NamedOutputs | None = _current.value
    return x if outputs is None else outputs.constrain(x, path)


class NamedOutputs:
    """The activations named by one step's model, and the rules for them."""

    def __init__(self, layouts: ShardingPlan) -> None:
        """Starts without names. The rules are `layouts.output_rules`; they cannot use `layouts.manual_axes`."""
        self._layouts = layouts
        self._named: dict[str, None] = {}
        self._problems: dict[str, None] = {}

    def within(self, model: Model | BlockModel) -> Model | BlockModel:
        """Returns the model with its named activations constrained when it is traced; the model itself without
        rules."""
        if self._layouts.output_rules is None:
            return model
        if isinstance(model, Model):
            return replace(model, loss=self._bound(model.loss))
        parts = {name: self._bound(getattr(model, name)) for name in ("embed", "block", "head")}
        return replace(model, **parts)

    def constrain(self, x: Any, path: str) -> Any:
        """Constrains an activation by the rule for its name; records problems for `around`."""
        rules = self._layouts.output_rules
        assert rules is not None
        self._named[path] = None
        keys = rules.deciding_keys(path)
        problem = problems.ambiguous(keys) if len(keys) > 1 else None
        layout = None if problem else rules[path]
        if layout is not None:
            problem = self._problem(x, layout, *keys)
        if problem is not None:
            self._problems[f"Activation {path!r} of shape {x.shape} (on each device) {problem}"] = None
        return x if problem or layout is None else self._constrained(x, layout)

    def around(self, program: Callable[..., Any], *, unused: bool = True) -> Callable[..., Any]:
        """Wraps a function to raise a LayoutError with all problems after the model has been traced.

        Args:
            program: Any function that calls the result of `within`.
            unused: Whether to report rules that do not match any name.
        """

        rules, parameters = self._layouts.output_rules, [row.path for row in self._layouts.table.rows]

        def call(*arguments: Any) -> Any:
            result = program(*arguments)
            found = list(self._problems)
            if unused and rules is not None:
                found += unused_output_rules(rules, list(self._named), parameters)
            if found:
                raise LayoutError(found)
            return result

        return call

    def _bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            with _current(self):
                return function(*arguments)

        return call

    def _problem(self, x: Any, layout: TensorLayout, key: str) -> str | None:
        if layout.axes and len(layout.axes) != jnp.ndim(x):
            return problems.rank_mismatch(jnp.ndim(x), layout, key)
        left = without_axes(layout, self._layouts.manual_axes)
        reasons = (left.indivisible(dim, size) for dim, size in enumerate(x.shape))
        reason = next((reason for reason in reasons if reason is not None), None)
        axes = " or ".join(f"strategy.{name}" for name in layout.used_axes)
        return reason and (
            f"gets the layout {layout} from rule {key!r}, but {reason}. Change the dim or {axes}, or write null for "
            "this dim in the rule."
        )

    def _constrained(self, x: Any, layout: TensorLayout) -> Any:
        mesh, manual = self._layouts.mesh, self._layouts.manual_axes
        if all(mesh.axis_size(axis) == 1 or axis in manual for axis in mesh.axis_names):
            return x  # XLA handles no axis
        left, context = without_axes(layout, manual), jax.sharding.get_abstract_mesh()
        mesh = mesh.abstract_mesh if context.empty else context
        return lax.with_sharding_constraint(x, NamedSharding(mesh, left.spec))
