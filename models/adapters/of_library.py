"""`spmdkit.adapt`: a module of another library and a loss of its outputs become a `Model`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax import Array

from ...mesh.errors import UserError
from ...mesh.user_errors import told_as_users
from ...mesh.user_options import takes_option
from ...parallel.model import Batch, Model, Params
from ...parallel.model.batch_names import meant, of_missing_key
from ...parallel.model.loss_sums import LossSums
from ...parallel.model.row_axes import batch_axes
from .adapted import Adapted, Rows
from .makers import LIBRARIES, library_of
from .row_dropout import row_keys
from .row_loss import row_function, sums


class ModuleError(UserError):
    """A module that cannot be made, or called with the data."""


def adapt(
    module: Any,
    *,
    loss: str | Callable[[Any, Batch], Any],
    example: Mapping[str, Any],
    metrics: Mapping[str, str | Callable[[Any, Batch], Any]] | None = None,
    inputs: str | Sequence[str] | Callable[..., Any] = "inputs",
    name: str = "",
) -> Model:
    """Makes a `Model` of a module of Flax Linen, Flax NNX, Equinox or Keras, as it is.

    Batch norm sums its statistics over the rows of all devices, its running statistics are the model's state, and
    dropout draws a mask for each row: loss and gradients do not depend on the mesh.

    Args:
        module: A `flax.linen.Module`; a `flax.nnx.Module` or a function of `rngs` that makes one; an `equinox.Module`
            for one row, a pair (module, state) of `equinox.nn.make_with_state`, or a function of `key` that makes
            either; a `keras.Layer` or `keras.Model` of the JAX backend. What a function makes is drawn from the run's
            seed; a module that is there already starts from its own values.
        loss: (outputs, batch) -> one number for each row, or for each position of each row, not summed; or one of
            softmax_cross_entropy, sigmoid_cross_entropy, squared_error, which compare with `batch["targets"]`.
        example: A batch of one row or more, arrays with rows on dim 0: what the module is called with.
        metrics: Name -> the same as for `loss`; also accuracy.
        inputs: What of a batch the module is called with: the name of an array, several names, or batch -> arrays; a
            tuple is several arguments, or the inputs of a functional Keras model. A function with an argument `keys`
            is also given uint32 (rows, 2), a key for each row of this step, for a module that draws by itself.
        name: What reports call it; its class by default.

    Returns:
        The model; its parameters have the library's own paths.

    Raises:
        ModuleError: It raises something while it is made or called.
        UserError: It is a module of no known library, or there is no such loss.
    """
    for key, value, entry in (("example", example, "inputs: array"), ("metrics", metrics or {}, "name: function")):
        if not isinstance(value, Mapping):
            raise UserError(f"adapt: {key} must be a mapping {{{entry}}}, got a {type(value).__name__}.")
    of_batch = _inputs(inputs)
    first_row = {"example": np.zeros(1, np.int32), **{key: array[:1] for key, array in example.items()}}
    what = f"model {name or _name_of(module)!r}"
    given = _called(of_batch, first_row, f"{what}: inputs", inputs)
    with _told_with_inputs(what, module, given):
        adapted = _adapted(module, given)
    of_rows = row_function(loss, "loss")
    more = {key: row_function(each, f"metrics.{key}") for key, each in (metrics or {}).items()}

    def run(params: Params, state: Any, batch: Batch, key: Array | None) -> tuple[Any, Any]:
        axes = batch_axes() if adapted.keeps_state and key is not None else ()
        return adapted.call(params, state, of_batch(batch, key), Rows(key=key, example=batch["example"], axes=axes))

    def model_loss(params: Params, batch: Batch, key: Array | None, state: Any = ()) -> LossSums:
        outputs, after = run(params, state, batch, key)
        total, weight = sums(of_rows, outputs, batch, "loss")
        found = {name: sums(function, outputs, batch, f"metrics.{name}") for name, function in more.items()}
        return LossSums(total, weight, found, after if adapted.keeps_state else ())

    def predict(params: Params, batch: Batch, state: Any = ()) -> Any:
        rows = next(iter(batch.values())).shape[0]
        return run(params, state, {"example": jax.numpy.zeros(rows, "int32"), **batch}, None)[0]

    if not adapted.keeps_state:
        return Model(
            init=lambda key: adapted.init(key)[0],
            loss=lambda params, batch, key: model_loss(params, batch, key),
            predict=lambda params, batch: predict(params, batch),
            name=name or adapted.name,
            library=library_of(module) or "",
        )
    return Model(
        init=lambda key: adapted.init(key)[0],
        init_state=lambda key: adapted.init(key)[1],
        loss=lambda params, batch, key, state: model_loss(params, batch, key, state),
        predict=lambda params, batch, state: predict(params, batch, state),
        name=name or adapted.name,
        library=library_of(module) or "",
    )


def _name_of(module: Any) -> str:
    """What messages call a module that has no name of the user's."""
    module = module[0] if isinstance(module, tuple) and module else module
    return getattr(module, "__name__", type(module).__name__)


def _called(of_batch: Callable[..., Any], row: Batch, what: str, inputs: Any) -> Any:
    """What a module is called with for one row."""
    try:
        with told_as_users(what, inputs if callable(inputs) else None, ModuleError):
            return of_batch(row, None)
    except ModuleError as error:
        said = of_missing_key(error.__cause__, row) if isinstance(error.__cause__, KeyError) else ""
        raise ModuleError(f"{str(error).rstrip('.')}. {said}" if said else str(error)) from error.__cause__


@contextmanager
def _told_with_inputs(what: str, module: Any, given: Any) -> Iterator[None]:
    """Tells what a module raises while it is made or called, and what it is called with."""
    first = module[0] if isinstance(module, tuple) and module else module
    code = module if library_of(module, makers=False) is None else type(first).__call__
    try:
        with told_as_users(f"{what}: the module", code, ModuleError):
            yield
    except ModuleError as error:
        leaves = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in jax.tree.leaves(given) if _is_array(leaf))
        row = f"One row of the data, as model.inputs gives it to the module, is {leaves}."
        raise ModuleError(f"{str(error).rstrip('.')}. {row}") from error.__cause__


def _is_array(leaf: Any) -> bool:
    """Whether a leaf of what a module is called with has a shape and a dtype."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _adapted(module: Any, inputs: Any) -> Adapted:
    library = library_of(module)
    if library is None:
        raise UserError(
            f"adapt got a {type(module).__name__}. It takes a module of Flax Linen, Flax NNX, Equinox or Keras, or a "
            "function of rngs (NNX) or key (Equinox) that makes one. A plain pair of functions is a spmdkit.Model."
        )
    _, file, function = LIBRARIES[library]
    return getattr(import_module(f".{file}", __package__), function)(module, inputs)


def _inputs(given: str | Sequence[str] | Callable[..., Any]) -> Callable[[Batch, Array | None], Any]:
    """What a batch and the key of a step give the module."""
    if callable(given):
        if takes_option(given, "keys"):
            return lambda batch, key: given(batch, keys=row_keys(key, batch["example"]))
        return lambda batch, key: given(batch)
    if not isinstance(given, str):
        each = [_inputs(name) for name in given]
        return lambda batch, key: tuple(named(batch, key) for named in each)

    def named(batch: Batch, key: Array | None) -> Any:
        if given not in batch:
            near = meant(given, batch)
            hint = f" Did you mean {near!r}?" if near else ""
            raise UserError(f"inputs={given!r} is no array of the batch, which has {', '.join(batch)}.{hint}")
        return batch[given]

    return named
