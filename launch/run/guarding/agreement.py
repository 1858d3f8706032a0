"""All processes of a run agree on what they are about to do, before it begins.

JAX compares nothing: processes with another learning rate, seed, batch or program train together without an error, and
what they train is nobody's model. Here each tells the others what it has, and where two differ, all of them end with
one message that names the ranks and the first things that differ.

    at the start              versions, devices, settings, every key of the config  nothing was built yet
    once the folder is read   the step to go on from, see shared.py                 nothing was compiled
    before the first step     data, layouts, the program, settings again            everything is compiled

Settings are those of JAX and XLA that change a program or its numbers: XLA_FLAGS, `jax.config`, and a few variables.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from ....configs.schema import Config
from ....configs.write import as_plain
from ....mesh.compat import coordination_client, jax_settings
from ....mesh.coordination import differences, exchange
from ....mesh.errors import UserError
from ....mesh.processes import is_main_process, tell
from ..build import Built
from ..directory.provenance import Provenance
from ..directory.shared import wait_until_all_know

PACKAGES = ("spmdkit", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
OF_EACH_HOST = ("run.root",)
"""Keys of the config that may differ: where files lie on this host."""
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
VARIABLES = ("NVIDIA_TF32_OVERRIDE",)
FLAGS_THAT_MAY_DIFFER = re.compile(r"dump|_log|cache_(dir|file)|force_host_platform_device_count")
SETTINGS_THAT_MAY_DIFFER = re.compile(
    "dump|debug|_log|explain|traceback|source_|pprint|report"  # what is shown
    "|cache|share_binary"  # where compiled programs are kept
    "|num_cpu_devices|visible_devices|default_device|platform|xla_backend|mock_"  # compared as devices of a process
    "|address|timeout|cross_host|topology|preemption|recoverability"  # how processes meet
)
MOST_TOLD = 8
MOST_CHARACTERS = 80
NOT_SET = "not set"


class Disagreement(UserError):
    """The processes of a run are about to do different things."""


def agree_on_config(config: Config) -> None:
    """Makes sure that all processes have the same software, settings and config, and as many devices.

    Raises:
        Disagreement: They have not; what differs is named with the ranks.
        ProcessesMissing: Some did not answer within `timeouts.rendezvous`.
    """
    if coordination_client() is None:
        return
    found = {f"version of {name}": text for name, text in _versions().items()}
    found["devices of a process"] = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
    found |= numeric_settings(os.environ, jax_settings())
    found |= {key: value for key, value in _leaves(as_plain(config)).items() if key not in OF_EACH_HOST}
    _agree("config", found, config.timeouts.rendezvous)


def agree_on_start(built: Built, made_of: Provenance) -> None:
    """Makes sure that all processes are about to run the same program on the same data.

    Args:
        built: The run.
        made_of: What it is made of.

    Raises:
        Disagreement: They are not; what differs is named with the ranks.
        ProcessesMissing: Some did not answer within `timeouts.rendezvous`.
    """
    if jax.process_count() == 1:
        return
    found = {
        "the data (fingerprint)": made_of.fingerprint,
        "the program of model.name": made_of.model.program,
        "the program of optimizer.name": made_of.optimizer.program,
        "the layouts of the parameters": _short_hash(str(built.layouts.table.to_json())),
        "the program of a step (StableHLO)": _short_hash(built.step.lower(built.batch).as_text()),
        **numeric_settings(os.environ, jax_settings()),  # the user's own modules may have changed some
    }
    _agree("start", found, built.config.timeouts.rendezvous)


def numeric_settings(environ: Mapping[str, str], settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the settings that change a program or its numbers, and so must be equal in all processes.

    Args:
        environ: The environment variables of this process.
        settings: The values of `jax.config` by name.

    Returns:
        Each flag of XLA, each variable and each setting of JAX, by name, as text.
    """
    found = {
        f"{variable} {name}": value
        for variable in FLAGS
        for name, value in _flags(environ.get(variable, "")).items()
        if not FLAGS_THAT_MAY_DIFFER.search(name)
    }
    found |= {name: environ[name] for name in VARIABLES if name in environ}
    return found | {
        f"jax.config.{name}": str(value)
        for name, value in settings.items()
        if not SETTINGS_THAT_MAY_DIFFER.search(name)
    }


def _flags(text: str) -> dict[str, str]:
    """Reads "--a=1 --b" as XLA does: the last of several counts, and a text without a dash names a file of flags."""
    if text.strip() and not text.lstrip().startswith("-"):
        with suppress(OSError):
            text = Path(text.strip()).read_text(encoding="utf-8", errors="replace")
    parts = (word.partition("=") for word in text.split())
    return {name: value if equals else "true" for name, equals, value in parts}


def _agree(name: str, found: Mapping[str, str], seconds: float) -> None:
    say = tell if is_main_process() else (lambda line: None)
    texts = exchange(name, json.dumps(found), seconds=seconds, say=say)
    if len(set(texts)) == 1:
        return
    told = [json.loads(text) for text in texts]
    keys = list(dict.fromkeys(key for each in told for key in each))
    differing = [key for key in keys if len({each.get(key) for each in told}) > 1]
    lines = [differences(key, [_cut(each.get(key, NOT_SET)) for each in told]) for key in differing[:MOST_TOLD]]
    more = [f"... and {len(differing) - MOST_TOLD} more"] if len(differing) > MOST_TOLD else []
    wait_until_all_know()
    raise Disagreement(
        f"The {len(texts)} processes of this run differ, and would train different things together:\n  "
        + "\n  ".join([*lines, *more])
        + "\nGive all of them the same config, data, software and settings, and start them again; nothing was trained."
    )


def _versions() -> dict[str, str]:
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _leaves(values: object, prefix: str = "") -> dict[str, str]:
    """Every key of a plain config with its value as text."""
    if not isinstance(values, Mapping):
        return {prefix: json.dumps(values, default=str)}
    found: dict[str, str] = {}
    for name, value in values.items():
        found |= _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."
