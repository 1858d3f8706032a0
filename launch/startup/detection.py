"""The job of this process, merged from all sources, or an error for missing or contradicting variables.

1. Manual variables (SPMDKIT_*, KERAS_DISTRIBUTION_*, JAX_*) are merged in this order. If two of them contradict each
   other, that is an error.
2. Missing values are taken from the launcher that started this process: the first of LAUNCHERS with a rank and a number
   of processes, and later ones that agree with it.
3. If the rank, the number of processes or the address is still missing, that is an error: the process would train alone
   or wait forever.
"""

import os

from ...mesh.devices import VISIBLE_GPUS, count_gpus
from ...mesh.errors import UserError
from .variables import LAUNCHERS, MANUAL, Environ, Job, read_source

REQUIRED = {
    "num_processes": "the number of processes (SPMDKIT_NUM_PROCESSES)",
    "process_id": "the rank of this one (SPMDKIT_PROCESS_ID)",
    "address": "host:port of process 0 (SPMDKIT_JOB_ADDRESSES)",
}
"""The facts without which a process of several cannot start, for messages."""
MERGED = tuple(fact for fact in Job._fields if fact not in ("source", "variables"))


def find_job(environ: Environ | None = None, given: Job | None = None) -> Job | None:
    """Finds the job that an environment describes.

    Args:
        environ: The variables; this process's own by default.
        given: Values that take precedence over all variables.

    Returns:
        The job; None if nothing describes one.

    Raises:
        UserError: Values are missing, contradicting or invalid. The message names the variables.
    """
    environ = os.environ if environ is None else environ
    known = Job()
    for source in MANUAL:
        facts = read_source(source, environ)
        if facts and known.num_processes != 1:  # one process, whatever other sources contain
            _check_contradiction(known, facts, "num_processes", "process_id", "address")
            known = _merge(known, facts)
    known = _merge(given, known) if given else known
    if known.num_processes == 1:
        return _checked_job(known._replace(process_id=max(0, known.process_id)), environ)
    known = _add_launchers(known, environ)
    if not known.known_values(*REQUIRED) and not known.local_rank and (known.local_processes or 1) == 1:
        return None
    return _checked_job(known, environ)


def _check_contradiction(first: Job, second: Job, *facts: str) -> None:
    others = second.known_values(*facts)
    for fact, value in first.known_values(*facts).items():
        if others.get(fact, value) != value:
            raise UserError(
                f"{first.variables.get(fact, fact)}={value} and {second.variables[fact]}={others[fact]} contradict "
                "each other. Unset one of the two."
            )


def _merge(first: Job, second: Job) -> Job:
    """Adds the values that the first source lacks."""
    own = first.known_values(*MERGED)
    new = {fact: value for fact, value in second.known_values(*MERGED).items() if fact not in own}
    variables = {fact: name for fact, name in second.variables.items() if fact in new}
    source = second.source if "process_id" in new or not first.source else first.source
    return first._replace(**new, source=source, variables={**first.variables, **variables})


def _add_launchers(known: Job, environ: Environ) -> Job:
    """Adds the values of the launcher that started this process, and of later ones that agree with it."""
    partial = None
    for source in LAUNCHERS:
        try:
            facts = read_source(source, environ)
        except UserError:
            if known.is_complete:  # around the launcher that started this process
                continue
            raise
        if facts is None:
            continue
        if known.is_complete:
            if facts.process_id == known.process_id and facts.num_processes in (0, known.num_processes):
                known = _merge(known, facts._replace(identity=""))  # maybe not set in all processes
        elif known.known_values("num_processes", "process_id"):
            _check_contradiction(known, facts, "num_processes", "process_id")
            known = _merge(known, facts)
        elif facts.is_complete:
            known = _merge(known, facts)
        else:
            partial = partial or facts
    return known if known.is_complete or partial is None else _merge(known, partial)


def _checked_job(facts: Job, environ: Environ) -> Job:
    """Returns the job.

    Raises:
        UserError: The rank or the local rank is out of range, or a value is missing without which this process would
            train alone or wait forever.
    """
    count, rank, names = facts.num_processes, facts.process_id, facts.variables
    if not facts.is_complete or (count > 1 and facts.address is None):
        known = facts.known_values(*REQUIRED, "local_rank", "local_processes")
        given = ", ".join(f"{names.get(fact, fact)}={value}" for fact, value in known.items())
        missing = ", ".join(text for fact, text in REQUIRED.items() if fact not in known)
        raise UserError(
            f"With {given}, this process is one of several. Missing: {missing}. Set them in all processes, or "
            "SPMDKIT_NUM_PROCESSES=1 to train in one process."
        )
    counted = names.get("num_processes", "num_processes")
    if not 0 <= rank < count:
        raise UserError(f"{names.get('process_id', 'process_id')}={rank} must be in 0 .. {counted} - 1 = {count - 1}.")
    local, of = facts.local_rank, facts.local_processes
    if local is not None and of is not None and local >= of:
        variable = names.get("local_rank", "local_rank")
        raise UserError(f"{variable}={local} must be in 0 .. {names.get('local_processes', of)} - 1 = {of - 1}.")
    devices = facts.local_devices
    if devices is None and count > 1 and not environ.get("JAX_LOCAL_DEVICE_IDS"):
        devices = divide_gpus(count_visible_gpus(environ, count_gpus()), local, of)
    return facts._replace(local_devices=devices)


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
