"""`spmdkit launch CONFIG --on kubernetes`: a JobSet, or an Indexed Job with a headless service.

The cluster places the pods, starts them and restarts them; the section `launch` of the config describes them. The one
command that talks to the cluster is `kubectl apply`, with the user's own context and permissions.
"""

import subprocess
from dataclasses import replace
from pathlib import PurePosixPath

from ..configs import resolved_yaml
from ..mesh.errors import UserError
from .launchers import LaunchJob, LaunchRequest, check_no_size, describe_missing_gpus, invalid_target
from .manifest import is_below, job_name, write_manifest
from .supervision.attempts import NotNow
from .supervision.output import announce

UNREACHABLE = ("connection refused", "Unable to connect", "no such host", "i/o timeout", "TLS handshake timeout")
NO_JOBSET = " The cluster has no JobSet controller: install it, or set launch.kubernetes.form=job."


def parse(given: str) -> None:
    """Checks that nothing follows the name: the config contains everything.

    Raises:
        UserError: Something follows.
    """
    check_no_size("kubernetes", given)
    if given:
        raise invalid_target("kubernetes", given)


def describe(request: LaunchRequest, target: None) -> str:
    """Returns the manifest."""
    return write_manifest(*_load(request)).rstrip("\n")


def launch(request: LaunchRequest, target: None) -> int:
    """Applies the manifest to the cluster.

    Returns:
        0: the cluster has accepted it.

    Raises:
        UserError: The config cannot be launched on Kubernetes, kubectl is missing, or the cluster refuses the manifest.
        NotNow: The cluster does not answer.
    """
    job, config = _load(request)
    wanted, name = job.launch.kubernetes, job_name(job)
    kind, within = wanted.form, f" --namespace {wanted.namespace}" if wanted.namespace else ""
    for line in apply(write_manifest(job, config), kind, name):
        announce(line)
    announce(f"to watch it:    kubectl get {kind} {name} --watch{within}")
    announce(f"its output:     kubectl logs --selector app.kubernetes.io/instance={name} --prefix --follow{within}")
    announce(f"to stop it:     kubectl delete {kind} {name}{within}    (it saves first; launch again to resume)")
    return 0


def _load(request: LaunchRequest) -> tuple[LaunchJob, str]:
    """Returns the run to launch, and the resolved config that its pods read: relative paths start from the volume."""
    job = LaunchJob.load(request)
    warning = describe_missing_gpus(job)
    if warning:
        announce(warning)
    config = job.config
    mount = job.launch.kubernetes.mount
    root = config.run.root if is_below(config.run.root, mount) else mount
    run = replace(config.run, dir=str(PurePosixPath(mount) / config.run.dir), root=root)
    return job, resolved_yaml(replace(config, run=run))


def apply(manifest: str, kind: str, name: str) -> list[str]:
    """Applies a manifest to the cluster.

    Args:
        manifest: The manifest as YAML.
        kind: The kind of the main object: "jobset" or "job".
        name: The name of the main object.

    Returns:
        The lines that kubectl printed.

    Raises:
        UserError: kubectl is missing, the cluster refuses the manifest, or a job of that name exists.
        NotNow: The cluster does not answer.
    """
    again = f"A job exists only once: to resume, delete the old one (kubectl delete {kind} {name}), then launch again"
    try:
        ended = subprocess.run(["kubectl", "apply", "-f", "-"], input=manifest, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            "kubectl is not installed on this machine. Install it; or print the manifest with --dry-run and apply it "
            "elsewhere."
        ) from None
    output = ended.stderr.strip() or ended.stdout.strip()
    if ended.returncode and any(words in output for words in UNREACHABLE):
        raise NotNow(f"The cluster does not answer: {output.splitlines()[-1]}")
    if ended.returncode:
        hint = f" {again}." if "immutable" in output else NO_JOBSET if 'no matches for kind "JobSet"' in output else ""
        raise UserError(f"kubectl apply failed with exit code {ended.returncode}: {output}{hint}")
    lines = ended.stdout.splitlines()
    done = [line for line in lines if line.partition(" ")[0].partition(".")[0].partition("/")[0] == kind]
    if not any(line.endswith(" created") for line in done):
        raise UserError(f"Nothing was started: {'; '.join(done or lines) or 'kubectl printed nothing'}. {again}.")
    return lines
