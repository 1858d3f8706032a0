"""What a check says."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from ...mesh.coordination import ranks

Level = Literal["ok", "note", "wrong"]
WIDTH = 14


class Finding(NamedTuple):
    """What one check has found.

    Attributes:
        name: What was looked at.
        found: What it is.
        level: ok; note, which may be meant so; wrong, which will not work.
        fix: What to do about it.
        variable: The environment variable that says so.
    """

    name: str
    found: str
    level: Level = "ok"
    fix: str = ""
    variable: str = ""

    def lines(self, of: str = "") -> list[str]:
        """As text: a line, and one with the fix where there is one.

        Args:
            of: Whose it is, such as "rank 3".
        """
        mark = "WRONG" if self.level == "wrong" else self.level
        by = f" ({self.variable})" if self.variable else ""
        said = f"  {mark:<6}{self.name:<{WIDTH}}{f'{of}: ' if of else ''}{self.found}{by}"
        return [said, f"{'':<{8 + WIDTH}}fix: {self.fix}"] if self.fix else [said]


def as_text(found: Sequence[Sequence[Finding]]) -> list[str]:
    """The findings of all processes: what all say stands there once, the rest after the ranks that say it.

    Args:
        found: By rank.
    """
    lines: list[str] = []
    for finding in in_order(found):
        saying = [rank for rank, findings in enumerate(found) if finding in findings]
        lines += finding.lines("" if len(saying) == len(found) else ranks(saying))
    return lines


def in_order(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Every different finding once, those of one name together."""
    different = list(dict.fromkeys(finding for findings in found for finding in findings))
    names = list(dict.fromkeys(finding.name for finding in different))
    return [finding for name in names for finding in different if finding.name == name]


def is_wrong(findings: Iterable[Finding]) -> bool:
    """Tells whether anything is wrong."""
    return any(finding.level == "wrong" for finding in findings)


def from_plain(values: Any) -> list[Finding]:
    """Findings that came as JSON."""
    return [Finding(*map(str, each)) for each in values]  # pyright: ignore[reportArgumentType]
