"""One job from all that the environment says about it; or what is missing, or contradicts itself.

1. What somebody set on purpose (SPMDKIT_*, KERAS_DISTRIBUTION_*, JAX_*) is put together; the first that says
   something is believed, and a later one that says something else is refused.
2. What is still missing is taken from the launcher that started this process: from the first of OF_LAUNCHERS that
   knows who this process is among how many, and from later ones that say the same of it.
3. What is missing then is refused: a process that knows half of its job would train alone, or wait for ever.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import UserError
from .accelerators import devices_of_process, gpus_of_host, gpus_visible
from .addresses import Address
from .facts import Environ, Facts
from .sources import BY_HAND, OF_LAUNCHERS

ALONE = "Or set SPMDKIT_NUM_PROCESSES=1 to train in one process."
MERGED = ("address", "num_processes", "process_id", "local_rank", "local_processes", "local_devices", "identity")
LISTS = ("hosts", "nodes")


class Job(NamedTuple):
    """What this process knows of the run that it is one of.

    Attributes:
        source: Who says which process this is.
        address: Of the coordinator, process 0; of a run of one process it may be None.
        num_processes: Processes in the run.
        process_id: This one, 0 <= process_id < num_processes.
        local_rank: Which one of those on its host, where that is known.
        local_processes: How many those are.
        local_devices: Places of this process's GPUs among those that it sees; None = all.
        hosts: Of each process by rank; empty where that is not known.
        nodes: The hosts of the job; empty where they are not known.
        identity: Of this attempt of this job; "" where nothing says.
        said: Which variable each of these is from, by name.
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
    said: Mapping[str, str] = {}

    @property
    def is_shared(self) -> bool:
        """Whether the run has other processes."""
        return self.num_processes > 1


def find_job(environ: Environ | None = None, given: Facts | None = None) -> Job | None:
    """Finds what an environment says about the run.

    Args:
        environ: Variables; this process's own by default.
        given: What is known otherwise; it wins over all variables.

    Returns:
        The job; None where nothing says that this process is one of several.

    Raises:
        UserError: Half of it is missing, two sources contradict each other, or a variable cannot be read. The message
            names the variables.
    """
    environ = os.environ if environ is None else environ
    by_hand = [facts for facts in (read(environ) for read in BY_HAND.values()) if facts]
    if by_hand and by_hand[0].num_processes == 1:  # alone, whatever else says
        by_hand = by_hand[:1]
    _refuse_contradictions(by_hand)
    known = _together([*([given] if given else []), *by_hand])
    if known and known.num_processes == 1:
        return _job(known._replace(process_id=known.process_id or 0), environ)
    complete = known is not None and known.is_whole and known.address is not None
    launchers = _of_launchers(environ, quiet=complete)
    known = _completed(known, launchers)
    return None if known is None else _job(known, environ)


def _of_launchers(environ: Environ, *, quiet: bool) -> list[Facts]:
    """What the launchers say; where it is not needed, what cannot be read is left out."""
    found = []
    for read in OF_LAUNCHERS.values():
        try:
            facts = read(environ)
        except UserError:
            if quiet:
                continue
            raise
        found += [facts] if facts else []
    return found


def _refuse_contradictions(by_hand: Sequence[Facts]) -> None:
    """Raises where two sources that somebody set on purpose say different things."""
    for fact in ("num_processes", "process_id", "address"):
        said = [(facts.said[fact], getattr(facts, fact)) for facts in by_hand if getattr(facts, fact) is not None]
        for variable, value in said[1:]:
            if value != said[0][1]:
                raise UserError(
                    f"{said[0][0]} says {said[0][1]}, and {variable} says {value}: they contradict each other. Unset "
                    "one of the two."
                )


def _together(found: Sequence[Facts]) -> Facts | None:
    """One set of facts: of each, what the first says that says something."""
    if not found:
        return None
    first, *others = found
    for facts in others:
        new = {fact: getattr(facts, fact) for fact in (*MERGED, *LISTS) if getattr(first, fact) in (None, "", ())}
        new = {fact: value for fact, value in new.items() if value not in (None, "", ())}
        said = {fact: facts.said[fact] for fact in new if fact in facts.said}
        source = first.source if first.process_id is not None or facts.process_id is None else facts.source
        first = first._replace(**new, source=source, said={**first.said, **said})
    return first


def _completed(known: Facts | None, launchers: Sequence[Facts]) -> Facts | None:
    """Adds what launchers say that agree with what is known."""
    whole = [facts for facts in launchers if facts.is_whole]
    if known is None or (known.num_processes is None and known.process_id is None):
        if not whole:
            return _nothing_whole(known, launchers)
        base = _together([facts for facts in (known, whole[0]) if facts])
    else:
        base = _with_missing_half(known, launchers)
    assert base is not None
    agreeing = [
        facts if facts.source == base.source else facts._replace(identity="")  # not all processes may see that one
        for facts in launchers
        if facts.process_id == base.process_id and facts.num_processes in (None, base.num_processes)
    ]
    return _together([base, *agreeing])


def _with_missing_half(known: Facts, launchers: Sequence[Facts]) -> Facts:
    """Completes a count without a rank, or a rank without a count, from a launcher; as it is where both are there.

    Raises:
        UserError: No launcher says the other half, or what it says contradicts the first.
    """
    if known.is_whole:
        return known
    missing, there = ("process_id", "num_processes") if known.process_id is None else ("num_processes", "process_id")
    variable = known.said.get(there, there)
    for facts in launchers:
        if getattr(facts, missing) is None:
            continue
        other = getattr(facts, there)
        if other not in (None, getattr(known, there)):
            raise UserError(
                f"{variable} says {getattr(known, there)}, and {facts.said[there]} of {facts.source} says {other}: "
                f"they contradict each other. Unset {variable}, or set {_variable(missing)} too."
            )
        value = getattr(facts, missing)
        return known._replace(
            **{missing: value}, source=facts.source, said={**known.said, missing: facts.said[missing]}
        )
    raise _half(known)


def _nothing_whole(known: Facts | None, launchers: Sequence[Facts]) -> Facts | None:
    """What follows where nothing says who this process is among how many.

    Raises:
        UserError: Something says a part of it.
    """
    for facts in launchers:
        if facts.unusable:
            raise UserError(facts.unusable)
    for facts in launchers:
        if facts.num_processes is not None or facts.process_id is not None:
            raise _half(facts)
    if known is not None and known.address is not None:
        raise UserError(
            f"{known.said.get('address', 'job_addresses')}={known.address} says where process 0 is, but nothing says "
            f"how many processes there are and which one this is. Set {_variable('num_processes')} and "
            f"{_variable('process_id')}. {ALONE}"
        )
    local = known is not None and ((known.local_rank or 0) > 0 or (known.local_processes or 1) > 1)
    if known is not None and local:
        which = " and ".join(known.said[fact] for fact in ("local_rank", "local_processes") if fact in known.said)
        raise UserError(
            f"{which} says that this process is one of several on its host, but nothing says how many the run has and "
            f"which one this is. Set {_variable('num_processes')} and {_variable('process_id')}. {ALONE}"
        )
    return None


def _half(facts: Facts) -> UserError:
    """The error of a rank without a count, or a count without a rank."""
    if facts.process_id is None:
        variable, value, missing = facts.said.get("num_processes"), facts.num_processes, "process_id"
        what = f"says that there are {value} processes, but nothing says which one this is"
    else:
        variable, value, missing = facts.said.get("process_id"), facts.process_id, "num_processes"
        what = f"says that this is process {value}, but nothing says how many there are"
    by = f"{variable} ({facts.source})" if variable and not variable.startswith(facts.source.rstrip("*")) else variable
    return UserError(f"{by or missing} {what}. Set {_variable(missing)} too. {ALONE}")


def _job(facts: Facts, environ: Environ) -> Job:
    """The job, checked.

    Raises:
        UserError: The rank is out of range, or nothing says where the others are.
    """
    count, rank = facts.num_processes, facts.process_id
    assert count is not None
    assert rank is not None
    said = facts.said
    counted = said.get("num_processes", "num_processes")
    if not 0 <= rank < count:
        raise UserError(f"{said.get('process_id', 'process_id')}={rank} must be in 0 .. {counted} - 1 = {count - 1}.")
    if count > 1 and facts.address is None:
        raise UserError(
            f"This process is one of {count} ({counted}), but no address says where the others are{_why_none(facts)}: "
            "each would train alone, in the same folder. Set SPMDKIT_JOB_ADDRESSES to host:port of process 0 in all of "
            f"them. {ALONE}"
        )
    local, of = facts.local_rank, facts.local_processes
    if local is not None and of is not None and local >= of:
        rank_said, of_said = said.get("local_rank", "local_rank"), said.get("local_processes", "local_processes")
        raise UserError(f"{rank_said}={local} must be in 0 .. {of_said} - 1 = {of - 1}.")
    devices = facts.local_devices
    if devices is None and count > 1 and not environ.get("JAX_LOCAL_DEVICE_IDS"):
        visible = gpus_visible(environ, gpus_of_host())
        devices = devices_of_process(visible, facts.local_rank, facts.local_processes)
    return Job(
        facts.source,
        facts.address,
        count,
        rank,
        facts.local_rank,
        facts.local_processes,
        devices,
        facts.hosts,
        facts.nodes,
        facts.identity,
        said,
    )


def _why_none(facts: Facts) -> str:
    return " (MPI gives none for several hosts)" if facts.source in ("Open MPI", "PMI", "PMIx") else ""


def _variable(fact: str) -> str:
    return f"SPMDKIT_{fact.upper()}"
