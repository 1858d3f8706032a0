"""Text generation: one compiled program that reads the last tokens of the text and samples token after token."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from ..mesh.errors import UserError
from ..mesh.keys import check_seed, make_key
from ..parallel.model import LOGITS, Batch, BlockModel, Model, Params, without_predict
from ..parallel.model.user_errors import as_user_error


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

    The parameters may be laid out over a mesh, also of several processes: the program runs on their devices and XLA
    adds the communication. All processes must call this, with the same arguments.

    Args:
        model: A language model whose `predict` turns {"inputs": (1, window) int32} into logits (1, window, V), which
            at each position do not depend on later ones.
        params: The parameters, global arrays.
        prompt: The first tokens; text is read as its bytes. The model sees the end that fits the window; an empty
            prompt is read as one token 0, which separates documents in byte-level text.
        length: Tokens to generate, >= 1.
        window: Tokens that the model sees at once, >= 1: usually the length of the training rows.
        temperature: 0 selects the most likely token each time; 1 samples from the model's own distribution.
        seed: The seed of the sampling; the result is the same on every mesh, up to rounding.

    Returns:
        The whole prompt and `length` new tokens. The program is compiled once for each model, length and window.

    Raises:
        UserError: The model has no `predict`, its predictions are not logits over tokens, a token of the prompt is
            outside its vocabulary, or a number is out of range.
    """
    predict = model.predict
    if predict is None:
        raise UserError(without_predict(model.name, "it cannot continue a prompt", LOGITS))
    if isinstance(prompt, str):
        check_text(prompt)
    tokens = list(prompt.encode() if isinstance(prompt, str) else prompt)
    start = (tokens or [0])[-window:]
    if length < 1 or window < 1 or not temperature >= 0:
        raise UserError(
            f"length={length} and window={window} must be at least 1, and temperature={temperature} at least 0."
        )
    check_seed(seed)
    _check_tokens(model, params, start, window)
    text = np.zeros((window + length,), np.int32)
    text[: len(start)] = start
    numbers = np.int32(len(start)), np.float32(temperature), np.uint32(seed)
    static: Any = {"predict": predict, "window": window, "replicated": _replicated(params)}
    new_tokens = _continue(params, text, *numbers, **static)
    return tokens + np.asarray(new_tokens).tolist()


@functools.partial(jax.jit, static_argnames=("predict", "window", "replicated"))
def _continue(
    params: Params,
    text: Any,
    filled: Any,
    temperature: Any,
    seed: Any,
    *,
    predict: Callable[[Params, Batch], Array],
    window: int,
    replicated: NamedSharding | None,
) -> Array:
    """Returns the new tokens, int32, replicated.

    Args:
        params: The parameters.
        text: int32 (window + new tokens,): the prompt, then padding.
        filled: The number of tokens of the prompt, from 1 to `window`.
        temperature: See `generate`.
        seed: See `generate`.
        predict: The model's `predict`.
        window: Tokens that the model sees at once.
        replicated: The sharding of the result.
    """
    length = text.shape[0] - window

    def write(text: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        end, key = step
        begin = jnp.maximum(end - window, 0)
        logits_LV = predict(params, {"inputs": lax.dynamic_slice_in_dim(text, begin, window)[None, :]})[0]
        logits_V = lax.dynamic_index_in_dim(logits_LV, end - begin - 1, keepdims=False)
        token = _draw(logits_V.astype(jnp.float32), temperature, key)
        return text.at[end].set(token), token

    _, tokens = lax.scan(write, text, (filled + jnp.arange(length), jax.random.split(make_key(seed), length)))
    return tokens if replicated is None else lax.with_sharding_constraint(tokens, replicated)


def _draw(logits_V: Array, temperature: Array, key: Array) -> Array:
    likeliest = jnp.argmax(logits_V)
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, likeliest).astype(jnp.int32)


def _replicated(params: Params) -> NamedSharding | None:
    """Returns the replicated sharding on the mesh of the parameters, if they have one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    mesh = next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def check_text(prompt: str) -> None:
    """Raises a UserError if a prompt cannot be encoded; the shell passes invalid UTF-8 as unpaired surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The prompt {prompt!r:.80} is not valid UTF-8: {error.reason}. Write it in UTF-8.") from None


def _check_tokens(model: Model | BlockModel, params: Params, start: Sequence[int], window: int) -> None:
    """Checks that the model predicts one array from tokens alone, and the tokens against its shape."""
    predict: Any = model.predict
    inputs = jax.ShapeDtypeStruct((1, window), jnp.int32)
    with as_user_error(f"model {model.name!r}: predict, given inputs (1, {window}) alone,", predict):
        found = jax.eval_shape(predict, params, {"inputs": inputs})
    if not hasattr(found, "shape"):
        raise UserError(
            f"The model {model.name} predicts a {type(found).__name__}. To continue a prompt it must predict one "
            "array, logits for each position."
        )
    shape = found.shape
    if len(shape) != 3 or shape[:2] != (1, window):
        raise UserError(
            f"The model predicts an array of shape {shape} for {window} tokens. To continue a prompt it must predict "
            f"logits for each position: (1, {window}, vocabulary)."
        )
    outside = [token for token in start if not 0 <= token < shape[2]]
    if outside:
        raise UserError(f"The prompt has the tokens {outside[:5]}, but the model's vocabulary is 0 to {shape[2] - 1}.")
