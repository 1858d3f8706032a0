"""Compares the collectives of a compiled step with those that its strategies predict.

    in general                                   the collectives must equal the prediction
    the optimizer combines elements of arrays    further ones are allowed: XLA adds collectives to the update
    a gradient is zero on one device             those of its parameter may be absent: XLA removes unused results

If rows depend on each other, a model sums over `batch_axes()`. No strategy predicts these sums; they are read from the
model's own program (`sums_over_rows`). If XLA splits them differently, at least the collectives of the strategies must
be present.
"""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ...mesh.keys import make_key
from ..collectives import Collective
from ..collectives import differing as differing_lines
from ..model import has_state
from ..options import cast_inputs
from ..sharding.batch_rows import uses_batch_axes
from ..sharding.lay_out import abstract_parameters
from ..step.cost import step_cost, sums_over_rows
from ..step.state import abstract_model_state
from ..step.train_step import Step
from ..step.update import apply_optimizer
from ..xla.census import census
from ..xla.graph import equations, inner_programs
from .reference import HostBatch

ACROSS = ("sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "triangular_solve", "lu")
"""Operations that combine elements without changing the shape."""


def combines_elements(step: Step) -> bool:
    """Returns whether the update of an element depends on other elements: an optimizer operation changes shapes."""
    state = step.abstract_state()
    program = jax.make_jaxpr(partial(apply_optimizer, step.optimizer))(
        state.params, state.opt_state, state.params, jnp.zeros(())
    )
    return any(_mixes(each) for each in equations(program.jaxpr) if not inner_programs(each))


def _mixes(equation: Any) -> bool:
    given, made = ({each.aval.shape for each in some} - {()} for some in (equation.invars, equation.outvars))
    return bool(given) and (not made or len(given | made) > 1 or equation.primitive.name in ACROSS)


class CollectiveCheck(NamedTuple):
    """The collectives of a step, predicted and found.

    Attributes:
        predicted: The collectives by the strategies' formulas.
        found: The collectives in the compiled step.
        left_to_xla: Found collectives that no strategy predicts: over axes left to XLA, or of an optimizer that
            combines elements of a parameter.
        unexpected: One line for each kind and set of axes that differs from the prediction.
        of_the_model: Found collectives that contain a different number of the model's own sums over rows than its
            program has.
    """

    predicted: tuple[Collective, ...] = ()
    found: tuple[Collective, ...] = ()
    left_to_xla: tuple[Collective, ...] = ()
    unexpected: tuple[str, ...] = ()
    of_the_model: tuple[Collective, ...] = ()


_Key: TypeAlias = tuple[str, tuple[str, ...]]
"""The kind and the axes of collectives."""


def check_collectives(step: Step, batch: HostBatch, frozen: Collection[str] = ()) -> CollectiveCheck:
    """Compares the predicted collectives with those of the compiled step.

    If rules leave an axis to XLA, it decides how the shards of such a parameter are moved: then only counts are
    compared, or the bytes of sums that are split differently. If rules lay out activations, counts are not compared
    either, since XLA may split gradients.

    Args:
        step: The step; it is compiled for batches of this shape.
        batch: A global batch.
        frozen: Paths of parameters with a gradient of zero on one device.
    """
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in batch.items()
    }
    mesh, owned = step.plan.mesh, set(step.plan.manual_axes)
    exact = owned >= set(mesh.split_axes)
    compared = ("count", "bytes") if exact else () if step.plan.output_rules else ("count",)
    predicted, found = step.cost(abstract), census(step.compile(abstract).as_text() or "", mesh)
    foreign = {line.key for line in found if not set(line.axes) <= owned}
    if step.plan.platform == "gpu":
        compared = tuple(figure for figure in compared if figure == "bytes")  # XLA combines small collectives there
    differing: dict[_Key, str] = differing_lines(predicted, found, compared)
    if not exact:
        differing = {key: text for key, text in differing.items() if not _same_sums(predicted, found, key)}
    if differing.keys() - foreign:
        least = step_cost(step.given_model, step.plan, abstract, step.plan.platform, without=frozen)
        enough = {key for key in differing if _includes(found, least, key)}
        unread = {key for key in enough if _includes(predicted, found, key)}
        differing = {key: text for key, text in differing.items() if key not in unread}
        foreign |= enough & differing.keys() if combines_elements(step) else set()
    own = _models_own(step, abstract, predicted, found) & differing.keys() - foreign if differing else set[_Key]()
    differing = {key: text for key, text in differing.items() if key not in own}
    left = tuple(line for line in found if line.key in foreign)
    unexpected = tuple(text for key, text in sorted(differing.items()) if key not in foreign)
    return CollectiveCheck(predicted, found, left, unexpected, tuple(line for line in found if line.key in own))


def _models_own(
    step: Step, abstract: dict[str, jax.ShapeDtypeStruct], predicted: Iterable[Collective], found: Iterable[Collective]
) -> set[_Key]:
    """Returns the kind of all-reduce that a model adds by summing over the rows of all devices."""
    model, key = step.given_model, ("all-reduce", step.plan.batch_axes)
    more = (abstract_model_state(model, step.precision.params),) if has_state(model) else ()
    rows = jax.eval_shape(lambda batch: cast_inputs(batch, step.precision.compute), abstract)
    params = abstract_parameters(model, step.precision)
    try:
        asks = uses_batch_axes(model.loss, params, rows, jax.eval_shape(lambda: make_key(0)), *more)
    except Exception:  # a model that runs on its mesh alone
        return set()
    strategies = _subtract(predicted, sums_over_rows(model, step.plan, abstract, step.plan.platform))
    return {key} if asks and _includes(found, strategies, key) else set()


def _same_sums(some: Iterable[Collective], others: Iterable[Collective], key: _Key) -> bool:
    """Returns whether the same bytes are summed in a different number of all-reduces, since XLA may combine them."""
    (count, size), (other, moved) = _amount(some, key), _amount(others, key)
    return key[0] == "all-reduce" and size == moved and min(count, other) > 0


def _includes(found: Iterable[Collective], others: Iterable[Collective], key: _Key) -> bool:
    """Returns whether the found collectives of a kind have at least the count and the bytes of the others."""
    return all(got >= wanted for got, wanted in zip(_amount(found, key), _amount(others, key), strict=True))


def _amount(lines: Iterable[Collective], key: _Key) -> tuple[int, int]:
    """Returns the count and the bytes of the collectives of a kind."""
    own = [line for line in lines if line.key == key]
    return sum(line.count for line in own), sum(line.bytes for line in own)


def _subtract(lines: Iterable[Collective], taken: Collection[Collective]) -> tuple[Collective, ...]:
    """Subtracts lines from lines; negative amounts become 0."""
    rest = [(line, _amount(taken, line.key)) for line in lines]
    return tuple(
        Collective(line.kind, line.axes, max(line.count - count, 0), max(line.bytes - size, 0))
        for line, (count, size) in rest
        if line.count > count or line.bytes > size
    )
