"""The analytic memory of a run, before anything is compiled, and changes that would need less of it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..configs.schema import Config
from ..mesh.devices import list_devices
from ..mesh.errors import UserError
from ..mesh.targets import compiling_for
from ..parallel.sharding.strategies import option_types
from ..parallel.xla.graph import equations
from ..runtime.build_run import Built, build
from ..runtime.compilation import DOUBLE_BUFFERING
from ..runtime.explain import state_bytes
from .traced_memory import peak_of


@dataclass(frozen=True)
class AnalyticMemory:
    """The memory that the layouts and the traced program of a step imply, in bytes of each device.

    Attributes:
        state: Kind -> bytes: parameters, optimizer, gradients, batch.
        activations: What loops keep for backward, when the step needs the most memory.
        communication: Parameters and activations that it has gathered at that time.
        other: All else at that time, among it the gradients so far.
    """

    state: dict[str, int]
    activations: int
    communication: int
    other: int

    @property
    def peak_bytes(self) -> int:
        """The most memory that a device needs: the state, and the gradients or what the program needs besides."""
        kept = sum(self.state.values()) - self.state["gradients"]
        return kept + max(self.activations + self.communication + self.other, self.state["gradients"])


@dataclass(frozen=True)
class Remedy:
    """A change of a config that needs less memory.

    Attributes:
        change: The keys and their new values.
        peak_bytes: The analytic memory with it.
    """

    change: str
    peak_bytes: int


def analytic_memory(built: Built) -> AnalyticMemory:
    """Returns the memory of a step, from its layouts and its traced program."""
    with compiling_for(built.layouts.mesh.target):
        program = built.step.trace(built.batch).jaxpr.jaxpr
    on_a_device = [each.params["jaxpr"] for each in equations(program) if each.primitive.name == "shard_map"]
    unrolled = 2 if dict(built.step.plan.options.xla).get(DOUBLE_BUFFERING) else 1
    peaks = (peak_of(each, unrolled) for each in on_a_device)
    peak: Counter[str] = max(peaks, key=Counter.total, default=Counter())
    activations, communication = peak["activations"], peak["communication"]
    return AnalyticMemory(state_bytes(built), activations, communication, peak.total() - activations - communication)


def find_remedies(config: Config, target: str, peak_bytes: int) -> tuple[Remedy, ...]:
    """Returns changes after which a run needs less than `peak_bytes`, by the analytic memory, the largest saving last.

    Args:
        config: The run's configuration.
        target: The accelerators.
        peak_bytes: The analytic memory without a change.
    """
    found = []
    for change, changed in _changes(config, list_devices(target=target)):
        try:
            needed = analytic_memory(build(changed, devices=list_devices(target=target))).peak_bytes
        except UserError:  # the batch has too few rows, or the model does not split this way
            continue
        if needed < peak_bytes:
            found.append(Remedy(change, needed))
    return tuple(sorted(found, key=lambda remedy: -remedy.peak_bytes))


def _changes(config: Config, devices: list[str]) -> Iterator[tuple[str, Config]]:
    """Yields changes of a config: recomputation, microbatches, and more shards."""
    policies = {"": config.train.remat} | ({} if config.train.remat == "full" else {"train.remat=full": "full"})
    factors = [1] if "pipe" in config.strategy else [1, 2, 4, 8]
    for policy, remat in policies.items():
        for factor in factors:
            accumulate = factor * config.train.accumulate
            words = [policy] * bool(policy) + [f"train.accumulate={accumulate}"] * (factor > 1)
            if words:
                train = replace(config.train, remat=remat, accumulate=accumulate)
                yield " ".join(words), replace(config, train=train)
    others: dict[str, Any] = {name: value for name, value in config.strategy.items() if name not in ("data", "fsdp")}
    taken = 1
    for options in others.values():
        taken *= max(options.size, 1)
    size = len(devices) // taken
    if getattr(config.strategy.get("fsdp"), "size", 1) not in (size, -1):
        strategy = {"fsdp": option_types()["fsdp"](size=size), **others}
        yield f"strategy.fsdp={size} without strategy.data", replace(config, strategy=strategy)
