"""Compares the collectives of a compiled step with those that its strategies predict.

A step has two parts. Every collective of its gradients is predicted. In its update, XLA adds the collectives of an
optimizer that combines elements. If the whole differs from the prediction, the parts are compiled separately:

    gradients    must move what the strategies predict, without ZeRO's gathers of updated parameters
    step         must move the sum of what the gradients and the update move
    update       must move only ZeRO's gathers, if the optimizer is elementwise

A model with rows that depend on each other sums over `batch_axes()`, which no strategy predicts; its own program shows
these sums (`sums_over_rows`). If XLA splits them differently, at least those of the strategies must be present.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ...mesh.keys import make_key
from .. import zero
from ..collectives import Collective, merge
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


def predicted_of_update(step: Step) -> tuple[Collective, ...]:
    """Returns ZeRO's gathers of updated parameters, the only predicted collectives of an update."""
    return merge(zero.gathers(step.plan, step.plan.platform))


def traffic_of_update(step: Step) -> tuple[Collective, ...]:
    """Returns the collectives of the optimizer's update, compiled on its own."""
    update, arguments = _update_of(step)
    state = step.abstract_state()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))
    compiled = jax.jit(update, out_shardings=shardings).lower(*arguments).compile()
    return census(compiled.as_text() or "", step.plan.mesh)


def looks_across(step: Step) -> bool:
    """Checks if the update of an element depends on other elements: some optimizer operation changes shapes."""
    update, arguments = _update_of(step)
    program = jax.make_jaxpr(update)(*arguments)
    return any(_mixes(each) for each in equations(program.jaxpr) if not inner_programs(each))


def _mixes(equation: Any) -> bool:
    given, made = (
        {each.aval.shape for each in some if each.aval.shape} for some in (equation.invars, equation.outvars)
    )
    to_scalars = bool(given) and not made
    return to_scalars or len(given | made) > 1 or (bool(given) and equation.primitive.name in ACROSS)


def _update_of(step: Step) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the optimizer's update and its abstract arguments (parameters, state, gradients)."""
    state = step.abstract_state()
    gradients = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state.params,
        step.plan.update_table.shardings(),
    )

    def update(params: Any, opt_state: Any, gradients: Any) -> Any:
        return apply_optimizer(step.optimizer, gradients, opt_state, params, jnp.zeros(()))

    return update, (gradients, state.opt_state, gradients)


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
_Amount: TypeAlias = tuple[int, int]
"""A count and its bytes."""
MAX_AMOUNTS = 20_000
"""The maximum number of sums of amounts to search."""


def check_collectives(
    step: Step, batch: HostBatch, frozen: Collection[str] = (), *, compiles_apart: bool = True
) -> CollectiveCheck:
    """Compares the predicted collectives with those of the compiled step.

    If rules leave an axis to XLA, it decides how the shards of such a parameter are moved: then only counts are
    compared, or the bytes of sums that are split differently. If rules lay out activations, counts are not compared
    either, since XLA may split gradients.

    Args:
        step: The step; it is compiled for batches of this shape.
        batch: A global batch.
        frozen: Paths of parameters with a gradient of zero on one device: XLA may remove their collectives.
        compiles_apart: Compile gradients and update separately if the step differs from the prediction. Otherwise,
            additional collectives are attributed to XLA if the optimizer combines elements.
    """
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in batch.items()
    }
    mesh, owned = step.plan.mesh, set(step.plan.manual_axes)
    exact = owned >= {axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1}
    compared = ("count", "bytes") if exact else () if step.plan.output_rules else ("count",)
    predicted, found = step.cost(abstract), census(step.compile(abstract).as_text() or "", mesh)
    foreign = {_key(line) for line in found if not set(line.axes) <= owned}
    if step.plan.platform == "gpu":
        compared = tuple(figure for figure in compared if figure == "bytes")  # XLA combines small collectives there
    differing: dict[_Key, str] = differing_lines(predicted, found, compared)
    if not exact:
        differing = {key: text for key, text in differing.items() if not _same_sums(predicted, found, key)}
    if differing.keys() - foreign and compiles_apart:
        optimizers, differing = _apart(step, abstract, found, compared, frozen)
        foreign |= optimizers - differing.keys()
    elif differing.keys() - foreign and looks_across(step):
        foreign |= {key for key in differing if _holds(found, predicted, key)}
    own = _models_own(step, abstract, predicted, found) & differing.keys() - foreign if differing else set[_Key]()
    differing = {key: text for key, text in differing.items() if key not in own}
    left = tuple(line for line in found if _key(line) in foreign)
    unexpected = tuple(text for key, text in sorted(differing.items()) if key not in foreign)
    return CollectiveCheck(predicted, found, left, unexpected, tuple(line for line in found if _key(line) in own))


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
    strategies = _less(predicted, sums_over_rows(model, step.plan, abstract, step.plan.platform))
    return {key} if asks and _holds(found, strategies, key) else set()


def _same_sums(some: Iterable[Collective], others: Iterable[Collective], key: _Key) -> bool:
    """Checks if the same bytes are summed in a different number of all-reduces, which XLA may combine.

    It may combine one of the update with one of the gradients, but not two of parameters that it has split differently.
    """
    (count, size), (other, moved) = (_amounts(lines).get(key, (0, 0)) for lines in (some, others))
    return key[0] == "all-reduce" and size == moved and min(count, other) > 0


def _holds(found: Iterable[Collective], others: Iterable[Collective], key: _Key) -> bool:
    """Checks if the found collectives include at least as many of a kind, with at least the bytes."""
    got, wanted = (_amounts(lines).get(key, (0, 0)) for lines in (found, others))
    return got[0] >= wanted[0] and got[1] >= wanted[1]


def _apart(
    step: Step,
    abstract: dict[str, jax.ShapeDtypeStruct],
    found: Iterable[Collective],
    compared: tuple[str, ...],
    frozen: Any,
) -> tuple[set[_Key], dict[_Key, str]]:
    """Compiles gradients and update apart; returns the optimizer's own collectives and the differences."""
    mesh = step.plan.mesh
    program = jax.jit(step.gradients).lower(step.abstract_state(), abstract).compile()
    gradients, update = census(program.as_text() or "", mesh), traffic_of_update(step)
    gathers = predicted_of_update(step)
    predicted = _less(step.cost(abstract), gathers)
    differing = differing_lines(predicted, gradients, compared)
    for key in [key for key in differing if frozen and _is_unread(step, abstract, frozen, key, predicted, gradients)]:
        del differing[key]
    more = {_key(line) for line in _less(update, gathers)}
    if more and not looks_across(step):
        text = "{}: moved by the update alone, though the optimizer treats every element by itself"
        return set(), differing | {_key(line): text.format(line) for line in update if _key(line) in more}
    both = merge([*gradients, *update])
    whole = {
        key: text for key, text in differing_lines(both, found, compared).items() if not _same_sums(both, found, key)
    }
    if "bytes" not in compared:  # XLA may divide the whole as it divides neither part
        whole = {key: text for key, text in whole.items() if key not in more}
    return more, whole | differing


def _key(line: Collective) -> _Key:
    return line.kind, line.axes


def _amounts(lines: Iterable[Collective]) -> dict[_Key, _Amount]:
    return {_key(line): (line.count, line.bytes) for line in merge(lines)}


def _less(lines: Iterable[Collective], taken: Iterable[Collective]) -> tuple[Collective, ...]:
    """Subtracts lines from lines; negative amounts become 0."""
    off = _amounts(taken)
    rest = [(line, off.get(_key(line), (0, 0))) for line in lines]
    return tuple(
        Collective(line.kind, line.axes, max(line.count - count, 0), max(line.bytes - size, 0))
        for line, (count, size) in rest
        if line.count > count or line.bytes > size
    )


def _is_unread(
    step: Step,
    abstract: dict[str, jax.ShapeDtypeStruct],
    frozen: Collection[str],
    key: _Key,
    predicted: Iterable[Collective],
    found: Iterable[Collective],
) -> bool:
    """Checks if only collectives of frozen parameters are missing: XLA removes unused results."""
    (count, size), (less, smaller) = (_amounts(lines).get(key, (0, 0)) for lines in (predicted, found))
    gathers = predicted_of_update(step)
    reached = {(0, 0)}
    for path in sorted(frozen):
        rest = merge(step_cost(step.given_model, step.plan, abstract, step.plan.platform, without=(path,)))
        without = _amounts(_less(rest, gathers)).get(key, (0, 0))
        moves, moved = count - without[0], size - without[1]
        units = [(1, moved // moves)] * moves if moves > 0 else [(0, moved)]
        for unit in units:
            reached |= {(some + unit[0], sizes + unit[1]) for some, sizes in reached}
            if len(reached) > MAX_AMOUNTS:
                return False
    return (count - less, size - smaller) in reached
