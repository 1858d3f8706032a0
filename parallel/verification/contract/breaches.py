"""What the runtime relies on in a model, checked on a few rows on one device when a run is built.

    the pair (sum, weight) adds up over halves of the rows      else devices and microbatches do not add up either
    rows in another order give the same pair                    else they depend on what is beside them
    weights of zero give (0, 0)                                 else padding counts
    some gradient is not zero                                   else training changes nothing

The pairs are measured in float32, at parameters near the initial ones, with a key as in training. Only where they do
not agree, more runs find the kind of breach, in float64 where the model computes in it: what float32 explains is no
breach.
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
from ...xla.equations import equations
from . import words as words
from .probe import ROWS, HostBatch, Pair, Pairs, Probe, first_rows, moved, nudged, part
from .probe import NotChecked as NotChecked
from .random_key import check_key, shared_key

SCREEN = 1e-5
"""The smallest difference that is looked into, as a part of the sums: four rows in another order round to 1e-6."""
SAME = 1e-6
"""The smallest that is a breach when it is looked at in float64, where rounding is 1e-15."""
NOISE, NARROW_NOISE = 30.0, 3.0
"""A breach is this many times larger than the noise: the change of the sums when every parameter changes by a random
part of 1e-6 (a model that casts to float32 by itself rounds in float64 too) or, where a model casts to fewer bits, of
what these round. The second number is for the latter."""
MIN_UNUSUAL_ROWS = 11
"""The smallest number of rows that a loss is traced with to find arrays (rows, rows)."""
MANY_ROWS = 64
"""Rows without any gradient after which a model is called dead: a few may be on the flat side of every unit."""


class Breach(NamedTuple):
    """Something that the runtime relies on and a model does not do.

    Attributes:
        kind: "random", its random numbers depend on which rows are together; "rows", its rows depend on each other;
            "mean", it returns a mean as the sum; "weights", what it returns is not weighted by the weights; "dead",
            every gradient is zero.
        message: What was measured and how to mend it.
    """

    kind: str
    message: str


class ContractError(UserError):
    """A model that breaks the contract."""


def breaches(model: Model | BlockModel, params: Params, batch: HostBatch, key: Array | None) -> tuple[Breach, ...]:
    """Finds what of the contract a model breaks.

    Args:
        model: The model; it is called whole, on JAX's default device.
        params: Its parameters, whole arrays of that device or of the host.
        batch: Host arrays with rows on dim 0; the first four that have weight are used.
        key: A key as in training; with None randomness is not looked at.

    Returns:
        The breaches: none for a model that keeps the contract, or whose loss is not finite here, or counts nothing.

    Raises:
        NotChecked: The rows need too much memory on one device.
        Exception: Whatever the model raises for so few rows.
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
    """Where a model is measured: on which rows, with which key, at the initial parameters and near them."""

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
        """The same in float64, its bound set; as it is where the model does not compute in float64."""
        try:
            wide = _Case(self.model, "float64", self.given, self.rows, self.key)
            wide.bound = max(SAME, wide.noise())
        except Exception:
            self.bound = max(SCREEN, self.noise())
            return self
        return wide

    def noise(self) -> float:
        """What rounding does to the sums, as a part of them, with a margin."""
        bits = self.probe.rounding(self.moved, self.rows, self.key)
        found = self.sums(self.key)
        near = self.probe.pair(nudged(self.moved, max(bits, 1e-6)), self.rows, self.key)
        return (NOISE if bits <= 1e-6 else NARROW_NOISE) * max(_apart(near, found.whole, found))

    def agree(self, sums: Pairs) -> bool:
        """Whether the pair adds up, and in any order."""
        return max(*_apart(sums.halves, sums.whole, sums), *_apart(sums.shuffled, sums.whole, sums)) <= self.bound

    def same(self, value: float, other: float, sums: Pairs) -> bool:
        """Whether two totals are one."""
        return abs(value - other) <= self.bound * _scale(sums).total


def _kinds(case: _Case) -> Iterator[Breach]:
    """The breaches of a model whose sums do not agree."""
    found = case.sums(case.key)
    is_mean = False
    if not case.agree(found) and _pairs_rows(case):
        yield Breach("rows", words.paired(found))
        return
    if not case.agree(found) and not _adds_a_constant(case, found) and not _only_weight_differs(case, found):
        alone = None if case.key is None else _without_key(case)
        shared = shared_key(case.key) if case.key is not None and _draws(case) else None
        if alone and not case.agree(alone):
            plain, key = alone, None
        else:  # with the same random numbers for all rows, what is left is not theirs
            plain, key = (found, case.key) if shared is None else (case.sums(shared), shared)
        if shared is not None and case.agree(plain):
            yield Breach("random", words.random(found, alone))
        else:
            twice, once = case.pair([0, 1, 0, 1], key), case.pair([0, 1], key)
            is_mean = case.same(twice.total, once.total, plain) and not case.same(once.total, 0.0, plain)
            if is_mean:
                yield Breach("mean", words.mean(twice, once))
            if not is_mean or not _mean_adds_up(case, plain):
                yield Breach("rows", words.rows(plain, is_mean))
    if not is_mean:
        yield from _weights(case, found)


def _pairs_rows(case: _Case) -> bool:
    """Whether the loss broadcasts (rows, 1) with (rows,) to (rows, rows).

    Its program is read for a number of rows that no dim of the parameters and of the batch has.
    """
    taken = {size for leaf in jax.tree.leaves((case.given, dict(case.rows))) for size in np.shape(leaf)}
    size = next(size for size in itertools.count(MIN_UNUSUAL_ROWS, 2) if size not in taken)
    try:
        found = [*equations(case.probe.program(case.given, case.rows, case.key, size))]
    except Exception:  # it runs for other numbers of rows alone
        return False
    crosses = any(
        each.primitive.name == "broadcast_in_dim"
        and each.invars[0].aval.shape == (size,)
        and each.params["broadcast_dimensions"] == (1,)
        for each in found
    )
    return crosses and any(getattr(made.aval, "shape", ()) == (size, size) for each in found for made in each.outvars)


def _only_weight_differs(case: _Case, found: Pairs) -> bool:
    """Whether the weight alone does not add up: it is not made of the rows' weights."""
    totals = (found.halves.total, found.shuffled.total)
    return all(case.same(total, found.whole.total, found) for total in totals)


def _adds_a_constant(case: _Case, found: Pairs) -> bool:
    """Whether every call adds the same, whatever the rows: a penalty on the parameters."""
    if found.unweighted is None or not found.unweighted.is_finite:
        return False
    constant, whole = found.unweighted.total, found.whole.total
    if case.same(constant, 0.0, found) or case.same(constant, whole, found):  # nothing, or all of it: then a mean
        return False
    return case.same(found.halves.total - constant, whole, found) and case.same(found.shuffled.total, whole, found)


def _without_key(case: _Case) -> Pairs | None:
    """The sums as in evaluation, where the model can be evaluated."""
    try:
        return case.sums(None)
    except Exception:
        return None


def _draws(case: _Case) -> bool:
    """Whether another key gives another loss."""
    assert case.key is not None
    other = case.pair([0, 1, 2, 3], jax.random.fold_in(case.key, 1))
    return other.total != case.pair([0, 1, 2, 3], case.key).total


def _mean_adds_up(case: _Case, sums: Pairs) -> bool:
    """Whether the sums of a model that returns means add up once these are multiplied by rows, or by weights."""
    if not case.same(sums.shuffled.total, sums.whole.total, sums):
        return False
    weights = np.asarray(case.rows.get("weights", np.ones(ROWS)), np.float64).reshape(ROWS, -1).sum(axis=1)
    half = ROWS // 2
    for first, second in ((half, half), (weights[:half].sum(), weights[half:].sum()), (sums.first[1], sums.second[1])):
        mean = (sums.first.total * first + sums.second.total * second) / ((first + second) or 1)
        if case.same(mean, sums.whole.total, sums):
            return True
    return False


def _weights(case: _Case, found: Pairs) -> Iterator[Breach]:
    """What is wrong with how weights count."""
    zero = Pair(0.0, 0.0) if found.unweighted is None else found.unweighted
    if found.whole.weight == 0:
        yield Breach("weights", words.no_weight(found))
    elif _adds_a_constant(case, found):
        yield Breach("weights", words.constant(found))
    elif max(_apart(zero, Pair(0.0, 0.0), found)) > case.bound:
        yield Breach("weights", words.unweighted(found))
    elif max(abs(found.halves.weight - found.whole.weight), abs(found.shuffled.weight - found.whole.weight)) > (
        case.bound * _scale(found).weight
    ):
        yield Breach("weights", words.weight_alone(found))


def _dead(case: _Case, first: Pair, batch: HostBatch) -> Iterator[Breach]:
    """The breach of a model whose gradients are all zero on more rows too, and what was tried."""
    rows = first_rows(batch, MANY_ROWS)
    assert rows is not None, "four were found before"
    _, moves = case.probe.moves(case.given, rows, case.key)
    if moves:
        return
    near, moves = case.probe.moves(case.moved, rows, case.key)
    number = sum(leaf.size for leaf in jax.tree.leaves(case.given))
    if not moves:
        yield Breach("dead", words.dead(number, near))
    elif first.total != 0:  # where the loss itself is 0, it may be at its least for these rows
        yield Breach("dead", words.dead_at_first(number, first))


def _apart(pair: Pair, other: Pair, sums: Pairs) -> Pair:
    """How far two pairs are apart, as parts of the sums; infinitely where one is not finite."""
    return Pair(*(_relative(a - b, scale) for a, b, scale in zip(pair, other, _scale(sums), strict=True)))


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return abs(difference) / scale if np.isfinite(difference) and scale else np.inf


def _scale(sums: Pairs) -> Pair:
    """What differences are measured against: the whole and its halves."""
    three = (sums.whole, sums.first, sums.second)
    return Pair(sum(abs(pair.total) for pair in three), sum(abs(pair.weight) for pair in three))


def _largest(found: Pairs) -> float:
    """The largest difference between what should be one."""
    zero = Pair(0.0, 0.0)
    pairs = [(found.halves, found.whole), (found.shuffled, found.whole), (found.unweighted or zero, zero)]
    return max(max(_apart(pair, other, found)) for pair, other in pairs)
