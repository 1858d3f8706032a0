"""Checks of the contract between model and runtime, on a few rows on one device, while a run is built.

    the pairs (sum, weight) of two halves of the rows add up    otherwise, devices and microbatches do not add up either
    rows in another order give the same pair                    otherwise, rows depend on their neighbors
    weights of zero give (0, 0)                                 otherwise, padding counts
    some gradient is not zero                                   otherwise, training changes nothing

The pairs are measured in float32, near the initial parameters, with a key as in training. If they do not agree, further
runs find the kind of breach, in float64 if the model supports it: float32 rounding is not a breach.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....mesh.errors import UserError
from ...model import BlockModel, Model, Params
from ...xla.graph import equations
from . import breach_messages as messages
from .probe import HostBatch, Pair, Pairs, Probe, first_rows, moved, nudged, part
from .probe import NotChecked as NotChecked
from .random_key import check_key, shared_key

SCREEN = 1e-5
"""The minimum relative difference that is investigated: rounding of four reordered rows is 1e-6."""
SAME = 1e-6
"""The minimum relative difference that is a breach in float64, where rounding is 1e-15."""
NOISE, NARROW_NOISE = 30.0, 3.0
"""The minimum ratio of a breach to the noise: the change of the sums if every parameter changes by a random relative
1e-6 (a model may cast to float32) or, if a model casts to fewer bits, by their rounding. The second number is for the
latter."""
MIN_UNUSUAL_ROWS = 11
"""The minimum number of rows for tracing a loss to find arrays of shape (rows, rows)."""
MANY_ROWS = 64
"""The number of rows without gradients that make a model dead: a few rows may be on the flat side of every unit."""


class Breach(NamedTuple):
    """A requirement of the runtime that a model violates.

    Attributes:
        kind: "random": random numbers depend on the other rows; "rows": rows depend on each other; "mean": the sum is a
            mean; "weights": the result is not weighted; "dead": every gradient is zero.
        message: The measurement and the fix.
    """

    kind: str
    message: str


class ContractError(UserError):
    """A model that breaks the contract."""


def breaches(model: Model | BlockModel, params: Params, batch: HostBatch, key: Array | None) -> tuple[Breach, ...]:
    """Finds the breaches of a model.

    Args:
        model: The model; it is called whole, on JAX's default device.
        params: Its parameters, whole arrays on that device or the host.
        batch: Host arrays with rows on dim 0; the first four rows with a weight are used.
        key: A key as in training; None skips randomness.

    Returns:
        The breaches; empty also if the loss is not finite here or all weights are zero.

    Raises:
        NotChecked: The rows need too much memory on one device.
        Exception: Any error of the model for so few rows.
    """
    rows = first_rows(batch)
    if rows is None:
        return ()
    key = None if key is None else check_key(key)
    wide = bool(jax.config.read("jax_enable_x64"))
    case = _Case(model, "float64" if wide else "float32", params, rows, key)
    first, moves = case.probe.moves(case.given, rows, key)
    if not first.is_finite or first == (0, 0):
        return ()
    found = case.sums(key)
    broken: list[Breach] = []
    if found.whole.is_finite and (_largest(found) > SCREEN or found.whole.weight == 0):
        broken += _kinds(case.widened())
    if not moves:
        broken += _dead(case, first, batch)
    return tuple(broken)


class _Case:
    """A model with the rows, the key and the parameters of its measurements."""

    def __init__(self, model: Model | BlockModel, dtype: str, params: Params, rows: HostBatch, key: Array | None):
        def to_host(leaf: Any) -> np.ndarray:
            leaf = np.asarray(leaf)
            return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        self.model, self.rows, self.key = model, rows, key
        self.given = jax.tree.map(to_host, params)
        self.moved = moved(self.given)
        self.probe = Probe(model, dtype)
        self.bound = SCREEN

    def sums(self, key: Array | None) -> Pairs:
        return self.probe.sums(self.moved, self.rows, key)

    def pair(self, which: list[int], key: Array | None) -> Pair:
        return self.probe.pair(self.moved, part(self.rows, which), key)

    def widened(self) -> "_Case":
        """Returns this case in float64 with its bound; unchanged if the model does not support float64."""
        try:
            wide = _Case(self.model, "float64", self.given, self.rows, self.key)
            wide.bound = max(SAME, wide.noise())
        except Exception:
            self.bound = max(SCREEN, self.noise())
            return self
        return wide

    def noise(self) -> float:
        """Returns the relative effect of rounding on the sums, with a margin."""
        bits = self.probe.rounding(self.moved, self.rows, self.key)
        found = self.sums(self.key)
        near = self.probe.pair(nudged(self.moved, max(bits, 1e-6)), self.rows, self.key)
        return (NOISE if bits <= 1e-6 else NARROW_NOISE) * max(_apart(near, found.whole, found))

    def agree(self, sums: Pairs) -> bool:
        """Checks if the pairs add up, in any order."""
        return max(*_apart(sums.halves, sums.whole, sums), *_apart(sums.shuffled, sums.whole, sums)) <= self.bound

    def same(self, value: float, other: float, sums: Pairs) -> bool:
        """Checks if two totals agree."""
        return abs(value - other) <= self.bound * _scale(sums).total


def _kinds(case: _Case) -> Iterator[Breach]:
    """Yields the breaches if the sums do not agree."""
    found = case.sums(case.key)
    if not case.agree(found) and _pairs_rows(case):
        yield Breach("rows", messages.paired(found))
        return
    if not case.agree(found) and not _adds_a_constant(case, found) and not _only_weight_differs(case, found):
        alone = None if case.key is None else _without_key(case)
        shared = shared_key(case.key) if case.key is not None and _draws(case) else None
        if alone and not case.agree(alone):
            plain, key = alone, None
        else:  # with the same random numbers for all rows, what is left is not theirs
            plain, key = (found, case.key) if shared is None else (case.sums(shared), shared)
        if shared is not None and case.agree(plain):
            yield Breach("random", messages.random(found, alone))
        else:
            twice, once = case.pair([0, 1, 0, 1], key), case.pair([0, 1], key)
            if case.same(twice.total, once.total, plain) and not case.same(once.total, 0.0, plain):
                yield Breach("mean", messages.mean(twice, once))
                return
            yield Breach("rows", messages.rows(plain))
    yield from _weights(case, found)


def _pairs_rows(case: _Case) -> bool:
    """Checks if the loss broadcasts (rows, 1) with (rows,) to (rows, rows).

    Reads its program for a number of rows that no dim of the parameters or the batch has.
    """
    taken = {size for leaf in jax.tree.leaves((case.given, dict(case.rows))) for size in np.shape(leaf)}
    size = next(size for size in itertools.count(MIN_UNUSUAL_ROWS, 2) if size not in taken)
    try:
        found = [*equations(case.probe.program(case.given, case.rows, case.key, size))]
    except Exception:  # the model accepts only other numbers of rows
        return False
    crosses = any(
        each.primitive.name == "broadcast_in_dim"
        and each.invars[0].aval.shape == (size,)
        and each.params["broadcast_dimensions"] == (1,)
        for each in found
    )
    return crosses and any(getattr(made.aval, "shape", ()) == (size, size) for each in found for made in each.outvars)


def _only_weight_differs(case: _Case, found: Pairs) -> bool:
    """Checks if only the weight does not add up: it is not computed from the rows' weights."""
    totals = (found.halves.total, found.shuffled.total)
    return all(case.same(total, found.whole.total, found) for total in totals)


def _adds_a_constant(case: _Case, found: Pairs) -> bool:
    """Checks if every call adds the same constant: a penalty on the parameters."""
    if found.unweighted is None or not found.unweighted.is_finite:
        return False
    constant, whole = found.unweighted.total, found.whole.total
    if case.same(constant, 0.0, found) or case.same(constant, whole, found):  # nothing, or all of it: then a mean
        return False
    return case.same(found.halves.total - constant, whole, found) and case.same(found.shuffled.total, whole, found)


def _without_key(case: _Case) -> Pairs | None:
    """Returns the sums as in evaluation; None if the model cannot be evaluated."""
    try:
        return case.sums(None)
    except Exception:
        return None


def _draws(case: _Case) -> bool:
    """Checks if another key gives another loss."""
    assert case.key is not None
    other = case.pair([0, 1, 2, 3], jax.random.fold_in(case.key, 1))
    return other.total != case.pair([0, 1, 2, 3], case.key).total


def _weights(case: _Case, found: Pairs) -> Iterator[Breach]:
    """Yields breaches in the use of weights."""
    zero = Pair(0.0, 0.0) if found.unweighted is None else found.unweighted
    if found.whole.weight == 0:
        yield Breach("weights", messages.no_weight(found))
    elif _adds_a_constant(case, found):
        yield Breach("weights", messages.constant(found))
    elif max(_apart(zero, Pair(0.0, 0.0), found)) > case.bound:
        yield Breach("weights", messages.unweighted(found))
    elif max(abs(found.halves.weight - found.whole.weight), abs(found.shuffled.weight - found.whole.weight)) > (
        case.bound * _scale(found).weight
    ):
        yield Breach("weights", messages.weight_alone(found))


def _dead(case: _Case, first: Pair, batch: HostBatch) -> Iterator[Breach]:
    """Yields a breach if all gradients are zero on more rows as well."""
    rows = first_rows(batch, MANY_ROWS)
    assert rows is not None, "four were found before"
    _, moves = case.probe.moves(case.given, rows, case.key)
    if moves:
        return
    near, moves = case.probe.moves(case.moved, rows, case.key)
    number = sum(leaf.size for leaf in jax.tree.leaves(case.given))
    if not moves:
        yield Breach("dead", messages.dead(number, near))
    elif first.total != 0:  # a loss of 0 may be the minimum for these rows
        yield Breach("dead", messages.dead_at_first(number, first))


def _apart(pair: Pair, other: Pair, sums: Pairs) -> Pair:
    """Returns the relative distances of two pairs; infinite if one is not finite."""
    return Pair(*(_relative(a - b, scale) for a, b, scale in zip(pair, other, _scale(sums), strict=True)))


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return abs(difference) / scale if np.isfinite(difference) and scale else np.inf


def _scale(sums: Pairs) -> Pair:
    """Returns the scale of differences: the largest of the whole and its halves."""
    three = (sums.whole, sums.first, sums.second)
    return Pair(sum(abs(pair.total) for pair in three), sum(abs(pair.weight) for pair in three))


def _largest(found: Pairs) -> float:
    """Returns the largest difference between sums that should be equal."""
    zero = Pair(0.0, 0.0)
    pairs = [(found.halves, found.whole), (found.shuffled, found.whole), (found.unweighted or zero, zero)]
    return max(max(_apart(pair, other, found)) for pair, other in pairs)
