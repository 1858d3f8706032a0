"""The doctors of several processes meet as the processes of a run would, and compare what they found."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...mesh.coordination import ProcessesMissing, differences
from ...mesh.errors import UserError
from ...mesh.joining.accelerators import gpus_of_host, gpus_visible
from ...mesh.joining.addresses import PortTaken, own_ip
from ...mesh.joining.detection import Job
from ...mesh.joining.meeting import Meeting
from ...mesh.joining.rendezvous import meet
from ...mesh.processes import check_own_names
from .finding import Finding, from_plain
from .folder import MOST_SKEW, WAIT_SECONDS, probe, shared

RUN = "spmdkit doctor"


class Compared(NamedTuple):
    """What the doctors know after they have met.

    Attributes:
        findings: Of each process, by rank; of this one alone where they have not met.
        met: Whether they have.
    """

    findings: list[list[Finding]]
    met: bool


def compare(
    job: Job,
    own: Sequence[Finding],
    run_dir: Path,
    versions: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    on_cpu: bool,
    seconds: float,
    say: Callable[[str], None],
    look_seconds: float = WAIT_SECONDS,
) -> Compared:
    """Meets the doctors of the other processes.

    Args:
        job: Of several processes.
        own: What this one has found by itself.
        run_dir: The run's folder, absolute.
        versions: Of the packages that are installed.
        environ: Of this process.
        on_cpu: Whether the run computes on the CPU.
        seconds: How long to wait for the others.
        say: Gets a line now and then that says who is missing.
        look_seconds: How long to look for the files of the others.
    """
    try:
        with probe(run_dir, job.process_id) as name:
            visible = gpus_visible(environ, gpus_of_host())
            note = {"own_ip": own_ip(), "probe": name, "versions": dict(versions), "gpus": visible}
            meeting = meet(job, seconds=seconds, run=RUN, note=note, share=True, say=say)
            seen = [
                shared(run_dir, [str(each.get("probe", "")) for each in meeting.notes], meeting.hosts, look_seconds)
            ]
            seen += [*met(meeting), *clocks(meeting), *mixed(meeting.notes), *names(meeting, on_cpu)]
            seen += oversubscribed(meeting)
            again = {"findings": [list(finding) for finding in (*own, *seen)]}
            told = meet(job, seconds=seconds, run=RUN, note=again, share=True, say=say)
    except (ProcessesMissing, PortTaken, UserError) as error:
        fix = "start `spmdkit doctor` in every process, as the run itself"
        return Compared([[*own, Finding("processes", str(error), "wrong", fix)]], met=False)
    return Compared([from_plain(each["findings"]) for each in told.notes], met=True)


def met(meeting: Meeting) -> list[Finding]:
    """That all are there, and where."""
    counts = {host: meeting.hosts.count(host) for host in dict.fromkeys(meeting.hosts)}
    where = ", ".join(f"{count} on {host}" for host, count in list(counts.items())[:8])
    more = f" and {len(counts) - 8} hosts more" if len(counts) > 8 else ""
    return [Finding("processes", f"all {len(meeting.hosts)} have met: {where}{more}")]


def clocks(meeting: Meeting) -> list[Finding]:
    """Clocks of the hosts against that of process 0."""
    furthest: dict[str, float] = {}
    for host, skew in zip(meeting.hosts, meeting.skews, strict=True):
        if abs(skew) > abs(furthest.get(host, 0.0)):
            furthest[host] = skew
    wrong = {host: skew for host, skew in furthest.items() if abs(skew) > MOST_SKEW}
    if not wrong:
        return [Finding("clock", f"those of all hosts agree within {MOST_SKEW:.0f} s")]
    said = ", ".join(f"{host} {skew:+.0f} s" for host, skew in wrong.items())
    fix = "let all hosts follow the same time server (chrony, ntpd)"
    return [Finding("clock", f"against {meeting.hosts[0]}: {said}", "wrong", fix)]


def mixed(notes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Versions that are not the same in all processes."""
    versions = [note.get("versions") or {} for note in notes]
    packages = list(dict.fromkeys(package for each in versions for package in each))
    wrong = [package for package in packages if len({each.get(package) for each in versions}) > 1]
    fix = "install the same versions on all hosts"
    return [
        Finding("versions", differences(name, [str(each.get(name, "none")) for each in versions]), "wrong", fix)
        for name in wrong
    ]


def names(meeting: Meeting, on_cpu: bool) -> list[Finding]:
    """Host names that the others could not reach."""
    try:
        check_own_names(meeting, on_cpu=on_cpu)
    except UserError as error:
        return [Finding("host name", str(error), "wrong")]
    return []


def oversubscribed(meeting: Meeting) -> list[Finding]:
    """More processes on a host than GPUs, where none was bound to one."""
    wrong = []
    for host in dict.fromkeys(meeting.hosts):
        seen = [note.get("gpus", 0) for note, other in zip(meeting.notes, meeting.hosts, strict=True) if other == host]
        if max(seen) > 1 and len(seen) > max(seen):
            fix = f"start at most {max(seen)} processes on each host (launch.processes_per_node)"
            wrong.append(Finding("GPUs", f"{len(seen)} processes on {host}, for {max(seen)} GPUs", "wrong", fix))
    return wrong
