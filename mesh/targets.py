"""Targets: accelerators that are not on this machine, such as "h100:16x8" (16 hosts with 8 GPUs each).

A program can be compiled for them, but not run. Their devices are named "gpu:0@h100:16x8", "gpu:1@h100:16x8", ..., in
the order of the hosts. TPUs are named by the shape of their slice, "v5p:8x8x16"; "tpu:0@v5p:8x8x16" is a chip, and the
first dim of the slice varies fastest. A file in `cards/` describes each accelerator and cites its sources; users can
write their own.
"""

import dataclasses
import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from jax.experimental import topologies
from pydantic import ConfigDict, PositiveFloat, PositiveInt, StringConstraints, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ErrorDetails

from .compat import Device, answer_cudnn_checks, jax_option
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
TPU_PLUGINS = ("libtpu",)
TPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
}
"""Environment of libtpu without a TPU: it asks no metadata server, and writes no log. The last two are not used."""
TARGET_CONFIG = CARDS / "target_config.txtpb"
"""XLA's description of a GPU (stream_executor.GpuTargetConfigProto), with the versions of cuDNN and CUDA."""


RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""How pydantic checks a file in `cards/`."""


class CompilerMissing(UserError):
    """The compiler plugin of a target is not installed."""


@pydantic_dataclass(frozen=True, kw_only=True, config=RULES)
class Accelerator:
    """One accelerator and its network.

    Attributes:
        name: The name of the device.
        memory_bytes: Memory of one device.
        memory_bandwidth: Bytes per second to its memory.
        flops: Dtype -> peak operations per second of dense matrix products.
        link: Bytes per second in one direction: of a GPU to others of its host, of a TPU over one of its links.
    """

    name: str
    memory_bytes: PositiveInt
    memory_bandwidth: PositiveFloat
    flops: Mapping[str, PositiveFloat]
    link: PositiveFloat


@pydantic_dataclass(frozen=True, kw_only=True, config=RULES)
class TpuCard(Accelerator):
    """One TPU chip.

    Attributes:
        generation: The name of libtpu, such as "v5p".
        torus: The dims of a slice, with two links of each chip along each of them.
        wraps: A dim whose length is a multiple of this is a ring; others are lines.
        chip_config: The configuration of libtpu in which a chip is one device.
    """

    generation: str
    torus: PositiveInt
    wraps: PositiveInt
    chip_config: str = "default"


@pydantic_dataclass(frozen=True, kw_only=True, config=RULES)
class Card(Accelerator):
    """One GPU and its network.

    Attributes:
        compute_capability: CUDA's, such as "9.0".
        cores: Streaming multiprocessors.
        clock_ghz: Clock rate.
        l2_bytes: Size of its L2 cache.
        shared_memory: Bytes of shared memory of a multiprocessor.
        shared_memory_per_block: The largest part of it that a block can use.
        gpus_per_host: Devices of a host that its fast links connect.
        network: Bytes per second of one device to other hosts, in one direction.
    """

    compute_capability: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")]
    cores: PositiveInt
    clock_ghz: PositiveFloat
    l2_bytes: PositiveInt
    shared_memory: PositiveInt
    shared_memory_per_block: PositiveInt
    gpus_per_host: PositiveInt
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
        shape: The shape of a slice of TPUs; () for GPUs.
    """

    text: str
    card: Card | TpuCard
    hosts: int
    gpus: int
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.hosts * self.gpus

    def host_of(self, name: str) -> int:
        """Returns the number of the host of a device, by the name of the device; a slice of TPUs counts as one."""
        return 0 if self.shape else int(name.partition(MARK)[0].partition(":")[2]) // self.gpus

    def device_names(self) -> list[str]:
        """Returns the names of all devices, host by host."""
        platform = "tpu" if self.shape else "gpu"
        return [f"{platform}:{number}{MARK}{self.text}" for number in range(self.size)]

    def links(self, devices: Sequence[int]) -> int:
        """Returns the number of links of a TPU chip over which a group of devices, by number, can send at once."""
        assert isinstance(self.card, TpuCard)
        places = np.stack(np.unravel_index(devices, self.shape, order="F"), axis=-1)
        spanned = (places != places[0]).any(axis=0)
        return sum(2 if size % self.card.wraps == 0 else 1 for size in compress(self.shape, spanned))


@cache
def parse_target(text: str) -> Target:
    """Returns the target of a text.

    Args:
        text: CARD:HOSTSxGPUS, such as "h100:16x8", or the shape of a slice of TPUs, such as "v5p:8x8x16". CARD is a
            file of `cards/` without its suffix, or the path of a YAML file with the same keys. CARD:GPUS is one host,
            "h100:8" for "h100:1x8", which is then the target's text.

    Raises:
        UserError: The card is unknown or invalid, or the numbers are.
    """
    card, separator, shape = text.rpartition(":")
    numbers = shape.split("x")
    if not separator or len(numbers) > 3 or not all(each.isascii() and each.isdigit() for each in numbers):
        raise UserError(
            f"target {text!r} is invalid: expected CARD:HOSTSxGPUS, such as h100:16x8, or TPU:SHAPE, such as "
            "v5p:8x8x16."
        )
    sizes = tuple(map(int, numbers))
    found = _read_card(card)
    if len(sizes) == 1 and isinstance(found, Card):
        return parse_target(_one_host(text, card, found, sizes[0]))
    dims = found.torus if isinstance(found, TpuCard) else 2
    if len(sizes) != dims:
        example = f"{card}:{'x'.join(['4'] * dims)}" if isinstance(found, TpuCard) else f"{card}:16x8"
        raise UserError(f"target {text!r}: {found.name} needs {dims} numbers, got {len(sizes)}, such as {example}.")
    size = math.prod(sizes)
    if not 1 <= size <= MAX_DEVICES:
        product = " x ".join(map(str, sizes))
        raise UserError(f"target {text!r}: {product} = {size:,} devices; allowed: 1 .. {MAX_DEVICES:,}.")
    if isinstance(found, TpuCard):
        gpus = math.prod(_host_bounds(sizes))
        return Target(text, found, size // gpus, gpus, sizes)
    hosts, gpus = sizes[0], sizes[-1]
    if gpus > found.gpus_per_host:
        raise UserError(
            f"target {text!r}: a host has {found.gpus_per_host} of {found.name} (gpus_per_host), got {gpus}. "
            f"For {hosts * gpus} devices, write {card}:{math.ceil(hosts * gpus / found.gpus_per_host)}x"
            f"{found.gpus_per_host}."
        )
    return Target(text, found, hosts, gpus)


def _one_host(text: str, name: str, card: Card, count: int) -> str:
    """Returns the target of CARD:GPUS: GPUs of one host.

    Raises:
        UserError: One host has fewer; the number could be that of the GPUs or of the hosts.
    """
    limit = card.gpus_per_host
    if count <= limit:
        return f"{name}:1x{count}"
    hosts = math.ceil(count / limit)
    raise UserError(
        f"target {text!r}: a host has {limit} of {card.name} (gpus_per_host), so {count} is more than one host. For "
        f"{count} GPUs, write {name}:{hosts}x{limit}; for {count} hosts, {name}:{count}x{limit}."
    )


def _host_bounds(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the chips of one host: 2 x 2, or 1 along a dim of odd length."""
    return *(2 if size % 2 == 0 else 1 for size in shape[:2]), 1


@contextmanager
def compiling_for(target: Target | None) -> Iterator[None]:
    """Lets programs be lowered and compiled for a target; None means the devices of this machine.

    Their programs do not enter JAX's compilation cache: without a device, it can write but not read them.
    """
    if target is None:
        yield
        return
    checks = answer_cudnn_checks(getattr(target.card, "compute_capability", "0.0"), CUDNN_VERSION)
    with jax_option("jax_persistent_cache_min_compile_time_secs", math.inf), checks:
        yield


def has_compiler(target: Target) -> bool:
    """Returns True if the compiler of a target is installed."""
    return any(map(find_spec, TPU_PLUGINS if target.shape else CUDA_PLUGINS))


@cache
def target_devices(text: str) -> Mapping[str, Device]:
    """Returns JAX's compile-only devices of a target by name.

    Raises:
        UserError: The compiler plugin is missing, or it cannot describe the card.
    """
    target = parse_target(text)
    compiler, extra = ("TPU", "tpu-targets") if target.shape else ("CUDA", "targets")
    if not has_compiler(target):
        raise CompilerMissing(
            f"target {text!r} needs the {compiler} compiler of JAX, which is not installed (0.7 GB, no accelerator "
            f"needed): pip install 'spmdkit[{extra}]'"
        )
    try:
        devices = _describe_topology(target).devices
    except Exception as error:  # the plugin's own errors: another version, or a card that it does not know
        raise UserError(
            f"target {text!r}: JAX's {compiler} compiler cannot describe it: {first_line(error)}"
        ) from error
    return dict(zip(target.device_names(), sorted(devices, key=lambda device: device.id), strict=True))


def _describe_topology(target: Target) -> Any:
    """Returns JAX's description of a target."""
    card = target.card
    if isinstance(card, TpuCard):
        for name, value in TPU_SETTINGS.items():
            os.environ.setdefault(name, value)
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{card.generation}:{'x'.join(map(str, target.shape))}",
            chips_per_host_bounds=_host_bounds(target.shape),
            chip_config_name=card.chip_config,
        )
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=card.name,
        topology=f"{target.hosts}x1x{target.gpus}",
        target_config=card.target_config(),
    )


def _read_card(card: str) -> Card | TpuCard:
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
        return (TpuCard if "generation" in values else Card)(**{str(key): value for key, value in values.items()})
    except ValidationError as error:
        problems = "; ".join(map(_describe, error.errors()))
        raise UserError(f"target file {path}: {problems}. {CARDS / 'h100.yaml'} is an example.") from None


def _describe(error: ErrorDetails) -> str:
    """Returns a problem of a card: the key, the rule, and the value."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] in KEY_PROBLEMS:
        return f"{KEY_PROBLEMS[error['type']]} key {key}"
    return f"{key}: {error['msg']}, got {reprlib.repr(error['input'])}"
