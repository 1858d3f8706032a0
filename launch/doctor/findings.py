"""`spmdkit doctor`: runs every check, in one process or in all processes of a run, and prints the findings."""

import json
import os
import sys
from collections.abc import Sequence

from ...configs import load_config
from ...configs.schema import RunConfig
from ...mesh.devices import has_accelerators
from ...mesh.errors import UserError, counted
from ...mesh.exit_codes import FINISHED, INVALID_INPUT
from ...mesh.files import absolute_path
from ...mesh.processes import ProcessesMissing, ranks
from ..startup.addresses import PortTaken
from ..startup.detection import find_job
from ..startup.variables import Job
from ..startup.worker import count_simulated
from .host_checks import check_devices, check_machine, check_versions, installed_versions
from .job_checks import Finding, check_coordinator, check_run_dir, compare, describe_job

NAME_WIDTH = 14


def examine(source: str | None, overrides: Sequence[str] = (), *, as_json: bool = False, seconds: float = 60.0) -> int:
    """Checks everything that a run needs before it starts, and prints the findings.

    For a run with several processes, all of them call this, and process 0 prints the findings of all.

    Args:
        source: A YAML file or the name of a preset; None = no config.
        overrides: Arguments of the form `key=value`.
        as_json: Print one JSON object.
        seconds: How long to wait for the other processes.

    Returns:
        0 without problems, 2 otherwise.
    """
    try:
        job = find_job()
        found = describe_job(job)
    except UserError as error:
        job, found = None, [Finding("job", str(error), "wrong")]
    run = RunConfig()
    if source is not None:
        try:
            processes = job.num_processes if job else 1
            run = load_config(source, overrides, num_processes=processes, simulate=count_simulated()).run
        except UserError as error:
            found.append(Finding("config", str(error), "wrong"))
    by_rank = _examine_together(job, found, run.simulate, run.dir if source else ".", seconds)
    if job is None or job.process_id == 0 or len(by_rank) == 1:
        first = job.process_id if job and len(by_rank) == 1 else 0
        print(format_json(by_rank, first) if as_json else format_text(by_rank))
    is_ok = all(finding.level != "wrong" for findings in by_rank for finding in findings)
    return FINISHED if is_ok else INVALID_INPUT


def _examine_together(
    job: Job | None, found: list[Finding], simulate: int, run_dir: str, seconds: float
) -> list[list[Finding]]:
    """Returns the findings by rank; only those of this process if it is alone or the others did not connect."""
    versions, folder = installed_versions(), absolute_path(run_dir)
    simulated = count_simulated() or simulate
    found = [
        *found,
        *check_versions(versions),
        *check_devices(os.environ, simulated, job, versions),
        *check_machine(simulated * ((job.local_processes if job else None) or 1)),
        check_run_dir(folder),
    ]
    if job is None or not job.is_shared:
        return [found]
    found += check_coordinator(job, os.environ, len({*(job.hosts or job.nodes)}) > 1)
    on_cpu = simulated > 0 or not has_accelerators()
    try:
        return compare(job, found, folder, versions, on_cpu=on_cpu, seconds=seconds)
    except (ProcessesMissing, PortTaken, UserError, OSError) as error:
        is_missing = isinstance(error, ProcessesMissing)
        fix = "start `spmdkit doctor` in every process, like the run itself" if is_missing else ""
        return [[*found, Finding("processes", str(error), "wrong", fix)]]


def format_text(by_rank: Sequence[Sequence[Finding]]) -> str:
    """Returns the findings as text; a finding of all processes is listed once, others with their ranks.

    Args:
        by_rank: The findings by rank.
    """
    lines, count = [], 0
    for finding, owners in merge_findings(by_rank):
        lines += format_finding(finding, "" if len(owners) == len(by_rank) else ranks(owners))
        count += finding.level == "wrong"
    end = f"{counted(count, 'problem')} found." if count else "No problems found."
    title = f"spmdkit doctor of {len(by_rank)} processes" if len(by_rank) > 1 else "spmdkit doctor"
    return "\n".join([title, "", *lines, "", end])


def format_finding(finding: Finding, owner: str = "") -> list[str]:
    """Returns the lines of a finding: its value, and the fix if there is one.

    Args:
        finding: The finding.
        owner: The ranks that have it, such as "rank 3"; "" for all.
    """
    mark = "WRONG" if finding.level == "wrong" else finding.level
    variable = f" ({finding.variable})" if finding.variable else ""
    line = f"  {mark:<6}{finding.name:<{NAME_WIDTH}}{f'{owner}: ' if owner else ''}{finding.found}{variable}"
    return [line, f"{'':<{8 + NAME_WIDTH}}fix: {finding.fix}"] if finding.fix else [line]


def format_json(by_rank: Sequence[Sequence[Finding]], first: int = 0) -> str:
    """Returns the findings as one JSON object.

    Args:
        by_rank: The findings by rank.
        first: The first of these ranks: that of this process if the others did not connect.
    """
    merged = merge_findings(by_rank)
    is_ok = all(finding.level != "wrong" for finding, _ in merged)
    values = [{**finding._asdict(), "ranks": [first + owner for owner in owners]} for finding, owners in merged]
    return json.dumps({"ok": is_ok, "python": sys.executable, "findings": values}, indent=2)


def merge_findings(by_rank: Sequence[Sequence[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Returns every different finding once with the ranks that have it, grouped by name."""
    different = list(dict.fromkeys(finding for findings in by_rank for finding in findings))
    names = list(dict.fromkeys(finding.name for finding in different))
    different.sort(key=lambda finding: names.index(finding.name))
    return [(each, [rank for rank, findings in enumerate(by_rank) if each in findings]) for each in different]
