"""Code that depends on the version of JAX, or on names that JAX does not export."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jaxlib.version
from jax._src import compilation_cache, distributed, source_info_util, xla_bridge
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import Literal

Device: TypeAlias = Any
"""A `jax.Device`, which JAX does not export as a type."""

PyTreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, which JAX does not export as a type."""


class KnownFault(NamedTuple):
    """Wrong numbers that versions of jaxlib are known to compute.

    Attributes:
        platform: The platform of the devices, as JAX names it: "cpu", "gpu", "tpu".
        versions: The versions of jaxlib with the fault, each measured.
        effect: The computation, and what is wrong.
        remedy: The versions that are right.
        url: The report.
    """

    platform: str
    versions: tuple[str, ...]
    effect: str
    remedy: str
    url: str

    def describe(self, version: str = jaxlib.version.__version__) -> str:
        """Returns the fault in one line, without the remedy."""
        return f"jaxlib {version} on {self.platform}: {self.effect} ({self.url})"


KNOWN_FAULTS = (
    KnownFault(
        platform="cpu",
        versions=("0.10.2",),
        effect=(
            "jitted `vmap(lambda row: reduce(matrix @ row))` is wrong for a matrix of 2 or 3 rows and 3 columns, from "
            "16,385 rows in float64 and 32,769 in float32"
        ),
        remedy="install jaxlib 0.10.1, 0.11.0 or newer",
        url="https://github.com/jax-ml/jax/issues/39103",
    ),
)


def known_faults(platform: str, version: str = jaxlib.version.__version__) -> list[KnownFault]:
    """Returns the known faults of a platform, for a version of jaxlib."""
    return [fault for fault in KNOWN_FAULTS if fault.platform == platform and version in fault.versions]


def backend_started() -> bool:
    """Returns True if JAX has opened its devices, without opening them; their number is fixed then."""
    return bool(xla_bridge.backends_are_initialized())


def jax_settings() -> dict[str, Any]:
    """Returns the value of every setting of `jax.config`, as environment variables and this process have set it."""
    return dict(jax.config.values)


@contextmanager
def jax_option(name: str, value: Any) -> Iterator[None]:
    """Changes a setting of `jax.config` within a `with` block."""
    before = jax_settings()[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def quick_compiler_options() -> dict[str, Any]:
    """Returns compiler options for a program that runs a few times: on CPU, JAX 0.10 has a faster code generator.

    It compiles a transformer's loss in 0.54 of the time (0.28 s of 0.52 s of processor; 2 cores, November 2026).
    """
    if jaxlib.version.__version_info__[:2] != (0, 10) or jax.default_backend() != "cpu":
        return {}
    return {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the mesh axes over which the type of a value inside `shard_map` is varying."""
    aval = jax.typeof(value)
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)


Variable: TypeAlias = Any
"""A `jax.extend.core.Var` (or a `Literal`): one value of a traced function."""

Equation: TypeAlias = Any
"""A `jax.extend.core.JaxprEqn`: one operation of a traced function."""


def is_literal(variable: Variable) -> bool:
    """Returns True if a variable is a literal, a scalar inside its equation."""
    return isinstance(variable, Literal)


def carried_by_scan(equation: Equation) -> range:
    """Returns the positions of the operands that a `scan` carries from turn to turn; stacked operands come after them.

    Its first results are what it carries at last, as many as these operands; stacked results come after them. JAX 0.12
    describes the operands as a tree, and JAX before it by two numbers.
    """
    params = equation.params
    if "num_carry" in params:
        constants = params["num_consts"]
        return range(constants, constants + params["num_carry"])
    parts = [list(part) for part in params["ft_in"].unpack()]
    constants = len(parts[0])
    return range(constants, constants + len(parts[1]))


def line_of(equation: Equation) -> str:
    """Returns the line of the user's code of an operation, such as "models/mlp.py:12 (loss)", or ""."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame.file_name).parts[-2:])}:{frame.start_line} ({frame.function_name})"


def name_scopes(equation: Equation) -> str:
    """Returns the name scopes of an operation (`jax.named_scope`), joined by "/"."""
    return str(equation.source_info.name_stack)


@contextmanager
def own_source_lines() -> Iterator[None]:
    """Gives operations of a backward pass their own source lines; JAX gives all that of the call in forward."""
    with source_info_util.set_name_stack(scopes := source_info_util.current_name_stack()):
        source_info_util._source_info_context.context = source_info_util.SourceInfo(None, scopes)
        yield


@contextmanager
def answer_cudnn_checks(capability: str, cudnn_version: int) -> Iterator[None]:
    """Lets JAX lower cuDNN's attention for a GPU that is not here: it reads these values from a device otherwise.

    Args:
        capability: The compute capability of the GPU, such as "9.0".
        cudnn_version: The version of cuDNN, such as 91000 for 9.10.
    """
    card = tuple(map(int, capability.split(".")))
    answers = {
        "check_cudnn_version": lambda: cudnn_version,
        "check_compute_capability": lambda least: card >= tuple(map(int, least.split("."))),
        "is_cuda_compute_capability_equal": lambda other: card == tuple(map(int, other.split("."))),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.callback(setattr, fused_attention_stablehlo, name, getattr(fused_attention_stablehlo, name))
            setattr(fused_attention_stablehlo, name, answer)
        yield


def cudnn_attention_and_logarithm(query: Any, key: Any, value: Any, *, mask: Any, is_causal: bool) -> tuple[Any, Any]:
    """Returns cuDNN's attention, and the logarithm of the softmax' divisor in float32.

    `jax.nn.dot_product_attention` rounds the logarithm to the dtype of the queries.

    Args:
        query: (B, S, H, K), bfloat16 or float16.
        key: (B, T, G, K), G a divisor of H.
        value: (B, T, G, K).
        mask: True where a query attends to a key, (B, 1, S, T); None if it attends to all.
        is_causal: True if it attends to the keys that are not after it.

    Returns:
        The output, (B, S, H, K), and the logarithm, (B, H, S).
    """
    options = {"scale": query.shape[-1] ** -0.5, "mask_type": _cudnn_mask_type(is_causal), "return_residual": True}
    found: Any = fused_attention_stablehlo.dot_product_attention(query, key, value, mask=mask, **options)
    return found


def _cudnn_mask_type(is_causal: bool) -> Any:
    return getattr(fused_attention_stablehlo.MaskType, "CAUSAL" if is_causal else "NO_MASK")


def cudnn_attention_gradients(
    query: Any, key: Any, value: Any, *, log_weight: Any, out: Any, gradient: Any, mask: Any, is_causal: bool
) -> tuple[Any, Any, Any]:
    """Returns the gradients of cuDNN's attention, given a softmax that may extend over more keys than these.

    JAX exports this only as the gradient of its own forward pass, with the softmax over its keys.

    Args:
        query: (B, S, H, K), bfloat16 or float16.
        key: (B, T, G, K), G a divisor of H.
        value: (B, T, G, K).
        log_weight: The logarithm of the softmax' divisor, float32, (B, H, S).
        out: The output of attention, (B, S, H, K).
        gradient: The gradient of `out`.
        mask: True where a query attends to a key, (B, 1, S, T); None if it attends to all.
        is_causal: True if it attends to the keys that are not after it.

    Returns:
        The gradients of query, key and value.
    """
    cudnn = fused_attention_stablehlo
    empty = jnp.zeros(0, query.dtype)
    bias = empty if mask is None else jnp.where(mask, 0, cudnn.get_large_negative_number(query.dtype))
    later = {"score_mod": None} if "score_mod" in signature(cudnn._dot_product_attention_bwd_rule).parameters else {}
    sequences = [empty] * 6  # their lengths, offsets and pages
    return cudnn._dot_product_attention_bwd_p_wrapper.bind(
        *(query, key, value, bias, *sequences, log_weight, out, gradient),
        scale=query.shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(mask is not None, False),
        mask_type=_cudnn_mask_type(is_causal),
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **later,
    )[:3]


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service, or None in a run of one process."""
    return distributed.global_state.client


def keep_quiet_about_proxies() -> None:
    """Turns off JAX's warning about proxy variables."""
    with suppress(AttributeError, ValueError):
        jax.config.update("jax_check_proxy_envs", False)


def keep_programs(programs: Any) -> None:
    """Replaces the store of JAX's compilation cache.

    `jax_compilation_cache_dir` must be set as well: XLA keeps its own results there.

    Args:
        programs: An object with `get(key) -> bytes | None`, `put(key, value)` and `_path`; None to keep no programs.
    """
    compilation_cache.reset_cache()
    if programs is not None:
        compilation_cache._cache = programs  # pyright: ignore[reportPrivateUsage]
        compilation_cache._cache_initialized = True  # pyright: ignore[reportPrivateUsage]


def is_intact_program(value: bytes) -> bool:
    """Returns True if JAX can decompress an entry of its compilation cache."""
    try:
        compilation_cache.decompress_executable(value)
    except Exception:  # the error depends on the compression
        return False
    return True
