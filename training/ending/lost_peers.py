"""The words of a process that has lost another of its run: a symptom, whose cause is elsewhere.

When one process dies, the others learn of it as an error of a collective (Gloo on CPU, NCCL on GPU) or of JAX's
coordination service, wherever they happen to wait: in a step, in a save, at a barrier. None of that is their fault.
Nor is Gloo's complaint of a message of another size: when one collective breaks off, the next one finds what is left of
it. Processes whose programs differ were refused before their first step.
"""

import re

LOST = re.compile(
    r"\bGloo [\w -]{1,60} failed"
    r"|gloo::EnforceNotMet"
    r"|gloo[^\n]{0,200}(?:closed by peer|reset by peer|Broken pipe|Timed out waiting)"
    r"|JAX distributed service detected fatal errors"
    r"|\bcoordination service\b|CoordinationService|stopped sending heartbeats"
    r"|\bBarrier (?:timed out|failed)|[Ss]hutdown barrier"
    r"|ncclRemoteError|ncclSystemError|NCCL [^\n]{0,200}remote (?:process|peer)"
)
UNHEALTHY = "stopped sending heartbeats):"
TASK = re.compile(r"[\s,]*(?:/job:\w+(?:/replica:\d+)?/task:)?(\d+)(?=[\s,]|$)")


def tells_of_lost_peer(text: str) -> bool:
    """Tells whether an error or the last lines of a process say that it lost another one.

    Args:
        text: What it printed, or the message of the error.
    """
    return LOST.search(text) is not None


def without_heartbeat(text: str) -> list[int]:
    """The ranks that JAX's coordination service has not heard of for too long, as its message names them.

    Args:
        text: What a process printed before it was aborted.

    Returns:
        Ranks; empty where it names none.
    """
    _, named, rest = text.partition(UNHEALTHY)
    ranks = []
    while named and (task := TASK.match(rest)):
        ranks.append(int(task.group(1)))
        rest = rest[task.end() :]
    return ranks
