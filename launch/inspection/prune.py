"""`spmdkit checkpoint prune`: removes checkpoints by rule, and never the newest that is whole.

What goes is listed first; it goes only where that is confirmed, while the directory is owned, so that no job uses it.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...layouts.sizes import format_bytes
from ...mesh.errors import UserError
from ...mesh.text import printable
from ...training.checkpointing.errors import CheckpointError
from ...training.checkpointing.folder import REMOVED, set_aside, size_on_disk
from ..run.directory.ownership import Ownership, refuse_if_in_use
from .finding import Found, find, shown
from .verify import verify_one


class Plan(NamedTuple):
    """What goes and what stays.

    Attributes:
        found: the folder of checkpoints.
        removed: names of what goes -> its bytes.
        kept: steps that stay, in order.
        newest: the newest step that is whole.
    """

    found: Found
    removed: dict[str, int]
    kept: tuple[int, ...]
    newest: int

    def __str__(self) -> str:
        return printable("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        kept = ", ".join(map(str, self.kept))
        if not self.removed:
            yield f"{shown(self.found.checkpoints)}: nothing to remove; kept: {kept or 'none'}"
            return
        total = format_bytes(sum(self.removed.values()))
        yield f"{shown(self.found.checkpoints)}: {len(self.removed)} to remove, {total}"
        for name, size in self.removed.items():
            yield f"  {name:>12}  {format_bytes(size):>10}"
        yield f"kept: {kept}; step {self.newest} is the newest that is whole"


def plan(found: Found, *, keep: int | None = None, every: int | None = None, leftovers: bool = False) -> Plan:
    """Decides what a rule removes; removes nothing.

    Args:
        found: The folder of checkpoints.
        keep: Keep the newest so many; None where that is no rule.
        every: Keep those whose step is a multiple of this; None where that is no rule. With both rules, what either
            keeps stays.
        leftovers: Remove as well what is set aside as damaged, unfinished, or on its way out.

    Raises:
        UserError: There is no rule, a number is out of range, or one checkpoint is named.
        CheckpointError: No checkpoint is whole: then none is removed.
        DirectoryInUse: A job of this machine uses the directory.
        CheckpointUnavailable: The machine or the file system does not let one be read.
    """
    if found.chosen is not None:
        raise UserError(f"prune removes by rule: give the folder of the run, {found.run}, and --keep N or --every K.")
    if keep is None and every is None and not leftovers:
        raise UserError("prune needs a rule: --keep N, --every K or --leftovers. Without --yes it only lists.")
    for name, value in (("--keep", keep), ("--every", every)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} must be at least 1; the newest checkpoint that is whole always stays.")
    refuse_if_in_use(found.run)
    steps, held = found.contents.steps, found.contents
    newest = next((step for step in reversed(steps) if verify_one(found.checkpoints / str(step)).is_whole), None)
    if steps and newest is None:
        raise CheckpointError(
            f"No checkpoint in {found.checkpoints} is whole; none is removed. `spmdkit checkpoint verify` says more."
        )
    by_rule = keep is not None or every is not None
    wanted = (
        {*steps} if not by_rule else {*(steps[-keep:] if keep else ())} | {s for s in steps if every and s % every == 0}
    )
    kept = sorted(wanted | ({newest} if newest is not None else set()))
    names = [str(step) for step in steps if step not in kept]
    names += [*held.damaged, *held.unfinished, *held.leaving] if leftovers else []
    sizes = {name: size_on_disk(found.checkpoints / name) for name in names}
    return Plan(found, sizes, tuple(kept), newest or 0)


def _stays(step: int, steps: Sequence[int], keep: int | None, every: int | None) -> bool:
    """Whether a rule keeps a step; without a rule for steps all stay."""
    if keep is None and every is None:
        return True
    return (keep is not None and step in steps[-keep:]) or (every is not None and step % every == 0)


def carry_out(planned: Plan, say: Callable[[str], None]) -> int:
    """Removes what a plan says.

    Args:
        planned: The plan.
        say: Gets a line where there is something to wait for.

    Returns:
        The bytes that were removed.

    Raises:
        DirectoryInUse: A job uses the directory; nothing was removed.
        CheckpointError: The directory has changed since the plan was made; nothing was removed.
        OSError: Something could not be removed; what remains is not used by a run.
    """
    checkpoints = planned.found.checkpoints
    with Ownership(planned.found.run, say) as ownership:
        ownership.take()
        if find(str(checkpoints)).contents != planned.found.contents:
            raise CheckpointError(f"{checkpoints} has changed meanwhile; nothing was removed. Start the command again.")
        steps = [name for name in planned.removed if name.isdecimal()]
        leaving = set_aside(checkpoints, steps, REMOVED)
        for path in [*leaving, *(checkpoints / name for name in planned.removed if name not in steps)]:
            shutil.rmtree(path)
    return sum(planned.removed.values())
