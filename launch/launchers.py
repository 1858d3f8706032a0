"""The launchers: one file each in this directory, and one entry in LAUNCHERS.

    local         processes on this machine
    ssh           processes on hosts that are reached over SSH
    slurm         a batch job of a Slurm cluster
    mpi           mpirun of Open MPI, on this machine or on the hosts of a hostfile
    kubernetes    pods of a JobSet or an Indexed Job

A launcher has three functions. All of them raise UserError for mistakes of the user; then nothing was started.

    parse(given)                returns the target: the part of `--on` after "name:"
    describe(request, target)   returns what would be started, as text: command lines, a batch script, or a manifest
    launch(request, target)     starts it; returns the exit code of the run, or 0 if a scheduler has taken it

Placing, starting and requeueing jobs is left to the scheduler.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..configs import load_config
from ..configs.launch_config import LaunchConfig
from ..configs.schema import Config, Timeouts
from ..configs.secret_variables import redact, redact_override
from ..mesh.errors import UserError, did_you_mean
from .config_copy import ConfigCopy, digest_of, is_edited, make_copy

MAX_SHOWN = 60
"""Characters of an invalid `--on` in a message."""
KEEPS_CONFIG = (
    "since this launch began. The run keeps the config that it started with, {}. To change it, stop the run and launch "
    "it again."
)
"""The end of the message that the file of a config is not the one that a launch has read."""
GPU_OPTIONS = ("--gres", "--gpus", "--tres-per", "--exclusive")
"""Beginnings of the options with which a job of Slurm can ask for GPUs."""
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.policies["json.dumps_kwargs"] = {"ensure_ascii": False}


class LaunchRequest(NamedTuple):
    """The arguments of `spmdkit launch`.

    Attributes:
        source: A YAML file or the name of a preset.
        overrides: Arguments of the form `key=value`.
        fresh: Start from step 0; process 0 moves the contents of the run's directory aside, except its logs.
        restarts: The maximum number of restarts in a row without a newer checkpoint.
    """

    source: str
    overrides: tuple[str, ...] = ()
    fresh: bool = False
    restarts: int = 0


class LaunchJob(NamedTuple):
    """A run to launch: the request and its config, which is read once.

    Attributes:
        request: The arguments of `spmdkit launch`.
        config: The config of all attempts and processes.
        digest: The digest of the config's file when it was read; "" if nobody edits it (see `is_edited`).
        copy: The file that the processes read; None = that of the request.
    """

    request: LaunchRequest
    config: Config
    digest: str = ""
    copy: ConfigCopy | None = None

    @classmethod
    def load(cls, request: LaunchRequest, *, num_processes: int | None = None, simulate: int | None = None) -> Self:
        """Reads and checks the config for a number of processes; None = that of the section `launch`.

        Raises:
            UserError: The config is invalid.
        """
        digest = digest_of(Path(request.source))
        config = load_config(request.source, request.overrides, num_processes=num_processes, simulate=simulate)
        return cls(request, config, digest if is_edited(config) else "")

    @property
    def launch(self) -> LaunchConfig:
        """The section `launch` of the config."""
        return self.config.launch

    @property
    def timeouts(self) -> Timeouts:
        """The section `timeouts`."""
        return self.config.timeouts

    @property
    def run_dir(self) -> str:
        """The directory of the run."""
        return self.config.run.dir

    def with_copy(self, run_dir: str | Path | None = None) -> Self:
        """Returns the job with processes that read a copy of the config; it has to be written before they start.

        Args:
            run_dir: The directory of the run; None = as the config gives it.
        """
        logs = Path(self.run_dir if run_dir is None else run_dir) / "logs"
        return self._replace(copy=make_copy(self.config, self.request.source, logs))

    def describe_change(self) -> str:
        """Returns a line for people if the config's file is not the one that this launch has read, otherwise ""."""
        if self.copy is None or not self.digest:
            return ""
        digest = digest_of(Path(self.request.source))
        if digest == self.digest:
            return ""
        what = "has changed" if digest else "was removed"
        return f"{self.request.source} {what} {KEEPS_CONFIG.format(self.copy.path)}"

    def command(self, python: str, *, fresh: bool) -> list[str]:
        """Returns the command line of every process.

        The copy contains the values of the overrides. They are repeated for those who look at the processes, and
        because relative paths in them start from the working directory of the process.
        """
        source = (self.request.source,) if self.copy is None else self.copy.arguments
        arguments = ["train", *source, *map(redact_override, self.request.overrides)]
        return [python, "-P", "-m", "spmdkit", *arguments, *(["--fresh"] if fresh else [])]

    def run_setup(self, command: list[str], *options: str) -> list[str]:
        """Returns a command line that runs the lines of `launch.setup` before a command, if there are any.

        Args:
            command: The command line.
            options: Options of bash, such as "-e".
        """
        if not self.launch.setup:
            return command
        return ["bash", *options, "-c", "\n".join([*self.launch.setup, 'exec "$@"']), "bash", *command]


class Form(NamedTuple):
    """The usage of a launcher.

    Attributes:
        usage: The argument of `--on`.
        text: An explanation.
    """

    usage: str
    text: str


LAUNCHERS = {
    "local": Form("local:PxD", "P processes on this machine that simulate D CPU devices each, such as local:2x4"),
    "ssh": Form("ssh:FILE", "the hosts of a file (names, or YAML), such as ssh:hosts.yaml; or ssh:gpu1,gpu2"),
    "slurm": Form("slurm[:PARTITION]", "a job of this Slurm cluster, with the sizes in the config's section launch"),
    "mpi": Form("mpi[:HOSTFILE]", "mpirun of Open MPI, with those sizes, on this machine or the hosts of a hostfile"),
    "kubernetes": Form("kubernetes", "pods as described by the section launch of the config"),
}  # fmt: skip
"""By name, which is also the name of the module."""


def find_launcher(on: str | None) -> tuple[ModuleType, Any]:
    """Parses `--on`; None if it is missing.

    Returns:
        The module of the launcher, and the result of its `parse`.

    Raises:
        UserError: `--on` is missing, or its launcher or target is not valid; the message lists the valid forms.
    """
    if on is None:
        width = max(len(form.usage) for form in LAUNCHERS.values())
        forms = [f"  --on {form.usage:<{width}}  {form.text}" for form in LAUNCHERS.values()]
        raise UserError("\n".join(["spmdkit launch needs a launcher. Add one of these:", *forms]))
    name, _, rest = on.partition(":")
    if name not in LAUNCHERS:
        hint, forms = did_you_mean(name, LAUNCHERS), " or ".join(form.usage for form in LAUNCHERS.values())
        raise UserError(f"--on {on[:MAX_SHOWN]!r}: unknown launcher {name[:MAX_SHOWN]!r}.{hint} Use {forms}.")
    launcher = import_module(f".{name}", __package__)
    return launcher, launcher.parse(rest)


def invalid_target(name: str, given: str, reason: str = "") -> UserError:
    """Returns the error for an invalid argument of a launcher.

    Args:
        name: The launcher.
        given: The part of `--on` after its name.
        reason: An explanation that begins with ": ", or "".
    """
    on = f"{name}:{given}" if given else name
    form = LAUNCHERS[name]
    return UserError(f"--on {on[:MAX_SHOWN]!r} is not valid{reason}; use {form.usage}: {form.text}.")


def check_no_size(name: str, given: str) -> None:
    """Checks that an argument of a launcher is not the size of a job, as `local:2x4` has it.

    Args:
        name: The launcher.
        given: The part of `--on` after its name.

    Raises:
        UserError: It is; the message names the keys that set the size.
    """
    size = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", given, re.ASCII)
    if size is None:
        return
    nodes, gpus = size.groups()
    raise UserError(
        f"--on '{name}:{given}' is not valid: a size is not part of --on {name}, but keys of the config. For {nodes} "
        f"hosts with {gpus} GPUs each: --on {LAUNCHERS[name].usage} launch.nodes={nodes} launch.gpus_per_process={gpus}"
    )


def describe_missing_gpus(job: LaunchJob, options: Sequence[str] = ()) -> str:
    """Returns a warning if a job for real devices asks a cluster for no GPU; "" otherwise.

    Args:
        job: The run to launch.
        options: Options of the scheduler that may ask for GPUs too.
    """
    sizes = job.launch
    asks = sizes.gpus_per_process > 0 or any(option.startswith(GPU_OPTIONS) for option in options)
    platforms = sizes.environment.get("JAX_PLATFORMS") or ""
    if asks or job.config.run.simulate > 0 or platforms.startswith("cpu"):
        return ""
    return (
        "warning: this job asks for no GPU (launch.gpus_per_process=0), so it would train on CPUs. For 8 GPUs of each "
        "process: launch.gpus_per_process=8. If CPUs are meant: launch.environment.JAX_PLATFORMS=cpu."
    )


def shell_line(command: Sequence[str], variables: Mapping[str, str | None]) -> str:
    """Returns a line for a shell: environment variables, then a command."""
    return " ".join([*assignments(variables), shlex.join(command)])


def assignments(variables: Mapping[str, str | None]) -> list[str]:
    """Returns assignments of environment variables for a shell; secrets and null values refer to the variable."""
    redacted = redact(variables).items()
    return [f'{name}="${name}"' if value is None else f"{name}={shlex.quote(value)}" for name, value in redacted]


def render(template: str, **values: Any) -> str:
    """Returns a text of templates/ with some values, which the template itself quotes."""
    return TEMPLATES.get_template(template).render(values)
