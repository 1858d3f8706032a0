"""The sums of a few rows in several arrangements, on one device, for checking a model's contract.

whole        rows 0 1 2 3                 the pair (sum, weight) must be the sum of the halves' pairs
halves       rows 0 1, rows 2 3           with shapes of their own; if a model sums over the rows of all devices, as on
                                          two devices that communicate
shuffled     rows 2 0 3 1                 must give the pair of `whole`
unweighted   rows 0 1 2 3, weights of 0   must give (0, 0)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....mesh.compat import is_literal, jax_option, quick_compiler_options
from ....mesh.keys import make_key
from ...model import BlockModel, Model, Params
from ...sharding.batch_rows import record_batch_axes
from ...sharding.strategies import axes_that_split
from ..reference import HostBatch, wide_scalar
from ..rounding import narrowing
from .pairs import Pair, Pairs
from .random_key import check_key

ROWS = 4
ORDER = (2, 0, 3, 1)
RAGGED = (1.0, 0.5, 0.75, 0.25)
"""Factors of the rows' weights; equal weights would hide mistakes."""
MAX_TEMPORARY_BYTES = 1 << 30
"""The maximum memory of one program of the check, without its arguments."""


class NotChecked(Exception):
    """The contract cannot be checked; the message is the reason."""


class Probe:
    """A model's loss on four rows on one device, in one dtype, compiled once for each number of rows.

    Args:
        model: The model.
        dtype: The dtype of parameters and floating-point arrays of a batch: "float32" or "float64".
        params: The parameters that `init` returns.
        rows: Four rows of a batch.
        key: A key as in training; random numbers are drawn by the generator of `random_key`.
    """

    def __init__(self, model: Model | BlockModel, dtype: str, params: Params, rows: HostBatch, key: Array) -> None:
        def to_host(leaf: Any) -> np.ndarray:
            leaf = np.asarray(leaf)
            return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        self.model, self.rows, self.key = model, rows, check_key(key)
        self.loss = with_first_state(model)
        self.dtype = dtype
        self.given = jax.tree.map(to_host, params)
        self.moved = moved(self.given)
        self._couples_rows = False
        self._compiled: dict[tuple[str, int, str], Any] = {}

    def traced_again(self) -> "Probe":
        """Returns a probe of the same rows and parameters, which traces and compiles the loss anew."""
        return Probe(self.model, self.dtype, self.given, self.rows, self.key)

    def sums(self, key: Array | None = None) -> Pairs:
        """Returns the pairs of the rows in all arrangements, with the probe's key or another one."""
        rows, half = self.rows, ROWS // 2
        without = {**rows, "weights": np.zeros_like(rows["weights"])} if "weights" in rows else None
        whole = self.pair(rows, key)
        if self._couples_rows:  # as two devices along `data` compute them
            stacked = {name: np.asarray(array).reshape(2, half, *array.shape[1:]) for name, array in rows.items()}
            totals, weights = self._run("two devices", self._sums_of_devices, self.moved, stacked, key)
            first, second = (Pair(float(totals[n]), float(weights[n])) for n in range(2))
        else:
            first, second = (self.pair(part(rows, which), key) for which in (slice(half), slice(half, None)))
        shuffled = self.pair(part(rows, list(ORDER)), key)
        return Pairs(whole, first, second, shuffled, None if without is None else self.pair(without, key))

    def _sums_of_devices(self, params: Params, rows: Any, key: Array) -> tuple[Array, Array]:
        return jax.vmap(lambda own: self._sums(params, own, key), axis_name=axes_that_split("rows")[0])(rows)

    def pair(self, rows: HostBatch, key: Array | None = None, params: Params = None) -> Pair:
        """Returns the pair of some rows; four rows use the compiled program of `moves`."""
        params = self.moved if params is None else params
        if count(rows) == ROWS:
            return Pair(*map(float, self._run("one gradient", self._differentiate_one, params, rows, key)[0]))
        return Pair(*map(float, self._run("sums", self._sums, params, rows, key)))

    def moves(self, params: Params, rows: HostBatch) -> tuple[Pair, bool]:
        """Returns the pair, and True if any element of any gradient is not zero."""
        sums, moves = self._run("one gradient", self._differentiate_one, params, rows)
        if not moves:
            sums, moves = self._run("all gradients", self._differentiate, params, rows)
        return Pair(*map(float, sums)), bool(moves)

    def rounding(self) -> float:
        """Returns the relative rounding error of the narrowest dtype that arrays in the loss are cast to."""
        arrays = {name: self._prepared(array) for name, array in self.rows.items()}
        with jax.enable_x64(self.dtype == "float64"):
            program = jax.make_jaxpr(self._sums)(self.given, arrays, self.key).jaxpr
        return float(jnp.finfo(narrowing(program, self.dtype, scalars=False).dtype).eps) / 2

    def _sums(self, params: Params, rows: Any, key: Array) -> tuple[Array, Array]:
        total, weight, *_ = self.loss(params, rows, key)
        return wide_scalar(total), wide_scalar(weight)

    def _differentiate(self, params: Params, rows: Any, key: Array) -> tuple[tuple[Array, Array], Array]:
        sums, gradients = jax.value_and_grad(self._sums, has_aux=True)(params, rows, key)
        return sums, jnp.stack([jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradients)]).any()

    def _differentiate_one(self, params: Params, rows: Any, key: Array) -> tuple[tuple[Array, Array], Array]:
        """Differentiates by the leaf that is read last: its backward pass is the shortest and usually sufficient."""
        leaves, structure = jax.tree.flatten(params)
        which = _last_read(jax.make_jaxpr(self._sums)(params, rows, key).jaxpr, leaves)

        def sums(leaf: Any) -> tuple[Array, Array]:
            return self._sums(jax.tree.unflatten(structure, [*leaves[:which], leaf, *leaves[which + 1 :]]), rows, key)

        found, gradient = jax.value_and_grad(sums, has_aux=True)(leaves[which])
        return found, jnp.any(gradient != 0)

    def _run(
        self, name: str, function: Callable[..., Any], params: Params, rows: HostBatch, key: Array | None = None
    ) -> Any:
        key = self.key if key is None else key
        with jax.enable_x64(self.dtype == "float64"):
            arguments = params, {name: self._prepared(array) for name, array in rows.items()}, key
            signature = name, count(rows), str(key.dtype)
            if signature not in self._compiled:
                with record_batch_axes() as asked:
                    self._compiled[signature] = _compiled(function, arguments, count(rows))
                self._couples_rows |= bool(asked)
            return jax.device_get(self._compiled[signature](*arguments))

    def _prepared(self, array: Any) -> np.ndarray:
        """Converts an array as the runtime does, floating-point ones to the dtype of the check."""
        array = np.asarray(array)
        if jnp.issubdtype(array.dtype, jnp.floating):
            return array.astype(self.dtype)
        return array.astype({"int64": "int32", "uint64": "uint32"}.get(array.dtype.name, array.dtype))


def with_first_state(model: Model | BlockModel) -> Callable[..., Any]:
    """Returns a model's loss as a function of (params, batch, key), with the initial state if the model has one."""
    if not isinstance(model, Model) or model.init_state is None:
        return model.loss
    init_state = model.init_state
    return lambda params, rows, key: model.loss(params, rows, key, init_state(make_key(0)))


def _compiled(function: Callable[..., Any], arguments: Any, rows: int) -> Any:
    with jax.default_matmul_precision("highest"):
        compiled = compile_quickly(function, *arguments)
    needed = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    if needed > MAX_TEMPORARY_BYTES:
        raise NotChecked(f"{rows} rows on one device need {needed / 2**30:.1f} GiB")
    return compiled


def _last_read(jaxpr: Any, leaves: list[Any]) -> int:
    """Returns the index of the floating-point parameter that the operations of a loss read last."""
    first_read: dict[Any, int] = {}
    for index, equation in enumerate(jaxpr.eqns):
        for variable in equation.invars:
            if not is_literal(variable):
                first_read.setdefault(variable, index)
    floating = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return max(floating, key=lambda n: first_read.get(jaxpr.invars[n], -1))


def first_rows(batch: HostBatch, most: int = ROWS) -> dict[str, np.ndarray] | None:
    """Returns the first rows with a weight, repeated up to four if there are fewer, with different weights.

    Of two rows, the second one is repeated, so that the two halves of the four rows differ.

    Args:
        batch: Arrays with rows on dim 0.
        most: The maximum number of rows.

    Returns:
        The rows, or None if all weights are zero.
    """
    weights = batch.get("weights")
    rows = np.arange(count(batch))
    if weights is not None:
        weights = np.asarray(weights)
        rows = rows[weights.reshape(len(rows), -1).any(axis=1)]
    if not len(rows):
        return None
    if len(rows) == ROWS // 2:
        rows = rows[[0, 1, 1, 1]]
    chosen = part(batch, np.resize(rows, max(ROWS, min(most, len(rows)))))
    if weights is not None and jnp.issubdtype(weights.dtype, jnp.floating):
        factors = np.resize(RAGGED, count(chosen)).reshape(-1, *[1] * (weights.ndim - 1))
        chosen["weights"] = (chosen["weights"] * factors).astype(weights.dtype)
    return chosen


def part(batch: HostBatch, which: Any) -> dict[str, np.ndarray]:
    """Returns some rows of a batch."""
    return {name: np.asarray(array)[which] for name, array in batch.items()}


def count(batch: HostBatch) -> int:
    """Returns the number of rows of a batch."""
    return len(next(iter(batch.values())))


def moved(params: Params) -> Params:
    """Returns parameters near the given ones, on the host, because a table of zeros or ones hides mistakes.

    Every element is multiplied by a random factor within a tenth of 1; zeros become small positive numbers.
    """
    return nudged(params, 0.1, zero=0.1)


def nudged(params: Params, by: float, zero: float = 0.0) -> Params:
    """Returns the parameters with every element scaled by a random factor within `by` of 1; zeros become `zero`."""
    random = np.random.default_rng(0)

    def scale(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = random.uniform(-by, by, leaf.shape)
        return np.where(leaf == 0, zero * (1 + noise / (2 * by)), leaf * (1 + noise)).astype(leaf.dtype)

    return jax.tree.map(scale, params)


def compile_quickly(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a function for the shapes of its arguments and few runs."""
    with quick_compilation():
        return jax.jit(function).lower(*arguments).compile(compiler_options=quick_compiler_options())


def quick_compilation() -> AbstractContextManager[None]:
    """Disables most of XLA's optimizations within a `with` block, for short compilation."""
    return jax_option("jax_disable_most_optimizations", True)
