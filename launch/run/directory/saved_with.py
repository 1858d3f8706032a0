"""What a checkpoint says of the run that saved it: software, model, mesh and strategy. Nothing depends on it."""

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from ....configs.write import as_plain
from ....models.lora import lora_config
from ..build import Built, data_facts

PACKAGES = ("spmdkit", "jax", "jaxlib", "orbax-checkpoint")


def saved_with(built: Built) -> dict[str, Any]:
    """Describes a run for whoever looks at its checkpoints.

    Returns:
        Plain values: `versions`, `model`, `parameters` (how many numbers), `mesh` (axis -> size, of those over 1),
        `devices`, `processes`, `strategy` and `precision` as in the config, `data` (what it says about the sizes of the
        model, see `data_facts`), `library` (whose module the model is, "" for none), `lora_scale` (what the product of
        low-rank adapters is multiplied by; None without any), `since` (when the run began, UTC).
    """
    mesh = built.layouts.mesh
    plain = as_plain(built.config)
    adapters = lora_config(built.config.model)
    return {
        "versions": {package: _version(package) for package in PACKAGES},
        "model": built.model.name,
        "parameters": built.layouts.num_parameters,
        "mesh": {name: mesh.axis_size(name) for name in mesh.axis_names if mesh.axis_size(name) > 1},
        "devices": mesh.size,
        "processes": jax.process_count(),
        "strategy": plain["strategy"],
        "precision": plain["precision"],
        "data": data_facts(built.config, built.splits),
        "library": getattr(built.model, "library", ""),
        "lora_scale": None if adapters is None else adapters.scale,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
