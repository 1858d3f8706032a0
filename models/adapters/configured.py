"""A module of another library, as a config names it: its loss, its metrics and what it is called with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...mesh.errors import UserError
from ...mesh.user_code import import_function
from ...parallel.model import Model
from .of_library import adapt
from .row_loss import NAMED, row_function

OF_OUTPUTS = ("loss", "metrics", "inputs")
"""Keys of the section `model` that are about what a module returns and is called with."""


def adapt_configured(
    module: Any,
    name: str,
    options: Mapping[str, Any],
    search_path: Sequence[str | Path],
    example: Callable[[], Mapping[str, Any]] | None,
) -> Model:
    """Makes a `Model` of a module and of `model.loss`, `model.metrics` and `model.inputs`.

    Args:
        module: As `adapt` takes it.
        name: The config's `model.name`.
        options: Of `OF_OUTPUTS`, those given.
        search_path: Folders where the user's functions are looked for first.
        example: Gives a batch of one row or more.

    Raises:
        UserError: There is no loss, or one of the functions is not there.
    """
    if "loss" not in options:
        raise UserError(
            f"model.name={name!r} is a module of another library; model.loss says what judges its outputs: set it to "
            f"{', '.join(list(NAMED)[:-1])}, or your own module:function, (outputs, batch) -> one number for each row."
        )
    if example is None:
        raise UserError(f"model.name={name!r} is a module of another library, which needs an example of the data.")
    named = _named(options.get("metrics", {}))

    def found(given: Any, key: str) -> Any:
        is_own = isinstance(given, str) and ":" in given
        return import_function(given, key, search_path) if is_own else row_function(given, key)

    inputs = options.get("inputs", "inputs")
    is_name = isinstance(inputs, str)
    if not is_name and not (isinstance(inputs, Sequence) and all(isinstance(each, str) for each in inputs)):
        raise UserError(
            f"model.inputs={inputs!r} must be the name of an array of the data, or module:function, or a list of names."
        )
    return adapt(
        module,
        loss=found(options["loss"], "model.loss"),
        metrics={key: found(each, f"model.metrics.{key}") for key, each in named.items()},
        inputs=import_function(inputs, "model.inputs", search_path) if is_name and ":" in inputs else inputs,
        example=example(),
        name=name,
    )


def _named(metrics: Any) -> Mapping[str, Any]:
    """Metrics by their names, given by a list of names or as a mapping."""
    if isinstance(metrics, Mapping):
        return metrics
    if (
        isinstance(metrics, Sequence)
        and not isinstance(metrics, str)
        and all(isinstance(each, str) for each in metrics)
    ):
        return {each: each for each in metrics}
    example = f"[{metrics}]" if isinstance(metrics, str) else "[accuracy]"
    raise UserError(
        f"model.metrics={metrics!r} must be a list of names, such as {example}, or a mapping of names to "
        "module:function."
    )
