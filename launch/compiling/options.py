"""What XLA is told of a step beside its program, by platform, and what of it this version of XLA knows.

    run.xla: default                 the line of PRESETS for the platform
             none                    nothing
             [xla_gpu_x=true, ...]   these instead; xla_gpu_, xla_tpu_ and xla_cpu_ count on that platform alone

They are options of the compiled step, not words in XLA_FLAGS: XLA ends a process whose XLA_FLAGS name something that it
does not know, and says so of an option in an error. So each is tried before use, on a program of one addition, and one
of a preset that this XLA does not know is left out. What the user's XLA_FLAGS name stays as it is there.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax

from ...mesh.compat import backend_started
from ...mesh.errors import UserError

DEFAULT, NONE = "default", "none"
PRESETS: dict[str, dict[str, bool | int]] = {
    "cuda": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
    },
}
"""What was found to gain something, with the evidence:

latency_hiding_scheduler    puts products between the start and the end of a collective. NVIDIA's images of JAX set it;
                            without it the gather of the next block does not run under the current one
double_buffering            a loop over blocks that carries gathered weights no longer copies them every turn: 1,847 ms
                            against 1,888 of a step (compiled for H100s, 8B parameters, fsdp 128, prefetch; estimated
                            from the schedule, not run)

Collectives are asynchronous in XLA by default. Thresholds of combining are left alone: `fsdp` gathers one block at a
time already, and combining across blocks holds more of them at once. A CPU has no line: nothing was found to gain."""
UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
TRUTHS = {"true": True, "false": False}
OF_PLATFORM = {"cuda": "xla_gpu_", "gpu": "xla_gpu_", "rocm": "xla_gpu_", "tpu": "xla_tpu_", "cpu": "xla_cpu_"}


class XlaOptions(NamedTuple):
    """What a step is compiled with.

    Attributes:
        used: option -> value.
        left_out: option -> why, of a preset.
    """

    used: Mapping[str, Any] = {}
    left_out: Mapping[str, str] = {}

    def __str__(self) -> str:
        used = ", ".join(f"{name}={_text(value)}" for name, value in self.used.items()) or "no options of XLA"
        return used + "".join(f"; {name} left out: {why}" for name, why in self.left_out.items())


def xla_options(xla: str | Sequence[str], platform: str, *, flags: str | None = None) -> XlaOptions:
    """The options of a step on a platform.

    Args:
        xla: `run.xla`.
        platform: As `ShardingPlan.platform`. Options are tried on the devices of this process, if they are of it.
        flags: XLA_FLAGS; those of this process by default.

    Raises:
        UserError: XLA does not know an option that the user gives, or its value.
    """
    flags = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    given = chosen(xla, platform)
    named = {name: "XLA_FLAGS names it" for name in given if re.search(rf"--{name}\b", flags)}
    wanted = {name: value for name, value in given.items() if name not in named}
    if not wanted or not _has_devices(platform):
        return XlaOptions(wanted, named)
    problems = _problems(tuple(wanted.items()))
    if problems and xla != DEFAULT:
        raise UserError("\n".join(f"run.xla: {why}" for why in problems.values()))
    return XlaOptions({name: value for name, value in wanted.items() if name not in problems}, {**named, **problems})


def chosen(xla: str | Sequence[str], platform: str) -> dict[str, Any]:
    """The options that `run.xla` names for a platform, as values."""
    if xla == DEFAULT:
        return dict(PRESETS.get("cuda" if platform == "gpu" else platform, {}))
    pairs = [each.removeprefix("--").partition("=") for each in ([] if xla == NONE else xla)]
    given = {name: _value(value) if equals else True for name, equals, value in pairs}
    foreign = tuple({*OF_PLATFORM.values()} - {OF_PLATFORM.get(platform, "")})
    return {name: value for name, value in given.items() if not name.startswith(foreign)}


def _value(text: str) -> Any:
    """A value as XLA's options want it: a bool, a number or text."""
    if text.lower() in TRUTHS:
        return TRUTHS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _has_devices(platform: str) -> bool:
    """Whether this process has opened devices of a platform; opens none."""
    named = ("gpu", "cuda") if platform in ("gpu", "cuda") else (platform,)
    return backend_started() and jax.default_backend() in named


@functools.cache
def _problems(options: tuple[tuple[str, Any], ...]) -> dict[str, str]:
    """What XLA says against options, by name: all of them together, and where that fails each alone."""
    if not _problem(dict(options)):
        return {}
    found = {name: _problem({name: value}) for name, value in options}
    return {name: why for name, why in found.items() if why}


def _problem(options: Mapping[str, Any]) -> str:
    try:
        jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        unknown = UNKNOWN.search(str(error))
        if unknown:
            return f"XLA of jaxlib {version('jaxlib')} does not know {unknown[1]}; take it out, or find its new name"
        return f"{', '.join(options)}: {str(error).splitlines()[0]}"
    return ""
