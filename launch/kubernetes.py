"""`spmdkit launch CONFIG --on kubernetes`: a JobSet, or an Indexed Job with a headless service.

The cluster places the pods, starts them and starts them again; the section `launch` of the config says what they are.
"""

from ..configs import Config, load_config
from .places import Run, not_a_target
from .pods.kubectl import apply
from .pods.manifest import manifest
from .pods.names import job_name
from .supervision.attempts import say


def parse(given: str) -> None:
    """Reads nothing: all is in the config.

    Raises:
        UserError: Something is given.
    """
    if given:
        raise not_a_target("kubernetes", given)


def describe(run: Run, target: None) -> str:
    """The manifest."""
    return manifest(run, load(run)).rstrip("\n")


def launch(run: Run, target: None) -> int:
    """Hands the manifest to the cluster.

    Returns:
        0: the cluster has taken it.

    Raises:
        UserError: The config cannot be launched there, there is no kubectl, or the cluster refuses the manifest.
        ClusterUnavailable: It does not answer.
    """
    config = load(run)
    kind, name = config.launch.kubernetes.form, job_name(config)
    for line in apply(manifest(run, config), kind, name):
        say(line)
    for line in after(config, kind, name):
        say(line)
    return 0


def load(run: Run) -> Config:
    """Reads the config for as many processes as there are pods."""
    return load_config(run.source, run.overrides, num_processes=None)


def after(config: Config, kind: str, name: str) -> list[str]:
    """The commands to look after it with."""
    namespace = config.launch.kubernetes.namespace
    within = f" --namespace {namespace}" if namespace else ""
    return [
        f"to watch it:    kubectl get {kind} {name} --watch{within}",
        f"what it prints: kubectl logs --selector app.kubernetes.io/instance={name} --prefix --follow{within}",
        f"to stop it:     kubectl delete {kind} {name}{within}    (it saves first; launch again to go on)",
    ]
