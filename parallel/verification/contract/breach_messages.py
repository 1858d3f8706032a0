"""Messages for breaches of the contract: the measurement, the reason, the fix."""

from ....mesh.errors import docs_url
from .probe import ROWS, Pair, Pairs

HALF = ROWS // 2
PAIR = '((losses * batch["weights"]).sum(), batch["weights"].sum())'


def random(found: Pairs, alone: Pairs | None) -> str:
    """Returns the message for random numbers that depend on the other rows."""
    without = f"; without a key both give {alone.whole.total:.6g}" if alone else ""
    return (
        f"its random numbers depend on which rows are together. With a key, {ROWS} rows give a sum of "
        f"{found.whole.total:.6g}, their halves {found.first.total:.6g} + {found.second.total:.6g} = "
        f"{found.halves.total:.6g}, in another order {found.shuffled.total:.6g}{without}. "
        "Every mesh would draw other numbers. Draw those of each row from its own key, "
        f'jax.random.fold_in(key, batch["example"][row]): {docs_url("models", "randomness")}'
    )


def paired(found: Pairs) -> str:
    """Returns the message for shapes (rows, 1) and (rows,) in one operation."""
    return (
        f"{_depend(found)}It combines an array of shape (rows, 1) with one of shape (rows,), which broadcast to (rows, "
        "rows): every row meets every other. Give both the same shape, such as outputs[:, 0] or outputs.squeeze(-1) "
        "beside targets of shape (rows,)."
    )


def rows(found: Pairs) -> str:
    """Returns the message for rows that depend on each other."""
    return (
        f"{_depend(found)}Batch norm does this (sum its statistics over spmdkit.batch_axes(), or take layer or group "
        "norm), as do losses between the rows of a batch, means that are taken over rows, and whatever reads a row's "
        "place in the batch."
    )


def mean(twice: Pair, once: Pair) -> str:
    """Returns the message for a mean returned as the sum."""
    grows = abs(twice.weight) > 1.5 * abs(once.weight)
    meaning = (
        "The runtime divides by the weight once more: loss and gradients come out too small."
        if grows
        else "The runtime would take a mean of means, in which rows that weigh less count as much as others."
    )
    return (
        f"its loss returns a mean as the sum. {HALF} rows give {once}, the same rows twice {twice}: the sum is "
        f"{twice.total / once.total:.6g} times as large and must be 2 times as large. {meaning} Return {PAIR}."
    )


def constant(found: Pairs) -> str:
    """Returns the message for a penalty that is added on every call."""
    zero = found.unweighted
    assert zero is not None
    return (
        f"it adds {zero.total:.6g} on every call, whatever the rows weigh: {ROWS} rows give {found.whole}, with "
        f"weights of zero {zero}. Every device and microbatch would add it again. A penalty on the parameters must "
        'count as the rows do: add penalty * batch["weights"].sum() to the sum.'
    )


def unweighted(found: Pairs) -> str:
    """Returns the message for rows with weight zero that count."""
    zero = found.unweighted
    assert zero is not None
    if not zero.is_finite:
        remedy = "The loss divides by the sum of the weights, which is 0 for padding alone. Do not divide"
    elif zero.total != 0:
        remedy = 'The loss does not multiply what a row (or a token) loses by batch["weights"]'
    else:
        remedy = 'The weight is not the sum of batch["weights"]; it may be a number of rows, or kept above 0'
    return (
        f"rows of weight zero count. {ROWS} rows give {found.whole}, with weights of zero {zero}, which must be "
        f"(0, 0): evaluation would count the rows that fill up its last batch. {remedy}: return {PAIR}."
    )


def weight_alone(found: Pairs) -> str:
    """Returns the message for a weight that does not add up."""
    return (
        f"the weight that it returns does not add up. {ROWS} rows give {found.whole}, their halves {_pairs(found)}. "
        f"The runtime divides by the sum of all weights. Return {PAIR}; without weights, the number of rows."
    )


def no_weight(found: Pairs) -> str:
    """Returns the message for a weight of zero."""
    return (
        f"the weight that it returns is 0. {ROWS} rows that have weight give {found.whole}, and the runtime divides "
        f"by the weight. Return {PAIR}."
    )


def dead(number: int, pair: Pair) -> str:
    """Returns the message for a model without gradients."""
    return (
        f"every gradient is zero: {number:,} parameters, a loss of {pair}, and no parameter changes it. Training would "
        "change nothing. Look for jax.lax.stop_gradient, a loss multiplied by 0, argmax, rounding, a cast to "
        "integers, or parameters that the loss does not read."
    )


def dead_at_first(number: int, pair: Pair) -> str:
    """Returns the message for a model without gradients at its initial parameters."""
    return (
        f"every gradient is zero at the parameters that init returns: {number:,} parameters, a loss of {pair}. Near "
        "them there are gradients, so training would never leave its start. Draw the parameters at random: layers of "
        "zeros that multiply each other keep each other at zero."
    )


def _depend(found: Pairs) -> str:
    return (
        f"its rows depend on each other. {ROWS} rows give {found.whole}, their halves {_pairs(found)}, in "
        f"another order {found.shuffled}. A device sees its own rows alone, so every mesh would train another model. "
    )


def _pairs(found: Pairs) -> str:
    return f"{found.first} + {found.second} = {found.halves}"
