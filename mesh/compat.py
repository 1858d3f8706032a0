"""Everything that depends on the version of JAX, or on a name JAX does not export."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import jaxlib.version
from jax._src import compilation_cache, distributed, source_info_util, xla_bridge
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType

Device: TypeAlias = Any
"""A `jax.Device`, which JAX does not export as a type."""

PyTreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, which JAX does not export as a type."""


def backend_started() -> bool:
    """Tells whether JAX has opened its devices already, without opening them.

    Returns:
        True once any backend is initialised; device counts can no longer change then.
    """
    return bool(xla_bridge.backends_are_initialized())


def jax_settings() -> dict[str, Any]:
    """Returns the value of every setting of `jax.config`, as environment variables and this process have set it."""
    return dict(jax.config.values)


def quick_compiler_options() -> dict[str, Any]:
    """Options of a program that is compiled for a few runs: on CPU, JAX 0.10 has an older code generator.

    It compiles a transformer's loss in 0.54 of the time (0.28 s of 0.52 s of processor; 2 cores, November 2026).
    """
    if jaxlib.version.__version_info__[:2] != (0, 10) or jax.default_backend() != "cpu":
        return {}
    return {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def make_abstract_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> AbstractMesh:
    """Builds a mesh without devices whose axes are all Auto.

    Args:
        shape: One size per axis.
        axis_names: One name per axis.

    Returns:
        The abstract mesh; enough to lower and type a program.
    """
    return AbstractMesh(shape, axis_names, axis_types=(AxisType.Auto,) * len(axis_names))


def varying_axes(value: Any) -> frozenset[str]:
    """The mesh axes over which a value inside `shard_map` is typed as different on each device."""
    aval = jax.typeof(value)
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)


Variable: TypeAlias = Any
"""A `jax.extend.core.Var` (or a `Literal`): one value of a traced function."""

Equation: TypeAlias = Any
"""A `jax.extend.core.JaxprEqn`: one operation of a traced function."""


def is_literal(variable: Variable) -> bool:
    """Whether a variable is no variable, but a scalar written into its equation."""
    return isinstance(variable, Literal)


def line_of(equation: Equation) -> str:
    """The line of the user's code that an operation comes from, such as "models/mlp.py:12 (loss)"; "" if unknown."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame.file_name).parts[-2:])}:{frame.start_line} ({frame.function_name})"


def coordination_client() -> Any:
    """The client of JAX's coordination service in this process; None where it is the only one."""
    return distributed.global_state.client


def keep_quiet_about_proxies() -> None:
    """Turns off JAX's warning about proxy variables, once they are seen to."""
    with suppress(AttributeError, ValueError):
        jax.config.update("jax_check_proxy_envs", False)


class Programs(Protocol):
    """What JAX asks of a place that keeps compiled programs."""

    _path: Any

    def get(self, key: str) -> bytes | None:
        """The program of a key; None where there is none."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program."""
        ...


def keep_programs(programs: Programs | None) -> None:
    """Lets JAX read and keep compiled programs there from now on, not in a folder that it writes itself; None: nowhere.

    `jax_compilation_cache_dir` is to be set as well: beside that folder XLA keeps its own results.
    """
    compilation_cache.reset_cache()
    if programs is not None:
        compilation_cache._cache = programs  # pyright: ignore[reportPrivateUsage]
        compilation_cache._cache_initialized = True  # pyright: ignore[reportPrivateUsage]
