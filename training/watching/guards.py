"""The section `guards` of a config: what watches a run while it trains. Nothing here changes the numbers."""

from dataclasses import dataclass

from ...mesh.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """What watches a run while it trains; nothing here changes the numbers."""

    replicas_every: int = 0
    """Steps between two comparisons of what several devices hold a copy of, such as parameters over `data`: a flipped
    bit is found, and the device named. Every state is compared before it is saved in any case; 0 = only then."""
    stragglers: float = 0.2
    """A process is named as slow where its own work (waiting for data, Python) holds every step up by more than this
    share of the step; 0 = nobody looks."""
    straggler_steps: int = 20
    """For how many steps, most of them, before it is named."""
    ledger: bool = True
    """Whether goodput.jsonl says where the time of the run went."""

    def __post_init__(self) -> None:
        problems = []
        if self.replicas_every < 0:
            problems.append(f"guards.replicas_every={self.replicas_every} must be at least 1, or 0 for saves only.")
        if not 0 <= self.stragglers < 1:
            problems.append(
                f"guards.stragglers={self.stragglers} is a share of a step: at least 0 (nobody looks) and less than 1."
            )
        if self.straggler_steps < 2:
            problems.append(f"guards.straggler_steps={self.straggler_steps} must be at least 2.")
        if problems:
            raise UserError("\n".join(problems))
