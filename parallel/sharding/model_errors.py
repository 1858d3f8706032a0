"""Mistakes in a model's own functions, found by tracing them before anything is compiled, each told in one message.

init     its arguments, what it raises, no parameters, parameters that are no floating-point arrays, blocks that
         are not stacked
state    arrays of numbers, and the same from every loss
loss     its arguments, what it raises, what it returns, for the rows of one device
blocks   what embed, block and head raise and return, a block that gives back another shape or dtype
predict  its arguments
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError
from ...mesh.keys import make_key
from ...mesh.user_errors import accepts, is_of_package, place_of_function, told_as_users
from ..model import BlockModel, Model, Params, has_state
from ..model.batch_names import meant
from ..model.loss_sums import LossSums, NotSums, as_sums, state_problem
from ..precision import cast_floats, cast_inputs

GROUPS = ("embed", "blocks", "head")
MOST_LISTED = 12
CALLED_WITH = {
    "init": "key",
    "loss": "params, batch, key",
    "predict": "params, batch",
    "embed": "groups, batch, key",
    "block": "block_params, x, key",
    "head": "groups, x, batch, key",
    "init_state": "key",
}
"""The functions of a model and what they are given; `loss` and `predict` of a model with a state get it last."""
OF_TRACING = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
TRACED = (
    "The function is traced once for all batches, so no value is known in it: choose with jnp.where, keep numbers as "
    "arrays, and call jnp in place of NumPy."
)
WITHOUT_KEY = (
    "The same call with a key succeeds: in evaluation key is None, so draw random numbers only `if key is not None`."
)
Shapes = Mapping[str, jax.ShapeDtypeStruct]


class ModelError(UserError):
    """A mistake in one of a model's own functions."""


def abstract_init(model: Model | BlockModel) -> Params:
    """Shapes and dtypes of what a model's init returns; no array is made.

    Raises:
        ModelError: init cannot be called with a key alone, raises something, or returns what cannot be trained.
    """
    _check_arguments(model, "init")
    wrong: list[str] = []
    classes: list[str] = []

    def init(key: Any) -> Params:
        params = model.init(key)
        classes.extend(_dataclasses(params))
        wrong.extend(f"{path or 'it'} is {_kind(leaf)}" for path, leaf in leaves_with_paths(params) if _kind(leaf))
        return () if wrong else params

    with told_as_users(f"model {model.name!r}: init", model.init, ModelError):
        params = jax.eval_shape(init, make_key(0))
    if wrong:
        raise ModelError(
            f"{_of_init(model)} what is no parameter: {_some(wrong)}. Parameters have to be floating-point arrays, as "
            "they are differentiated and updated. Keep constants, counters and keys out of init's result: make them "
            "where the loss uses them, or give them in the batch; write a number as "
            f"jnp.asarray(1.0).{_register(classes)}"
        )
    return params


def abstract_state(model: Model | BlockModel) -> Any:
    """Shapes and dtypes of the state that a model's init_state returns; () of a model without one.

    Raises:
        ModelError: init_state cannot be called with a key alone, raises something, or returns what is no number.
    """
    if not isinstance(model, Model) or model.init_state is None:
        return ()
    _check_arguments(model, "init_state")
    init_state, wrong, classes = model.init_state, list[str](), list[str]()

    def init(key: Any) -> Any:
        state = init_state(key)
        classes.extend(_dataclasses(state))
        wrong.extend(
            f"{path or 'it'} is {kind}" for path, leaf in leaves_with_paths(state) if (kind := _no_number(leaf))
        )
        return () if wrong else state

    with told_as_users(f"model {model.name!r}: init_state", init_state, ModelError):
        state = jax.eval_shape(init, make_key(0))
    if wrong:
        raise ModelError(
            f"model {model.name!r}: init_state, {place_of_function(init_state)}, returns what is no array of numbers: "
            f"{_some(wrong)}. Keep numbers as jnp.asarray(0); a key as jax.random.key_data(key).{_register(classes)}"
        )
    return state


def check_groups(model: Model | BlockModel, params: Params) -> None:
    """Checks the groups of a `BlockModel` and that its blocks are stacked.

    Args:
        model: Any model; of others there is nothing to check.
        params: What `abstract_init` returns for it, or the same cast.

    Raises:
        ModelError: A group is missing, or a leaf of "blocks" has another first dim than `num_blocks`.
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
        batch: Per-device shapes and dtypes of a batch.
        compute: The dtype in which parameters reach the model.
        evaluates: Whether the loss will also be called without a key.

    Raises:
        ModelError: The loss, or a part of a model of blocks, cannot be called so, raises, or returns something else.
    """
    names = ("embed", "block", "head") if isinstance(model, BlockModel) else ("loss",)
    for name in (*names, *(("predict",) if model.predict is not None else ())):
        _check_arguments(model, name)
    params = abstract_init(model)
    if not jax.tree.leaves(params):
        given = f"no parameters ({params}): there is nothing to train. Return a tree of arrays."
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
            f"model {model.name!r}: block, {place_of_function(model.block)}, changes "
            f"{_some(changed) or 'the structure of x'}. Every block gets what the one before it returns: it has to "
            "give back the shapes and dtypes that embed returns (cast with .astype(x.dtype))."
        )
    _check_sums(model, "head", _trace(model, "head", (head, x, batch, key), batch, without))


def _trace(model: Any, name: str, arguments: tuple[Any, ...], batch: Shapes, without: str) -> Any:
    """What a function returns, as shapes."""
    function = getattr(model, name)
    try:
        with told_as_users(f"model {model.name!r}: {name}{without}", function, ModelError):
            return jax.eval_shape(function, *arguments)
    except ModelError as error:
        facts = _facts(error.__cause__, arguments, batch, WITHOUT_KEY if without else "")
        raise ModelError(f"{str(error).rstrip(' .,')}. {facts}") from error.__cause__


def _facts(error: BaseException | None, arguments: tuple[Any, ...], batch: Shapes, remedy: str) -> str:
    """What the function was given, and what to do."""
    held = _some([f"{name} {_shape(leaf)}" for name, leaf in batch.items()])
    params = _some([f"{path} {_shape(leaf)}" for path, leaf in leaves_with_paths(arguments[0])])
    given = f"On each device the batch holds {held}; the parameters are {params}."
    if remedy:
        return f"{given} {remedy}"
    if isinstance(error, KeyError):
        names = [str(name) for name in arguments[0]] if isinstance(arguments[0], Mapping) else []
        near = meant(error.args[0] if error.args else "", batch, names)
        return f"{given} Read what is there{f' (did you mean {near})' if near else ''}, or give data of that name."
    if isinstance(error, TypeError) and "dtype" in str(error):
        return f"{given} Bring both to one dtype, as in x.astype(kernel.dtype)."
    if isinstance(error, OF_TRACING):
        return f"{given} {TRACED}"
    if error is not None and is_of_package(error):
        return f"{given} Mend what is called there, or the data."
    return f"{given} Mend that line, or the data."


def _check_arguments(model: Any, name: str) -> None:
    function = getattr(model, name)
    wanted = CALLED_WITH[name] + (", state" if name in ("loss", "predict") and has_state(model) else "")
    if not accepts(function, len(wanted.split(","))):
        raise ModelError(
            f"model {model.name!r}: {name}, {place_of_function(function)}, cannot be called with "
            f"({wanted}), as the runtime calls it. Give it these arguments, in this order."
        )


def _dataclasses(tree: Any) -> list[str]:
    """The classes of the dataclasses that JAX takes for leaves, each once."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_dataclass(leaf) and not isinstance(leaf, type)]
    return list(dict.fromkeys(type(leaf).__name__ for leaf in leaves))


def _register(classes: list[str]) -> str:
    """The remedy for dataclasses that JAX does not look into."""
    calls = " and ".join(f"jax.tree_util.register_dataclass({name})" for name in classes)
    return f" For JAX to find the arrays of a dataclass, call {calls}." if classes else ""


def _of_init(model: Model | BlockModel) -> str:
    return f"model {model.name!r}: init, {place_of_function(model.init)}, returns"


def _check_sums(model: Any, name: str, result: Any) -> None:
    """Checks what a loss returned, given as shapes."""
    try:
        jax.eval_shape(lambda: as_sums(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)))
    except NotSums as error:
        where = place_of_function(getattr(model, name))
        raise ModelError(f"model {model.name!r}: {name}, {where}, {error.said}") from None


def _check_state(model: Any, result: Any, state: Any) -> None:
    """Checks that a loss returned the next state, given as shapes."""
    if problem := state_problem(LossSums(*result).state, state):
        raise ModelError(f"model {model.name!r}: loss, {place_of_function(model.loss)}, {problem}")


def _no_number(leaf: Any) -> str:
    """What a leaf of a state is that cannot be one; empty for an array of numbers."""
    dtype = getattr(leaf, "dtype", None)
    is_number = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))
    return "" if is_number else _kind(leaf)


def _kind(leaf: Any) -> str:
    """What a leaf of the parameters is that cannot be one; empty for an array of floating-point numbers."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return f"{leaf!r} of type {type(leaf).__name__}"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "a random key"
    return "" if jnp.issubdtype(dtype, jnp.inexact) else _shape(leaf)


def _shape(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype} {tuple(leaf.shape)}"


def _some(items: list[str]) -> str:
    rest = len(items) - MOST_LISTED
    return ", ".join(items[:MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "")
