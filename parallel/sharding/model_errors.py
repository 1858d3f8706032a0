"""Errors in a model's own functions, found by tracing them before anything is compiled.

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

from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError
from ...mesh.keys import make_key
from ..model import BlockModel, Model, Params, has_state
from ..model.batch_names import guess_name
from ..model.loss_sums import LossSums, NotSums, as_sums, state_problem
from ..model.user_errors import accepts, as_user_error, is_of_package, locate_function
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
TRACER_ERRORS = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
TRACED = (
    "The function is traced once for all batches, so values are unknown in it: select with jnp.where, keep numbers as "
    "arrays, and call jnp instead of NumPy."
)
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
    _check_arguments(model, "init")
    wrong: list[str] = []
    classes: list[str] = []

    def init(key: Any) -> Params:
        params = model.init(key)
        classes.extend(_dataclasses(params))
        wrong.extend(f"{path or 'it'} is {_kind(leaf)}" for path, leaf in leaves_with_paths(params) if _kind(leaf))
        return () if wrong else params

    with as_user_error(f"model {model.name!r}: init", model.init, ModelError):
        params = jax.eval_shape(init, make_key(0))
    if wrong:
        raise ModelError(
            f"{_of_init(model)} invalid parameters: {_some(wrong)}. Parameters must be floating-point arrays, because "
            "they are differentiated and updated. Do not return constants, counters and keys from init: create them "
            "in the loss, or pass them in the batch; write a number as "
            f"jnp.asarray(1.0).{_register(classes)}"
        )
    return params


def abstract_state(model: Model | BlockModel) -> Any:
    """Returns the shapes and dtypes of a model's initial state; () for a model without one.

    Raises:
        ModelError: init_state cannot be called with only a key, raises an exception, or returns invalid values.
    """
    if not isinstance(model, Model) or model.init_state is None:
        return ()
    _check_arguments(model, "init_state")
    init_state, wrong, classes = model.init_state, list[str](), list[str]()

    def init(key: Any) -> Any:
        state = init_state(key)
        classes.extend(_dataclasses(state))
        wrong.extend(
            f"{path or 'it'} is {kind}" for path, leaf in leaves_with_paths(state) if (kind := _invalid_number(leaf))
        )
        return () if wrong else state

    with as_user_error(f"model {model.name!r}: init_state", init_state, ModelError):
        state = jax.eval_shape(init, make_key(0))
    if wrong:
        raise ModelError(
            f"model {model.name!r}: init_state, {locate_function(init_state)}, returns values that are not arrays of "
            f"numbers: {_some(wrong)}. Keep numbers as jnp.asarray(0); a key as "
            f"jax.random.key_data(key).{_register(classes)}"
        )
    return state


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
    where = _of_init(model)
    if not isinstance(params, Mapping) or any(name not in params for name in GROUPS):
        given = f"the groups {', '.join(map(str, params))}" if isinstance(params, Mapping) else type(params).__name__
        raise ModelError(f'{where} {given}. A BlockModel has the groups "embed", "blocks" and "head"; one may be {{}}.')
    missing = [name for name in (*model.embed_reads, *model.head_reads) if name not in params]
    if missing:
        raise ModelError(f"{where} the groups {', '.join(params)}; embed_reads or head_reads name {missing[0]!r} too.")
    wrong = [
        f"blocks/{path} is {_shape(leaf)}"
        for path, leaf in leaves_with_paths(params["blocks"])
        if leaf.shape[:1] != (model.num_blocks,)
    ]
    if wrong or not jax.tree.leaves(params["blocks"]):
        raise ModelError(
            f"{where} blocks that are not num_blocks={model.num_blocks} stacked on dim 0: "
            f"{_some(wrong) or 'blocks is empty'}. Give every leaf of blocks that first dim, as with jnp.stack."
        )


def check_loss(model: Model | BlockModel, batch: Shapes, *, compute: str = "float32", evaluates: bool = False) -> None:
    """Traces the loss of the rows of one device.

    Args:
        model: The model.
        batch: The per-device shapes and dtypes of a batch.
        compute: The compute dtype.
        evaluates: Whether the loss will also be called without a key.

    Raises:
        ModelError: The loss, or a part of a `BlockModel`, has other arguments, raises an exception, or returns an
            invalid result.
    """
    names = ("embed", "block", "head") if isinstance(model, BlockModel) else ("loss",)
    for name in (*names, *(("predict",) if model.predict is not None else ())):
        _check_arguments(model, name)
    params = abstract_init(model)
    if not jax.tree.leaves(params):
        given = f"an empty tree of parameters ({params}): there is nothing to train. Return a tree of arrays."
        raise ModelError(f"{_of_init(model)} {given}")
    check_groups(model, params)
    params = jax.eval_shape(lambda tree: cast_floats(tree, compute), params)
    cast = jax.eval_shape(lambda rows: cast_inputs(rows, compute), dict(batch))
    batch = {name: cast[name] for name in batch}
    key = jax.eval_shape(lambda: make_key(0))
    for given in (key, None) if evaluates else (key,):
        without = " without a key, as in evaluation," if given is None else ""
        if isinstance(model, BlockModel):
            _trace_blocks(model, params, batch, given, without)
        else:
            state = abstract_state(model)
            more = (state,) if has_state(model) else ()
            result = _trace(model, "loss", (params, batch, given, *more), batch, without)
            _check_sums(model, "loss", result)
            if given is not None and has_state(model):
                _check_state(model, result, state)


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
            f"{_some(changed) or 'the structure of x'}. Every block gets the result of the previous one, so it must "
            "return the shapes and dtypes that embed returns (cast with .astype(x.dtype))."
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
    """Describes the arguments of the function, and the fix."""
    held = _some([f"{name} {_shape(leaf)}" for name, leaf in batch.items()])
    params = _some([f"{path} {_shape(leaf)}" for path, leaf in leaves_with_paths(arguments[0])])
    given = f"On each device the batch contains {held}; the parameters are {params}."
    if remedy:
        return f"{given} {remedy}"
    if isinstance(error, KeyError):
        names = [str(name) for name in arguments[0]] if isinstance(arguments[0], Mapping) else []
        near = guess_name(error.args[0] if error.args else "", batch, names)
        return f"{given} Use a valid name{f' (did you mean {near})' if near else ''}, or add data with that name."
    if isinstance(error, TypeError) and "dtype" in str(error):
        return f"{given} Bring both to one dtype, as in x.astype(kernel.dtype)."
    if isinstance(error, TRACER_ERRORS):
        return f"{given} {TRACED}"
    if error is not None and is_of_package(error):
        return f"{given} Fix the called function, or the data."
    return f"{given} Fix that line, or the data."


def _check_arguments(model: Any, name: str) -> None:
    function = getattr(model, name)
    wanted = CALLED_WITH[name] + (", state" if name in ("loss", "predict") and has_state(model) else "")
    if not accepts(function, len(wanted.split(","))):
        raise ModelError(
            f"model {model.name!r}: {name}, {locate_function(function)}, cannot be called with "
            f"({wanted}), as the runtime calls it. Give it these arguments, in this order."
        )


def _dataclasses(tree: Any) -> list[str]:
    """Returns the names of dataclasses that JAX treats as leaves, each once."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_dataclass(leaf) and not isinstance(leaf, type)]
    return list(dict.fromkeys(type(leaf).__name__ for leaf in leaves))


def _register(classes: list[str]) -> str:
    """Returns the fix for dataclasses that JAX treats as leaves."""
    calls = " and ".join(f"jax.tree_util.register_dataclass({name})" for name in classes)
    return f" For JAX to find the arrays of a dataclass, call {calls}." if classes else ""


def _of_init(model: Model | BlockModel) -> str:
    return f"model {model.name!r}: init, {locate_function(model.init)}, returns"


def _check_sums(model: Any, name: str, result: Any) -> None:
    """Checks the result of a loss, given as shapes."""
    try:
        jax.eval_shape(lambda: as_sums(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)))
    except NotSums as error:
        where = locate_function(getattr(model, name))
        raise ModelError(f"model {model.name!r}: {name}, {where}, {error.reason}") from None


def _check_state(model: Any, result: Any, state: Any) -> None:
    """Checks the next state that a loss returned, given as shapes."""
    if problem := state_problem(LossSums(*result).state, state):
        raise ModelError(f"model {model.name!r}: loss, {locate_function(model.loss)}, {problem}")


def _invalid_number(leaf: Any) -> str:
    """Describes an invalid leaf of a state; "" for an array of numbers."""
    dtype = getattr(leaf, "dtype", None)
    is_number = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))
    return "" if is_number else _kind(leaf)


def _kind(leaf: Any) -> str:
    """Describes an invalid leaf of the parameters; "" for a floating-point array."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return f"{leaf!r} of type {type(leaf).__name__}"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "a random key"
    return "" if jnp.issubdtype(dtype, jnp.inexact) else _shape(leaf)


def _shape(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype} {tuple(leaf.shape)}"


def _some(items: list[str]) -> str:
    rest = len(items) - MAX_LISTED
    return ", ".join(items[:MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
