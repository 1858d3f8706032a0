"""The places to launch a run on: one file each beside this one, and one line of PLACES.

    local         processes on this machine
    ssh           processes on hosts that are reached over SSH
    slurm         a batch job of a Slurm cluster
    mpi           mpirun of Open MPI, on this machine or the hosts of a file
    kubernetes    pods of a JobSet or an Indexed Job

A place has three functions. `parse` reads what `--on` says after its name. `describe` gives what would be started, as
text: the command lines, the script, the manifest. `launch` starts it, and returns how it ended where that is this
command's to know. To place, start and requeue is the scheduler's work; none of that is done here.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from ..configs.secret_variables import redact, redact_override
from ..mesh.errors import UserError
from ..mesh.near_miss import did_you_mean


class Run(NamedTuple):
    """What is launched.

    Attributes:
        source: A YAML file or the name of a preset.
        overrides: `key=value` each.
        fresh: Start anew; process 0 moves aside what the folder of the run holds, but its logs.
        restarts: How often in a row a run that died starts again by itself without a newer checkpoint.
        wait: Where a scheduler takes the run, wait for its end.
    """

    source: str
    overrides: tuple[str, ...] = ()
    fresh: bool = False
    restarts: int = 0
    wait: bool = False

    @property
    def arguments(self) -> list[str]:
        """What every process of the run is started with, after `python -P -m spmdkit`."""
        return ["train", self.source, *map(redact_override, self.overrides)]


class Place(Protocol):
    """A module beside this one."""

    def parse(self, given: str) -> Any:
        """Reads what `--on` says after "name:"; an empty text where it says the name alone.

        Raises:
            UserError: It is of another form.
        """
        ...

    def describe(self, run: Run, target: Any) -> str:
        """What would be started, as `--dry-run` prints it; nothing is started or written.

        Raises:
            UserError: The config cannot be launched there.
        """
        ...

    def launch(self, run: Run, target: Any) -> int:
        """Starts the run; returns its exit code, or 0 where a scheduler has taken it.

        Raises:
            UserError: The config or the folder of the run cannot be used; nothing was started.
            FolderUnavailable: The file system of run.dir cannot be written to.
        """
        ...


class Listed(NamedTuple):
    """A line of PLACES.

    Attributes:
        form: How it is written after `--on`.
        text: What that means.
    """

    form: str
    text: str


PLACES = {
    "local": Listed("local:PxD", "P processes here that simulate D CPU devices each, such as local:2x4"),
    "ssh": Listed("ssh:FILE", "the hosts that a YAML file names, such as ssh:hosts.yaml"),
    "slurm": Listed("slurm[:PARTITION]", "a job of this Slurm cluster, of the sizes in the config's section launch"),
    "mpi": Listed("mpi[:HOSTFILE or :N]", "mpirun of Open MPI, of those sizes, on a file's hosts; or N processes here"),
    "kubernetes": Listed("kubernetes", "pods as the section launch of the config says"),
}
"""By name, which is that of the module too."""


def find_place(on: str | None) -> tuple[Place, Any]:
    """Reads `--on`; None where it was not given.

    Returns:
        The place, and what its `parse` made of the rest.

    Raises:
        UserError: None is given, there is no such place, or the rest is of another form; the message says which forms
            there are.
    """
    if on is None:
        width = max(len(listed.form) for listed in PLACES.values())
        places = [f"  --on {listed.form:<{width}}  {listed.text}" for listed in PLACES.values()]
        raise UserError("\n".join(["spmdkit launch has to be told where; give one of these:", *places]))
    name, _, rest = on.partition(":")
    if name not in PLACES:
        raise UserError(f"--on {on[:60]!r} is no place to launch on.{did_you_mean(name, PLACES)} Give {forms()}.")
    place = cast(Place, import_module(f".{name}", __package__))
    return place, place.parse(rest)


def not_a_target(name: str, given: str, reason: str = "") -> UserError:
    """The error of a place whose rest is of another form."""
    on = f"{name}:{given}" if given else name
    listed = PLACES[name]
    return UserError(f"--on {on[:60]!r} is not a target{reason}; give {listed.form}: {listed.text}.")


def forms() -> str:
    """All forms of `--on` in one line."""
    return " or ".join(listed.form for listed in PLACES.values())


def shell_line(command: Sequence[str], variables: Mapping[str, str | None]) -> str:
    """One process as a line for a shell: its variables, then its command."""
    import shlex

    return " ".join([*assignments(variables), shlex.join(command)])


def assignments(variables: Mapping[str, str | None]) -> list[str]:
    """Environment variables as a shell sets them; secrets, and those that are null, by name."""
    import shlex

    redacted = redact(variables).items()
    return [f'{name}="${name}"' if value is None else f"{name}={shlex.quote(value)}" for name, value in redacted]
