"""`spmdkit.adapt`: a module of another library and a loss of its outputs become a `Model`."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from ...layouts.paths import some
from ...mesh.errors import UserError
from ...parallel.model import Batch, Model, Params
from ...parallel.model.batch_names import explain_key_error, guess_name
from ...parallel.model.loss_sums import LossSums
from ...parallel.model.user_code import import_function
from ...parallel.model.user_errors import as_user_error
from ...parallel.model.user_options import takes_option
from ...parallel.sharding.batch_rows import batch_axes
from .adapted import Adapted, Rows, row_keys
from .libraries import library_of
from .row_loss import NAMED, row_function, sums


class ModuleError(UserError):
    """An error in making a module, or in calling it with the data."""


def adapt(
    module: Any,
    *,
    loss: str | Callable[[Any, Batch], Any],
    example: Mapping[str, Any],
    metrics: Mapping[str, str | Callable[[Any, Batch], Any]] | None = None,
    inputs: str | Sequence[str] | Callable[..., Any] = "inputs",
    name: str = "",
) -> Model:
    """Makes a `Model` of a module of Flax Linen, Flax NNX, Equinox or Keras.

    Batch norm sums its statistics over the rows of all devices, its running statistics are the model's state, and
    dropout draws a mask for each row: loss and gradients do not depend on the mesh.

    Args:
        module: A `flax.linen.Module`; a `flax.nnx.Module` or a function of `rngs` that makes one; an `equinox.Module`
            for one row, a pair (module, state) of `equinox.nn.make_with_state`, or a function of `key` that makes
            either; a `keras.Layer` or `keras.Model` of the JAX backend. A function's module is drawn from the run's
            seed; a module starts from its own values.
        loss: (outputs, batch) -> one number for each row, or for each position of each row, not summed; or one of
            softmax_cross_entropy, sigmoid_cross_entropy, squared_error, which compare with `batch["targets"]`.
        example: A batch of at least one row, arrays with rows on dim 0.
        metrics: Name -> the same as for `loss`; also accuracy.
        inputs: The arguments of the module from a batch: the name of an array, several names, or batch -> arrays; a
            tuple is several arguments, or the inputs of a functional Keras model. A function with an argument `keys`
            is also given uint32 (rows, 2), a key for each row of this step, for a module that draws by itself.
        name: The name in reports; by default, its class.

    Returns:
        The model; its parameters have the library's own paths.

    Raises:
        ModuleError: The module raises an error while it is made or called.
        UserError: The library of the module, or the loss, is unknown.
    """
    _check_mapping("example", example, "inputs: array")
    _check_mapping("metrics", metrics or {}, "name: function")
    _check_example(example)
    of_batch = _inputs(inputs)
    first_row = {"example": np.zeros(1, np.int32), **{key: array[:1] for key, array in example.items()}}
    first = module[0] if isinstance(module, tuple) and module else module
    name = name or getattr(first, "__name__", type(first).__name__)
    what = f"model {name!r}"
    with _with_hint(
        f"{what}: inputs",
        inputs if callable(inputs) else None,
        lambda cause: explain_key_error(cause, first_row) if isinstance(cause, KeyError) else "",
    ):
        given = of_batch(first_row, None)
    code = module if library_of(module, makers=False) is None else type(first).__call__
    with _with_hint(f"{what}: the module", code, lambda cause: _describe_row(given)):
        adapted = _adapted(module, given)
        first_state = jax.eval_shape(adapted.init, jax.eval_shape(jax.random.key, 0))[1]  # opens no device
        keeps_state = bool(jax.tree.leaves(first_state))
    _warn_of_losses(what, adapted.left_out)
    of_rows = row_function(loss, "loss")
    more = {key: row_function(each, f"metrics.{key}") for key, each in (metrics or {}).items()}

    def run(params: Params, state: Any, batch: Batch, key: Array | None) -> tuple[Any, Any]:
        axes = batch_axes() if keeps_state and key is not None else ()
        return adapted.call(params, state, of_batch(batch, key), Rows(key=key, example=batch["example"], axes=axes))

    def model_loss(params: Params, batch: Batch, key: Array | None, state: Any = ()) -> LossSums:
        outputs, after = run(params, state, batch, key)
        total, weight = sums(of_rows, outputs, batch, "loss")
        found = {name: sums(function, outputs, batch, f"metrics.{name}") for name, function in more.items()}
        return LossSums(total, weight, found, after if keeps_state else ())

    def predict(params: Params, batch: Batch, state: Any = ()) -> Any:
        rows = next(iter(batch.values())).shape[0]
        return run(params, state, {"example": jax.numpy.zeros(rows, "int32"), **batch}, None)[0]

    return Model(
        init=lambda key: adapted.init(key)[0],
        init_state=(lambda key: adapted.init(key)[1]) if keeps_state else None,
        loss=model_loss,
        predict=predict,
        name=name,
        library=library_of(module) or "",
    )


def _warn_of_losses(what: str, left_out: Sequence[str]) -> None:
    """Warns of losses that a module collects beside its outputs."""
    if left_out:
        warnings.warn(
            f"{what}: training leaves out {some(left_out)}, which the module collects beside its outputs. To count it, "
            "return it with the outputs, and add it in your own loss, one number for each row.",
            stacklevel=3,
        )


@contextmanager
def _with_hint(what: str, code: Any, hint: Callable[[BaseException | None], str]) -> Iterator[None]:
    """Turns an error of the user's code into a ModuleError, with a hint about its cause if there is one."""
    try:
        with as_user_error(what, code, ModuleError):
            yield
    except ModuleError as error:
        if more := hint(error.__cause__):
            raise ModuleError(f"{str(error).rstrip('.')}. {more}") from error.__cause__
        raise


def _describe_row(given: Any) -> str:
    shapes = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in map(np.asarray, jax.tree.leaves(given)))
    return f"One row of the data, as model.inputs gives it to the module, is {shapes}."


def _adapted(module: Any, inputs: Any) -> Adapted:
    library = library_of(module)
    if library is None:
        raise UserError(
            f"adapt does not support a {type(module).__name__}. It takes a module of Flax Linen, Flax NNX, Equinox or "
            "Keras, or a function of rngs (NNX) or key (Equinox) that makes one. A plain pair of functions is a "
            "spmdkit.Model."
        )
    file = library.rpartition(".")[2]
    return getattr(import_module(f".{file}", __package__), f"adapt_{file}")(module, inputs)


def _check_mapping(key: str, value: Any, entry: str) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"adapt: {key} must be a mapping {{{entry}}}, got a {type(value).__name__}.")


def _check_example(example: Mapping[str, Any]) -> None:
    """Checks that an example of a batch is arrays with at least one row on dim 0."""
    for name, value in example.items():
        if not hasattr(value, "shape") or not hasattr(value, "__getitem__"):
            raise UserError(
                f"adapt: example[{name!r}] must be an array with rows on dim 0, got {value!r:.60} "
                f"({type(value).__name__}). Use np.asarray([...]) of at least one row."
            )
        shape = tuple(value.shape)
        if not shape or shape[0] == 0:
            found = f"no rows, shape {shape}" if shape else "a scalar, without dims"
            raise UserError(
                f"adapt: example[{name!r}] must be an array with at least one row on dim 0, got {found}. A value that "
                "all rows share belongs into the module or the loss, not into the batch."
            )


def _inputs(given: str | Sequence[str] | Callable[..., Any]) -> Callable[[Batch, Array | None], Any]:
    """Returns the function from a batch and the key of a step to the module's arguments."""
    if callable(given):
        if takes_option(given, "keys"):
            return lambda batch, key: given(batch, keys=row_keys(key, batch["example"]))
        return lambda batch, key: given(batch)
    if not isinstance(given, str):
        if not isinstance(given, list | tuple) or not given:
            raise UserError(
                f"adapt: inputs={given!r:.60} ({type(given).__name__}) must be the name of an array of the batch, a "
                "list of names, or a function of the batch."
            )
        each = [_inputs(name) for name in given]
        return lambda batch, key: tuple(named(batch, key) for named in each)

    def named(batch: Batch, key: Array | None) -> Any:
        if given not in batch:
            near = guess_name(given, batch)
            hint = f" Did you mean {near!r}?" if near else ""
            raise UserError(f"inputs={given!r} is not an array of the batch, which has {', '.join(batch)}.{hint}")
        return batch[given]

    return named


OF_OUTPUTS = ("loss", "metrics", "inputs")
"""Keys of the section `model` about a module's inputs and outputs."""


def adapt_configured(
    module: Any,
    name: str,
    options: Mapping[str, Any],
    search_path: Sequence[str | Path],
    example: Callable[[], Mapping[str, Any]] | None,
) -> Model:
    """Makes a `Model` of a module, `model.loss`, `model.metrics` and `model.inputs`.

    Args:
        module: See `adapt`.
        name: The config's `model.name`.
        options: The given options of `OF_OUTPUTS`.
        search_path: Directories to search first for the user's functions.
        example: Returns a batch of at least one row.

    Raises:
        UserError: The loss is missing, or a function does not exist.
    """
    if "loss" not in options:
        raise UserError(
            f"model.name={name!r} is a module of another library: model.loss is missing. Set it to "
            f"{', '.join(list(NAMED)[:-1])}, or your own module:function, (outputs, batch) -> one number for each row."
        )
    if example is None:
        raise UserError(f"model.name={name!r} is a module of another library, which requires an example of the data.")
    metrics, inputs = options.get("metrics", {}), options.get("inputs", "inputs")
    for key, value in (("metrics", metrics), ("inputs", inputs)):
        if not isinstance(value, str | Sequence | Mapping):
            raise UserError(f"model.{key}={value!r} must be a name or a list of names.")
    if not isinstance(metrics, Mapping):
        metrics = {str(each): each for each in ([metrics] if isinstance(metrics, str) else metrics)}

    def is_own(given: Any) -> bool:
        return isinstance(given, str) and ":" in given

    def found(given: Any, key: str) -> Any:
        return import_function(given, key, search_path) if is_own(given) else row_function(given, key)

    return adapt(
        module,
        loss=found(options["loss"], "model.loss"),
        metrics={key: found(each, f"model.metrics.{key}") for key, each in metrics.items()},
        inputs=import_function(inputs, "model.inputs", search_path) if is_own(inputs) else inputs,
        example=example(),
        name=name,
    )
