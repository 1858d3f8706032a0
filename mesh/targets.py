"""Targets: accelerators that are not on this machine, such as "h100:16x8" (16 hosts with 8 GPUs each).

A program can be compiled for them, but not run. Their devices are named "gpu:0@h100:16x8", "gpu:1@h100:16x8", ..., in
the order of the hosts. A file in `cards/` describes each accelerator and cites its sources; users can write their own.
"""

import dataclasses
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jax
import yaml
from jax.experimental import topologies
from pydantic import ConfigDict, PositiveFloat, PositiveInt, StringConstraints, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ErrorDetails

from .compat import Device, answer_cudnn_checks, jax_settings
from .errors import UserError, first_line, unknown_name

CARDS = Path(__file__).parent / "cards"
MARK = "@"
"""Separates a device from its target in a name."""
MAX_DEVICES = 1 << 16
KEY_PROBLEMS = {"missing": "missing", "unexpected_keyword_argument": "unknown"}
"""Type of a pydantic error -> what is wrong with the key itself."""
CUDNN_VERSION = 91000
"""cuDNN 9.10, which `TARGET_CONFIG` names."""
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
TARGET_CONFIG = CARDS / "target_config.txtpb"
"""XLA's description of a GPU (stream_executor.GpuTargetConfigProto), with the versions of cuDNN and CUDA."""


class CompilerMissing(UserError):
    """The compiler plugin of a target is not installed."""


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class Card:
    """One accelerator and its network.

    Attributes:
        name: The name of the device.
        compute_capability: CUDA's, such as "9.0".
        cores: Streaming multiprocessors.
        clock_ghz: Clock rate.
        memory_bytes: Memory of one device.
        memory_bandwidth: Bytes per second to its memory.
        l2_bytes: Size of its L2 cache.
        shared_memory: Bytes of shared memory of a multiprocessor.
        shared_memory_per_block: The largest part of it that a block can use.
        flops: Dtype -> peak operations per second of dense matrix products.
        gpus_per_host: Devices of a host that its fast links connect.
        link: Bytes per second of one device to others of its host, in one direction.
        network: Bytes per second of one device to other hosts, in one direction.
    """

    name: str
    compute_capability: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")]
    cores: PositiveInt
    clock_ghz: PositiveFloat
    memory_bytes: PositiveInt
    memory_bandwidth: PositiveFloat
    l2_bytes: PositiveInt
    shared_memory: PositiveInt
    shared_memory_per_block: PositiveInt
    flops: Mapping[str, PositiveFloat]
    gpus_per_host: PositiveInt
    link: PositiveFloat
    network: PositiveFloat

    def target_config(self) -> str:
        """Returns the text that XLA's compiler needs in place of a device."""
        major, minor = self.compute_capability.split(".")
        fpus = 64 if self.compute_capability == "8.0" else 128
        text = TARGET_CONFIG.read_text(encoding="utf-8")
        return text.format(**dataclasses.asdict(self), major=major, minor=minor, fpus=fpus)


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of hosts with equal accelerators.

    Attributes:
        text: The target as the user wrote it.
        card: The accelerator.
        hosts: Number of hosts.
        gpus: Accelerators of each host.
    """

    text: str
    card: Card
    hosts: int
    gpus: int

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.hosts * self.gpus

    def host_of(self, name: str) -> int:
        """Returns the number of the host of a device, by the name of the device."""
        return int(name.partition(MARK)[0].partition(":")[2]) // self.gpus

    def device_names(self) -> list[str]:
        """Returns the names of all devices, host by host."""
        return [f"gpu:{number}{MARK}{self.text}" for number in range(self.size)]


@cache
def parse_target(text: str) -> Target:
    """Returns the target of a text.

    Args:
        text: CARD:HOSTSxGPUS, such as "h100:16x8". CARD is a file of `cards/` without its suffix, or the path of a
            YAML file with the same keys.

    Raises:
        UserError: The card is unknown or invalid, or the numbers are.
    """
    card, separator, shape = text.rpartition(":")
    numbers = shape.split("x")
    if not separator or len(numbers) != 2 or not all(each.isascii() and each.isdigit() for each in numbers):
        raise UserError(f"target {text!r} is invalid: expected CARD:HOSTSxGPUS, such as h100:16x8.")
    hosts, gpus = map(int, numbers)
    found = _read_card(card)
    if not 1 <= hosts * gpus <= MAX_DEVICES:
        raise UserError(f"target {text!r}: {hosts} x {gpus} = {hosts * gpus:,} devices; allowed: 1 .. {MAX_DEVICES:,}.")
    if gpus > found.gpus_per_host:
        raise UserError(
            f"target {text!r}: a host has {found.gpus_per_host} of {found.name} (gpus_per_host), got {gpus}. "
            f"For {hosts * gpus} devices, write {card}:{math.ceil(hosts * gpus / found.gpus_per_host)}x"
            f"{found.gpus_per_host}."
        )
    return Target(text, found, hosts, gpus)


@contextmanager
def compiling_for(target: Target | None) -> Iterator[None]:
    """Lets programs be lowered and compiled for a target; None means the devices of this machine.

    Their programs do not enter JAX's compilation cache: without a device, it can write but not read them.
    """
    if target is None:
        yield
        return
    before = jax_settings()["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        with answer_cudnn_checks(target.card.compute_capability, CUDNN_VERSION):
            yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def has_compiler() -> bool:
    """Returns True if the compiler of targets is installed."""
    return any(map(find_spec, CUDA_PLUGINS))


@cache
def target_devices(text: str) -> Mapping[str, Device]:
    """Returns JAX's compile-only devices of a target by name.

    Raises:
        UserError: The compiler plugin is missing, or it cannot describe the card.
    """
    target = parse_target(text)
    if not has_compiler():
        raise CompilerMissing(
            f"target {text!r} needs the CUDA compiler of JAX, which is not installed (0.7 GB, no GPU needed): "
            "pip install 'spmdkit[targets]'"
        )
    try:
        devices = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.card.name,
            topology=f"{target.hosts}x1x{target.gpus}",
            target_config=target.card.target_config(),
        ).devices
    except Exception as error:  # the plugin's own errors: another version, or a card that it does not know
        raise UserError(f"target {text!r}: JAX's CUDA compiler cannot describe it: {first_line(error)}") from error
    ordered = sorted(devices, key=lambda device: device.id)
    return dict(zip(target.device_names(), ordered, strict=True))


def _read_card(card: str) -> Card:
    known = sorted(path.stem for path in CARDS.glob("*.yaml"))
    path = CARDS / f"{card}.yaml" if card in known else Path(card)
    if card not in known and path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{unknown_name('target', card, known)} For another one, write the path of a YAML file.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"target file {path}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"target file {path}: expected keys as in {CARDS / 'h100.yaml'}, got {reprlib.repr(values)}.")
    try:
        return Card(**{str(key): value for key, value in values.items()})
    except ValidationError as error:
        problems = "; ".join(map(_describe, error.errors()))
        raise UserError(f"target file {path}: {problems}. {CARDS / 'h100.yaml'} is an example.") from None


def _describe(error: ErrorDetails) -> str:
    """Returns a problem of a card: the key, the rule, and the value."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] in KEY_PROBLEMS:
        return f"{KEY_PROBLEMS[error['type']]} key {key}"
    return f"{key}: {error['msg']}, got {reprlib.repr(error['input'])}"
