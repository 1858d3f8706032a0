"""Freezing: a model with some parameters that do not train, because its loss stops their gradients.

Their gradients are exactly zero, so the norm of the gradients and its clipping do not count them, and backward does not
compute them. The optimizer must skip them too (`optimizer.freeze` does both): weight decay would change them, and
averages would take memory.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

from jax import lax

from ..layouts.paths import leaves_with_paths, map_with_path, match_paths, some
from ..mesh.errors import UserError
from ..parallel.collectives import Traffic
from ..parallel.model import BlockModel, Model, Params
from ..parallel.sharding.model_errors import abstract_init

AnyModel = TypeVar("AnyModel", bound=Model | BlockModel)
FREEZE = "optimizer.freeze"
"""The config key of the regular expressions."""


def frozen_paths(patterns: Collection[str], params: Params) -> frozenset[str]:
    """Returns the paths of the parameters that regular expressions match.

    Args:
        patterns: Regular expressions of whole paths, or paths.
        params: The parameters, or their shapes.

    Raises:
        UserError: An expression does not match any parameter, or all parameters are frozen.
    """
    paths = [path for path, _ in leaves_with_paths(params)]
    frozen = frozenset(path for met in match_paths(tuple(patterns), paths, FREEZE).values() for path in met)
    if paths and frozen.issuperset(paths):
        raise UserError(
            f"{FREEZE}={list(patterns)} matches all {len(paths)} parameters ({some(paths)}): none is left to train. "
            "Remove one."
        )
    return frozen


def freeze(model: AnyModel, patterns: Collection[str]) -> AnyModel:
    """Returns a model with some of its parameters frozen.

    Args:
        model: A model. Its `predict` and `init` do not change.
        patterns: Regular expressions of paths, as in `layouts.rules`: "embed/.*". Empty: the model itself.

    Returns:
        A model with the same parameters, rules and traffic.

    Raises:
        UserError: An expression does not match any parameter, or all parameters are frozen.
    """
    if not patterns:
        return model
    params = abstract_init(model)
    return without_gradients(model, frozen_paths(patterns, params), params)


def without_gradients(model: AnyModel, frozen: Collection[str], params: Params) -> AnyModel:
    """Returns a model that stops the gradients of the parameters at these paths.

    Args:
        model: A model.
        frozen: Whole paths.
        params: The shapes of all parameters.
    """
    if isinstance(model, Model):
        return replace(model, loss=_stopped(model.loss, "", frozen))
    parallelize, traffic = model.parallelize, model.traffic
    return replace(
        model,
        embed=_stopped(model.embed, "", frozen),
        block=_stopped(model.block, "blocks/", frozen),
        head=_stopped(model.head, "", frozen),
        parallelize=parallelize and (lambda parallel: without_gradients(parallelize(parallel), frozen, params)),
        traffic=traffic and _without_backward(traffic, _without_training(model, frozen, params)),
    )


def _without_training(model: BlockModel, frozen: Collection[str], params: Params) -> tuple[str, ...]:
    """Returns the parts of a model before the first parameter that trains, which need no backward pass."""
    groups = {path.split("/")[0] for path, _ in leaves_with_paths(params) if path not in frozen}
    if groups & set(model.embed_reads):
        return ()
    return ("embed",) if "blocks" in groups else ("embed", "block")


def _without_backward(traffic: Callable[..., Traffic], parts: Collection[str]) -> Callable[..., Traffic]:
    """Returns a traffic function without backward for some parts."""

    @wraps(traffic)
    def call(part: str, *arguments: Any) -> Traffic:
        moved = traffic(part, *arguments)
        return Traffic(moved.forward) if part in parts else moved

    return call


def _stopped(function: Callable[..., Any], prefix: str, frozen: Collection[str]) -> Callable[..., Any]:
    """Returns a function of parameters, with paths below a prefix, that stops the gradients of the frozen ones."""

    def stop(path: str, leaf: Any) -> Any:
        return lax.stop_gradient(leaf) if f"{prefix}{path}" in frozen else leaf

    return with_params(function, partial(map_with_path, stop))


def with_params(function: Callable[..., Any], change: Callable[[Params], Params]) -> Callable[..., Any]:
    """Returns a function of parameters that changes them first."""

    @wraps(function)
    def call(params: Params, *arguments: Any) -> Any:
        return function(change(params), *arguments)

    return call
