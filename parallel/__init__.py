"""Strategies, one file each, and the step they compose into.

Read first: `model` (what a model is), `data` and `fsdp` (strategies), `forward` (gather, run, drop), `gradients`,
`step` (the one compiled program), `census` (what the compiler made of it). Where the rest is:

    strategies             data, zero, fsdp, tensor, context, expert, pipeline, local_steps, compressed
    from YAML to layouts   strategy, options, lay_out, default_layout, split_dim, layouts, precision, model, parallel,
                           named_outputs
    a step                 step, state, keys, step_inputs, update, given_params, local_step, gradients, forward, remat,
                           sharded, recompilation
    inside a block         product, neighbours, collective_matmul, ring_attention, all_to_all_attention,
                           partial_attention, expert_blocks, floats, prefetch
    pipeline schedules     schedule, schedules, schedule_csv, schedule_measure, timetable
    pipelines at work      stages, stored_order, cut, pieces, tick, pipeline_stage, pipeline_message, pipeline_run,
                           pipeline_loss, pipeline_outer
    collectives            collectives, calls, in_order, compiled_text, census
    proof                  verify, verification, oracle, prepared, rounding, differences, first_difference, claims,
                           beyond_steps, causality, round_trip, diagnosis, row_counts, update_cause,
                           collective_check, update_traffic
    a model's contract     check_model, contract, contract_probe, contract_key, contract_words, model_errors
"""

from .census import census as census
from .check_model import check_model as check_model
from .collectives import Collective as Collective
from .data import DataParallelConfig as DataParallelConfig
from .fsdp import FSDPConfig as FSDPConfig
from .lay_out import lay_out as lay_out
from .layouts import Layouts as Layouts
from .model import BlockModel as BlockModel
from .model import Model as Model
from .named_outputs import name_output as name_output
from .precision import Precision as Precision
from .state import TrainState as TrainState
from .step import Step as Step
from .step import build_step as build_step
from .strategy import STRATEGIES as STRATEGIES
from .verification import Verification as Verification
from .verify import verify as verify
