"""A model some of whose parameters do not train: its loss sees them without a gradient.

Their gradients are exactly zero, wherever they are taken, so the norm of the gradients and its clipping do not count
them, and backward does not compute them. The optimizer has to leave them alone as well (`optimizer.freeze` does both):
one that decays weights, or keeps averages, would move them or hold memory for them.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from jax import lax

from ..layouts.path_patterns import paths_met, some
from ..layouts.paths import leaves_with_paths, map_with_path
from ..mesh.errors import UserError
from ..parallel.collectives import Traffic
from ..parallel.model import BlockModel, Model, Params
from ..parallel.sharding.model_errors import abstract_init

AnyModel = TypeVar("AnyModel", bound=Model | BlockModel)
FREEZE = "optimizer.freeze"
"""The config key of the expressions."""


def frozen_paths(patterns: Collection[str], params: Params) -> frozenset[str]:
    """The parameters that regular expressions name.

    Args:
        patterns: They match whole paths, or are one.
        params: The parameters, or their shapes.

    Returns:
        Paths.

    Raises:
        UserError: An expression matches no parameter, or all parameters are frozen.
    """
    paths = [path for path, _ in leaves_with_paths(params)]
    frozen = frozenset(path for met in paths_met(tuple(patterns), paths, FREEZE).values() for path in met)
    if paths and frozen.issuperset(paths):
        raise UserError(
            f"{FREEZE}={list(patterns)} names all {len(paths)} parameters ({some(paths)}): nothing is left to train. "
            "Take one out."
        )
    return frozen


def freeze(model: AnyModel, patterns: Collection[str]) -> AnyModel:
    """The same model, some of its parameters without a gradient.

    Args:
        model: Any model. Its `predict` and `init` stay as they are.
        patterns: Regular expressions of paths, as in `layouts.rules`: "embed/.*". None: the model itself is returned.

    Returns:
        A model of the same parameters, rules and traffic.

    Raises:
        UserError: An expression matches no parameter, or all parameters are frozen.
    """
    if not patterns:
        return model
    params = abstract_init(model)
    return without_gradients(model, frozen_paths(patterns, params), params)


def without_gradients(model: AnyModel, frozen: Collection[str], params: Params) -> AnyModel:
    """The same model, the parameters at these paths without a gradient.

    Args:
        model: Any model.
        frozen: Whole paths.
        params: Shapes of all parameters.
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
    """The parts of a model before the first parameter that trains: gradients do not go back that far."""
    groups = {path.split("/")[0] for path, _ in leaves_with_paths(params) if path not in frozen}
    if groups & set(model.embed_reads):
        return ()
    return ("embed",) if "blocks" in groups else ("embed", "block")


def _without_backward(traffic: Callable[..., Traffic], parts: Collection[str]) -> Callable[..., Traffic]:
    """What a model moves, of some parts only that of forward."""

    @wraps(traffic)
    def call(part: str, *arguments: Any) -> Traffic:
        moved = traffic(part, *arguments)
        return Traffic(moved.forward) if part in parts else moved

    return call


def _stopped(function: Callable[..., Any], prefix: str, frozen: Collection[str]) -> Callable[..., Any]:
    """A function of parameters, whose paths begin with a prefix, that gives the frozen ones no gradient."""

    def stop(path: str, leaf: Any) -> Any:
        return lax.stop_gradient(leaf) if f"{prefix}{path}" in frozen else leaf

    @wraps(function)
    def call(params: Params, *arguments: Any) -> Any:
        return function(map_with_path(stop, params), *arguments)

    return call
