"""The job of this process, merged from all sources, or an error for missing or contradicting variables.

1. Manual variables (SPMDKIT_*, KERAS_DISTRIBUTION_*, JAX_*) are merged in this order. If two of them contradict each
   other, that is an error.
2. Missing values are taken from the launcher that started this process: the first of LAUNCHERS with a rank and a number
   of processes, and later ones that agree with it.
3. If the rank, the number of processes or the address is still missing, that is an error: the process would train alone
   or wait forever.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...mesh.devices import VISIBLE_GPUS, count_gpus
from ...mesh.errors import UserError
from .addresses import Address
from .variables import LAUNCHERS, MANUAL, Environ, Facts

ALONE = "Or set SPMDKIT_NUM_PROCESSES=1 to train in one process."
MERGED = (
    *("address", "num_processes", "process_id", "local_rank", "local_processes", "local_devices", "identity"),
    *("hosts", "nodes"),
)


class Job(NamedTuple):
    """The run of this process, and its place in it.

    Attributes:
        source: The source of the rank.
        address: The address of the coordinator, process 0; it can be None in a run of one process.
        num_processes: The number of processes.
        process_id: The rank of this process.
        local_rank: Its rank among the processes of its host, if known.
        local_processes: The number of processes on its host, if known.
        local_devices: The indices of its GPUs among the visible ones; None = all.
        hosts: The host of each process by rank, if known.
        nodes: The hosts of the job, if known.
        identity: The attempt of the job, or "".
        variables: The variable of each of these values, by name.
    """

    source: str
    address: Address | None
    num_processes: int
    process_id: int
    local_rank: int | None = None
    local_processes: int | None = None
    local_devices: tuple[int, ...] | None = None
    hosts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    identity: str = ""
    variables: Mapping[str, str] = {}

    @property
    def is_shared(self) -> bool:
        """True if the run has several processes."""
        return self.num_processes > 1


def find_job(environ: Environ | None = None, given: Facts | None = None) -> Job | None:
    """Finds the job that an environment describes.

    Args:
        environ: The variables; this process's own by default.
        given: Facts that take precedence over all variables.

    Returns:
        The job; None if nothing describes one.

    Raises:
        UserError: Values are missing, contradicting or invalid. The message names the variables.
    """
    environ = os.environ if environ is None else environ
    manual = [facts for facts in (read(environ) for read in MANUAL.values()) if facts]
    if manual and manual[0].num_processes == 1:  # one process, whatever other sources contain
        manual = manual[:1]
    _check_contradictions(manual)
    known = _merge([*([given] if given else []), *manual])
    if known and known.num_processes == 1:
        return _checked_job(known._replace(process_id=known.process_id or 0), environ)
    complete = known is not None and known.is_complete and known.address is not None
    known = _add_launchers(known, _read_launchers(environ, optional=complete))
    return None if known is None else _checked_job(known, environ)


def _read_launchers(environ: Environ, *, optional: bool) -> list[Facts]:
    """Reads the launchers' variables; ignores invalid ones if they are optional."""
    found = []
    for read in LAUNCHERS.values():
        try:
            facts = read(environ)
        except UserError:
            if optional:
                continue
            raise
        found += [facts] if facts else []
    return found


def _check_contradictions(manual: Sequence[Facts]) -> None:
    for fact in ("num_processes", "process_id", "address"):
        values = [(facts.variables[fact], getattr(facts, fact)) for facts in manual if getattr(facts, fact) is not None]
        for variable, value in values[1:]:
            if value != values[0][1]:
                raise UserError(
                    f"{values[0][0]}={values[0][1]} and {variable}={value} contradict each other. Unset one of the two."
                )


def _merge(found: Sequence[Facts]) -> Facts | None:
    """Merges facts; the first source that has a value takes precedence."""
    if not found:
        return None
    first, *others = found
    for facts in others:
        missing = [fact for fact in MERGED if getattr(first, fact) in (None, "", ())]
        new = {fact: getattr(facts, fact) for fact in missing if getattr(facts, fact) not in (None, "", ())}
        variables = {fact: facts.variables[fact] for fact in new if fact in facts.variables}
        source = first.source if first.process_id is not None or facts.process_id is None else facts.source
        first = first._replace(**new, source=source, variables={**first.variables, **variables})
    return first


def _add_launchers(known: Facts | None, launchers: Sequence[Facts]) -> Facts | None:
    """Adds the values of launchers that agree with the known ones."""
    if known is None or (known.num_processes is None and known.process_id is None):
        complete = [facts for facts in launchers if facts.is_complete]
        if not complete:
            _check_incomplete(known, launchers)
            return None
        base = _merge([facts for facts in (known, complete[0]) if facts])
    else:
        base = _complete(known, launchers)
    assert base is not None
    agreeing = [
        facts if facts.source == base.source else facts._replace(identity="")  # maybe not set in all processes
        for facts in launchers
        if facts.process_id == base.process_id and facts.num_processes in (None, base.num_processes)
    ]
    return _merge([base, *agreeing])


def _complete(known: Facts, launchers: Sequence[Facts]) -> Facts:
    """Adds a missing rank or number of processes from a launcher.

    Raises:
        UserError: No launcher has it, or the launcher contradicts the known value.
    """
    if known.is_complete:
        return known
    missing, present = ("process_id", "num_processes") if known.process_id is None else ("num_processes", "process_id")
    variable = known.variables.get(present, present)
    for facts in launchers:
        if getattr(facts, missing) is None:
            continue
        other = getattr(facts, present)
        if other not in (None, getattr(known, present)):
            raise UserError(
                f"{variable}={getattr(known, present)} and {facts.variables[present]}={other} of {facts.source} "
                f"contradict each other. Unset {variable}, or set {_variable(missing)} too."
            )
        value, variables = getattr(facts, missing), {**known.variables, missing: facts.variables[missing]}
        return known._replace(**{missing: value}, source=facts.source, variables=variables)
    raise _incomplete(known)


def _check_incomplete(known: Facts | None, launchers: Sequence[Facts]) -> None:
    """Raises UserError if any source describes a part of a job, though none has a rank and a number of processes."""
    for facts in launchers:
        if facts.unusable:
            raise UserError(facts.unusable)
    for facts in launchers:
        if facts.num_processes is not None or facts.process_id is not None:
            raise _incomplete(facts)
    if known is None:
        return
    both = f"Set {_variable('num_processes')} and {_variable('process_id')}. {ALONE}"
    unknown = "but the number of processes and the rank of this one are missing"
    if known.address is not None:
        name = known.variables.get("address", "job_addresses")
        raise UserError(f"{name}={known.address} is the address of process 0, {unknown}. {both}")
    if (known.local_rank or 0) > 0 or (known.local_processes or 1) > 1:
        names = [known.variables[fact] for fact in ("local_rank", "local_processes") if fact in known.variables]
        raise UserError(f"This process is one of several on its host ({' and '.join(names)}), {unknown}. {both}")


def _incomplete(facts: Facts) -> UserError:
    if facts.process_id is None:
        variable, missing = facts.variables.get("num_processes"), "process_id"
        problem = f"there are {facts.num_processes} processes, but the rank of this one is missing"
    else:
        variable, missing = facts.variables.get("process_id"), "num_processes"
        problem = f"this is process {facts.process_id}, but the number of processes is missing"
    source = (
        f"{variable} ({facts.source})" if variable and not variable.startswith(facts.source.rstrip("*")) else variable
    )
    return UserError(f"According to {source or 'the arguments'}, {problem}. Set {_variable(missing)} too. {ALONE}")


def _checked_job(facts: Facts, environ: Environ) -> Job:
    """Returns the job.

    Raises:
        UserError: The rank is out of range, or the address is missing.
    """
    count, rank, names = facts.num_processes, facts.process_id, facts.variables
    assert count is not None
    assert rank is not None
    counted = names.get("num_processes", "num_processes")
    if not 0 <= rank < count:
        raise UserError(f"{names.get('process_id', 'process_id')}={rank} must be in 0 .. {counted} - 1 = {count - 1}.")
    if count > 1 and facts.address is None:
        mpi = " (MPI sets none for several hosts)" if facts.source in ("Open MPI", "PMI", "PMIx") else ""
        raise UserError(
            f"This process is one of {count} ({counted}), but the address of process 0 is missing{mpi}: each process "
            "would train alone, in the same directory. Set SPMDKIT_JOB_ADDRESSES to host:port of process 0 in all of "
            f"them. {ALONE}"
        )
    local, of = facts.local_rank, facts.local_processes
    if local is not None and of is not None and local >= of:
        variable = names.get("local_rank", "local_rank")
        raise UserError(f"{variable}={local} must be in 0 .. {names.get('local_processes', of)} - 1 = {of - 1}.")
    devices = facts.local_devices
    if devices is None and count > 1 and not environ.get("JAX_LOCAL_DEVICE_IDS"):
        devices = divide_gpus(count_visible_gpus(environ, count_gpus()), local, of)
    job = {name: getattr(facts, name) for name in Job._fields}
    return Job(**{**job, "local_devices": devices})


def _variable(fact: str) -> str:
    return f"SPMDKIT_{fact.upper()}"


def count_visible_gpus(environ: Environ, of_host: int) -> int:
    """Returns the number of GPUs that a process sees: those in CUDA_VISIBLE_DEVICES, or all of the host.

    Args:
        environ: The variables of the process.
        of_host: The number of GPUs of the host.
    """
    text = environ.get(VISIBLE_GPUS)
    if text is None:
        return of_host
    entries = [part.strip() for part in text.split(",")]
    stop = next((index for index, part in enumerate(entries) if part in ("", "-1", "NoDevFiles")), len(entries))
    return min(stop, of_host) if of_host else stop


def divide_gpus(visible: int, local_rank: int | None, local_processes: int | None) -> tuple[int, ...] | None:
    """Divides the GPUs that all processes of a host see among them: with one each, process k has GPU k.

    Args:
        visible: The number of GPUs that each of the processes sees.
        local_rank: The rank of this process on its host.
        local_processes: The number of processes on its host.

    Returns:
        The indices of this process's GPUs among the visible ones. None = all visible ones: the process is alone on its
        host, its launcher has already bound it to one GPU, or the GPUs do not divide evenly.
    """
    if local_rank is None or local_processes is None or local_processes < 2 or visible < 2:
        return None
    each, left_over = divmod(visible, local_processes)
    if left_over or not each or local_rank >= local_processes:
        return None
    return tuple(range(local_rank * each, (local_rank + 1) * each))
