"""Finds errors in a model's own functions by tracing them before compilation.

init     arguments, exceptions, missing parameters, parameters that are not floating-point arrays, blocks that are not
         stacked
state    arrays of numbers, with the same structure from every loss
loss     arguments, exceptions and results, for the rows of one device
blocks   exceptions and results of embed, block and head; a block that changes shapes or dtypes
predict  arguments
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...layouts.paths import leaves_with_paths, some
from ...mesh.errors import UserError
from ...mesh.keys import make_key
from ..model import BlockModel, Model, Params, has_state
from ..model.batch_names import guess_name
from ..model.loss_sums import LossSums, NotSums, as_sums, state_problem
from ..model.user_errors import accepts, as_user_error, locate_function
from ..options import cast_floats, cast_inputs

GROUPS = ("embed", "blocks", "head")
MAX_LISTED = 12
CALLED_WITH = {
    "init": "key",
    "loss": "params, batch, key",
    "predict": "params, batch",
    "embed": "groups, batch, key",
    "block": "block_params, x, key",
    "head": "groups, x, batch, key",
    "init_state": "key",
}
"""The functions of a model and their arguments; `loss` and `predict` get the state of a model last."""
WITHOUT_KEY = (
    "The same call with a key succeeds: in evaluation key is None, so draw random numbers only `if key is not None`."
)
Shapes = Mapping[str, jax.ShapeDtypeStruct]


class ModelError(UserError):
    """An error in one of a model's own functions."""


def abstract_init(model: Model | BlockModel) -> Params:
    """Returns the shapes and dtypes of a model's initial parameters, without creating arrays.

    Raises:
        ModelError: init cannot be called with only a key, raises an exception, or returns untrainable values.
    """
    rule = (
        "Parameters must be floating-point arrays. Do not return constants, counters and keys from init: create them "
        "in the loss, or pass them in the batch; write a number as jnp.asarray(1.0)."
    )
    return _abstract_result(model, "init", jnp.inexact, f"invalid parameters: {{}}. {rule}")


def abstract_state(model: Model | BlockModel) -> Any:
    """Returns the shapes and dtypes of a model's initial state; () for a model without one.

    Raises:
        ModelError: init_state cannot be called with only a key, raises an exception, or returns invalid values.
    """
    if not has_state(model):
        return ()
    rule = "Keep numbers as jnp.asarray(0); a key as jax.random.key_data(key)."
    return _abstract_result(model, "init_state", jnp.generic, f"values that are not arrays of numbers: {{}}. {rule}")


def _abstract_result(model: Any, name: str, kind: Any, message: str) -> Any:
    """Returns the shapes and dtypes of the result of `init` or `init_state`, a tree of arrays of one kind."""
    _check_arguments(model, name)
    function, wrong, classes = getattr(model, name), list[str](), dict[str, None]()

    def init(key: Any) -> Any:
        result = function(key)
        for path, leaf in leaves_with_paths(result):
            if problem := _wrong_kind(leaf, kind):
                wrong.append(f"{path or 'it'} is {problem}")
            if is_dataclass(leaf):
                classes[type(leaf).__name__] = None
        return () if wrong else result

    with as_user_error(f"model {model.name!r}: {name}", function, ModelError):
        result = jax.eval_shape(init, make_key(0))
    if wrong:
        calls = " and ".join(f"jax.tree_util.register_dataclass({each})" for each in classes)
        hint = f" For JAX to find the arrays of a dataclass, call {calls}." if classes else ""
        raise ModelError(f"{_returned_by(model, name)} {message.format(some(wrong, MAX_LISTED))}{hint}")
    return result


def _wrong_kind(leaf: Any, kind: Any) -> str:
    """Describes a leaf that is not an array of a kind of numbers; "" for one that is."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return f"{leaf!r} of type {type(leaf).__name__}"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "a random key"
    return "" if jnp.issubdtype(dtype, kind) else _shape(leaf)


def check_groups(model: Model | BlockModel, params: Params) -> None:
    """Checks the groups of a `BlockModel` and that its blocks are stacked.

    Args:
        model: Any model; only a `BlockModel` is checked.
        params: The result of `abstract_init`, or the same cast.

    Raises:
        ModelError: A group is missing, or the first dim of a leaf of "blocks" is not `num_blocks`.
    """
    if not isinstance(model, BlockModel):
        return
    where = _returned_by(model, "init")
    groups = list(params) if isinstance(params, Mapping) else []
    missing = [name for name in (*GROUPS, *model.embed_reads, *model.head_reads) if name not in groups]
    if missing:
        given = f"the groups {', '.join(map(str, groups))}" if groups else type(params).__name__
        raise ModelError(
            f'{where} {given} without {missing[0]!r}. A BlockModel has the groups "embed", "blocks" and "head" (one '
            "may be {}), and those in embed_reads and head_reads."
        )
    wrong = [
        f"blocks/{path} is {_shape(leaf)}"
        for path, leaf in leaves_with_paths(params["blocks"])
        if leaf.shape[:1] != (model.num_blocks,)
    ]
    if wrong or not jax.tree.leaves(params["blocks"]):
        raise ModelError(
            f"{where} blocks that are not num_blocks={model.num_blocks} stacked on dim 0: "
            f"{some(wrong, MAX_LISTED) or 'blocks is empty'}. Give every leaf of blocks that first dim, as with "
            "jnp.stack."
        )


def check_loss(
    model: Model | BlockModel,
    batch: Shapes,
    *,
    compute: str = "float32",
    stored: str = "float32",
    evaluates: bool = False,
) -> None:
    """Traces the loss of the rows of one device.

    Args:
        model: The model.
        batch: The per-device shapes and dtypes of a batch.
        compute: The compute dtype.
        stored: The stored dtype, which the model's state has.
        evaluates: Whether the loss will also be called without a key.

    Raises:
        ModelError: The loss, or a part of a `BlockModel`, has other arguments, raises an exception, or returns an
            invalid result.
    """
    for name in ("embed", "block", "head") if isinstance(model, BlockModel) else ("loss",):
        _check_arguments(model, name)
    if model.predict is not None:
        _check_arguments(model, "predict")
    params = abstract_init(model)
    if not jax.tree.leaves(params):
        given = f"an empty tree of parameters ({params}): there is nothing to train. Return a tree of arrays."
        raise ModelError(f"{_returned_by(model, 'init')} {given}")
    check_groups(model, params)
    params = jax.eval_shape(lambda tree: cast_floats(tree, compute), params)
    cast = jax.eval_shape(lambda rows: cast_inputs(rows, compute), dict(batch))
    batch, key = {name: cast[name] for name in batch}, jax.eval_shape(lambda: make_key(0))
    for given in (key, None) if evaluates else (key,):
        without = " without a key, as in evaluation," if given is None else ""
        if isinstance(model, BlockModel):
            _trace_blocks(model, params, batch, given, without)
        else:
            state = jax.eval_shape(lambda tree: cast_floats(tree, stored), abstract_state(model))
            more = (state,) if has_state(model) else ()
            result = _trace(model, "loss", (params, batch, given, *more), batch, without)
            _check_sums(model, "loss", result, () if given is None else state)


def _trace_blocks(model: BlockModel, params: Params, batch: Shapes, key: Any, without: str) -> None:
    embed = {name: params[name] for name in model.embed_reads}
    head = {name: params[name] for name in model.head_reads}
    x = _trace(model, "embed", (embed, batch, key), batch, without)
    block = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["blocks"])
    y = _trace(model, "block", (block, x, key), batch, without)
    before, after = (dict(leaves_with_paths(each)) for each in (x, y))
    changed = [
        f"{path or 'x'} from {_shape(before.get(path))} to {_shape(after.get(path))}"
        for path in {**before, **after}
        if _shape(before.get(path)) != _shape(after.get(path))
    ]
    if changed or jax.tree.structure(x) != jax.tree.structure(y):
        raise ModelError(
            f"model {model.name!r}: block, {locate_function(model.block)}, changes "
            f"{some(changed, MAX_LISTED) or 'the structure of x'}. Every block gets the result of the previous one, so "
            "it must return the shapes and dtypes that embed returns (cast with .astype(x.dtype))."
        )
    _check_sums(model, "head", _trace(model, "head", (head, x, batch, key), batch, without))


def _trace(model: Any, name: str, arguments: tuple[Any, ...], batch: Shapes, without: str) -> Any:
    """Returns the shapes of a function's result."""
    function = getattr(model, name)
    try:
        with as_user_error(f"model {model.name!r}: {name}{without}", function, ModelError):
            return jax.eval_shape(function, *arguments)
    except ModelError as error:
        facts = _facts(error.__cause__, arguments, batch, WITHOUT_KEY if without else "")
        raise ModelError(f"{str(error).rstrip(' .,')}. {facts}") from error.__cause__


def _facts(error: BaseException | None, arguments: tuple[Any, ...], batch: Shapes, remedy: str) -> str:
    """Describes the arguments of the function, and the fix for an invalid name or a missing key."""
    held = some([f"{name} {_shape(leaf)}" for name, leaf in batch.items()], MAX_LISTED)
    params = some([f"{path} {_shape(leaf)}" for path, leaf in leaves_with_paths(arguments[0])], MAX_LISTED)
    if isinstance(error, KeyError) and not remedy:
        names = [str(name) for name in arguments[0]] if isinstance(arguments[0], Mapping) else []
        near = guess_name(error.args[0] if error.args else "", batch, names)
        remedy = f"Use a valid name{f' (did you mean {near})' if near else ''}, or add data with that name."
    return f"On each device the batch contains {held}; the parameters are {params}. {remedy}".rstrip()


def _check_arguments(model: Any, name: str) -> None:
    function = getattr(model, name)
    wanted = CALLED_WITH[name] + (", state" if name in ("loss", "predict") and has_state(model) else "")
    if not accepts(function, len(wanted.split(","))):
        call = f"cannot be called with ({wanted}), as the runtime calls it. Give it these arguments, in this order."
        raise ModelError(f"model {model.name!r}: {name}, {locate_function(function)}, {call}")


def _returned_by(model: Any, name: str) -> str:
    """Returns the beginning of a message about the result of a function."""
    return f"model {model.name!r}: {name}, {locate_function(getattr(model, name))}, returns"


def _check_sums(model: Any, name: str, result: Any, state: Any = ()) -> None:
    """Checks the result of a loss, given as shapes; `state` is the model's state, which it must return too."""
    try:
        jax.eval_shape(lambda: as_sums(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)))
        problem = state_problem(LossSums(*result).state, state) if jax.tree.leaves(state) else None
    except NotSums as error:
        problem = error.reason
    if problem:
        raise ModelError(f"model {model.name!r}: {name}, {locate_function(getattr(model, name))}, {problem}")


def _shape(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype} {tuple(leaf.shape)}"
