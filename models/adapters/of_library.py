"""`spmdkit.adapt`: a module of another library and a loss of its outputs become a `Model`."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax import Array

from ...mesh.errors import UserError
from ...mesh.user_code import takes_option
from ...parallel.model import Batch, Model, Params
from ...parallel.model.loss_sums import LossSums
from ...parallel.model.row_axes import batch_axes
from .adapted import Adapted, Rows
from .row_dropout import row_keys
from .row_loss import row_function, sums

LIBRARIES = {
    "flax.linen": ("Module", "linen", "adapt_linen"),
    "flax.nnx": ("Module", "nnx", "adapt_nnx"),
    "equinox": ("Module", "equinox", "adapt_equinox"),
    "keras": ("Layer", "keras", "adapt_keras"),
}
"""The library's module -> its base class, the file here and the function in it. A further library is one file and one
line."""
MAKERS = {"rngs": "flax.nnx", "key": "equinox"}
"""The argument by which a function that makes a module tells whose it is."""


def adapt(
    module: Any,
    *,
    loss: str | Callable[[Any, Batch], Any],
    example: Mapping[str, Any],
    metrics: Mapping[str, str | Callable[[Any, Batch], Any]] | None = None,
    inputs: str | Callable[..., Any] = "inputs",
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
        inputs: What of a batch the module is called with: the name of an array, or batch -> arrays; a tuple is several
            arguments. A function with an argument `keys` is also given uint32 (rows, 2), a key for each row of this
            step, for a module that draws by itself.
        name: What reports call it; its class by default.

    Returns:
        The model; its parameters have the library's own paths.

    Raises:
        UserError: It is a module of no known library, or there is no such loss.
    """
    of_batch = _inputs(inputs)
    first_row = {"example": np.zeros(1, np.int32), **{key: array[:1] for key, array in example.items()}}
    adapted = _adapted(module, of_batch(first_row, None))
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


def library_of(module: Any, *, makers: bool = True) -> str | None:
    """The library of a module; None where it is of none.

    Args:
        module: Anything.
        makers: Also take a function of `rngs` or `key` for one that makes a module.
    """
    values = module if isinstance(module, tuple) else (module,)
    for library, (base, _, _) in LIBRARIES.items():
        if any(_descends(value, library, base) for value in values[:1]):
            return library
    return _of_maker(module) if makers and callable(module) else None


def made_with(module: Any, options: Mapping[str, Any]) -> Any:
    """A module as it is, or the function that makes it with these options given."""
    if not options or library_of(module, makers=False) is not None:
        return module
    argument = next(name for name, library in MAKERS.items() if library == _of_maker(module))
    if argument == "rngs":
        return lambda rngs: module(rngs=rngs, **options)
    return lambda key: module(key=key, **options)


def _of_maker(function: Any) -> str | None:
    try:
        parameters = list(inspect.signature(function.__init__ if isinstance(function, type) else function).parameters)
    except (TypeError, ValueError):
        return None
    return next((library for name, library in MAKERS.items() if name in parameters), None)


def _descends(value: Any, library: str, base: str) -> bool:
    """Whether a value is an instance of a library's base class, without importing the library."""
    package = library.partition(".")[0]
    found = any(kind.__module__.partition(".")[0] == package for kind in type(value).__mro__)
    return found and isinstance(value, getattr(import_module(library), base))


def _adapted(module: Any, inputs: Any) -> Adapted:
    library = library_of(module)
    if library is None:
        raise UserError(
            f"adapt got a {type(module).__name__}. It takes a module of Flax Linen, Flax NNX, Equinox or Keras, or a "
            "function of rngs (NNX) or key (Equinox) that makes one. A plain pair of functions is a spmdkit.Model."
        )
    _, file, function = LIBRARIES[library]
    return getattr(import_module(f".{file}", __package__), function)(module, inputs)


def _inputs(given: str | Callable[..., Any]) -> Callable[[Batch, Array | None], Any]:
    """What a batch and the key of a step give the module."""
    if callable(given):
        if takes_option(given, "keys"):
            return lambda batch, key: given(batch, keys=row_keys(key, batch["example"]))
        return lambda batch, key: given(batch)

    def named(batch: Batch, key: Array | None) -> Any:
        if given not in batch:
            raise UserError(f"inputs={given!r} is no array of the batch, which has {', '.join(batch)}.")
        return batch[given]

    return named
