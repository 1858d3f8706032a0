"""Checks of the processes of a run against each other, before the first step.

JAX compares nothing: processes with different learning rates, seeds, batches or programs train together without an
error. Here, every process publishes its values. If two differ, all processes end with one message that names the ranks
and the first differences.

    at the start                      versions, devices, settings, every key of the config    nothing is built
    once the directory is read        the latest checkpoint                                   nothing is compiled
    before the first step             data, layouts, the programs, settings again             everything is compiled
    after `init`                      the values of arrays that several devices hold          nothing is trained
    once process 0 owns run.dir       the directory itself                                    nothing else is written

Settings are those of JAX and XLA that change a program or its numbers: XLA_FLAGS, `jax.config`, and some variables.

run.dir must be the same directory for all processes: each one writes its part of a checkpoint there, and reads it
again. Otherwise (a local disk of each host, another working directory) all would train, and no checkpoint would be
complete.
"""

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from ..layouts.paths import flatten_mapping
from ..mesh.compat import coordination_client, jax_settings
from ..mesh.errors import UserError, first_lines
from ..mesh.processes import PREFIX, broadcast_text, differences, exchange, is_main_process, unequal
from .build_run import Built
from .ownership import read_owner, this_place
from .provenance import Provenance, package_versions

HOST_KEYS = ("run.root",)
"""Keys of the config that may differ between hosts."""
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
VARIABLES = ("NVIDIA_TF32_OVERRIDE",)
FLAGS_THAT_MAY_DIFFER = re.compile(r"dump|_log|cache_(dir|file)|force_host_platform_device_count")
SETTINGS_THAT_MAY_DIFFER = re.compile(
    "dump|debug|_log|explain|traceback|source_|pprint|report"  # output
    "|cache|share_binary"  # the compilation cache
    "|num_cpu_devices|visible_devices|default_device|platform|xla_backend|mock_"  # compared as devices of a process
    "|address|timeout|cross_host|topology|preemption|recoverability"  # the rendezvous
)
MAX_LISTED = 8
MAX_CHARACTERS = 80
NOT_SET = "not set"
SAME_EVERYWHERE = "Give all of them the same config, data, software and settings"
SHARED = "Set run.dir to an absolute path on a file system that all hosts mount"
SEE_SECONDS = 60.0
"""The time for a file to appear on another host: network file systems cache its absence for so long."""
POLL_SECONDS = 0.2
LEAVE_SECONDS = 5.0
"""The time that process 0 waits for the others before it ends."""


class Disagreement(UserError):
    """The processes of a run are about to do different things."""


class NotShared(UserError):
    """The processes of a run see different directories under one name."""


def agree_on_config(plain: Mapping[str, Any], seconds: float) -> None:
    """Checks that all processes have the same software, settings, config, and number of devices.

    Args:
        plain: The plain values of the config.
        seconds: The maximum time to wait for the others.

    Raises:
        Disagreement: They differ; names the differences and the ranks.
        ProcessesMissing: Some did not answer in time.
    """
    if coordination_client() is None:
        return
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), **package_versions()}
    found = {f"version of {name}": text for name, text in versions.items()}
    found["devices of a process"] = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
    found |= numeric_settings(os.environ, jax_settings())
    keys = flatten_mapping(plain)
    found |= {key: json.dumps(value, default=str) for key, value in keys.items() if key not in HOST_KEYS}
    agree("config", found, seconds)


def agree_on_start(built: Built, provenance: Provenance) -> None:
    """Checks that all processes are about to run the same program on the same data.

    Args:
        built: The run.
        provenance: Its data and source.

    Raises:
        Disagreement: They differ; names the differences and the ranks.
        ProcessesMissing: Some did not answer within `timeouts.rendezvous`.
    """
    if jax.process_count() == 1:
        return
    names = (built.config.model["name"], *built.config.optimizer.names)
    own = {str(name).partition(":")[0] for name in names}  # others may be imported by one process alone
    hashes = {module: hashed for module, (_, hashed) in provenance.code.items() if module in own}
    found = {
        "the data (fingerprint)": provenance.fingerprint,
        "the user's own code": short_hash(str(hashes)),
        "the layouts of the parameters": short_hash(str(built.layouts.table.to_json())),
        "the program of a step (StableHLO)": short_hash(built.step.lower(built.batch).as_text()),
        **numeric_settings(os.environ, jax_settings()),  # the user's own modules may have changed some
    }
    agree("start", found, built.config.timeouts.rendezvous)


NOT_FROM_THE_KEY = (
    "is not deterministic: it takes numbers from something else than its key, such as np.random without a seed, a "
    "clock, or a file that differs between hosts. Draw every number from the key (jax.random)"
)


def agree_on_init(built: Built, name: str, *, draws: bool) -> None:
    """Checks that all processes are about to create the first state with the same programs.

    A number that `init` takes from NumPy or from the clock while it is traced is a constant of its program.

    Args:
        built: The run, which starts at step 0.
        name: The name of this comparison, used once.
        draws: Whether the model draws its parameters; False if they are read from files.

    Raises:
        Disagreement: They differ; names the differences and the ranks.
        ProcessesMissing: Some did not answer within `timeouts.rendezvous`.
    """
    if jax.process_count() == 1:
        return
    programs = built.step.lower_init(draws=draws)
    found = {
        f"the program that creates {created} (StableHLO)": short_hash(lowered.as_text())
        for created, lowered in programs.items()
    }
    agree(name, found, built.config.timeouts.rendezvous, f"init {NOT_FROM_THE_KEY}")


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


def check_same_step(step: int, seconds: float, name: str = "the step to go on from") -> None:
    """Checks that all processes would continue from the same checkpoint. Every process of the run calls this.

    Args:
        step: The step of the latest checkpoint that this process sees; 0 = none.
        seconds: Seconds to wait for the other processes.
        name: The name of this comparison, used once.

    Raises:
        Disagreement: Some see other checkpoints; names them.
        ProcessesMissing: Some did not answer in time.
    """
    agree(name, {"latest checkpoint in run.dir": str(step)}, seconds, SHARED)


def check_shared(folder: Path, seconds: float) -> None:
    """Checks that all processes see the directory that process 0 owns. Every process of the run calls this.

    Args:
        folder: The absolute path of `run.dir`; process 0 has created it and owns it.
        seconds: Seconds to wait for the other processes.

    Raises:
        NotShared: Some see another directory; names them.
        ProcessesMissing: Some did not answer in time.
    """
    if jax.process_count() == 1:
        return
    owner = read_owner(folder) if is_main_process() else None
    token, place = (owner.token, owner.place) if owner else ("", "")
    token, place = json.loads(broadcast_text("run.dir is owned", json.dumps([token, place]), seconds=seconds))
    patience = 0.0 if place == this_place() else min(seconds, SEE_SECONDS)  # on one host, files are visible at once

    def is_owned() -> bool:
        owner = read_owner(folder)
        return owner is not None and owner.token == token

    seen = wait_until_visible(is_owned, folder, patience)
    answers = exchange("run.dir is seen", "yes" if seen else "no", seconds=seconds + SEE_SECONDS)
    if blind := [rank for rank, answer in enumerate(answers) if answer != "yes"]:
        wait_until_all_know()
        raise NotShared(
            f"run.dir is not shared between ranks 0 and {blind[0]}: {folder} of one is not that of the other. Every "
            f"process writes its part of a checkpoint into it. {SHARED}."
        )


def wait_until_all_know() -> None:
    """Delays the end of process 0; every process calls this before it ends for a reason that all of them found.

    Process 0 runs the service through which they found it. If it ended first, JAX would abort the others before they
    print the reason.
    """
    client, left = coordination_client(), f"{PREFIX}leaving/"
    if client is None:
        return
    client.key_value_set(f"{left}{jax.process_index()}", "", allow_overwrite=True)
    deadline = time.monotonic() + LEAVE_SECONDS
    while jax.process_index() == 0 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if len(client.key_value_dir_get(left)) == jax.process_count():
            time.sleep(POLL_SECONDS)
            return


def _flags(text: str) -> dict[str, str]:
    """Parses "--a=1 --b" as XLA does: the last of several counts, and a text without a dash names a file of flags."""
    if text.strip() and not text.lstrip().startswith("-"):
        with suppress(OSError):
            text = Path(text.strip()).read_text(encoding="utf-8", errors="replace")
    parts = (word.partition("=") for word in text.split())
    return {name: value if equals else "true" for name, equals, value in parts}


def agree(name: str, found: Mapping[str, str], seconds: float, fix: str = SAME_EVERYWHERE) -> None:
    """Checks that all processes have found the same; every process of the run calls this.

    Args:
        name: The name of this comparison, used once.
        found: What this process has found, by name.
        seconds: Seconds to wait for the other processes.
        fix: What to change if they differ, without a period.

    Raises:
        Disagreement: They differ; names the differences and the ranks.
        ProcessesMissing: Some did not answer in time.
    """
    texts = exchange(name, json.dumps(found), seconds=seconds)
    if len(set(texts)) == 1:
        return
    unlike = unequal([json.loads(text) for text in texts], NOT_SET)
    lines = [differences(key, [*map(_cut, values)]) for key, values in unlike.items()]
    wait_until_all_know()
    raise Disagreement(
        f"The {len(texts)} processes of this run differ, and would train different things together:\n  "
        + "\n  ".join(first_lines(lines, MAX_LISTED))
        + f"\n{fix}, and start them again; nothing was trained."
    )


def short_hash(text: str) -> str:
    """Returns twelve digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 4]} ..."


def wait_until_visible(is_visible: Callable[[], bool], folder: Path, seconds: float) -> bool:
    """Waits until this process sees what another host has written to a directory.

    Args:
        is_visible: Returns True if this process sees it.
        folder: The directory, which may be missing.
        seconds: The time limit.

    Returns:
        False if it is not visible in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            os.listdir(folder)  # refreshes the cache of a network file system
        if is_visible():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
