"""Estimates how long one kernel takes on a GPU: a roofline of its arithmetic and of its memory traffic.

Matrix products and attention run at a share of the card's peak; all other kernels move bytes. `EFFICIENCY` has the
shares. They are the same for every card and every prediction.
"""

import json
import math
import re
from typing import NamedTuple

from ..mesh.errors import UserError
from ..mesh.targets import Card
from .scheduled_program import Array, Computation, Instruction, Program

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier"}
FREE |= {"partition-id", "replica-id"}
"""Operations that start no kernel, or one too small to count."""
SLICES = {"slice", "dynamic-slice", "gather"}
GEMM = re.compile(r'custom_call_target="__cublas')
ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w*)"')
_CONFIG = re.compile(r"\bbackend_config=(\{.*\})")
ROW_BYTES = 16
"""GPUs load matrices in pieces of this size."""
WIDE_HEAD = 128
"""Heads of this width fill the units that multiply matrices."""
_DIMS = re.compile(r"(lhs|rhs)_(contracting|batch)_dims=\{([\d,]*)\}")
_PEAKS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


class Efficiency(NamedTuple):
    """Shares of a card's peaks that kernels and collectives reach.

    `docs/planning.md` compares predictions with published runs, and `docs/gpu.md` with steps measured on one H100
    (700 W, JAX 0.11.2, 2026-11-26, `benchmarks/on_gpu.py --trace`), which "measured" refers to.

    Attributes:
        matmul: The share of the peak of dense products in training. Measured: 0.69 to 0.78, at clocks of 1.2 to 1.8
            GHz under the power limit. Published training runs on many GPUs imply 0.56. This is between them.
        unaligned: The share of products whose rows are not a multiple of 16 bytes, measured: 0.18.
        attention: The share of fused attention forward with heads of 128, measured: 0.53 to 0.62. Narrower heads reach
            less in proportion: 0.30 with heads of 64.
        attention_backward: The share of its backward pass, measured: 0.37 to 0.44 with heads of 128, 0.20 with heads
            of 64.
        memory: The share of the memory bandwidth, measured: 0.89 in blocks of 4,096, 0.76 in blocks of 768.
        link: The share of the bandwidth inside a host: NCCL's ring reaches 361 of 450 GB/s on 8 H100s
            (stas00/ml-engineering, network/README.md).
        network: The share of the bandwidth of a device's adapter: 324 of 400 GB/s on 4 x 8 H100s (the same source).
        overlapped: The speed of kernels while a collective takes multiprocessors and memory bandwidth beside them:
            they take 18.9 % longer on average over A100, H100 and AMD's GPUs (arXiv 2507.03114, abstract).
        kernel_seconds: The least time of a kernel, measured: 2.4 us.
        product_seconds: Time to fill and to drain a matrix product: 256^3 takes 5 us on an H100 (XLA,
            xla/service/gpu/model/default_matmul_perf_table.txtpb).
        link_seconds: Time until a collective inside a host moves its first byte.
        network_seconds: This time between hosts.
    """

    matmul: float = 0.64
    unaligned: float = 0.18
    attention: float = 0.53
    attention_backward: float = 0.38
    memory: float = 0.85
    link: float = 0.8
    network: float = 0.8
    overlapped: float = 1 / 1.189
    kernel_seconds: float = 2e-6
    product_seconds: float = 5e-6
    link_seconds: float = 10e-6
    network_seconds: float = 25e-6


EFFICIENCY = Efficiency()


class Work(NamedTuple):
    """The work of one kernel.

    Attributes:
        flops: Operations of matrix products and attention.
        bytes: Bytes read and written.
        seconds: How long it takes.
    """

    flops: float
    bytes: int
    seconds: float


def kernel_work(
    instruction: Instruction, computation: Computation, program: Program, card: Card, efficiency: Efficiency
) -> Work:
    """Returns the work of one kernel.

    Args:
        instruction: The instruction that starts the kernel.
        computation: The computation that contains it.
        program: The whole program.
        card: The accelerator.
        efficiency: The shares of its peaks that count.
    """
    operands = computation.operands_of(instruction)
    moved = sum(each.bytes for each in operands) + instruction.bytes
    rows = [each.results[0] for each in (*operands, instruction) if each.results and len(each.results[0].shape) > 1]
    aligned = all(row.shape[-1] * row.itemsize % ROW_BYTES == 0 for row in rows)
    share, flops = efficiency.matmul if aligned else efficiency.unaligned, 0.0
    dtype = operands[0].results[0].dtype if operands and operands[0].results else "f32"
    if GEMM.search(instruction.attributes):
        flops = _gemm_flops(instruction, operands)
    elif attention := ATTENTION.search(instruction.attributes):
        backward = "Backward" in attention[1]
        share = efficiency.attention_backward if backward else efficiency.attention
        share *= min(1.0, operands[0].results[0].shape[-1] / WIDE_HEAD)
        flops = _attention_flops(instruction, operands, backward)
    elif fused := program.called(instruction):
        flops, moved = _dot_flops(fused, program), _bytes_of_fusion(instruction, fused, operands)
        dtype = next((fused.operands_of(each)[0].results[0].dtype for each in fused if each.opcode == "dot"), dtype)
    elif instruction.opcode == "dot":
        flops = _flops_of_dot(instruction, operands)
    elif instruction.opcode in SLICES:
        moved = 2 * instruction.bytes
    elif instruction.opcode == "dynamic-update-slice":
        moved = 2 * operands[1].bytes
    arithmetic = efficiency.product_seconds + flops / (share * _peak(card, dtype)) if flops else 0.0
    return Work(
        flops, moved, efficiency.kernel_seconds + max(arithmetic, moved / (efficiency.memory * card.memory_bandwidth))
    )


def _peak(card: Card, dtype: str) -> float:
    name = _PEAKS.get(dtype, dtype)
    if name not in card.flops:
        raise UserError(
            f"the step has products in {name}; the peaks of {card.name} (key flops of its file) are of "
            f"{', '.join(card.flops)}. Add one of {name}."
        )
    return card.flops[name]


def _gemm_flops(instruction: Instruction, operands: list[Instruction]) -> float:
    """Returns the operations of a call of cuBLAS: 2 for each element of the result and of the contracted dims."""
    numbers = _backend_config(instruction)["gemm_backend_config"]["dot_dimension_numbers"]
    lhs = operands[0].results[0].shape
    return 2.0 * instruction.results[0].size * math.prod(lhs[int(dim)] for dim in numbers["lhs_contracting_dimensions"])


def _attention_flops(instruction: Instruction, operands: list[Instruction], backward: bool) -> float:
    """Returns the operations of fused attention: 2 products of scores forward, 5 backward; half of them if causal.

    Source: FlashAttention-2 (arXiv 2307.08691), section 4.1.
    """
    config = _backend_config(instruction)["cudnn_fmha_backend_config"]
    scores = math.prod(int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    width = operands[0].results[0].shape[-1]
    return (5 if backward else 2) * 2.0 * scores * width * (0.5 if "CAUSAL" in config["mask_type"] else 1.0)


def _backend_config(instruction: Instruction) -> dict:
    found = _CONFIG.search(instruction.attributes)
    assert found, f"{instruction.name} has no backend_config"
    return json.loads(found[1])


def _dot_flops(computation: Computation, program: Program) -> float:
    """Returns the operations of all products of a fused computation."""
    total = 0.0
    for each in computation:
        if each.opcode == "dot":
            total += _flops_of_dot(each, computation.operands_of(each))
        elif each.opcode == "fusion" and (inner := program.called(each)):
            total += _dot_flops(inner, program)
    return total


def _flops_of_dot(dot: Instruction, operands: list[Instruction]) -> float:
    dims = {(side, kind): text for side, kind, text in _DIMS.findall(dot.attributes)}
    contracted = [int(n) for n in dims.get(("lhs", "contracting"), "").split(",") if n]
    return 2.0 * dot.results[0].size * math.prod(operands[0].results[0].shape[dim] for dim in contracted)


def _bytes_of_fusion(fusion: Instruction, fused: Computation, operands: list[Instruction]) -> int:
    """Returns the bytes that a fusion reads and writes: of a sliced operand the slice, of an updated one the update."""
    needed = _elements_needed(fused)
    parameters = [each for each in fused if each.opcode == "parameter"]
    read = sum(needed[each.name] * each.results[0].itemsize for each in parameters if each.results)
    return read + sum(_written(each, fused) for each in _roots(fused))


def _roots(fused: Computation) -> list[Instruction]:
    return fused.operands_of(fused.root) if fused.root.opcode == "tuple" else [fused.root]


def _written(root: Instruction, fused: Computation) -> int:
    """Returns the bytes that one result of a fusion writes; an updated operand is written in place."""
    while root.opcode in ("bitcast", "copy", "convert") and fused.operands_of(root):
        before = fused.operands_of(root)[0]
        if before.opcode not in ("bitcast", "copy", "convert", "dynamic-update-slice"):
            break
        root = before
    if root.opcode == "dynamic-update-slice":
        return fused.operands_of(root)[1].bytes
    return root.bytes


def _elements_needed(fused: Computation) -> dict[str, int]:
    """Returns how many elements of each value of a fusion are computed or read: slices need only their own."""
    needed = dict.fromkeys(fused.by_name, 0)
    for root in _roots(fused):
        needed[root.name] = root.results[0].size if root.results else 0
    for user in reversed(fused.instructions):
        for position, operand in enumerate(fused.operands_of(user)):
            size = operand.results[0].size if operand.results else 0
            if user.opcode in SLICES and position == 0:
                count = min(needed[user.name], _size(user.results))
            elif user.opcode == "dynamic-update-slice" and position == 0:
                count = 0
            elif user.opcode != "tuple" and _size(user.results) == size:
                count = needed[user.name]
            else:
                count = size
            needed[operand.name] = max(needed[operand.name], min(count, size))
    return needed


def _size(arrays: tuple[Array, ...]) -> int:
    return sum(each.size for each in arrays)
