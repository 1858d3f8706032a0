"""Builds a step from a plan and its options."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optax

from ...mesh.errors import UserError
from ..model import BlockModel, Model
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
    """Builds the training step. Nothing is computed and no device is touched until it runs.

    Args:
        model: The model.
        optimizer: Any optax transformation; it must not clip by global norm (the step does).
        plan: From `lay_out`, with the same precision.
        accumulate: Microbatches a step, one after the other; their gradients are summed.
        clip_norm: Largest global norm of the gradients; 0 leaves them as they are.
        remat: What blocks keep for backward: `none` drops only gathered parameters, `dots` keeps products of matrices,
            `selective` those that do not widen their input, `full` only the input of each block.
        precision: The dtypes.
        xla: XLA compiler options for the step and its evaluation, such as
            {"xla_gpu_enable_latency_hiding_scheduler": True}; one that XLA does not know is an error of JAX when they
            are compiled.

    Raises:
        UserError: A number is out of its range, or the policy is unknown.
    """
    if accumulate < 1:
        raise UserError(f"train.accumulate={accumulate}: a step has at least 1 microbatch.")
    if not 0 <= clip_norm < float("inf"):
        raise UserError(f"train.clip_norm={clip_norm}: a norm is positive and finite; 0 turns clipping off.")
    flags = tuple((xla or {}).items())
    options = StepOptions(accumulate=accumulate, clip_norm=clip_norm, remat=remat, precision=precision, xla=flags)
    return Step(model, optimizer, replace(plan, options=options))
