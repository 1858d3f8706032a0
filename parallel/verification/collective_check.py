"""Compares the collectives of a compiled step with those that its strategies predict.

    more than predicted                          something moves that no strategy asks for: an alarm
    fewer than predicted                         XLA merged collectives, or removed unused ones: a remark
    the optimizer combines elements of arrays    more is allowed: XLA adds collectives to the update

If rows depend on each other, a model sums or gathers over `batch_axes()`. No strategy predicts these collectives; they
are read from the model's own program (`collectives_of_rows`), and listed as the model's own. If XLA splits them
differently, at least the collectives of the strategies must be present.
"""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..collectives import Collective, CollectiveKey, amount, merge, subtract
from ..collectives import differing as differing_lines
from ..model import Params
from ..plan import ShardingPlan
from ..step.cost import StepCost
from ..step.train_step import Step
from ..step.update import apply_optimizer
from ..xla.census import census
from ..xla.graph import equations, inner_programs
from .fewer_collectives import UnneededGradients, explain_fewer, find_unneeded
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
        unexpected: One line for each kind and set of axes of which the step has more than predicted.
        fewer: One line for each kind and set of axes of which the step has fewer than predicted, with what XLA merged
            or removed.
        of_the_model: Found collectives that the model itself asks for, or that contain some of these.
    """

    predicted: tuple[Collective, ...] = ()
    found: tuple[Collective, ...] = ()
    left_to_xla: tuple[Collective, ...] = ()
    unexpected: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ()
    of_the_model: tuple[Collective, ...] = ()

    @property
    def has_unpredicted_of_the_model(self) -> bool:
        """True if the step has another number or other bytes of the model's own collectives than predicted."""
        return any(line not in self.predicted for line in self.of_the_model)

    @property
    def verdict(self) -> str:
        """The comparison in a few words."""
        return describe_comparison(self.unexpected, self.fewer)


def describe_comparison(unexpected: Collection[str], fewer: Collection[str]) -> str:
    """Describes a comparison in a few words, from the lines of `CollectiveCheck`."""
    if unexpected:
        return "NOT as predicted"
    return "fewer than predicted" if fewer else "as predicted"


def check_collectives(step: Step, batch: HostBatch, gradients: Params | None = None) -> CollectiveCheck:
    """Compares the predicted collectives with those of the compiled step.

    If rules leave an axis to XLA, it decides how the shards of such a parameter are moved: then only counts are
    compared, or the bytes of sums that are split differently. If rules lay out activations, counts are not compared
    either, since XLA may split gradients.

    Args:
        step: The step; it is compiled for batches of this shape.
        batch: A global batch.
        gradients: The gradients of the batch on one device, on the host; with them, the check names those that XLA did
            not need to sum.
    """
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in batch.items()
    }
    plan = step.plan
    cost = StepCost(step.given_model, plan, abstract, plan.platform)
    predicted = merge(cost.lines())
    asked = {line.key for line in cost.of_the_model}
    found = census(step.compile(abstract).as_text() or "", plan.mesh)
    unneeded = UnneededGradients() if gradients is None else find_unneeded(gradients)
    compared = _compared_figures(plan)
    differing = differing_lines(predicted, found, compared)
    if not set(plan.mesh.split_axes) <= set(plan.manual_axes):
        differing = {key: text for key, text in differing.items() if not _same_sums(predicted, found, key)}
    foreign = {line.key for line in found if not set(line.axes) <= set(plan.manual_axes)}
    more = {key for key in differing if _exceeds(found, predicted, key, compared)} - foreign
    fewer = differing.keys() - more - foreign
    if more and combines_elements(step):
        least = cost.lines(unneeded.zero)
        foreign |= {key for key in more if _includes(found, least, key)}
    of_strategies = subtract(predicted, cost.of_the_model)
    more -= foreign | {key for key in asked if _includes(found, of_strategies, key)}
    paths = [row.path for row in plan.trained.table.rows]
    return CollectiveCheck(
        predicted,
        found,
        left_to_xla=tuple(line for line in found if line.key in foreign),
        unexpected=tuple(differing[key] for key in sorted(more)),
        fewer=tuple(
            f"{differing[key]}: {explain_fewer(key, predicted, found, cost.lines, paths, unneeded)}"
            for key in sorted(fewer)
        ),
        of_the_model=tuple(line for line in found if line.key in asked),
    )


def _compared_figures(plan: ShardingPlan) -> tuple[str, ...]:
    """Returns the figures of a line that XLA does not decide on."""
    if not set(plan.mesh.split_axes) <= set(plan.manual_axes):
        figures = () if plan.output_rules else ("count",)
    else:
        figures = ("count", "bytes")
    if plan.platform == "gpu":  # XLA combines small collectives there
        return tuple(figure for figure in figures if figure == "bytes")
    return figures


def _exceeds(
    found: Iterable[Collective], predicted: Iterable[Collective], key: CollectiveKey, compared: Collection[str]
) -> bool:
    """Returns whether a step has more collectives of a kind than predicted, or some although none are predicted."""
    has = amount(found, key)
    expected = amount(predicted, key)
    if not expected.count:
        return True
    return any(getattr(has, figure) > getattr(expected, figure) for figure in compared)


def _same_sums(some: Iterable[Collective], others: Iterable[Collective], key: CollectiveKey) -> bool:
    """Returns whether the same bytes are summed in a different number of all-reduces, since XLA may combine them."""
    first = amount(some, key)
    second = amount(others, key)
    return key[0] == "all-reduce" and first.bytes == second.bytes and min(first.count, second.count) > 0


def _includes(found: Iterable[Collective], others: Iterable[Collective], key: CollectiveKey) -> bool:
    """Returns whether the found collectives of a kind have at least the count and the bytes of the others."""
    rest = amount(found, key).minus(amount(others, key))
    return rest.count >= 0 and rest.bytes >= 0
