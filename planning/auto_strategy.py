"""`strategy: auto`: the search without a compiler, for the devices of a run.

All processes make the same choice: it depends on the config and the number of devices alone, and that of process 0
counts. A run records it in its config.yaml, so that a resume on as many devices has the same mesh.
"""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from math import prod
from pathlib import Path

import jax

from ..configs.checks import AUTO, axis_sizes
from ..configs.config_sources import CONFIG, is_run_directory
from ..configs.load import load_config
from ..configs.schema import Config
from ..mesh.errors import UserError
from ..mesh.processes import broadcast_text, is_main_process, print_progress
from ..mesh.targets import CARDS, Target, parse_target
from ..parallel.sharding.strategies import read_strategy
from .search import rank

OTHERWISE = "h100"
"""The card whose proportions count for devices without a card, such as simulated ones."""


def choose_strategy(config: Config, target: Target | None = None, *, fresh: bool = False) -> Config:
    """Returns a config with the fastest strategy by the estimate in place of `strategy: auto`; any other as it is.

    Args:
        config: The run's configuration.
        target: The accelerators; by default the devices of this run, every process of which then calls this.
        fresh: Whether the run starts again, without what its directory records.

    Raises:
        UserError: The model or its data is invalid, or nothing fits.
    """
    if AUTO not in config.strategy:
        return config
    if target is not None:
        return rank(config, target)[0][0].candidate.configure(config)
    chosen = None if fresh else _recorded(Path(config.run.dir), jax.device_count())
    source = "as the run began"
    if chosen is None:
        target = local_target()
        chosen, source = choose_strategy(config, target), f"by the estimate for {target.card.name}"
    strategy = {axis: asdict(options) for axis, options in chosen.strategy.items()}
    text = json.dumps([strategy, chosen.train.accumulate, chosen.train.remat])
    text = broadcast_text("the strategy that was chosen", text, seconds=config.timeouts.rendezvous)
    strategy, accumulate, remat = json.loads(text)
    if is_main_process():
        sizes = " x ".join(f"{axis} {options['size']}" for axis, options in strategy.items())
        print_progress(f"strategy: auto is {sizes}, accumulate {accumulate}, remat {remat}, {source}")
    train = replace(config.train, accumulate=accumulate, remat=remat)
    return replace(config, strategy=read_strategy(strategy), train=train)


def local_target() -> Target:
    """Returns the devices of this run as a target; their card is that with the name of the device."""
    hosts = jax.process_count()
    card = _card(jax.devices()[0].device_kind)
    return Target(f"{jax.device_count()} devices", card.card, hosts, jax.device_count() // hosts)


@cache
def _card(kind: str) -> Target:
    for path in sorted(CARDS.glob("*.yaml")):
        with suppress(UserError):
            target = parse_target(f"{path.stem}:1x1")
            if target.card.name == kind:
                return target
    return parse_target(f"{OTHERWISE}:1x1")


def _recorded(folder: Path, num_devices: int) -> Config | None:
    """Returns the config that a run directory records, if its mesh has as many devices."""
    if not is_run_directory(folder):
        return None
    recorded = load_config(folder / CONFIG, sizes=False)
    return recorded if prod(axis_sizes(recorded.strategy).values()) == num_devices else None
