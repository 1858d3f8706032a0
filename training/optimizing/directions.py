"""The direction of an update: what an optimizer is known for, before weight decay and the learning rate.

Each is a function of the section `optimizer:`, the shapes of the parameters and whether their blocks are stacked.

Sources: Kingma & Ba 2015 (adam); Loshchilov & Hutter 2019 (adamw, decoupled decay); Chen et al. 2023 (lion); Shazeer &
Stern 2018 (adafactor); Jordan et al. 2024, Liu et al. 2025 (muon).
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

from ...mesh.errors import UserError
from .optimizer_config import OptimizerConfig
from .parameter_kinds import by_layer, select


def _sgd(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The gradient, or its running sum."""
    return optax.trace(config.momentum) if config.momentum else optax.identity()


def _adam(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The average gradient over the root of the average square."""
    first, second = config.betas or (0.9, 0.999)
    return optax.scale_by_adam(first, second, 1e-8 if config.epsilon is None else config.epsilon)


def _lion(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The sign of the average gradient."""
    first, second = config.betas or (0.9, 0.99)
    return optax.scale_by_lion(first, second)


def _adafactor(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The gradient over the root of a rank-one estimate of the average square, limited and scaled per parameter."""
    factored = optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
    )
    return by_layer(factored, abstract_params) if stacked else factored


MUON_RMS = 0.2
"""Root mean square of muon's updates: about adam's, so that one learning rate serves both (Liu et al. 2025)."""


def _muon(config: OptimizerConfig, abstract_params: Any, stacked: bool) -> optax.GradientTransformation:
    """The average gradient of each matrix with its singular values brought near 1; adam for everything else."""
    if "consistent_rms" not in inspect.signature(getattr(optax.contrib, "muon", lambda: None)).parameters:
        raise UserError(f"optimizer.name=muon needs optax 0.2.7; this is optax {optax.__version__}.")
    matrices = select(abstract_params, stacked, skip=config.muon_skip, layer_rank=(2,))
    kinds = jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adam", matrices)
    per_matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    orthogonal = optax.contrib.scale_by_muon(
        beta=0.95 if config.momentum is None else config.momentum,
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: per_matrix, updates),
    )
    return optax.partition(
        {"muon": optax.chain(orthogonal, optax.stateless(_consistent_rms)), "adam": _adam(config, (), stacked)}, kinds
    )


def _consistent_rms(updates: Any, params: Any) -> Any:
    """Orthogonal matrices (..., rows, columns) have a root mean square of max(rows, columns) ** -0.5; makes it 0.2."""
    return jax.tree.map(lambda update: update * (MUON_RMS * max(update.shape[-2:]) ** 0.5), updates)


DIRECTIONS: dict[str, Callable[[OptimizerConfig, Any, bool], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adam,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
}
"""Name -> the direction of the update."""
