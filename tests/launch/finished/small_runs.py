"""Runs as training leaves them, made without training: first parameters, saved as checkpoints of some steps."""

from pathlib import Path
from typing import Any

import numpy as np
from spmdkit.configs import load_config
from spmdkit.configs.write import resolved_yaml
from spmdkit.launch.run.build import build
from spmdkit.launch.run.directory.saved_with import saved_with
from spmdkit.layouts.paths import leaves_with_paths, map_with_path
from spmdkit.parallel.sharding.stored_order import stored_order
from spmdkit.training.checkpointing.checkpoints import Checkpoints


def leave_run(config: Path, *overrides: str, steps: tuple[int, ...] = (4, 8), change: Any = None) -> Path:
    """Leaves the folder of a run: config.yaml, and a checkpoint of each step, whose parameters differ; returns it.

    `change` is applied to each parameter: (path, leaf) -> leaf.
    """
    loaded = load_config(config, overrides)
    built = build(loaded)
    folder = Path(loaded.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(loaded), encoding="utf-8")
    order = stored_order(built.layouts)
    saved = order.abstract_model(built.step.abstract_state())
    about = saved_with(built)
    with Checkpoints(folder / "checkpoints", keep=9, abstract_state=saved, about=about) as checkpoints:
        for step in steps:
            state = built.step.init(step)
            if change is not None:
                state = state._replace(params=map_with_path(change, state.params))
            checkpoints.save(step, order.to_model(state))
    return folder


def whole(params) -> dict[str, np.ndarray]:
    """Parameters as arrays of the host, by path."""
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(params)}


def first_params(config: Path, seed: int, *overrides: str) -> dict[str, np.ndarray]:
    """What `leave_run` saved as the parameters of a step: those that a model draws from that seed."""
    built = build(load_config(config, overrides))
    return whole(stored_order(built.layouts).to_model(built.step.init(seed).params))
