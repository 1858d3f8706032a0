"""What keeps a config from being launched on Kubernetes: everything that is wrong, at once."""

import re
from pathlib import PurePosixPath

from ...configs import Config
from ...configs.secret_variables import redact
from ...mesh.errors import UserError
from ..places import Run
from .names import MOST_NAME, as_label, is_image, is_label, is_namespace, is_subdomain, job_name

QUANTITY = re.compile(r"[1-9][0-9]{0,11}(\.[0-9]{1,3})?([KMGTP]i|[kMGTP])")
"""An amount of memory as Kubernetes writes it; one without a unit would be bytes."""
CONFIG_FOLDER = "/config"
"""Of a pod, where its config lies."""


def refuse(found: list[str]) -> None:
    """Raises a UserError that says everything that is wrong, where anything is."""
    if found:
        raise UserError("\n".join(["The config cannot be launched on Kubernetes:", *(f"  {each}" for each in found)]))


def problems(run: Run, config: Config) -> list[str]:
    """What keeps a config from being launched on Kubernetes."""
    wanted, found = config.launch.kubernetes, []
    if not is_image(wanted.image):
        found.append(
            f"launch.kubernetes.image={wanted.image!r} must name a container image that has spmdkit, in "
            "small letters, such as registry.example.org/team/train:1.4."
        )
    if wanted.name and not is_label(wanted.name, MOST_NAME):
        found.append(
            f"launch.kubernetes.name={wanted.name!r} must be a label of DNS (small letters, digits, dashes, a letter "
            f"first) of at most {MOST_NAME} characters, such as {as_label(wanted.name, MOST_NAME)!r}."
        )
    if wanted.namespace and not is_namespace(wanted.namespace):
        found.append(
            f"launch.kubernetes.namespace={wanted.namespace!r} is no namespace: small letters, digits and dashes, of "
            "which at most 63 are allowed."
        )
    names = [(key, getattr(wanted, key)) for key in ("queue", "volume_claim", "service_account")]
    for key, value in [*names, *(("secrets", name) for name in wanted.secrets)]:
        if (value or key == "secrets") and not is_subdomain(value):
            found.append(f"launch.kubernetes.{key}={value!r} is no name: small letters, digits, dashes and dots.")
    if wanted.memory and not QUANTITY.fullmatch(wanted.memory):
        found.append(
            f"launch.kubernetes.memory={wanted.memory!r} must be a number with a unit, such as '64Gi' or '500M'."
        )
    if not wanted.volume_claim:
        found.append(
            "launch.kubernetes.volume_claim must name a PersistentVolumeClaim that all pods can write (ReadWriteMany): "
            "run.dir has to outlive a pod and to be the same for all."
        )
    found += _secret_problems(config)
    return found + _folder_problems(config) + _process_problems(config) + _option_problems(run, config)


def _secret_problems(config: Config) -> list[str]:
    """A manifest is readable by many: variables that look like secrets come from Secrets of the cluster alone."""
    names = [name for name, value in redact(config.launch.environment).items() if value is None]
    if not names or config.launch.kubernetes.secrets:
        return []
    literals = " ".join(f'--from-literal={name}="${name}"' for name in names)
    return [
        f"launch.environment: {', '.join(names)} must come from a Secret, for a manifest shows its values. Create one "
        f"(kubectl create secret generic my-secret {literals}), and set launch.kubernetes.secrets=[my-secret]."
    ]


def _option_problems(run: Run, config: Config) -> list[str]:
    """What is wrong with the options of the command."""
    found = []
    if run.fresh:
        found.append("--fresh would start anew with every pod that comes again. Set run.dir to another folder instead.")
    if run.wait:
        form = config.launch.kubernetes.form
        done = "Completed" if form == "jobset" else "Complete"
        found.append(
            "--wait: this command ends when the cluster has taken the run, which keeps no exit code of all of it. "
            f"Leave it out, and wait with: kubectl wait --for=condition={done} {form}/{job_name(config)} --timeout=24h"
        )
    return found


def _folder_problems(config: Config) -> list[str]:
    mount, given = config.launch.kubernetes.mount, config.run.dir
    folder = PurePosixPath(mount)
    if mount[:1] != "/" or ":" in mount or ".." in folder.parts or str(folder).lstrip("/") in ("", CONFIG_FOLDER[1:]):
        return [
            f"launch.kubernetes.mount={mount!r} must be a folder of the container's own, without a colon or '..', such "
            "as /shared."
        ]
    if given.startswith("/") and not is_below(given, mount):
        return [
            f"run.dir={given} is not below launch.kubernetes.mount={mount}, where the volume is: it would be lost with "
            "the pod. Write it relative, or below that folder."
        ]
    return []


def _process_problems(config: Config) -> list[str]:
    launch, found = config.launch, []
    if launch.processes_per_node != 1:
        gpus = launch.processes_per_node * launch.gpus_per_process
        instead = f" and launch.gpus_per_process={gpus}" if gpus else ""
        found.append(
            f"launch.processes_per_node={launch.processes_per_node}, but a pod holds one process, which drives all "
            f"GPUs of the pod. Set launch.processes_per_node=1{instead}."
        )
    if launch.time and deadline(launch.time) is None:
        found.append(f"launch.time={launch.time!r} must be hours:minutes:seconds, such as '12:00:00'.")
    return found


def deadline(time: str) -> int | None:
    """Seconds of a time limit, as other schedulers read it too.

    Args:
        time: "minutes", "minutes:seconds", "hours:minutes:seconds"; after "days-", "hours" and what may follow it.

    Returns:
        None where the text is of another form, or no time at all.
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::([0-5]?\d))?(?::([0-5]?\d))?", time)
    if match is None:
        return None
    days, *parts = match.groups()
    given = [int(part) for part in parts if part is not None]
    if days is None and len(given) < 3:
        given.insert(0, 0)
    hours, minutes, seconds = [*given, 0, 0][:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds or None


def is_below(path: str, folder: str) -> bool:
    """Whether a path of the container lies in a folder, as it is written."""
    return PurePosixPath(path).is_relative_to(folder) and ".." not in PurePosixPath(path).parts
