"""Text from a language model: one compiled program that reads a fixed window and writes token after token."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from ..mesh.errors import UserError
from ..mesh.keys import make_key
from ..parallel.model import LOGITS, Batch, BlockModel, Model, Params, without_predict
from ..parallel.step.state import seed_problem


class Window(NamedTuple):
    """The tokens that the model reads.

    Attributes:
        tokens: (W,) int32, the last tokens of the text, then padding.
        filled: int32 scalar, how many of them are text; at least 1.
    """

    tokens: Array
    filled: Array


def generate(
    model: Model | BlockModel,
    params: Params,
    prompt: str | bytes | Sequence[int],
    *,
    length: int,
    window: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """Continues a prompt.

    The parameters may be laid out over a mesh, of several processes too: the program runs where they are and XLA moves
    what it must. On several processes, all of them call this, with the same arguments.

    Args:
        model: A language model whose `predict` turns {"inputs": (1, window) int32} into logits (1, window, V), those
            at a position depending on no later one.
        params: Its parameters, global arrays.
        prompt: Tokens to begin with; text stands for its bytes. The model sees as much of its end as fits the
            window; an empty one stands for one token 0, which separates documents in byte-level text.
        length: Tokens to generate, >= 1.
        window: Tokens that the model sees at once, >= 1: usually the length it was trained on.
        temperature: 0 takes the likeliest token each time; 1 draws from the model's own distribution.
        seed: The draws; the same for the same seed on every mesh, up to rounding.

    Returns:
        The whole prompt and `length` new tokens. The program is compiled once for each model, length and window.

    Raises:
        UserError: The model predicts nothing, its predictions are no logits over tokens, a token of the prompt is
            outside its vocabulary, or a number is out of range.
    """
    predict = model.predict
    if predict is None:
        raise UserError(without_predict(model.name, "it cannot continue a prompt", LOGITS))
    if isinstance(prompt, str):
        check_text(prompt)
    tokens = list(prompt.encode() if isinstance(prompt, str) else prompt)
    start = (tokens or [0])[-window:]
    _check_numbers(length=(length, 1), window=(window, 1), temperature=(temperature, 0))
    if problem := seed_problem(seed, "seed"):
        raise UserError(problem)
    _check_tokens(predict, params, start, window)
    buffer = np.zeros((window,), np.int32)
    buffer[: len(start)] = start
    new_tokens = _continue(
        params,
        Window(buffer, np.int32(len(start))),  # pyright: ignore[reportArgumentType]
        np.float32(temperature),
        np.uint32(seed),
        predict=predict,
        length=length,
        replicated=_replicated(params),
    )
    return tokens + np.asarray(new_tokens).tolist()


@functools.partial(jax.jit, static_argnames=("predict", "length", "replicated"))
def _continue(
    params: Params,
    window: Window,
    temperature: Array,
    seed: Array,
    *,
    predict: Callable[[Params, Batch], Array],
    length: int,
    replicated: NamedSharding | None,
) -> Array:
    """The new tokens, (length,) int32, whole on every device."""

    def write(window: Window, key: Array) -> tuple[Window, Array]:
        logits_LV = predict(params, {"inputs": window.tokens[None, :]})[0]
        logits_V = lax.dynamic_index_in_dim(logits_LV, window.filled - 1, keepdims=False)
        token = _draw(logits_V.astype(jnp.float32), temperature, key)
        return _append(window, token), token

    _, tokens = lax.scan(write, window, jax.random.split(make_key(seed), length))
    return tokens if replicated is None else lax.with_sharding_constraint(tokens, replicated)


def _draw(logits_V: Array, temperature: Array, key: Array) -> Array:
    likeliest = jnp.argmax(logits_V)
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, likeliest).astype(jnp.int32)


def _append(window: Window, token: Array) -> Window:
    """The window with one more token; a full one loses its first."""
    size = window.tokens.shape[0]
    full = window.filled == size
    kept = jnp.where(full, jnp.roll(window.tokens, -1), window.tokens)
    position = jnp.where(full, size - 1, window.filled)
    return Window(kept.at[position].set(token), position + 1)


def _replicated(params: Params) -> NamedSharding | None:
    """Whole on every device of the mesh that the parameters live on."""
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


def check_text(prompt: str) -> None:
    """Checks that a prompt can be encoded; the shell passes bytes that are not UTF-8 as lone surrogates.

    Raises:
        UserError: It cannot.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The prompt {prompt!r:.80} is not text in UTF-8: {error.reason}. Write it in UTF-8.") from None


def _check_numbers(**numbers: tuple[float, float]) -> None:
    problems = [
        f"{name}={given} has to be at least {least}." for name, (given, least) in numbers.items() if not given >= least
    ]
    if problems:
        raise UserError("\n".join(problems))


def _check_tokens(predict: Callable[[Params, Batch], Array], params: Params, start: Sequence[int], window: int) -> None:
    """Checks the tokens against what the model predicts for them, from shapes alone."""
    inputs: Any = jax.ShapeDtypeStruct((1, window), jnp.int32)
    shape = jax.eval_shape(predict, params, {"inputs": inputs}).shape
    if len(shape) != 3 or shape[:2] != (1, window):
        raise UserError(
            f"The model predicts an array of shape {shape} for {window} tokens. To continue a prompt it has to predict "
            f"logits for each position: (1, {window}, vocabulary)."
        )
    outside = [token for token in start if not 0 <= token < shape[2]]
    if outside:
        raise UserError(f"The prompt holds tokens {outside[:5]}, but the model's vocabulary is 0 to {shape[2] - 1}.")
