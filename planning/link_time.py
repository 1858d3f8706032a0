"""Estimates how long one collective takes, from its bytes and the links of its group."""

from collections import Counter

from ..mesh.targets import Target, TpuCard
from .kernel_time import Efficiency

ROUNDS = {"all-reduce": 2.0}
"""How often a ring of N moves (N - 1) / N of the value; once for the others (NCCL, nccl-tests, PERFORMANCE.md)."""


def collective_seconds(kind: str, size: int, groups: list[list[int]], target: Target, efficiency: Efficiency) -> float:
    """Returns the seconds of one collective: a start, and a ring over the slowest link of its group.

    A group over several hosts sends through the adapters of all its devices of a host at once. TPUs send over all links
    along the dims of the slice in which the members of the group differ.

    Args:
        kind: HLO's name, such as "all-gather".
        size: Bytes of the whole value: the result of an all-gather, the operand of the others.
        groups: The devices that communicate, by number.
        target: The hosts, their accelerators and links.
        efficiency: The shares of the links' peaks that count.
    """
    group = max(groups, key=lambda devices: _hosts(devices, target))
    members = len(group)
    if members < 2:
        return 0.0
    if isinstance(target.card, TpuCard):
        bandwidth = efficiency.link * target.card.link * target.links(group)
        return efficiency.link_seconds + ROUNDS.get(kind, 1.0) * (members - 1) / members * size / bandwidth
    hosts = _hosts(group, target)
    in_one_host = max(Counter(device // target.gpus for device in group).values())
    bandwidth, start = efficiency.link * target.card.link, efficiency.link_seconds
    if hosts > 1:
        adapters = 1 if kind == "collective-permute" else in_one_host
        bandwidth = min(bandwidth, efficiency.network * target.card.network * adapters)
        start = efficiency.network_seconds
    share = 1.0 if kind == "collective-permute" else (members - 1) / members
    return start + ROUNDS.get(kind, 1.0) * share * size / bandwidth


def _hosts(devices: list[int], target: Target) -> int:
    return 1 if target.shape else len({device // target.gpus for device in devices})
