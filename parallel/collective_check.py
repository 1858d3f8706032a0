"""The collectives of a compiled step against those that its strategies predict."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .census import census
from .collectives import Collective
from .oracle import HostBatch
from .step import Step
from .update import apply_optimizer


class CollectiveCheck(NamedTuple):
    """The collectives of a step, predicted and found.

    Attributes:
        predicted: by the strategies' formulas.
        found: in the compiled step.
        left_to_xla: of those found, the ones that no strategy predicts: over axes left to XLA, and those of an
            optimizer that looks across elements of a parameter.
        unexpected: one line for each kind and set of axes that is not as predicted.
    """

    predicted: tuple[Collective, ...] = ()
    found: tuple[Collective, ...] = ()
    left_to_xla: tuple[Collective, ...] = ()
    unexpected: tuple[str, ...] = ()


_Key: TypeAlias = tuple[str, tuple[str, ...]]


def check_collectives(step: Step, batch: HostBatch) -> CollectiveCheck:
    """Compares what the strategies predict with what the compiler made.

    Where rules leave an axis to XLA, it decides how the parts of such a parameter are moved: then counts are compared
    and bytes are not; nor are counts where rules lay out activations, since XLA may cut gradients then. Where an
    optimizer looks across elements, XLA adds collectives of its own and merges them with others: then a prediction has
    to be met by the whole step or by the part of it that computes gradients.

    Args:
        step: The step; it is compiled for batches of this shape.
        batch: A global batch.
    """
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in batch.items()
    }
    mesh, owned = step.layouts.mesh, set(step.layouts.manual_axes)
    exact = owned >= {axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1}
    compared = ("count", "bytes") if exact else () if step.layouts.output_rules else ("count",)
    predicted, found = step.cost(abstract), census(step.compile(abstract).as_text() or "", mesh)
    foreign = {_key(line) for line in found if not set(line.axes) <= owned}
    differing = {key: text for key, text in _differing(predicted, found, compared).items() if key not in foreign}
    if differing and _moved_by_optimizer(step):
        program = jax.jit(step.gradients).lower(step.abstract_state(), abstract).compile()
        in_gradients = _differing(predicted, census(program.as_text() or "", mesh), compared)
        foreign |= differing.keys() - in_gradients.keys()
        differing = {key: text for key, text in differing.items() if key in in_gradients}
    left = tuple(line for line in found if _key(line) in foreign)
    return CollectiveCheck(predicted, found, left, tuple(differing.values()))


def _key(line: Collective) -> _Key:
    return line.kind, line.axes


def _differing(
    predicted: Iterable[Collective], found: Iterable[Collective], compared: tuple[str, ...]
) -> dict[_Key, str]:
    """What differs, in words, by kind and axes."""
    wanted, got = ({_key(line): line for line in lines} for lines in (predicted, found))
    differing = {}
    for key in sorted({*wanted, *got}):
        one, other = wanted.get(key), got.get(key)
        if one and other and all(getattr(one, name) == getattr(other, name) for name in compared):
            continue
        texts = [f"{line.count} moving {line.bytes:,} bytes" if line else "none" for line in (one, other)]
        differing[key] = f"{key[0]} over {' x '.join(key[1])}: {texts[0]} predicted, {texts[1]} found"
    return differing


def _moved_by_optimizer(step: Step) -> bool:
    """Whether XLA moves anything for the optimizer alone: nothing where it treats every element by itself."""
    state = step.abstract_state()
    gradients = step.layouts.update_table.shardings()
    updated = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state.params, gradients
    )

    def update(params: Any, opt_state: Any, gradients: Any) -> Any:
        return apply_optimizer(step.optimizer, gradients, opt_state, params, jnp.zeros(()))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (updated, state.opt_state))
    lowered = jax.jit(update, out_shardings=shardings).lower(updated, state.opt_state, updated)
    return bool(census(lowered.compile().as_text() or "", step.layouts.mesh))
