"""The collectives of a compiled step against those that its strategies predict.

A step has two halves. Every collective of its gradients is predicted. In its update, XLA moves by itself what an
optimizer needs that looks across elements. Where the whole is not as predicted, the halves are compiled apart:

    gradients    move what the strategies predict, but for ZeRO's gathers of what was updated
    step         moves what the gradients and the update alone move, added up
    update       moves ZeRO's gathers alone, where the optimizer treats every element by itself

A model whose rows depend on each other sums over `batch_axes()` by itself, which no strategy predicts. Its own program
does (`sums_over_rows`). Where XLA divides these sums another way, at least those of the strategies have to be there.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax

from ...mesh.keys import make_key
from ..collectives import Collective, merge
from ..collectives import differing as told
from ..model import has_state
from ..model.row_axes import asks_for_batch_axes
from ..precision import cast_inputs
from ..sharding.lay_out import abstract_parameters
from ..step.cost import step_cost, sums_over_rows
from ..step.model_state import abstract_model_state
from ..step.train_step import Step
from ..xla.census import census
from .reference import HostBatch
from .update_traffic import looks_across, predicted_of_update, traffic_of_update


class CollectiveCheck(NamedTuple):
    """The collectives of a step, predicted and found.

    Attributes:
        predicted: by the strategies' formulas.
        found: in the compiled step.
        left_to_xla: of those found, the ones that no strategy predicts: over axes left to XLA, and those of an
            optimizer that looks across elements of a parameter.
        unexpected: one line for each kind and set of axes that is not as predicted.
        of_the_model: of those found, the ones among which are more or less of the model's own sums over the rows of all
            devices than its program tells.
    """

    predicted: tuple[Collective, ...] = ()
    found: tuple[Collective, ...] = ()
    left_to_xla: tuple[Collective, ...] = ()
    unexpected: tuple[str, ...] = ()
    of_the_model: tuple[Collective, ...] = ()


_Key: TypeAlias = tuple[str, tuple[str, ...]]
_Amount: TypeAlias = tuple[int, int]
"""A count and its bytes."""
MOST_AMOUNTS = 20_000
"""Sums of amounts that are looked through."""


def check_collectives(
    step: Step, batch: HostBatch, frozen: Collection[str] = (), *, compiles_apart: bool = True
) -> CollectiveCheck:
    """Compares what the strategies predict with what the compiler made.

    Where rules leave an axis to XLA, it decides how the parts of such a parameter are moved: then counts are compared
    and bytes are not, or the bytes of sums that are divided otherwise; nor are counts where rules lay out activations,
    since XLA may cut gradients then.

    Args:
        step: The step; it is compiled for batches of this shape.
        batch: A global batch.
        frozen: Paths of parameters whose gradient is zero on one device: XLA may leave out moves of these.
        compiles_apart: Compile gradients and update apart where the step is not as predicted. If not, all that is moved
            beyond the prediction is left to XLA where the optimizer looks across elements.
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
    differing: dict[_Key, str] = told(predicted, found, compared)
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
    """The all-reduces that a model which sums over the rows of all devices may have more of."""
    model, key = step.given_model, ("all-reduce", step.plan.batch_axes)
    more = (abstract_model_state(model, step.precision),) if has_state(model) else ()
    rows = jax.eval_shape(lambda batch: cast_inputs(batch, step.precision.compute), abstract)
    params = abstract_parameters(model, step.precision)
    try:
        asks = asks_for_batch_axes(model.loss, params, rows, jax.eval_shape(lambda: make_key(0)), *more)
    except Exception:  # a model that runs on its mesh alone
        return set()
    strategies = _less(predicted, sums_over_rows(model, step.plan, abstract, step.plan.platform))
    return {key} if asks and _holds(found, strategies, key) else set()


def _same_sums(some: Iterable[Collective], others: Iterable[Collective], key: _Key) -> bool:
    """Whether the same is summed in another number of all-reduces, where XLA is free to combine them.

    It combines one of the update with one of the gradients, and not two of parameters that it has split otherwise.
    """
    (count, size), (other, moved) = (_amounts(lines).get(key, (0, 0)) for lines in (some, others))
    return key[0] == "all-reduce" and size == moved and min(count, other) > 0


def _holds(found: Iterable[Collective], others: Iterable[Collective], key: _Key) -> bool:
    """Whether at least as many of a kind are among those found, moving as much."""
    got, wanted = (_amounts(lines).get(key, (0, 0)) for lines in (found, others))
    return got[0] >= wanted[0] and got[1] >= wanted[1]


def _apart(
    step: Step,
    abstract: dict[str, jax.ShapeDtypeStruct],
    found: Iterable[Collective],
    compared: tuple[str, ...],
    frozen: Any,
) -> tuple[set[_Key], dict[_Key, str]]:
    """Compiles gradients and update apart: what the optimizer moves for itself, by kind and axes, and what differs."""
    mesh = step.layouts.mesh
    program = jax.jit(step.gradients).lower(step.abstract_state(), abstract).compile()
    gradients, update = census(program.as_text() or "", mesh), traffic_of_update(step)
    gathers = predicted_of_update(step)
    predicted = _less(step.cost(abstract), gathers)
    differing = told(predicted, gradients, compared)
    for key in [key for key in differing if frozen and _is_unread(step, abstract, frozen, key, predicted, gradients)]:
        del differing[key]
    more = {_key(line) for line in _less(update, gathers)}
    if more and not looks_across(step):
        text = "{}: moved by the update alone, though the optimizer treats every element by itself"
        return set(), differing | {_key(line): text.format(line) for line in update if _key(line) in more}
    both = merge([*gradients, *update])
    whole = {key: text for key, text in told(both, found, compared).items() if not _same_sums(both, found, key)}
    if "bytes" not in compared:  # XLA may divide the whole as it divides neither part
        whole = {key: text for key, text in whole.items() if key not in more}
    return more, whole | differing


def _key(line: Collective) -> _Key:
    return line.kind, line.axes


def _amounts(lines: Iterable[Collective]) -> dict[_Key, _Amount]:
    return {_key(line): (line.count, line.bytes) for line in merge(lines)}


def _less(lines: Iterable[Collective], taken: Iterable[Collective]) -> tuple[Collective, ...]:
    """Lines without those taken off; what would be less than nothing is nothing."""
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
    """Whether what lacks are moves of frozen parameters alone: XLA leaves out what nobody reads."""
    (count, size), (less, smaller) = (_amounts(lines).get(key, (0, 0)) for lines in (predicted, found))
    gathers = predicted_of_update(step)
    whole = _amounts(_less(step.cost(abstract), gathers)).get(key, (0, 0))
    reached = {(0, 0)}
    for path in sorted(frozen):
        without = _amounts(_less(_cost_without(step, abstract, path), gathers)).get(key, (0, 0))
        moves, moved = whole[0] - without[0], whole[1] - without[1]
        units = [(1, moved // moves)] * moves if moves > 0 else [(0, moved)]
        for unit in units:
            reached |= {(some + unit[0], sizes + unit[1]) for some, sizes in reached}
            if len(reached) > MOST_AMOUNTS:
                return False
    return (count - less, size - smaller) in reached


def _cost_without(step: Step, abstract: dict[str, jax.ShapeDtypeStruct], path: str) -> tuple[Collective, ...]:
    """What the strategies predict of the same step with one parameter left out."""
    return merge(step_cost(step.given_model, step.plan, abstract, step.plan.platform, without=(path,)))
