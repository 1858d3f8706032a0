"""Builds a step from a plan and its options."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optax

from ...mesh.errors import UserError
from ..model import BlockModel, Model
from ..model.arguments import check_is_optimizer, require_model
from ..options import FLOAT32, Precision
from ..plan import ShardingPlan, StepOptions
from .train_step import Step


def build_step(
    model: Model | BlockModel,
    optimizer: optax.GradientTransformation,
    plan: ShardingPlan,
    *,
    accumulate: int = 1,
    clip_norm: float = 0.0,
    remat: str = "none",
    precision: Precision = FLOAT32,
    xla: Mapping[str, Any] | None = None,
) -> Step:
    """Builds the training step. Nothing is computed, and no device is used, until the step runs.

    Args:
        model: The model.
        optimizer: Any optax transformation. It must not clip by global norm, because the step does.
        plan: The result of `lay_out` with the same precision.
        accumulate: The number of microbatches per step, run one after another; their gradients are summed.
        clip_norm: The maximum global norm of the gradients; 0 = no clipping.
        remat: The values that blocks keep for backward: `none` drops only gathered parameters, `dots` keeps matrix
            products, `selective` those that do not widen their input, `local` what collectives within a block return,
            `full` only the input of each block.
        precision: The dtypes.
        xla: XLA compiler options for the step and its evaluation, such as
            {"xla_gpu_enable_latency_hiding_scheduler": True}. JAX raises an error for an unknown option at compilation.

    Raises:
        UserError: A number is out of range, the policy is unknown, or the model or the optimizer is something else.
    """
    model = require_model(model, "build_step")
    check_is_optimizer(optimizer, "build_step: the optimizer")
    if accumulate < 1:
        raise UserError(f"train.accumulate={accumulate} must be at least 1.")
    if not 0 <= clip_norm < float("inf"):
        raise UserError(f"train.clip_norm={clip_norm} must be positive and finite, or 0 for no clipping.")
    flags = tuple((xla or {}).items())
    options = StepOptions(accumulate=accumulate, clip_norm=clip_norm, remat=remat, precision=precision, xla=flags)
    return Step(model, optimizer, replace(plan, options=options))
