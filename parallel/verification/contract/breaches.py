"""Checks of the contract between model and runtime, on a few rows on one device, while a run is built.

    the pairs (sum, weight) of two halves of the rows add up    otherwise, devices and microbatches do not add up either
    rows in another order give the same pair                    otherwise, rows depend on their neighbors
    weights of zero give (0, 0)                                 otherwise, padding counts
    some gradient is not zero                                   otherwise, training changes nothing

The pairs are measured in float32, near the initial parameters, with a key as in training. If they do not agree, further
runs find the kind of breach, in float64 if the model supports it: float32 rounding is not a breach.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....mesh.errors import UserError, docs_url
from ...model import BlockModel, Model, Params
from .probe import ROWS, HostBatch, Pair, Pairs, Probe, first_rows, moved, nudged, part
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
MANY_ROWS = 64
"""The number of rows without gradients that make a model dead: a few rows may be on the flat side of every unit."""
NOTHING = Pair(0.0, 0.0)
RESULT = 'Return ((losses * batch["weights"]).sum(), batch["weights"].sum()).'


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
    if not first.is_finite or first == NOTHING:
        return ()
    found = case.sums(key)
    broken: list[Breach] = []
    if found.whole.is_finite and (not _follows(found, SCREEN) or found.whole.weight == 0):
        wider = case.widened()
        found = wider.sums(key)
        broken += list(_coupled(wider, found)) or _weights(wider, found)
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
        return (NOISE if bits <= 1e-6 else NARROW_NOISE) * max(found.apart(near, found.whole))

    def adds_up(self, found: Pairs, constant: float = 0.0) -> bool:
        """Checks if the sums of the losses add up, in any order, except for a constant that every call adds."""
        halves = found.halves._replace(total=found.halves.total - constant)
        return max(found.apart(other, found.whole).total for other in (halves, found.shuffled)) <= self.bound

    def adds_a_constant(self, found: Pairs) -> bool:
        """Checks if every call adds the same constant, such as a penalty on the parameters; not if that is all."""
        zero = found.unweighted
        if zero is None or not zero.is_finite:
            return False
        parts = (found.apart(zero, NOTHING), found.apart(zero, found.whole))
        return all(each.total > self.bound for each in parts) and self.adds_up(found, zero.total)


def _follows(found: Pairs, bound: float) -> bool:
    """Checks if all pairs that must agree do."""
    pairs = [(found.halves, found.whole), (found.shuffled, found.whole), (found.unweighted or NOTHING, NOTHING)]
    return max(max(found.apart(*pair)) for pair in pairs) <= bound


def _coupled(case: _Case, found: Pairs) -> Iterator[Breach]:
    """Yields a breach if the sums of the losses do not add up."""
    if case.adds_up(found) or case.adds_a_constant(found):
        return
    key = None if case.key is None else shared_key(case.key)
    plain = case.sums(key)  # with the same random numbers for all rows, what is left is not theirs
    if case.adds_up(plain):
        yield Breach(
            "random",
            f"its random numbers depend on which rows are together. With a key, {_arrangements(found)}; with the same "
            f"random numbers for all rows, {_arrangements(plain)}. Every mesh would draw other numbers. Draw those of "
            f'each row from its own key, jax.random.fold_in(key, batch["example"][row]): '
            f"{docs_url('models', 'randomness')}",
        )
        return
    twice, once = case.pair([0, 1, 0, 1], key), case.pair([0, 1], key)
    if plain.apart(twice, once).total <= case.bound < plain.apart(once, NOTHING).total:
        yield Breach(
            "mean",
            f"its loss returns a mean as the sum. {ROWS // 2} rows give {once}, the same rows twice {twice}: the sum "
            f"is {twice.total / once.total:.6g} times as large and must be 2 times as large. Loss and gradients would "
            f"be too small, or means of means. {RESULT}",
        )
        return
    yield Breach(
        "rows",
        f"its rows depend on each other. {_arrangements(plain)}. A device sees its own rows alone, so every mesh would "
        "train another model. Batch norm does this (sum its statistics over spmdkit.batch_axes(), or take layer or "
        "group norm), as do arrays of shapes (rows, 1) and (rows,) in one operation, which broadcast to (rows, rows), "
        "losses between the rows of a batch, means over rows, and whatever reads a row's place in the batch.",
    )


def _arrangements(found: Pairs) -> str:
    return (
        f"{ROWS} rows give {found.whole}, their halves {found.first} + {found.second} = {found.halves}, in another "
        f"order {found.shuffled}"
    )


def _weights(case: _Case, found: Pairs) -> Iterator[Breach]:
    """Yields a breach in the use of weights."""
    zero = found.unweighted or NOTHING
    adds_up = max(found.apart(other, found.whole).weight for other in (found.halves, found.shuffled)) <= case.bound
    if found.whole.weight == 0:
        message = (
            f"the weight that it returns is 0. {ROWS} rows that have weight give {found.whole}, and the runtime "
            f"divides by the weight. {RESULT}"
        )
    elif case.adds_a_constant(found):
        message = (
            f"it adds {zero.total:.6g} on every call, whatever the rows weigh: {ROWS} rows give {found.whole}, with "
            f"weights of zero {zero}. Every device and microbatch would add it again. A penalty on the parameters must "
            'count as the rows do: add penalty * batch["weights"].sum() to the sum.'
        )
    elif max(found.apart(zero, NOTHING)) > case.bound:
        message = (
            f"rows of weight zero count. {ROWS} rows give {found.whole}, with weights of zero {zero}, which must be "
            "(0, 0): evaluation would count the rows that fill up its last batch. Multiply what each row (or token) "
            f"loses by its weight, and do not divide by the sum of the weights. {RESULT}"
        )
    elif not adds_up:
        message = (
            f"the weight that it returns does not add up. {_arrangements(found)}. The runtime divides by the sum "
            f"of all weights. {RESULT} Without weights, the weight is the number of rows."
        )
    else:
        return
    yield Breach("weights", message)


def _dead(case: _Case, first: Pair, batch: HostBatch) -> Iterator[Breach]:
    """Yields a breach if all gradients are zero on more rows as well."""
    rows = first_rows(batch, MANY_ROWS)
    assert rows is not None, "four were found before"
    if case.probe.moves(case.given, rows, case.key)[1]:
        return
    near, moves = case.probe.moves(case.moved, rows, case.key)
    if moves and first.total == 0:  # it may be the minimum for these rows
        return
    number = sum(leaf.size for leaf in jax.tree.leaves(case.given))
    message = (
        f"every gradient is zero: {number:,} parameters, a loss of {near}, and no parameter changes it. Training would "
        "change nothing. Look for jax.lax.stop_gradient, a loss multiplied by 0, argmax, rounding, a cast to integers, "
        "or parameters that the loss does not read."
    )
    if moves:
        message = (
            f"every gradient is zero at the parameters that init returns: {number:,} parameters, a loss of {first}. "
            "Near them there are gradients, so training would never leave its start. Draw the parameters at random: "
            "layers of zeros that multiply each other keep each other at zero."
        )
    yield Breach("dead", message)
