"""Checks of the contract between model and runtime, on a few rows on one device, while a run is built.

    the pairs (sum, weight) of two halves of the rows add up    otherwise, devices and microbatches do not add up either
    rows in another order give the same pair                    otherwise, rows depend on their neighbors
    a program traced again gives the same pair                  otherwise, processes and restarts differ
    weights of zero give (0, 0)                                 otherwise, padding counts
    some gradient is not zero                                   otherwise, training changes nothing
    a language model sees no later tokens                       otherwise, it reads the tokens that it must predict

The pairs are measured in float32, near the initial parameters, with a key as in training. If they do not agree, further
runs find the kind of breach, in float64 if the model supports it: float32 rounding is not a breach. `check_model`, the
public function, also traces the model's functions.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from ....mesh.errors import UserError, docs_url
from ....mesh.keys import make_key
from ...model import BlockModel, Model, Params
from ...options import cast_floats
from ...sharding.model_errors import check_loss
from ..causality import look_ahead, may_look_ahead
from ..reference import HostBatch
from .pairs import NOTHING, Pair, Pairs
from .probe import ROWS, Probe, compile_quickly, count, first_rows, nudged, part
from .probe import NotChecked as NotChecked
from .random_key import check_key, shared_key

SCREEN = 1e-5
"""The minimum relative difference that is investigated; rounding of four reordered rows is 1e-6."""
SAME = 1e-6
"""The minimum relative difference that is a breach in float64, where rounding is 1e-15."""
NOISE, NARROW_NOISE = 30.0, 3.0
"""The minimum ratio of a breach to the noise. The noise is the change of the sums if every parameter changes by a
random relative 1e-6 (first number; a model may cast to float32) or, for a model that casts to fewer bits, by the
rounding of that dtype (second number)."""
MANY_ROWS = 64
"""The number of rows without gradients that make a model dead; fewer rows may all be on the flat side of every unit."""
CHECKS = ("error", "warn", "off")
"""The reaction to a breach: an error, a warning, or no check."""
RESULT = 'Return ((losses * batch["weights"]).sum(), batch["weights"].sum()).'


class Breach(NamedTuple):
    """A requirement of the runtime that a model violates.

    Attributes:
        kind: "trace": every traced program computes something else; "random": random numbers depend on the other rows;
            "rows": rows depend on each other; "mean": the sum is a mean; "weights": the result is not weighted; "dead":
            every gradient is zero; "future": a language model sees later tokens.
        message: The measurement and the fix.
    """

    kind: str
    message: str


class ContractError(UserError):
    """A model that breaks the contract."""


def check_model(
    model: Model | BlockModel, batch: HostBatch, *, params: Params | None = None, seed: int = 0, check: str = "error"
) -> tuple[Breach, ...]:
    """Checks a model and its contract with the runtime on one device, as `spmdkit train` does.

    Args:
        model: The model; its parameters are created whole, so pass a small model of the same structure.
        batch: Host arrays with rows on dim 0, four or more; "example", the index of each row, is added if absent.
        params: The parameters; by default, those of `model.init`.
        seed: The seed of the parameters and of the training key.
        check: "error" raises for a breach, "warn" warns, "off" only traces the model's functions.

    Returns:
        The breaches of the contract.

    Raises:
        ModelError: One of the model's functions cannot be called as the runtime calls it.
        ContractError: The model breaks the contract, with "error"; lists every breach.
        UserError: The batch has arrays of unequal length, or needs too much memory on one device.
    """
    if check not in CHECKS:
        raise UserError(f"check={check!r} is not one of {', '.join(CHECKS)}.")
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    rows = {name: array.shape[0] if array.ndim else "no dim" for name, array in arrays.items()}
    if len(set(rows.values())) != 1 or "no dim" in rows.values():
        raise UserError(f"The arrays of a batch have one row for each example on dim 0; these have {rows}.")
    arrays = {"example": np.arange(count(arrays), dtype=np.int32), **arrays}
    dtypes = {name: jax.dtypes.canonicalize_dtype(array.dtype) for name, array in arrays.items()}  # int64 as int32
    check_loss(model, {name: jax.ShapeDtypeStruct(array.shape, dtypes[name]) for name, array in arrays.items()})
    if check == "off":
        return ()
    key = make_key(seed)
    params = initial_params(model, key) if params is None else params
    try:
        broken = breaches(model, params, arrays, jax.random.fold_in(key, 0))
    except NotChecked as error:
        raise UserError(f"model {model.name!r}: {error}. Give a smaller model or shorter rows.") from error
    report(f"model {model.name!r}", broken, check)
    return broken


def initial_params(model: Model | BlockModel, key: Array) -> Params:
    """Returns float32 initial parameters, whole on the default device, from the generator of `random_key`."""
    key = check_key(key)
    return compile_quickly(lambda key: cast_floats(model.init(key), "float32"), key)(key)


def report(name: str, broken: Sequence[Breach], check: str) -> None:
    """Raises an error, warns, or does nothing, depending on `check`.

    Args:
        name: Names the model: "model.name='mine:make'".
        broken: The breaches.
        check: One of `CHECKS`.

    Raises:
        ContractError: There are breaches, and `check` is "error".
    """
    if not broken or check == "off":
        return
    message = "\n".join(f"{name} breaks the contract ({breach.kind}): {breach.message}" for breach in broken)
    if check == "warn":
        warnings.warn(message, stacklevel=3)
        return
    raise ContractError(f"{message} To train it as it is, set model.check: warn, or off.")


def breaches(model: Model | BlockModel, params: Params, batch: HostBatch, key: Array) -> tuple[Breach, ...]:
    """Finds the breaches of a model.

    Args:
        model: The model; it is called whole, on JAX's default device.
        params: Its parameters, whole arrays on that device or the host.
        batch: Host arrays with rows on dim 0; the first four rows with a weight are used.
        key: A key as in training.

    Returns:
        The breaches; empty also if the loss is not finite here or all weights are zero.

    Raises:
        NotChecked: The rows need too much memory on one device.
        Exception: Any error of the model for so few rows.
    """
    rows = first_rows(batch)
    if rows is None:
        return ()
    wide = bool(jax.config.read("jax_enable_x64"))
    probe = Probe(model, "float64" if wide else "float32", params, rows, key)
    first, moves = probe.moves(probe.given, rows)
    if not first.is_finite or first == NOTHING:
        return ()
    found = probe.sums()
    broken: list[Breach] = []
    if found.whole.is_finite and not found.are_right(SCREEN):
        exact, bound = _widened(probe)
        found = exact.sums()
        broken += list(_coupled(exact, found, bound)) or _weights(found, bound)
    if not moves:
        broken += _dead(probe, first, batch)
    if not broken:
        broken += _future(probe)
    return tuple(broken)


def _widened(probe: Probe) -> tuple[Probe, float]:
    """Returns a probe in float64, or the same one if the model does not support float64, and the bound for rounding."""
    try:
        wide = Probe(probe.model, "float64", probe.given, probe.rows, probe.key)
        return wide, max(SAME, _noise(wide))
    except Exception:
        return probe, max(SCREEN, _noise(probe))


def _noise(probe: Probe) -> float:
    """Returns the relative effect of rounding on the sums, including a margin."""
    bits, found = probe.rounding(), probe.sums()
    near = probe.pair(probe.rows, params=nudged(probe.moved, max(bits, 1e-6)))
    return (NOISE if bits <= 1e-6 else NARROW_NOISE) * max(found.apart(near, found.whole))


def _coupled(probe: Probe, found: Pairs, bound: float) -> Iterator[Breach]:
    """Yields a breach if the sums of the losses do not add up."""
    if found.adds_up(bound) or found.adds_a_constant(bound):
        return
    again = probe.traced_again().pair(probe.rows)
    if found.apart(again, found.whole).total > bound:
        yield Breach(
            "trace",
            f"it computes something else each time that JAX traces it. The same {ROWS} rows give {found.whole}, and "
            f"{again} in a program traced again. Numbers of np.random, random, time or a counter become constants of a "
            "program, so processes and restarts train different models. Draw random numbers from the key: "
            f"{docs_url('models', 'randomness')}",
        )
        return
    key = shared_key(probe.key)
    plain = probe.sums(key)  # with equal random numbers for all rows, they are not the cause of a difference
    if plain.adds_up(bound):
        yield Breach(
            "random",
            f"its random numbers depend on which rows are together. With a key, {_arrangements(found)}; with the same "
            f"random numbers for all rows, {_arrangements(plain)}. Every mesh would draw different numbers. Draw those "
            f'of each row from its own key, jax.random.fold_in(key, batch["example"][row]): '
            f"{docs_url('models', 'randomness')}",
        )
        return
    twice, once = (probe.pair(part(probe.rows, which), key) for which in ([0, 1, 0, 1], [0, 1]))
    if plain.apart(twice, once).total <= bound < plain.apart(once, NOTHING).total:
        yield Breach(
            "mean",
            f"its loss returns a mean as the sum. {ROWS // 2} rows give {once}, the same rows twice {twice}: the sum "
            f"is {twice.total / once.total:.6g} times as large and must be 2 times as large. Loss and gradients would "
            f"be too small, or means of means. {RESULT}",
        )
        return
    yield Breach(
        "rows",
        f"its rows depend on each other. {_arrangements(plain)}. A device has only its own rows, so every mesh would "
        "train a different model. Possible causes are batch norm (sum its statistics over spmdkit.batch_axes(), or use "
        "layer or group norm), arrays of shapes (rows, 1) and (rows,) in one operation, which broadcast to (rows, "
        "rows), losses between the rows of a batch, means over rows, and the use of a row's position in the batch.",
    )


def _arrangements(found: Pairs) -> str:
    return (
        f"{ROWS} rows give {found.whole}, their halves {found.first} + {found.second} = {found.halves}, in another "
        f"order {found.shuffled}"
    )


def _weights(found: Pairs, bound: float) -> Iterator[Breach]:
    """Yields a breach in the use of weights."""
    zero = found.unweighted or NOTHING
    if found.whole.weight == 0:
        problem, fix = "the weight that it returns is 0", f"The runtime divides by the weight. {RESULT}"
    elif found.adds_a_constant(bound):
        problem = f"it adds {zero.total:.6g} on every call, for any weights of the rows"
        fix = 'Weight a penalty on the parameters like the rows: add penalty * batch["weights"].sum() to the sum.'
    elif not found.ignores_padding(bound):
        problem = "rows of weight zero count, such as the padding of the last evaluation batch"
        fix = f"Multiply the loss of each row (or token) by its weight, and do not divide by the weights. {RESULT}"
    elif not found.weights_add_up(bound):
        problem = "the weight that it returns does not add up"
        fix = f"{RESULT} Without weights, the weight is the number of rows."
    else:
        return
    with_zeros = f", with weights of zero {zero}, which must be (0, 0)" if found.unweighted is not None else ""
    yield Breach("weights", f"{problem}. {_arrangements(found)}{with_zeros}. {fix}")


def _future(probe: Probe) -> Iterator[Breach]:
    """Yields a breach if the rows are those of a language model, and changed later tokens change earlier losses."""
    half = part(probe.rows, slice(ROWS // 2))  # their program has no gradient, and is compiled
    if not may_look_ahead(lambda rows: probe.pair(rows).total, half, float(np.finfo(np.float32).eps)):
        return
    exact, _ = _widened(probe)
    bound = SAME if exact.dtype == "float64" else SCREEN
    seen = look_ahead(lambda rows: exact.pair(rows).total, half, bound).seen
    if seen is None:
        return
    position, change = seen
    yield Breach(
        "future",
        f"it sees later tokens. The targets are the inputs, shifted by one. With other tokens after position "
        f"{position}, the losses of the positions up to it change by a relative {change:.2g}; a language model must "
        "not know these tokens, and its loss means nothing. Possible causes are a missing or shifted causal mask, and "
        "convolutions, pooling or norms over the positions.",
    )


def _dead(probe: Probe, first: Pair, batch: HostBatch) -> Iterator[Breach]:
    """Yields a breach if all gradients are zero on more rows as well."""
    rows = first_rows(batch, MANY_ROWS)
    assert rows is not None, "four were found before"
    if probe.moves(probe.given, rows)[1]:
        return
    near, moves = probe.moves(probe.moved, rows)
    if moves and first.total == 0:  # it may be the minimum for these rows
        return
    number = sum(leaf.size for leaf in jax.tree.leaves(probe.given))
    if moves:
        result = f" at the parameters that init returns: {number:,} parameters, a loss of {first}. Nearby parameters "
        cause = "have gradients: layers of zeros may keep each other at zero, so draw the parameters at random."
    else:
        result = f": {number:,} parameters, a loss of {near}, and no parameter changes it. Look for "
        cause = "jax.lax.stop_gradient, a loss multiplied by 0, argmax, rounding, or parameters that are not read."
    yield Breach("dead", f"every gradient is zero{result}{cause} Training would change nothing.")
