"""`spmdkit doctor`: every check, in this process and, where it is one of several, in all of them together."""

import json
import os
import sys
from collections.abc import Sequence

from ...configs import load_config
from ...configs.schema import Config, RunConfig
from ...mesh.errors import UserError
from ...mesh.files import absolute_path
from ...mesh.joining.accelerators import has_accelerators
from ...mesh.joining.detection import Job, find_job
from ...mesh.processes import tell
from ...training.ending.exits import FINISHED, USER_MISTAKE
from ...training.worker import simulated_by_job
from . import job as of_job
from .compiling import compiling
from .devices import devices
from .finding import Finding, as_text, in_order, is_wrong
from .folder import folder
from .machine import machine
from .software import installed, software
from .together import Compared, compare


def doctor(source: str | None, overrides: Sequence[str] = (), *, as_json: bool = False, seconds: float = 60.0) -> int:
    """Looks at everything that a run needs before it starts, and prints what it finds.

    In a run of several processes, all of which call this, process 0 prints for all.

    Args:
        source: A YAML file or the name of a preset; None = no config is looked at.
        overrides: `key=value` each.
        as_json: Whether to print one JSON object.
        seconds: How long to wait for the other processes.

    Returns:
        0 where nothing is wrong, 2 where something is.
    """
    job, found = _find_job()
    config, problems = _load(source, overrides, job)
    found += problems
    compared = _examine(job, config, found, seconds)
    own = compared.findings if compared.met else compared.findings[:1]
    if job is None or job.process_id == 0 or not compared.met:
        print(_as_json(own, job) if as_json else _as_text(own, job))
    wrong = any(is_wrong(findings) for findings in own)
    return USER_MISTAKE if wrong else FINISHED


def _find_job() -> tuple[Job | None, list[Finding]]:
    try:
        job = find_job()
    except UserError as error:
        return None, [Finding("job", str(error), "wrong")]
    return job, [*of_job.who(job), *of_job.others(job, os.environ)]


def _load(source: str | None, overrides: Sequence[str], job: Job | None) -> tuple[Config | None, list[Finding]]:
    """The config, where one is given."""
    if source is None:
        return None, []
    try:
        processes, simulate = job.num_processes if job else 1, simulated_by_job()
        return load_config(source, overrides, num_processes=processes, simulate=simulate), []
    except UserError as error:
        return None, [Finding("config", str(error), "wrong")]


def _examine(job: Job | None, config: Config | None, found: list[Finding], seconds: float) -> Compared:
    versions = installed()
    simulated = _simulated(config)
    nodes = {*(job.hosts or job.nodes)} if job else set()
    alone = job is None or not job.is_shared
    to_be_shared = alone and bool(config and config.launch.nodes > 1)  # processes that meet look themselves
    run_dir = absolute_path(config.run.dir if config else ".")
    local = (job.local_processes if job else None) or 1
    found = [
        *found,
        *software(versions),
        *devices(os.environ, simulated, job, versions),
        *machine(simulated * local),
        *folder(run_dir, to_be_shared),
        *compiling(config.run if config else RunConfig(), simulated, os.environ),
    ]
    if job is None or alone:
        return Compared([found], met=False)
    found += of_job.coordinator(job, os.environ, len(nodes) > 1)
    on_cpu = simulated > 0 or not has_accelerators()
    return compare(job, found, run_dir, versions, os.environ, on_cpu=on_cpu, seconds=seconds, say=tell)


def _simulated(config: Config | None) -> int:
    return simulated_by_job() or (config.run.simulate if config else 0)


def _as_text(found: Sequence[Sequence[Finding]], job: Job | None) -> str:
    lines = as_text(found)
    count = sum(finding.level == "wrong" for finding in in_order(found))
    end = "Nothing is wrong." if not count else "1 thing is wrong." if count == 1 else f"{count} things are wrong."
    of = f" of {job.num_processes} processes" if job and len(found) > 1 else ""
    return "\n".join([f"spmdkit doctor{of}", "", *lines, "", end])


def _as_json(found: Sequence[Sequence[Finding]], job: Job | None) -> str:
    values = [
        {**finding._asdict(), "ranks": [rank for rank, findings in enumerate(found) if finding in findings]}
        for finding in in_order(found)
    ]
    if len(found) == 1 and job is not None:
        values = [{**value, "ranks": [job.process_id]} for value in values]
    wrong = any(is_wrong(findings) for findings in found)
    return json.dumps({"ok": not wrong, "python": sys.executable, "findings": values}, indent=2)
