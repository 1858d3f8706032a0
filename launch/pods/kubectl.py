"""`kubectl apply`: the one command that talks to the cluster, with the user's own context and rights."""

import subprocess

from ...mesh.errors import UserError
from ...training.ending.exits import TRY_AGAIN

UNREACHABLE = ("connection refused", "Unable to connect", "no such host", "i/o timeout", "TLS handshake timeout")
NO_JOBSET = " The cluster has no JobSet controller: install it, or set launch.kubernetes.form=job."
SECONDS = 120.0


class ClusterUnavailable(RuntimeError):
    """The cluster does not answer; the same command may work when it does."""

    exit_code = TRY_AGAIN


def apply(manifest: str, kind: str, name: str) -> list[str]:
    """Hands a manifest to the cluster.

    Args:
        manifest: YAML.
        kind: Of the object that runs: "jobset" or "job".
        name: Of that object.

    Returns:
        What kubectl said, by line.

    Raises:
        UserError: There is no kubectl, the cluster refuses the manifest, or it holds a job of that name already.
        ClusterUnavailable: It does not answer.
    """
    command = ["kubectl", "apply", "-f", "-"]
    again = f"A job is there once: to go on, remove the old one (kubectl delete {kind} {name}), then launch again"
    try:
        ended = subprocess.run(command, input=manifest, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise UserError(
            "There is no kubectl on this machine to hand the manifest to the cluster with. Install it; or print the "
            "manifest with --dry-run and apply it elsewhere."
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterUnavailable(f"kubectl apply did not end within {SECONDS:.0f} s. Is the cluster there?") from None
    said = ended.stderr.strip() or ended.stdout.strip()
    if ended.returncode and any(words in said for words in UNREACHABLE):
        raise ClusterUnavailable(f"The cluster does not answer: {_last(said)}")
    if ended.returncode:
        hint = f" {again}." if "immutable" in said else NO_JOBSET if 'no matches for kind "JobSet"' in said else ""
        raise UserError(f"kubectl apply failed with exit code {ended.returncode}: {said}{hint}")
    lines = ended.stdout.splitlines()
    done = [line for line in lines if line.partition(" ")[0].partition(".")[0].partition("/")[0] == kind]
    if not any(line.endswith(" created") for line in done):
        raise UserError(f"Nothing was started: {'; '.join(done or lines) or 'kubectl said nothing'}. {again}.")
    return lines


def _last(text: str) -> str:
    return text.splitlines()[-1] if text else "it said nothing"
